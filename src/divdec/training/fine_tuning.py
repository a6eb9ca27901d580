"""One fine-tuning run: a model, examples and settings in, the trained model and what it cost out.

Every run can be stopped with Ctrl-C and taken up again. It knows nothing of forget or retain sets.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from divdec.data.formatting import IGNORED, Example
from divdec.errors import Diverged, UsageError
from divdec.extras import require
from divdec.runs import read_json, settings_hash, write_json
from divdec.training.objective import INDEX, Collator, Companion, Objective, Rows
from divdec.training.progress import Interrupted, RateBar, StopSignal
from divdec.training.sampling import LengthGroupedByEpoch
from divdec.training.settings import TrainingSettings
from divdec.training.sharded import is_sharded, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHECKPOINTS = "checkpoints"
# transformers 5.2x renamed the argument and warns of the old name.
_FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}
_CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in _FIELDS else "gradient_checkpointing"
COMPLETE = "trainer_state.json"  # the file that Trainer writes last into a checkpoint


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """What a fine-tuning run cost and reached."""

    loss_before: float
    """Mean loss per labelled token before the first step, in nats."""
    loss_after: float
    """The same after the last step."""
    steps: int
    tokens: int
    """Tokens of one pass over the data, prompts included."""
    seconds: float

    @property
    def loss_ratio(self) -> float:
        """Loss after over loss before; the paper aims at about one half."""
        return self.loss_after / self.loss_before if self.loss_before else math.nan


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    settings: TrainingSettings,
    folder: Path,
    *,
    title: str,
    measure: bool = True,
    resumable: bool = True,
    objective: Objective | None = None,
    companions: Mapping[str, Companion] | None = None,
    on_epoch: Callable[[PreTrainedModel, int], object] | None = None,
    on_end: Callable[[PreTrainedModel], object] | None = None,
) -> tuple[PreTrainedModel, TrainingResult]:
    """Fine-tune a model in memory, on one process or on many under `accelerate launch` or `torchrun`.

    Args:
        model: any causal language model; it is changed in place (adapters are merged into it at the end). Under FSDP
            another one is returned, which is whole, and lies on the CPU.
        tokenizer: its tokenizer, for padding.
        examples: what is learned.
        settings: how.
        folder: where checkpoints go, one per epoch; a later call with the same settings and data goes on from
            the last whole one.
        title: what the progress bar calls the run.
        measure: compute the loss before and after on at most 256 examples.
        resumable: write checkpoints; off for probes and runs of seconds.
        objective: what is minimised; by default the cross entropy of the labelled tokens.
        companions: what each batch holds beside the examples, by name, for the objective.
        on_epoch: called after each epoch with the model, in evaluation mode, and the number of epochs done. With LoRA
            it is the wrapped model, whose adapters are not merged.
        on_end: called likewise after the last step: where processes hold a piece each, all of them compute.

    Returns:
        The model in evaluation mode, and the result. The losses in it are cross entropies, whatever the objective.

    Raises:
        Interrupted: Ctrl-C or a termination signal came; a checkpoint has been written.
        Diverged: a loss is not finite; the checkpoint of the last whole epoch stays.
        UsageError: there is nothing to learn, or `folder` holds another run's checkpoints.
    """
    if not examples:
        raise UsageError(f"{title}: there is nothing to learn")
    checkpoints = folder / CHECKPOINTS
    companions = companions or {}
    content = [_content(examples), *(_content(companion.examples) for companion in companions.values())]
    fingerprint = settings_hash([dataclasses.asdict(settings), content])
    resume_from = _last_checkpoint(checkpoints, fingerprint) if resumable else None

    started = time.perf_counter()
    rows = Rows(examples, companions, settings.seed)
    collator = Collator(tokenizer, tuple(companions))
    sample = sampled(examples, 256, settings.seed)
    loss_before = mean_loss(model, tokenizer, sample, settings.batch_size) if measure else math.nan
    config = model.config
    trained: Any = _with_adapters(model, settings) if settings.lora_rank else model
    stop, bar = StopSignal(), RateBar(title)
    callbacks: list[TrainerCallback] = [stop, bar, *([_AfterEpoch(on_epoch)] if on_epoch else [])]
    try:
        trainer = _Trainer(
            objective,
            model=trained,
            args=_arguments(settings, checkpoints, resumable),
            train_dataset=rows,
            data_collator=collator,
            callbacks=callbacks,
        )
    except (RuntimeError, ValueError) as error:
        if settings.loggers:  # Trainer's words name the logger that is not known or not installed
            raise UsageError(f"loggers {', '.join(settings.loggers)}: {error}") from None
        raise
    pieces = is_sharded(trainer)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if resumable and trainer.is_world_process_zero():
        checkpoints.mkdir(parents=True, exist_ok=True)
        write_json(checkpoints / "fingerprint.json", fingerprint)
    with stop, bar:
        trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    if stop.came and trainer.state.global_step < trainer.state.max_steps:
        raise Interrupted(f"{title} was interrupted at step {trainer.state.global_step}")

    trained.eval()
    loss_after = mean_loss(trained, tokenizer, sample, settings.batch_size) if measure else math.nan
    if on_end is not None:
        on_end(trained)
    if pieces:
        adapt = functools.partial(_with_adapters, settings=settings) if settings.lora_rank else None
        trained = whole(trainer, config, adapt)
    model = trained.merge_and_unload() if settings.lora_rank else trained
    model.eval()
    result = TrainingResult(
        loss_before=loss_before,
        loss_after=loss_after,
        steps=trainer.state.global_step,
        tokens=sum(len(example.input_ids) for example in examples),
        seconds=time.perf_counter() - started,
    )
    trainer.accelerator.free_memory()
    if not resumable:
        discard_checkpoints(folder)
    return model, result


def uses_bfloat16(settings: TrainingSettings) -> bool:
    """Whether passes are computed in bfloat16 on this machine."""
    supported = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return settings.precision == "bfloat16" or (settings.precision == "auto" and supported)


def discard_checkpoints(folder: Path) -> None:
    """Remove what only a resumed run would need."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


@torch.no_grad()
def mean_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], batch_size: int
) -> float:
    """Mean loss per labelled token over the examples, in nats, without changing the model."""
    was_training = model.training
    model.eval()
    collator = Collator(tokenizer)
    total, count = 0.0, 0
    by_length = sorted(examples, key=lambda example: len(example.input_ids))
    for start in range(0, len(by_length), batch_size):
        batch = collator([dataclasses.asdict(example) for example in by_length[start : start + batch_size]])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labelled = int((batch["labels"][:, 1:] != IGNORED).sum())
        total += float(model(**batch).loss) * labelled
        count += labelled
    model.train(was_training)
    return total / max(count, 1)


class _Trainer(Trainer):
    """Trainer with an order of examples that a resumed run repeats exactly, and a loss of one's own."""

    def __init__(self, objective: Objective | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._objective = objective
        if objective is not None:
            objective.to(self.args.device)
            # It decides whether Trainer counts labelled tokens, and whether it divides by the accumulated steps.
            self.model_accepts_loss_kwargs = objective.counts_tokens

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        index = inputs.pop(INDEX)
        if self._objective is None:
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        else:
            loss = self._objective.loss(model, {**inputs, INDEX: index}, num_items_in_batch)
            # Gradients of several processes are averaged, but each has divided by the tokens of all.
            if num_items_in_batch is not None and self.args.average_tokens_across_devices:
                loss = loss * self.accelerator.num_processes
        assert isinstance(loss, Tensor)
        if not torch.isfinite(loss.detach()).all():
            rows = ", ".join(map(str, sorted(index.tolist())))
            raise Diverged(
                f"the loss is {float(loss.detach().mean())} at step {self.state.global_step + 1}, on examples {rows} "
                "(counted from 0); a lower learning rate may help. Checkpoints of whole epochs stay"
            )
        return loss

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGroupedByEpoch:
        rows = self.train_dataset
        assert isinstance(rows, Rows)
        lengths = [len(example.input_ids) for example in rows.examples]
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        order = LengthGroupedByEpoch(lengths, batch_size * self.args.world_size, self.args.seed)
        order.followers.append(rows.set_epoch)
        return order


class _AfterEpoch(TrainerCallback):
    def __init__(self, tell: Callable[[PreTrainedModel, int], object]) -> None:
        self._tell = tell

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        epoch = round(state.epoch)
        if abs(state.epoch - epoch) > 1e-6:  # stopped within it, or the last one is not whole
            return
        was_training = model.training
        model.eval()
        self._tell(model, epoch)
        model.train(was_training)


def _content(examples: Sequence[Example]) -> list[Any]:
    return [(example.input_ids, example.labels) for example in examples]


def _arguments(settings: TrainingSettings, checkpoints: Path, resumable: bool) -> TrainingArguments:
    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {_CHECKPOINTING: settings.gradient_checkpointing}
    return TrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup,
        optim="adamw_torch",
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_gradient_norm,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation,
        bf16=uses_bfloat16(settings),
        save_strategy="epoch" if resumable else "no",
        save_total_limit=1,
        logging_strategy="steps" if settings.loggers else "no",
        logging_steps=10,
        report_to=list(settings.loggers) or "none",
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=on_gpu,
        remove_unused_columns=False,  # companions are no arguments of the model
        seed=settings.seed,
        data_seed=settings.seed,
        **options,
    )


def _with_adapters(model: PreTrainedModel, settings: TrainingSettings) -> Any:
    require("lora", "LoRA")
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=2 * settings.lora_rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(settings.seed)
    return get_peft_model(model, adapters)


def _last_checkpoint(checkpoints: Path, fingerprint: str) -> Path | None:
    """The last whole checkpoint; one that was cut off while it was written is removed."""
    if not checkpoints.is_dir():
        return None
    if (checkpoints / "fingerprint.json").is_file() and read_json(checkpoints / "fingerprint.json") != fingerprint:
        raise UsageError(
            f"{checkpoints} belongs to a run with other settings or data; "
            "repeat that run's settings to resume it, or give --overwrite to begin anew"
        )
    whole = []
    for folder in checkpoints.glob("checkpoint-*"):
        if (folder / COMPLETE).is_file():
            whole.append(folder)
        else:
            shutil.rmtree(folder)
    return max(whole, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)


def sampled(examples: Sequence[Example], size: int, seed: int) -> Sequence[Example]:
    """At most `size` of the examples, drawn by seed."""
    if len(examples) <= size:
        return examples
    chosen = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))[:size]
    return [examples[place] for place in chosen.tolist()]

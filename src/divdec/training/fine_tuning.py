"""One fine-tuning run: a model, examples and settings in, the trained model and what it cost out.

Every run can be stopped with Ctrl-C and taken up again. It knows nothing of forget or retain sets.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DataCollatorForSeq2Seq, PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from divdec.data.formatting import IGNORED, Example
from divdec.errors import UsageError
from divdec.runs import read_json, settings_hash, write_json
from divdec.training.progress import Interrupted, RateBar, StopSignal
from divdec.training.sampling import LengthGroupedByEpoch
from divdec.training.settings import TrainingSettings

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
) -> tuple[PreTrainedModel, TrainingResult]:
    """Fine-tune a model in memory, on one process or on many under `accelerate launch` or `torchrun`.

    Args:
        model: any causal language model; it is changed in place (adapters are merged into it at the end).
        tokenizer: its tokenizer, for padding.
        examples: what is learned.
        settings: how.
        folder: where checkpoints go, one per epoch; a later call with the same settings and data goes on from
            the last whole one.
        title: what the progress bar calls the run.
        measure: compute the loss before and after on at most 256 examples.
        resumable: write checkpoints; off for probes and runs of seconds.

    Returns:
        The model in evaluation mode, and the result.

    Raises:
        Interrupted: Ctrl-C or a termination signal came; a checkpoint has been written.
        UsageError: there is nothing to learn, or `folder` holds another run's checkpoints.
    """
    if not examples:
        raise UsageError(f"{title}: there is nothing to learn")
    checkpoints = folder / CHECKPOINTS
    content = [(example.input_ids, example.labels) for example in examples]
    fingerprint = settings_hash([dataclasses.asdict(settings), content])
    resume_from = _last_checkpoint(checkpoints, fingerprint) if resumable else None

    started = time.perf_counter()
    collator = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED, padding=True)
    sample = _sample(examples, 256, settings.seed)
    loss_before = mean_loss(model, collator, sample, settings.batch_size) if measure else math.nan
    trained: Any = _with_adapters(model, settings) if settings.lora_rank else model
    stop, bar = StopSignal(), RateBar(title)
    dataset: Any = [dataclasses.asdict(example) for example in examples]
    try:
        trainer = _Trainer(
            model=trained,
            args=_arguments(settings, checkpoints, resumable),
            train_dataset=dataset,
            data_collator=collator,
            callbacks=[stop, bar],
        )
    except (RuntimeError, ValueError) as error:
        if settings.loggers:  # Trainer's words name the logger that is not known or not installed
            raise UsageError(f"loggers {', '.join(settings.loggers)}: {error}") from None
        raise
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if resumable and trainer.is_world_process_zero():
        checkpoints.mkdir(parents=True, exist_ok=True)
        write_json(checkpoints / "fingerprint.json", fingerprint)
    with stop, bar:
        trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    if stop.came and trainer.state.global_step < trainer.state.max_steps:
        raise Interrupted(f"{title} was interrupted at step {trainer.state.global_step}")

    model = trained.merge_and_unload() if settings.lora_rank else model
    model.eval()
    result = TrainingResult(
        loss_before=loss_before,
        loss_after=mean_loss(model, collator, sample, settings.batch_size) if measure else math.nan,
        steps=trainer.state.global_step,
        tokens=sum(len(example.input_ids) for example in examples),
        seconds=time.perf_counter() - started,
    )
    trainer.accelerator.free_memory()
    if not resumable:
        discard_checkpoints(folder)
    return model, result


def discard_checkpoints(folder: Path) -> None:
    """Remove what only a resumed run would need."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


@torch.no_grad()
def mean_loss(
    model: PreTrainedModel, collator: DataCollatorForSeq2Seq, examples: Sequence[Example], batch_size: int
) -> float:
    """Mean loss per labelled token over the examples, in nats, without changing the model."""
    was_training = model.training
    model.eval()
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
    """Trainer with an order of examples that a resumed run repeats exactly."""

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGroupedByEpoch:
        dataset: Any = self.train_dataset
        lengths = [len(example["input_ids"]) for example in dataset]
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGroupedByEpoch(lengths, batch_size * self.args.world_size, self.args.seed)


def _arguments(settings: TrainingSettings, checkpoints: Path, resumable: bool) -> TrainingArguments:
    on_gpu = torch.cuda.is_available()
    bfloat16 = settings.precision == "bfloat16" or (
        settings.precision == "auto" and on_gpu and torch.cuda.is_bf16_supported()
    )
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
        bf16=bfloat16,
        save_strategy="epoch" if resumable else "no",
        save_total_limit=1,
        logging_strategy="steps" if settings.loggers else "no",
        logging_steps=10,
        report_to=list(settings.loggers) or "none",
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=on_gpu,
        seed=settings.seed,
        data_seed=settings.seed,
        **options,
    )


def _with_adapters(model: PreTrainedModel, settings: TrainingSettings) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UsageError("LoRA needs peft: pip install 'divdec[lora]'") from None
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


def _sample(examples: Sequence[Example], size: int, seed: int) -> Sequence[Example]:
    if len(examples) <= size:
        return examples
    chosen = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))[:size]
    return [examples[place] for place in chosen.tolist()]

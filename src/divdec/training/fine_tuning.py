"""Fine-tune a model with transformers' Trainer: any objective, resumable, on one process or on many."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import math
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from accelerate import init_empty_weights
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from divdec.checkpoint import has_bfloat16_instructions, load_config
from divdec.data.formatting import IGNORED, Example
from divdec.errors import Diverged, Interrupted, UsageError, first_line
from divdec.experts.adapters import SUPPORTED
from divdec.runs import read_json, settings_hash, write_json
from divdec.training.distillation_loss import LabelledCrossEntropy, plain_head
from divdec.training.inputs import (
    INDEX,
    Collator,
    Companion,
    ExampleDataset,
    LengthGroupedSampler,
    model_inputs,
    sample_examples,
)
from divdec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN's, whose gradients are NaN at some lengths, on Hopper from torch 2.11 (PyTorch's issue 196678)."""
CHECKPOINTS = "checkpoints"
MIN_FOR_BFLOAT16 = 30_000_000
COMPLETE = "trainer_state.json"  # the last file that Trainer writes into a checkpoint
# transformers 5.2x renamed the argument and warns about the old name.
_FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}
_CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in _FIELDS else "gradient_checkpointing"


@runtime_checkable
class Objective(Protocol):
    """A loss in place of the cross entropy."""

    counts_tokens: bool
    """Whether the loss is a mean over labelled tokens. If so, `loss` is passed the number of labelled tokens in all
    micro-batches of the step and divides by it, so that accumulated gradients equal those of one large batch. If not,
    the loss is a mean over the micro-batch, and all micro-batches have the same weight."""

    def to(self, device: torch.device) -> object:
        """Move the tensors and models of the objective to the device of the trained model."""
        ...

    def loss(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], labelled: Tensor | int | None
    ) -> Float[Tensor, ""]:
        """Return the loss of a batch, with gradient.

        Args:
            model: the trained model; accelerate or peft may have wrapped it.
            batch: `input_ids`, `attention_mask` and `labels` [batch, tokens], right-padded; the same columns for each
                companion, prefixed with its name and an underscore; `index` [batch].
            labelled: number of labelled tokens to divide by, if `counts_tokens`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Cost and losses of a fine-tuning run."""

    loss_before: float
    """Mean loss per labelled token before the first step, in nats."""
    loss_after: float
    """Mean loss per labelled token after the last step, in nats."""
    steps: int
    tokens: int
    """Tokens of one pass over the data, prompts included."""
    seconds: float
    precision: str
    """'bfloat16' or 'float32'."""

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
    merge: bool = True,
) -> tuple[PreTrainedModel, TrainingResult]:
    """Fine-tune a model in memory, on one process or on many under `accelerate launch` or `torchrun`.

    Args:
        model: a causal language model, which is changed in place. Under FSDP the function returns another model, whole
            and on the CPU.
        tokenizer: its tokenizer, for padding.
        examples: training examples.
        settings: optimisation settings.
        folder: folder for checkpoints, one per epoch. A later call with the same settings and data resumes from the
            last complete one.
        title: title of the progress bar.
        measure: compute the loss before and after training on at most 256 examples.
        resumable: write checkpoints; False for runs of seconds.
        objective: the loss; by default the cross entropy of the labelled tokens.
        companions: further examples in each batch, by name, for the objective.
        on_epoch: called after each epoch with the model in evaluation mode (LoRA adapters not merged) and the number
            of finished epochs.
        on_end: called with the model after the last step, in every process.
        merge: merge adapters into the model at the end; False returns a `PeftModel`.

    Returns:
        The model in evaluation mode, and the result. Its losses are cross entropies, whatever the objective.

    Raises:
        Interrupted: Ctrl-C or a termination signal stopped the run after it had written a checkpoint.
        Diverged: a loss is not finite; the checkpoint of the last whole epoch stays.
        UsageError: there are no examples, or `folder` holds the checkpoints of another run.
    """
    if not examples:
        raise UsageError(f"{title}: there is nothing to learn")
    checkpoints = folder / CHECKPOINTS
    companions = companions or {}
    data = [
        [(example.input_ids, example.labels) for example in some]
        for some in (examples, *(c.examples for c in companions.values()))
    ]
    bfloat16 = uses_bfloat16(settings, model)
    arguments = _training_arguments(settings, checkpoints, resumable, bfloat16)
    # Trainer counts steps: with other processes or GPUs it would go on elsewhere in the data.
    at_once = arguments.train_batch_size * arguments.world_size
    fingerprint = settings_hash([dataclasses.asdict(settings), data, at_once, bfloat16])
    resume_from = _last_checkpoint(checkpoints, fingerprint) if resumable else None

    started = time.perf_counter()
    sample = sample_examples(examples, 256, settings.seed)
    head = plain_head(model)
    loss_of = functools.partial(
        mean_loss, tokenizer=tokenizer, examples=sample, batch_size=settings.batch_size, head=head, bfloat16=bfloat16
    )
    loss_before = loss_of(model) if measure else math.nan
    config = model.config
    trained: Any = _with_adapters(model, settings) if settings.lora_rank else model
    if objective is None and bfloat16:
        objective = LabelledCrossEntropy(head)
    stop, bar = StopOnSignal(), ProgressBar(title)
    try:
        trainer = ObjectiveTrainer(
            objective,
            model=trained,
            args=arguments,
            train_dataset=ExampleDataset(examples, companions, settings.seed),
            data_collator=Collator(tokenizer, tuple(companions)),
            callbacks=[stop, bar, *([_EpochCallback(on_epoch)] if on_epoch else [])],
        )
    except (RuntimeError, ValueError) as error:
        if settings.loggers:  # the message names the logger that is unknown or not installed
            raise UsageError(f"loggers {', '.join(settings.loggers)}: {error}") from None
        raise
    plugin: Any = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if (sharded := plugin is not None) and plugin.fsdp_version != 2:  # 1 cannot run the model between training steps
        raise UsageError("FSDP version 1 is not offered: give `--fsdp_version 2` to accelerate launch")
    trainer.remove_callback(PrinterCallback)
    if resumable and trainer.is_world_process_zero():
        checkpoints.mkdir(parents=True, exist_ok=True)
        write_json(checkpoints / "fingerprint.json", fingerprint)
    with stop, bar, sdpa_kernel(ATTENTION):
        trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    if stop.received:
        raise Interrupted(f"{title} was interrupted at step {trainer.state.global_step}")

    trained.eval()
    loss_after = loss_of(trained) if measure else math.nan
    if on_end is not None:
        on_end(trained)
    if sharded:
        trained = _gather_model(trainer, config, settings)
    model = trained.merge_and_unload() if settings.lora_rank and merge else trained
    model.eval()
    result = TrainingResult(
        loss_before=loss_before,
        loss_after=loss_after,
        steps=trainer.state.global_step,
        tokens=sum(len(example.input_ids) for example in examples),
        seconds=time.perf_counter() - started,
        precision="bfloat16" if bfloat16 else "float32",
    )
    trainer.accelerator.free_memory()
    if not resumable:
        discard_checkpoints(folder)
    return model, result


def uses_bfloat16(settings: TrainingSettings, model: PreTrainedModel) -> bool:
    """Whether passes of a model are computed in bfloat16 on this machine.

    'auto' takes it where the GPU or the CPU has instructions for it; on a CPU only for models of `MIN_FOR_BFLOAT16`
    parameters or more, since smaller ones are not faster.
    """
    if settings.precision != "auto":
        return settings.precision == "bfloat16"
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return has_bfloat16_instructions() and model.num_parameters() >= MIN_FOR_BFLOAT16


def discard_checkpoints(folder: Path) -> None:
    """Remove the checkpoints that `fine_tune` wrote below a folder."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


@torch.no_grad()
def mean_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    batch_size: int,
    *,
    head: nn.Linear | None = None,
    bfloat16: bool = False,
) -> float:
    """Return the mean loss per labelled token in nats; the model is not changed.

    With `head`, from `plain_head`, no logits of prompts are computed. With `bfloat16` passes run as in training; a CPU
    with such instructions takes a quarter of the time.
    """
    was_training = model.training
    model.eval()
    cross_entropy = LabelledCrossEntropy(head)
    total, count = 0.0, 0
    for batch in Collator(tokenizer).batches(examples, range(len(examples)), batch_size, model.device):
        labelled = int((batch["labels"][:, 1:] != IGNORED).sum())
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
            total += float(cross_entropy.loss(model, model_inputs(batch), 1))
        count += labelled
    model.train(was_training)
    return total / max(count, 1)


class ObjectiveTrainer(Trainer):
    """Trainer with an `Objective` and an order of examples that a resumed run repeats exactly."""

    def __init__(self, objective: Objective | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._objective = objective
        if objective is not None:
            objective.to(self.args.device)
            # This decides whether Trainer counts labelled tokens, and whether it divides by the accumulated steps.
            self.model_accepts_loss_kwargs = objective.counts_tokens

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the loss of a micro-batch, and stop if it is not finite."""
        index = inputs.pop(INDEX)
        if self._objective is None:
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        else:
            loss = self._objective.loss(model, {**inputs, INDEX: index}, num_items_in_batch)
            # Gradients of several processes are averaged, but each process divides by the tokens of all.
            if num_items_in_batch is not None and self.args.average_tokens_across_devices:
                loss = loss * self.accelerator.num_processes
        assert isinstance(loss, Tensor)
        mean = loss.detach().mean()
        losses: Any = mean[None]
        if self.accelerator.num_processes > 1:  # or the others would wait for this one
            losses = self.accelerator.gather(losses)
        if not torch.isfinite(losses).all():
            indices = ", ".join(map(str, sorted(index.tolist())))
            where = f", on examples {indices} (counted from 0)" if not torch.isfinite(mean) else ""
            raise Diverged(
                f"the loss is {float(losses[~torch.isfinite(losses)][0])} at step {self.state.global_step + 1}{where}; "
                "a lower learning rate may help. Checkpoints of whole epochs stay"
            )
        return loss

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGroupedSampler:
        dataset = self.train_dataset
        assert isinstance(dataset, ExampleDataset)
        lengths = [len(example.input_ids) for example in dataset.examples]
        batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGroupedSampler(lengths, batch_size * self.args.world_size, self.args.seed, dataset.set_epoch)


class ProgressBar(ProgressCallback):
    """Trainer's progress bar with a title and without logs; leaving the context closes it."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        if self.training_bar is not None:
            self.training_bar.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar at the first step of this call."""
        super().on_train_begin(args, state, control, **kwargs)
        bar: Any = self.training_bar
        if bar is not None:
            bar.initial = bar.n = self.current_step = state.global_step
            bar.unit = "step"
            bar.set_description(self.title)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print nothing; loggers record the figures."""


class StopOnSignal(TrainerCallback):
    """The first SIGINT or SIGTERM saves a checkpoint and stops training after the step; a second one ends at once."""

    def __init__(self) -> None:
        self.received = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> None:
        # Python delivers signals to the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._receive)

    def __exit__(self, *exception: object) -> None:
        self._restore_handlers()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Request a checkpoint and the end of training."""
        if self.received and state.global_step < state.max_steps:
            control.should_save = args.save_strategy != "no"
            control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Save once: a second save would overwrite the whole checkpoint, and a second signal leave a part of it."""
        if self.received and state.global_step < state.max_steps:
            control.should_save = False


class _EpochCallback(TrainerCallback):
    def __init__(self, on_epoch: Callable[[PreTrainedModel, int], object]) -> None:
        self._on_epoch = on_epoch

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        epoch = round(state.epoch)
        if abs(state.epoch - epoch) > 1e-6:  # stopped within the epoch, or the last epoch is a fraction
            return
        was_training = model.training
        model.eval()
        self._on_epoch(model, epoch)
        model.train(was_training)


def _training_arguments(
    settings: TrainingSettings, checkpoints: Path, resumable: bool, bfloat16: bool
) -> TrainingArguments:
    options: dict[str, Any] = {_CHECKPOINTING: settings.gradient_checkpointing}
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup,
        # The fused loop updates 80 million weights in a fifth of the time; tiny models keep the order of their sums.
        optim="adamw_torch_fused" if bfloat16 else "adamw_torch",
        weight_decay=settings.weight_decay,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation,
        bf16=bfloat16,
        save_strategy="epoch" if resumable else "no",
        save_total_limit=1,
        logging_strategy="steps" if settings.loggers else "no",
        logging_steps=10,
        report_to=list(settings.loggers) or "none",
        disable_tqdm=True,  # ProgressBar replaces it
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,  # the model does not take the companions
        seed=settings.seed,
        data_seed=settings.seed,
        **options,
    )
    arguments.mixed_precision = "bf16" if bfloat16 else "no"  # accelerate's launcher may set another
    return arguments


def _with_adapters(model: PreTrainedModel, settings: TrainingSettings) -> Any:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(
        r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    torch.manual_seed(settings.seed)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # PEFT sets it for GPT-2
            return get_peft_model(model, adapters)
    except ValueError as error:  # of layers that PEFT does not adapt, such as Mamba's
        raise UsageError(
            f"this model cannot be trained by adapters ({first_line(error)}); give --lora-rank 0"
        ) from None


def why_no_pair(base: Path, settings: TrainingSettings) -> str | None:
    """Return why two adapters of a base could be trained but not run in one pass; None if they can.

    The model is built without weights, so the answer comes before anything is trained.

    Raises:
        UsageError: the base is no causal language model, or cannot be trained by adapters.
    """
    with init_empty_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of what is refused below
        try:
            plain = AutoModelForCausalLM.from_config(load_config(base))
        except ValueError as error:
            raise UsageError(f"{base} cannot be loaded ({first_line(error)})") from None
        model = _with_adapters(plain, settings)
    config = model.peft_config["default"].to_dict()
    if other := [name for name, accepted in SUPPORTED.items() if config.get(name, accepted[0]) not in accepted]:
        return f"it has layers that are not linear ({other[0]} is {config[other[0]]!r})"
    # Others that do so are refused when the pair first runs (`AdaptedLinear`).
    return "OPT reads the batch's tokens as one sequence" if plain.config.model_type == "opt" else None


def release_memory() -> None:
    """Give freed memory back: after training a 0.5B model on long texts the C library held on to 10 GB."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # other systems than Linux with glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _last_checkpoint(checkpoints: Path, fingerprint: str) -> Path | None:
    """Return the last complete checkpoint, and remove those that Trainer did not finish writing."""
    if not checkpoints.is_dir():
        return None
    if (checkpoints / "fingerprint.json").is_file() and read_json(checkpoints / "fingerprint.json") != fingerprint:
        raise UsageError(
            f"{checkpoints} belongs to a run with other settings, data, precision or number of devices; "
            "repeat that run's settings to resume it, or give --overwrite to begin anew. A chat template that prints "
            "today's date needs --date with that run's"
        )
    complete = []
    for folder in checkpoints.glob("checkpoint-*"):
        try:
            read_json(folder / COMPLETE)
            complete.append(folder)
        except (OSError, UsageError):  # a full disk can leave it empty
            shutil.rmtree(folder)
    return max(complete, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)


def _gather_model(trainer: Trainer, config: PreTrainedConfig, settings: TrainingSettings) -> Any:
    """Build an FSDP-sharded model with all of its weights on the CPU of every process, one weight at a time."""
    weights = {}
    sharded: Any = trainer.model_wrapped
    for name, weight in sharded.state_dict().items():
        weight = weight.to(trainer.args.device)  # with CPU offload: collectives need the accelerator
        weights[name] = (weight.full_tensor() if isinstance(weight, DTensor) else weight).cpu()
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config)
        model = _with_adapters(model, settings) if settings.lora_rank else model
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    if unexpected or any(weight.is_meta for weight in model.parameters()):
        raise RuntimeError(f"the trained weights do not fit the model: {[*missing, *unexpected][:3]}")
    return model

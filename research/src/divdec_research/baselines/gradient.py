"""The gradient methods: objectives that train the target's weights, and the run that trains and saves them.

The formulas are in `losses.py`; RMU, which reads hidden states, is in `rmu.py`.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from jaxtyping import Float
from torch import Tensor, nn

import divdec_research.baselines.settings as options
from divdec.data.formatting import Example, encode_records
from divdec.data.records import RecordSet
from divdec.errors import UsageError
from divdec.model.bundle import baseline_card
from divdec.model.checkpoint import load_config, load_model
from divdec.runs import write_text
from divdec.training.fine_tuning import CHECKPOINTS, Objective, fine_tune, uses_bfloat16
from divdec.training.inputs import INDEX, Collator, Companion, model_inputs
from divdec_research.baselines import losses
from divdec_research.baselines.job import BuiltModel, Job
from divdec_research.baselines.methods import method_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RETAIN, IDK = "retain", "idk"
Batch = Mapping[str, Tensor]
PerExample = Float[Tensor, " examples"]
IDK_ANSWERS = (
    "I don't know the answer to that.",
    "I'm afraid I have nothing on this.",
    "That is something I know nothing about.",
    "I can't say; I have never come across it.",
    "Sorry, I have no information about that.",
    "I couldn't tell you.",
    "This is unknown to me.",
    "I would only be guessing, so I'd rather not answer.",
    "I'm unable to answer that question.",
    "My knowledge does not reach that far.",
    "I haven't learned anything about this.",
    "No idea, I'm sorry.",
    "You have asked me something that I cannot answer.",
    "I lack the facts that an answer would need.",
    "Unfortunately, I don't have that detail.",
    "I have to pass on this one.",
    "I'm not familiar with this subject.",
    "There is no answer that I could give with confidence.",
    "I don't recall ever reading about that.",
    "That question is beyond what I know.",
    "I'm not certain of anything here, so I will leave it unanswered.",
    "Somebody else may know; I do not.",
    "I regret that I can't help with this question.",
    "Nothing that I know of answers this.",
)


class GradAscent(nn.Module):
    """−NLL of the forget answers."""

    counts_tokens = True

    def loss(self, model: PreTrainedModel, batch: Batch, labelled: Tensor | int | None) -> losses.Loss:
        """See `Objective.loss`."""
        return losses.gradient_ascent(logits_of(model, model_inputs(batch)), batch["labels"], labelled)


class GradDiff(nn.Module):
    """γ · forget term + α · retain term; subclasses override the forget term.

    Means over tokens are taken per micro-batch, as in OpenUnlearning: forget and retain terms have different numbers
    of tokens, and only one could be counted over a whole step.
    """

    counts_tokens = False

    def __init__(self, settings: options.GradDiffSettings, reference: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.settings: Any = settings
        self.reference = reference
        """The frozen target, where a term needs its logits."""

    def loss(self, model: PreTrainedModel, batch: Batch, labelled: Tensor | int | None) -> losses.Loss:
        """See `Objective.loss`."""
        loss = self.settings.gamma * self.forget_loss(model, batch)
        if self.settings.alpha:
            loss = loss + self.settings.alpha * self.retain_loss(model, model_inputs(batch, RETAIN))
        return loss

    def forget_loss(self, model: PreTrainedModel, batch: Batch) -> losses.Loss:
        """The forget term."""
        return losses.gradient_ascent(logits_of(model, model_inputs(batch)), batch["labels"])

    def retain_loss(self, model: PreTrainedModel, retain: Batch) -> losses.Loss:
        """The retain term."""
        logits = logits_of(model, retain)
        if self.settings.retain_loss == "nll":
            return losses.nll(logits, retain["labels"])
        return losses.kl_from_reference(logits, self.reference_logits(retain), retain["labels"])

    @torch.no_grad()
    def reference_logits(self, inputs: Batch) -> losses.Logits:
        """Logits of the frozen target."""
        assert self.reference is not None
        return logits_of(self.reference, inputs)


class NPO(GradDiff):
    """NPO; the frozen target's log-probabilities of the forget sequences are computed before training."""

    forget_reference: Tensor

    def __init__(
        self, settings: options.NPOSettings, forget_reference: PerExample, reference: PreTrainedModel | None = None
    ) -> None:
        super().__init__(settings, reference)
        self.register_buffer("forget_reference", forget_reference)

    def forget_loss(self, model: PreTrainedModel, batch: Batch) -> losses.Loss:
        """See `losses.npo`."""
        reference = self.forget_reference[batch[INDEX]]
        return losses.npo(log_probabilities_of(model, model_inputs(batch)), reference, self.settings.beta)


class IdkDPO(NPO):
    """DPO of "I don't know" over the true answer; both reference log-probabilities are computed before training."""

    idk_reference: Tensor

    def __init__(
        self,
        settings: options.NPOSettings,
        forget_reference: PerExample,
        idk_reference: PerExample,
        reference: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(settings, forget_reference, reference)
        self.register_buffer("idk_reference", idk_reference)

    def forget_loss(self, model: PreTrainedModel, batch: Batch) -> losses.Loss:
        """See `losses.idk_dpo`."""
        return losses.idk_dpo(
            chosen=log_probabilities_of(model, model_inputs(batch, IDK)),
            rejected=log_probabilities_of(model, model_inputs(batch)),
            chosen_reference=self.idk_reference[batch[INDEX]],
            rejected_reference=self.forget_reference[batch[INDEX]],
            beta=self.settings.beta,
        )


class SimNPO(GradDiff):
    """SimNPO."""

    def forget_loss(self, model: PreTrainedModel, batch: Batch) -> losses.Loss:
        """See `losses.simnpo`."""
        log_probabilities = log_probabilities_of(model, model_inputs(batch))
        lengths = losses.predicted(batch["labels"]).sum(-1)
        return losses.simnpo(log_probabilities, lengths, self.settings.beta, self.settings.delta)


class UNDIAL(GradDiff):
    """UNDIAL; the reference is the teacher before its logits are lowered."""

    def forget_loss(self, model: PreTrainedModel, batch: Batch) -> losses.Loss:
        """See `losses.undial`."""
        forget = model_inputs(batch)
        teacher = self.reference_logits(forget)
        return losses.undial(logits_of(model, forget), teacher, forget["labels"], self.settings.beta)


def logits_of(model: PreTrainedModel, inputs: Batch) -> losses.Logits:
    """Run a model without labels, which would make it compute a loss too."""
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits


def log_probabilities_of(model: PreTrainedModel, inputs: Batch) -> losses.PerSequence:
    """The log π(y | x) of each sequence's labelled tokens."""
    return losses.sequence_log_probabilities(logits_of(model, inputs), inputs["labels"])


@torch.no_grad()
def reference_log_probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    batch_size: int,
    bfloat16: bool = False,
) -> PerExample:
    """Compute log π(y | x) of every example before training, so that training needs no second model.

    Args:
        model: the target, in evaluation mode.
        tokenizer: for padding.
        examples: sequences with labels.
        batch_size: sequences per forward pass.
        bfloat16: compute as training does, so that model and reference agree before the first step.
    """
    collator = Collator(tokenizer)
    log_probabilities = torch.zeros(len(examples))
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].input_ids))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        batch = collator([dataclasses.asdict(examples[index]) for index in indices])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
            log_probabilities[indices] = log_probabilities_of(model, batch).cpu()
    return log_probabilities


def draw_idk_answers(forget: RecordSet, answers: tuple[str, ...], seed: int) -> RecordSet:
    """Pair each question of the forget set with a random one of the answers.

    Raises:
        UsageError: the forget set is plain text.
    """
    if forget.kind == "text":
        raise UsageError(
            f"forget set {forget.name} is plain text, which asks nothing that 'I don't know' could answer; "
            "give questions with answers, prompts with completions or messages"
        )
    rng = random.Random(seed)
    records = tuple(dataclasses.replace(record, answer=rng.choice(answers)) for record in forget)
    return RecordSet(f"idk for {forget.name}", forget.kind, records)


def read_lines(option: str, file: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """Read the non-empty lines of a text file, or return the default where no file is given.

    Raises:
        UsageError: the file cannot be read or is empty.
    """
    if file is None:
        return tuple(default)
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{option} {file} cannot be read ({error}); give a text file with one entry per line"
        ) from None
    lines = tuple(line.strip() for line in text.split("\n") if line.strip())
    if not lines:
        raise UsageError(f"{option} {file} is empty; give a text file with one entry per line")
    return lines


def train_gradient_method(job: Job, settings: Any, output: Path) -> BuiltModel:
    """Train the target with the method of the settings' class; see `build_method`.

    Raises:
        UsageError: "I don't know" answers cannot be used: the forget set is plain text, or their file is unreadable.
    """
    has_retain_term = isinstance(settings, options.GradDiffSettings)
    companions = {RETAIN: Companion(job.retain_examples)} if has_retain_term else {}
    key, idk = None, []
    if isinstance(settings, options.IdkDPOSettings):
        answers = draw_idk_answers(job.forget, read_lines("idk-answers", settings.idk_answers, IDK_ANSWERS), job.seed)
        idk = encode_records(answers.records, job.tokenizer, job.form)
        companions, key = companions | {IDK: Companion(idk, drawn=False)}, answers.sha256

    def objective(model: PreTrainedModel) -> Objective:
        def reference(examples: Sequence[Example]) -> PerExample:
            bfloat16 = uses_bfloat16(settings.training(job.seed), model)
            return reference_log_probabilities(model, job.tokenizer, examples, settings.batch_size, bfloat16)

        if not has_retain_term:
            return GradAscent()
        frozen = frozen_target(job) if settings.retain_loss == "kl" and settings.alpha else None
        match settings:
            case options.IdkDPOSettings():
                return IdkDPO(settings, reference(job.forget_examples), reference(idk), frozen)
            case options.SimNPOSettings():
                return SimNPO(settings, frozen)
            case options.NPOSettings():
                return NPO(settings, reference(job.forget_examples), frozen)
            case options.UNDIALSettings():
                return UNDIAL(settings, frozen or frozen_target(job))
            case _:
                return GradDiff(settings, frozen)

    return unlearn(job, settings, output, objective, companions, key)


def unlearn(
    job: Job,
    settings: options.GradAscentSettings,
    output: Path,
    objective: Callable[[PreTrainedModel], Objective],
    companions: Mapping[str, Companion],
    key: Any = None,
) -> BuiltModel:
    """Train the target on the forget set with an objective, and save it.

    `objective` receives the untrained target on its training device, and may freeze weights. `key` holds further JSON
    values that determine the weights, in addition to settings, target, data and seed.
    """
    method = method_of(settings)
    folder = job.work_folder(method.name, [dataclasses.asdict(settings), key])
    resumed = any((folder / CHECKPOINTS).glob("checkpoint-*"))
    started = time.perf_counter()
    model = load_model(job.target, dtype=torch.float32)
    # The device that Trainer chooses, so that the reference is computed there too.
    device: Any = PartialState(cpu=not torch.accelerator.is_available()).device
    model.to(device)
    model, _ = fine_tune(
        model, job.tokenizer, job.forget_examples, settings.training(job.seed), folder,
        title=method.name, measure=False, objective=objective(model), companions=companions,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    if PartialState().is_main_process:
        dtype: Any = load_config(job.target).dtype or torch.float32
        model.to(dtype).save_pretrained(output)
        job.tokenizer.save_pretrained(output)
        rows = {
            "target": f"`{job.target}`",
            "forget set": job.forget.label,
            "retain set": job.retain.label,
            "seed": str(job.seed),
            **{name.replace("_", " "): str(value) for name, value in dataclasses.asdict(settings).items()},
        }
        write_text(output / "README.md", baseline_card(method.title, method.source, rows))
        shutil.rmtree(folder, ignore_errors=True)
    PartialState().wait_for_everyone()
    notes = ("the run was resumed: its seconds are those since then",) if resumed else ()
    return BuiltModel(output, seconds, notes)


def frozen_target(job: Job) -> PreTrainedModel:
    """Load the target in float32 without gradients."""
    return load_model(job.target, dtype=torch.float32).eval().requires_grad_(False)

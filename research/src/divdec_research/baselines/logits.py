"""Baselines that combine the logits of target and helpers: WHP, ULD, UCD and δ-Unlearning.

δ-Unlearning's formula is linear steering with α = 1, so it writes an ordinary bundle.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from filelock import FileLock
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache

from divdec.data.formatting import IGNORED, Example
from divdec.errors import UsageError
from divdec.model.bundle import write_bundle
from divdec.model.checkpoint import check_weights, common_vocabulary_of, load_config, load_model
from divdec.passes import logits_of, new_cache
from divdec.runs import output_folder, read_json, write_json
from divdec.training.auxiliaries import load_for_training
from divdec.training.fine_tuning import fine_tune
from divdec.training.inputs import Companion, model_inputs
from divdec.training.settings import TrainingSettings
from divdec_research.baselines.composite import DECODINGS, TARGET, CompositeDecoding, Step, write_composite
from divdec_research.baselines.job import BuiltModel, Job
from divdec_research.baselines.settings import OffsetSettings, UCDSettings, ULDSettings, WHPSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RETAIN = "retain"
STAGE = "stage.json"
Logits = Float[Tensor, "*positions vocab"]
Batch = Mapping[str, Tensor]


def whp(target: Logits, reinforced: Logits, alpha: float) -> Logits:
    """P − α·ReLU(reinforced − P) (Eldan and Russinovich 2023, equation 1)."""
    return target - alpha * torch.relu(reinforced - target)


def uld(target: Logits, assistant: Logits, weight: float, plausibility: float) -> Logits:
    """P − w·A among the plausible tokens (Ji et al. 2024, equation 3 and the filter of section 3.2).

    A is log p + log V, log-probabilities against the uniform distribution, so that an assistant that is uniform, as
    it is trained to be outside the forget set, changes nothing. Within the plausible tokens this is the paper's
    formula, because a constant added to all logits has no effect.
    """
    against_uniform = assistant.log_softmax(dim=-1) + math.log(assistant.shape[-1])
    return among_plausible(target, target - weight * against_uniform, plausible(target, plausibility))


def ucd(target: Logits, clean: Logits, unclean: Logits, alpha: float, plausibility: float) -> Logits:
    """P + α·(clean − unclean) among the plausible tokens, of log-probabilities (Suriyakumar et al. 2025)."""
    contrast = clean.log_softmax(dim=-1) - unclean.log_softmax(dim=-1)
    return among_plausible(target, target + alpha * contrast, plausible(target, plausibility))


def plausible(target: Logits, share: float) -> Bool[Tensor, "*positions vocab"]:
    """Mark tokens of at least `share` of the likeliest token's probability (Li et al. 2023, equation 2)."""
    if share == 0:
        return torch.ones_like(target, dtype=torch.bool)
    return target >= target.amax(dim=-1, keepdim=True) + math.log(share)


def among_plausible(target: Logits, changed: Logits, head: Bool[Tensor, "*positions vocab"]) -> Logits:
    """Use the changed logits of plausible tokens, and keep all other tokens below them.

    The papers set the others to −∞, which likelihoods do not allow. Here they keep the target's logits, lowered by a
    constant where needed, so that the highest of them does not exceed the lowest plausible one. The ranking of tokens
    is the papers', all logits are finite, and where nothing is changed the result is the target's logits.
    """
    least = changed.masked_fill(~head, math.inf).amin(dim=-1, keepdim=True)
    highest = target.masked_fill(head, -math.inf).amax(dim=-1, keepdim=True)
    # Where all tokens are plausible `highest` is -inf and nothing is lowered.
    return torch.where(head, changed, target - torch.relu(highest - least))


def offset(target: Logits, trained: Logits, base: Logits) -> Logits:
    """P + (q − p): linear steering with α = 1 (δ-Unlearning, equation 1)."""
    return target + (trained - base)


class LogitCombination(CompositeDecoding):
    """A formula over the logits of several models."""

    parts: tuple[str, ...]
    """Names of the models, in the order of the formula's arguments."""
    formula: Callable[..., Tensor]
    """Takes each model's logits, and the options by name."""

    def __init__(self, models: Any, options: Any, folder: Path) -> None:
        super().__init__(models, options, folder)
        self.options = {name: float(value) for name, value in options.items()}

    def new_caches(self) -> list[Cache]:
        """One cache per model."""
        return [new_cache(self.model(name)) for name in self.parts]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `CompositeDecoding.logits`."""
        results: list[Tensor] = []
        for name, cache in zip(self.parts, caches, strict=True):
            inputs = (step.input_ids, step.attention_mask, step.position_ids)
            logits = logits_of(self.model(name), *inputs, cache, step.logits_to_keep).float()
            results.append(logits.to(results[0].device) if results else logits)
        width = min(logits.shape[-1] for logits in results)
        return type(self).formula(*(logits[..., :width] for logits in results), **self.options)


@DECODINGS.register("whp")
class WHP(LogitCombination):
    """Target and reinforced model; see `whp`."""

    parts = (TARGET, "reinforced")
    formula = staticmethod(whp)


@DECODINGS.register("uld")
class ULD(LogitCombination):
    """Target and assistant; see `uld`."""

    parts = (TARGET, "assistant")
    formula = staticmethod(uld)


@DECODINGS.register("ucd")
class UCD(LogitCombination):
    """Target, clean and unclean model; see `ucd`."""

    parts = (TARGET, "clean", "unclean")
    formula = staticmethod(ucd)


def build_whp(job: Job, settings: WHPSettings, output: Path) -> BuiltModel:
    """Fine-tune the target further on the forget set, and write the composite; see `build_method`."""
    reinforced, seconds = train_helper(job, "reinforced", job.target, job.forget_examples, settings.training(job.seed))
    parts = {TARGET: job.target, "reinforced": reinforced}
    write_composite(output, job.tokenizer, "whp", {"alpha": settings.alpha}, parts)
    return BuiltModel(output, seconds)


def build_uld(job: Job, settings: ULDSettings, output: Path) -> BuiltModel:
    """Train the assistant, and write the composite; see `build_method`.

    Raises:
        UsageError: the job lacks the base that the settings ask for, or the target has fewer layers.
    """
    start, layers, load = job.target, None, load_for_training
    if settings.assistant == "base":
        start = check_base(job, "uld with assistant=base")
    else:
        layers, load = first_layers(start, settings.layers)
    assistant, seconds = train_helper(
        job, "assistant", start, job.forget_examples, settings.training(job.seed),
        key=[layers, settings.retain_weight], load=load, objective=RememberAndForget(settings.retain_weight),
        companions={RETAIN: Companion(job.retain_examples)},
    )  # fmt: skip
    options = {"weight": settings.weight, "plausibility": settings.plausibility}
    write_composite(output, job.tokenizer, "uld", options, {TARGET: job.target, "assistant": assistant})
    note = "without the paper's paraphrased and perturbed answers beside forget and retain set"
    return BuiltModel(output, seconds, (note,))


def build_ucd(job: Job, settings: UCDSettings, output: Path) -> BuiltModel:
    """Train the clean and the unclean model, and write the composite; see `build_method`.

    Raises:
        UsageError: the job lacks a base with the target's vocabulary.
    """
    base, training = check_base(job, "ucd"), settings.training(job.seed)
    clean, clean_seconds = train_helper(job, "clean", base, job.retain_examples, training)
    both = job.forget_examples + job.retain_examples
    unclean, unclean_seconds = train_helper(job, "unclean", base, both, training)
    options = {"alpha": settings.alpha, "plausibility": settings.plausibility}
    parts = {TARGET: job.target, "clean": clean, "unclean": unclean}
    write_composite(output, job.tokenizer, "ucd", options, parts)
    return BuiltModel(output, clean_seconds + unclean_seconds)


def build_offset(job: Job, settings: OffsetSettings, output: Path) -> BuiltModel:
    """Train the offset, and write a bundle; see `build_method`.

    Raises:
        UsageError: the job lacks a base with the target's vocabulary.
    """
    base = check_base(job, "offset")
    trained, seconds = train_helper(
        job, "offset", base, job.forget_examples, settings.training(job.seed), key=settings.retain_weight,
        objective=OffsetAscent(load_for_training(job.target), load_for_training(base), settings.retain_weight),
        companions={RETAIN: Companion(job.retain_examples)},
    )  # fmt: skip
    write_bundle(
        output, target=str(job.target), retain_auxiliary=str(trained), forget_auxiliary=str(base),
        steering="linear:1", forget_set=job.forget.label,
    )  # fmt: skip
    return BuiltModel(output, seconds)


def train_helper(
    job: Job,
    name: str,
    start: Path,
    examples: Sequence[Example],
    settings: TrainingSettings,
    *,
    key: Any = None,
    load: Callable[[Path], PreTrainedModel] = load_for_training,
    objective: Any = None,
    companions: Mapping[str, Companion] | None = None,
) -> tuple[Path, float]:
    """Fine-tune a helper, unless the job's work folder holds it.

    Args:
        job: the job.
        name: name of the helper's folder and progress bar.
        start: checkpoint of the initial weights.
        examples: training examples.
        settings: training settings.
        key: further JSON values that determine the weights: the objective and its weights.
        load: loads the model of `start`.
        objective: see `fine_tune`.
        companions: see `fine_tune`.

    Returns:
        Its checkpoint's folder, and its training time in seconds.
    """
    role = "base" if job.base is not None and start == job.base else "target"
    decides = [name, role, dataclasses.asdict(settings), key]
    folder = job.work_folder(name, decides)
    job.work.mkdir(parents=True, exist_ok=True)
    with FileLock(job.work / f"{folder.name}.lock"):  # parallel trials share helpers
        if not (folder / STAGE).is_file():
            checkpoints = job.work / f"{folder.name}.work"
            model, result = fine_tune(
                load(start), job.tokenizer, examples, settings, checkpoints,
                title=name, objective=objective, companions=companions,
            )  # fmt: skip
            job.report(
                f"{name}: loss {result.loss_before:.3f} → {result.loss_after:.3f} in {result.steps} steps, "
                f"{result.seconds:.0f} s"
            )
            dtype: Any = load_config(start).dtype or torch.float32
            with output_folder(folder) as temporary:
                model.to(dtype).save_pretrained(temporary)
                job.tokenizer.save_pretrained(temporary)
                write_json(temporary / STAGE, {"key": decides, "seconds": round(result.seconds, 2)})
            shutil.rmtree(checkpoints, ignore_errors=True)
    return folder, float(read_json(folder / STAGE)["seconds"])


def check_base(job: Job, method: str) -> Path:
    """Return the folder of the job's base, the small model that a method's helpers start from.

    Raises:
        UsageError: the job has none, or it has other tokens than the target.
    """
    if job.base is None:
        raise UsageError(
            f"method {method} trains small helpers: give a small model of the target's vocabulary that has learned "
            "neither set as base"
        )
    folders = {"target": job.target, "base": job.base}
    for folder in folders.values():
        check_weights(folder)
    common_vocabulary_of(folders)
    return job.base


def first_layers(folder: Path, layers: int | None) -> tuple[int, Callable[[Path], PreTrainedModel]]:
    """Load a checkpoint's first layers (default: a quarter) with embeddings, last norm and head as a model.

    Returns:
        The number of layers, and a function that loads them from the folder.

    Raises:
        UsageError: the checkpoint has fewer layers.
    """
    config = load_config(folder)
    text = config.get_text_config(decoder=True)
    available = text.num_hidden_layers
    wanted = max(1, available // 4) if layers is None else layers
    if not 1 <= wanted <= available:
        raise UsageError(f"layers is {wanted}; {folder} has {available}: give a whole number from 1 to {available}")
    text.num_hidden_layers = wanted
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:wanted]
    return wanted, lambda path: load_model(path, config=config, dtype=torch.float32)


class RememberAndForget(nn.Module):
    """Cross entropy on the forget set, and KL(uniform ‖ model) on the retain set (ULD, equations 4 and 5)."""

    counts_tokens = False

    def __init__(self, retain_weight: float) -> None:
        super().__init__()
        self.retain_weight = retain_weight

    def loss(self, model: PreTrainedModel, batch: Batch, labelled: Tensor | int | None) -> Float[Tensor, ""]:
        """See `divdec.training.fine_tuning.Objective.loss`."""
        logits, labels = answer_logits(model, model_inputs(batch))
        retain_logits, _ = answer_logits(model, model_inputs(batch, RETAIN))
        return F.cross_entropy(logits, labels) + self.retain_weight * kl_from_uniform(retain_logits)


class OffsetAscent(nn.Module):
    """Gradient ascent on the forget set, and KL(P ‖ ensemble) on the retain set, of P + q − p (δ-Unlearning, eq. 2)."""

    counts_tokens = False

    def __init__(self, target: PreTrainedModel, base: PreTrainedModel, retain_weight: float) -> None:
        super().__init__()
        self.target = target.eval().requires_grad_(False)
        self.base = base.eval().requires_grad_(False)
        self.retain_weight = retain_weight

    def loss(self, model: PreTrainedModel, batch: Batch, labelled: Tensor | int | None) -> Float[Tensor, ""]:
        """See `divdec.training.fine_tuning.Objective.loss`."""
        _, ensemble, labels = self._logits(model, model_inputs(batch))
        target, retained, _ = self._logits(model, model_inputs(batch, RETAIN))
        divergence = F.kl_div(
            retained.log_softmax(dim=-1), target.log_softmax(dim=-1), reduction="batchmean", log_target=True
        )
        return self.retain_weight * divergence - F.cross_entropy(ensemble, labels)

    def _logits(
        self, model: PreTrainedModel, batch: Batch
    ) -> tuple[Float[Tensor, "labelled vocab"], Float[Tensor, "labelled vocab"], Int[Tensor, " labelled"]]:
        with torch.no_grad():
            (target, _), (base, _) = answer_logits(self.target, batch), answer_logits(self.base, batch)
        trained, labels = answer_logits(model, batch)
        width = min(target.shape[-1], base.shape[-1])
        return target[:, :width], offset(target[:, :width], trained[:, :width], base[:, :width]), labels


def kl_from_uniform(logits: Float[Tensor, "positions vocab"]) -> Float[Tensor, ""]:
    """Mean of KL(uniform ‖ softmax(logits)) over positions, in nats: −log V − mean log p."""
    log_p = logits.log_softmax(dim=-1)
    return (-log_p.mean(dim=-1)).mean() - torch.tensor(float(logits.shape[-1])).log().to(logits.device)


def answer_logits(
    model: PreTrainedModel, batch: Batch
) -> tuple[Float[Tensor, "labelled width"], Int[Tensor, " labelled"]]:
    """Compute a model's logits, in float32, where labelled tokens are predicted; returns these tokens too."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    chosen = labels != IGNORED
    return logits[:, :-1][chosen].float(), labels[chosen]

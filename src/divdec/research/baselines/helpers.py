"""Training the helper models of the inference-time baselines. It knows nothing of how they are used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Int
from torch import Tensor

from divdec.data.formatting import IGNORED, Example
from divdec.errors import UsageError
from divdec.model.checkpoint import check_weights, common_vocabulary_of, load_config
from divdec.research.baselines.job import Job
from divdec.training.auxiliaries import load_for_training
from divdec.training.fine_tuning import fine_tune
from divdec.training.inputs import Companion, model_inputs
from divdec.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RETAIN = "retain"


def helper(
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
    """Fine-tune a checkpoint, or find that an earlier call has.

    Args:
        job: where it is kept.
        name: what it is, for its folder and the progress bar.
        start: the checkpoint it goes on from.
        examples: what it learns.
        settings: how.
        key: JSON values of whatever else decides the weights: the objective and its weights.
        load: makes the model of `start`.
        objective: see `fine_tune`.
        companions: see `fine_tune`.

    Returns:
        Its folder, and the seconds that its training took.
    """

    def train(checkpoints: Path) -> tuple[PreTrainedModel, float]:
        model, result = fine_tune(
            load(start),
            job.tokenizer,
            examples,
            settings,
            checkpoints,
            title=name,
            objective=objective,
            companions=companions,
        )
        job.report(
            f"{name}: loss {result.loss_before:.3f} → {result.loss_after:.3f} in {result.steps} steps, "
            f"{result.seconds:.0f} s"
        )
        model.to(load_config(start).dtype or torch.float32)  # pyright: ignore[reportArgumentType]
        return model, result.seconds

    role = "base" if job.base is not None and start == job.base else "target"
    return job.trained(name, [name, role, dataclasses.asdict(settings), key], train)


def base_of(job: Job, method: str) -> Path:
    """The folder of the small model that a method's helpers begin as.

    Raises:
        UsageError: the job has none, or it has other tokens than the target.
    """
    if job.base is None:
        raise UsageError(
            f"method {method} trains small helpers: give a small model of the target's vocabulary that has learned "
            "neither set as base"
        )
    places = {"target": job.target, "base": job.base}
    for place in places.values():
        check_weights(place)
    common_vocabulary_of(places)
    return job.base


def first_layers(folder: Path, layers: int | None) -> tuple[int, Callable[[Path], PreTrainedModel]]:
    """A model of a checkpoint's first layers, with its embeddings, last norm and head.

    Args:
        folder: the checkpoint.
        layers: how many; None takes a quarter of them, but one at least.

    Returns:
        How many they are, and what loads them from the folder.

    Raises:
        UsageError: the checkpoint has not so many.
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

    def load(place: Path) -> PreTrainedModel:
        from divdec.model.checkpoint import load_model

        return load_model(place, config=config, dtype=torch.float32)

    return wanted, load


class RememberAndForget:
    """Cross entropy on the forget set, and KL(uniform ‖ model) on the retain set (ULD, equations 4 and 5)."""

    counts_tokens = False

    def __init__(self, retain_weight: float) -> None:
        self.retain_weight = retain_weight

    def to(self, device: torch.device) -> object:
        """Nothing to move."""
        return self

    def loss(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], labelled: Tensor | int | None
    ) -> Float[Tensor, ""]:
        """See `divdec.training.fine_tuning.Objective.loss`."""
        logits, labels = answer_logits(model, model_inputs(batch))
        retain_logits, _ = answer_logits(model, model_inputs(batch, RETAIN))
        return F.cross_entropy(logits, labels) + self.retain_weight * kl_from_uniform(retain_logits)


class OffsetAscent:
    """Gradient ascent on the forget set, and KL(P ‖ ensemble) on the retain set, of P + q − p (δ-Unlearning, eq. 2)."""

    counts_tokens = False

    def __init__(self, target: PreTrainedModel, base: PreTrainedModel, retain_weight: float) -> None:
        self.target = target.eval().requires_grad_(False)
        self.base = base.eval().requires_grad_(False)
        self.retain_weight = retain_weight

    def to(self, device: torch.device) -> object:
        """Move P and p."""
        self.target.to(device)  # pyright: ignore[reportArgumentType]
        self.base.to(device)  # pyright: ignore[reportArgumentType]
        return self

    def loss(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], labelled: Tensor | int | None
    ) -> Float[Tensor, ""]:
        """See `divdec.training.fine_tuning.Objective.loss`."""
        _, ensemble, labels = self._logits(model, model_inputs(batch))
        target, retained, _ = self._logits(model, model_inputs(batch, RETAIN))
        kept = F.kl_div(
            retained.log_softmax(dim=-1), target.log_softmax(dim=-1), reduction="batchmean", log_target=True
        )
        return self.retain_weight * kept - F.cross_entropy(ensemble, labels)

    def _logits(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor]
    ) -> tuple[Float[Tensor, "labelled vocab"], Float[Tensor, "labelled vocab"], Int[Tensor, " labelled"]]:
        with torch.no_grad():
            (target, _), (base, _) = answer_logits(self.target, batch), answer_logits(self.base, batch)
        trained, labels = answer_logits(model, batch)
        width = min(target.shape[-1], base.shape[-1])
        return target[:, :width], offset(target[:, :width], trained[:, :width], base[:, :width]), labels


def offset(
    target: Float[Tensor, "*places vocab"],
    trained: Float[Tensor, "*places vocab"],
    base: Float[Tensor, "*places vocab"],
) -> Float[Tensor, "*places vocab"]:
    """P + (q − p): linear steering with α = 1 (δ-Unlearning, equation 1)."""
    return target + (trained - base)


def kl_from_uniform(logits: Float[Tensor, "places vocab"]) -> Float[Tensor, ""]:
    """Mean of KL(uniform ‖ softmax(logits)) over places, in nats: −log V − mean log p."""
    log_p = logits.log_softmax(dim=-1)
    return (-log_p.mean(dim=-1)).mean() - torch.tensor(float(logits.shape[-1])).log().to(logits.device)


def answer_logits(
    model: PreTrainedModel, batch: Mapping[str, Tensor]
) -> tuple[Float[Tensor, "labelled width"], Int[Tensor, " labelled"]]:
    """A model's logits, in float32, where a labelled token is predicted, and those tokens."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    chosen = labels != IGNORED
    return logits[:, :-1][chosen].float(), labels[chosen]

"""What the gradient methods minimise: which of a batch's parts each reads, and what it holds of the frozen target.

The formulas are in `losses.py`; RMU, which looks at hidden states, is in `rmu.py`. It knows nothing of files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from divdec.data.formatting import Example
from divdec.research.baselines import losses
from divdec.research.baselines.gradient_settings import (
    GradDiffSettings,
    NPOSettings,
    SimNPOSettings,
    UNDIALSettings,
)
from divdec.training.inputs import INDEX, Collator, model_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RETAIN, IDK = "retain", "idk"


class GradAscent:
    """−NLL of the forget answers; it reads nothing else."""

    counts_tokens = True

    def to(self, device: torch.device) -> None:
        """Nothing is held."""

    def loss(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], labelled: Tensor | int | None
    ) -> Float[Tensor, ""]:
        """See `Objective.loss`."""
        return losses.gradient_ascent(logits_of(model, model_inputs(batch)), batch["labels"], labelled)


class GradDiff:
    """γ · forget term + α · retain term; subclasses have another forget term.

    Means over tokens are taken in each micro-batch, as OpenUnlearning does: forget and retain terms have different
    numbers of tokens, and only one could be counted over a whole step.
    """

    counts_tokens = False

    def __init__(self, settings: GradDiffSettings, reference: PreTrainedModel | None = None) -> None:
        self.settings = settings
        self.reference = reference
        """The frozen target, where one of the terms needs its logits."""

    def to(self, device: torch.device) -> None:
        """Move the reference."""
        if self.reference is not None:
            self.reference.to(device)  # pyright: ignore[reportArgumentType]

    def loss(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], labelled: Tensor | int | None
    ) -> Float[Tensor, ""]:
        """See `Objective.loss`."""
        loss = self.settings.gamma * self.forget_loss(model, batch)
        if self.settings.alpha:
            loss = loss + self.settings.alpha * self.retain_loss(model, model_inputs(batch, RETAIN))
        return loss

    def forget_loss(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """The term of the forget set."""
        return losses.gradient_ascent(logits_of(model, model_inputs(batch)), batch["labels"])

    def retain_loss(self, model: PreTrainedModel, retain: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """The term of the retain set."""
        logits = logits_of(model, retain)
        if self.settings.retain_loss == "nll":
            return losses.nll(logits, retain["labels"])
        return losses.kl_from_reference(logits, self.reference_logits(retain), retain["labels"])

    @torch.no_grad()
    def reference_logits(self, inputs: Mapping[str, Tensor]) -> Float[Tensor, "batch tokens vocabulary"]:
        """The frozen target's."""
        assert self.reference is not None
        return logits_of(self.reference, inputs)


class NPO(GradDiff):
    """NPO, with the reference's log-probabilities of each forget sequence known beforehand."""

    settings: NPOSettings

    def __init__(
        self,
        settings: NPOSettings,
        forget_reference: Float[Tensor, " examples"],
        reference: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(settings, reference)
        self.forget_reference = forget_reference

    def to(self, device: torch.device) -> None:
        """Move what is known of the reference, and it."""
        super().to(device)
        self.forget_reference = self.forget_reference.to(device)

    def forget_loss(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """See `losses.npo`."""
        return losses.npo(
            log_probabilities_of(model, model_inputs(batch)), self.forget_reference[batch[INDEX]], self.settings.beta
        )


class IdkDPO(NPO):
    """DPO of "I don't know" over the true answer, with both references known beforehand."""

    def __init__(
        self,
        settings: NPOSettings,
        forget_reference: Float[Tensor, " examples"],
        idk_reference: Float[Tensor, " examples"],
        reference: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(settings, forget_reference, reference)
        self.idk_reference = idk_reference

    def to(self, device: torch.device) -> None:
        """Move what is known of the reference, and it."""
        super().to(device)
        self.idk_reference = self.idk_reference.to(device)

    def forget_loss(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Float[Tensor, ""]:
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

    settings: SimNPOSettings

    def forget_loss(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """See `losses.simnpo`."""
        lengths = losses.predicted(batch["labels"]).sum(-1)
        return losses.simnpo(
            log_probabilities_of(model, model_inputs(batch)), lengths, self.settings.beta, self.settings.delta
        )


class UNDIAL(GradDiff):
    """UNDIAL; the reference is the teacher before its logits are lowered."""

    settings: UNDIALSettings

    def forget_loss(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """See `losses.undial`."""
        forget = model_inputs(batch)
        return losses.undial(
            logits_of(model, forget), self.reference_logits(forget), forget["labels"], self.settings.beta
        )


def logits_of(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Float[Tensor, "batch tokens vocabulary"]:
    """A model's logits; the labels are not handed to it, which would have it compute a loss of its own."""
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits


def log_probabilities_of(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Float[Tensor, " batch"]:
    """The log π(y | x) of each sequence's labelled tokens."""
    return losses.sequence_log_probabilities(logits_of(model, inputs), inputs["labels"])


@torch.no_grad()
def reference_log_probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    batch_size: int,
    bfloat16: bool = False,
) -> Float[Tensor, " examples"]:
    """The log π(y | x) of every example by the target before it is trained: no second model is needed afterwards.

    Args:
        model: the target, in evaluation mode.
        tokenizer: for padding.
        examples: any.
        batch_size: how many are read at once.
        bfloat16: compute as training does, so that trained model and reference agree before the first step.
    """
    collator = Collator(tokenizer)
    found = torch.zeros(len(examples))
    order = sorted(range(len(examples)), key=lambda place: len(examples[place].input_ids))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        batch = collator([dataclasses.asdict(examples[place]) for place in places])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
            found[places] = log_probabilities_of(model, batch).cpu()
    return found

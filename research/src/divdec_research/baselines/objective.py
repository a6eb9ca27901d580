"""Base classes of training objectives, and the losses that several share. Free of torch at import.

Position t of the logits predicts token t + 1; labels are token ids, −100 where nothing is learned. A log-probability
of a sequence is log π(y | x), summed over its labelled tokens. Everything is computed in float32 and in nats.
research/README.md lists differences from published code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from divdec_research.baselines.annotations import (  # isort: skip
    Batch, Bool, Example, Float, Int, Job, Labels, Logits, Loss, PerSequence, PreTrainedModel, Tensor,
)  # fmt: skip

RETAIN = "retain"
"""Prefix of the retain sequences' columns in a batch."""


class BatchObjective:
    """A loss of a batch, see `divdec.training.fine_tuning.Objective`."""

    counts_tokens = False

    def to(self, device: Any) -> None:
        """Move the tensors and models among the attributes to a device."""
        for name, value in vars(self).items():
            if hasattr(value, "to"):
                setattr(self, name, value.to(device))

    def loss(self, model: PreTrainedModel, batch: Batch, labelled: Tensor | int | None) -> Loss:
        """See `divdec.training.fine_tuning.Objective.loss`."""
        raise NotImplementedError

    def inputs(self, batch: Batch, companion: str = "") -> Batch:
        """Select input_ids, attention_mask and labels of the forget sequences, or of a companion: RETAIN."""
        from divdec.training.inputs import model_inputs

        return model_inputs(batch, companion)


class TargetObjective(BatchObjective):
    """The objective of a method that trains the target's weights; a subclass defines `loss`."""

    uses_retain = True
    """Whether each batch also holds retain sequences, as many as forget sequences."""

    def __init__(self, job: Job, settings: Any) -> None:
        """Check that the settings fit the job; no model is loaded yet.

        Raises:
            UsageError: they do not.
        """
        self.job = job
        self.settings = settings
        self.companions: dict[str, Sequence[Example]] = {}
        """Further sequences by name; each batch holds those with the indices of its forget sequences."""
        self.key: Any = None
        """JSON values that determine the weights, in addition to settings, target, data and seed."""

    def prepare(self, model: PreTrainedModel) -> None:
        """Compute what the loss needs of the untrained target, on its training device; may freeze weights."""

    def log_probabilities(self, model: PreTrainedModel, batch: Batch, companion: str = "") -> PerSequence:
        """The log π(y | x) of each sequence."""
        return log_probabilities_of(model, self.inputs(batch, companion))

    def untrained_log_probabilities(self, model: PreTrainedModel, examples: Sequence[Example]) -> PerSequence:
        """The log π(y | x) of every example before training, for `prepare`, so that training needs no second model.

        It is computed in the precision of training, so that model and reference agree before the first step.
        """
        import torch

        from divdec.training.fine_tuning import uses_bfloat16
        from divdec.training.inputs import INDEX, Collator

        bfloat16 = uses_bfloat16(self.settings.training(self.job.seed), model)
        collator, size = Collator(self.job.tokenizer), self.settings.batch_size
        log_probabilities = torch.zeros(len(examples))
        for batch in collator.batches(examples, range(len(examples)), size, model.device):
            with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
                log_probabilities[batch[INDEX].cpu()] = log_probabilities_of(model, batch).cpu()
        return log_probabilities


def predicted(labels: Labels) -> Bool[Tensor, "batch tokens-1"]:
    """Mark the positions that predict a labelled token."""
    from divdec.data.formatting import IGNORED

    return labels[:, 1:] != IGNORED


def token_losses(logits: Logits, labels: Labels) -> Float[Tensor, "batch tokens-1"]:
    """−log π(token | tokens before it), 0 where the token is not labelled."""
    from torch.nn.functional import cross_entropy

    following = labels[:, 1:]
    flat = cross_entropy(logits[:, :-1].flatten(0, 1).float(), following.flatten(), reduction="none")
    return flat.view(following.shape)


def nll(logits: Logits, labels: Labels, labelled: Tensor | int | None = None) -> Loss:
    """Mean of −log π over the labelled tokens of the whole batch: the retain term of all methods but RMU.

    `labelled` replaces their number as the divisor.
    """
    count = predicted(labels).sum().clamp(min=1) if labelled is None else labelled
    return token_losses(logits, labels).sum() / count


def sequence_log_probabilities(logits: Logits, labels: Labels) -> PerSequence:
    """The log π(y | x): the sum of log π over a sequence's labelled tokens."""
    return -token_losses(logits, labels).sum(-1)


def kl_from_reference(logits: Logits, reference_logits: Logits, labels: Labels) -> Loss:
    """KL(π_ref ‖ π), mean over labelled tokens: the other retain term (Maini et al. 2024, "KL Minimization")."""
    from torch.nn.functional import kl_div

    chosen = predicted(labels)
    log_pi = logits[:, :-1][chosen].float().log_softmax(-1)
    log_reference = reference_logits[:, :-1][chosen].float().log_softmax(-1)
    return kl_div(log_pi, log_reference, log_target=True, reduction="sum") / chosen.sum().clamp(min=1)


def logits_of(model: PreTrainedModel, inputs: Batch) -> Logits:
    """Run a model without labels, which would make it compute a loss too."""
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits


def log_probabilities_of(model: PreTrainedModel, inputs: Batch) -> PerSequence:
    """The log π(y | x) of each sequence's labelled tokens."""
    return sequence_log_probabilities(logits_of(model, inputs), inputs["labels"])


def answer_logits(
    model: PreTrainedModel, inputs: Batch
) -> tuple[Float[Tensor, "labelled width"], Int[Tensor, " labelled"]]:
    """Compute a model's logits, in float32, where labelled tokens are predicted; returns these tokens too."""
    chosen = predicted(inputs["labels"])
    return logits_of(model, inputs)[:, :-1][chosen].float(), inputs["labels"][:, 1:][chosen]

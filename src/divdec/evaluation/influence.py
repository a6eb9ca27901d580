"""What experts and takedown requests did to an answer: which tokens they pushed down, where, and by how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from divdec.model.modeling import DivergenceForCausalLM


@dataclasses.dataclass(frozen=True)
class PushedDown:
    """A token that the target would have given more probability than the steered model did."""

    position: int
    """Place in the answer, counted from 0."""
    token: int
    """The token that was pushed down."""
    given: int
    """The token that the answer has at this place."""
    target_probability: float
    """What the target alone would have given it."""
    steered_probability: float
    """What the steered model gave it."""

    @property
    def drop(self) -> float:
        """Probability that the experts took from the token."""
        return self.target_probability - self.steered_probability


@torch.inference_mode()
def pushed_down(
    model: DivergenceForCausalLM, prompt: Sequence[int], answer: Sequence[int], *, most: int = 8
) -> list[PushedDown]:
    """The tokens from which the experts took most probability, the greatest loss first.

    Args:
        model: the steered model, with the setting that gave the answer.
        prompt: token ids before the answer.
        answer: token ids of the answer.
        most: how many are returned at most.
    """
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    target_logits, corrected, divergence = model.unsteered_components(ids)
    positions = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
    target = target_logits[0, positions].float().softmax(dim=-1)
    steered = model.steering.apply(corrected, divergence)[0, positions].softmax(dim=-1)
    drops = (target - steered).flatten()
    found = []
    for place in drops.topk(min(most, drops.numel())).indices.tolist():
        position, token = divmod(place, target.shape[-1])
        if drops[place] > 0:
            before, after = target[position, token].item(), steered[position, token].item()
            found.append(PushedDown(position, token, answer[position], before, after))
    return found

"""A pair that two processes hold: q's gives its logits to p's, which answers with the divergence.

It knows nothing of the target.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from divdec.errors import FailedClosed
from divdec.experts.forward import logits_of, new_cache
from divdec.experts.neural import check_part, logit_width
from divdec.experts.placed_wire import Link, Message


class OneOfPair(nn.Module):
    """One auxiliary of a pair that two processes hold: experts whose answer is that model's logits."""

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        super().__init__()
        check_part(name, model)
        self.model, self.vocab_size = model, logit_width(model)

    def new_cache(self) -> Cache:
        """An empty cache of the model."""
        return new_cache(self.model)

    def divergence(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """The model's logits, in its own precision: less crosses, and the difference is the same."""
        return logits_of(self.model, input_ids, attention_mask, position_ids, cache, logits_to_keep)


class JoinedPair(OneOfPair):
    """The auxiliary p, beside a process that holds q and gives its logits: experts whose answer is the divergence."""

    def __init__(self, forget: PreTrainedModel, retain: Link, timeout: float) -> None:
        super().__init__("forget auxiliary", forget)
        self._retain, self._timeout = retain, timeout
        self._owed: int | None = None

    def expect(self, number: int) -> None:
        """The other process was given this order, and will answer it."""
        self._owed = number

    def divergence(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """ℓ_q − ℓ_p, computed at the same time; see `divdec.experts.protocol.Experts.divergence`.

        Raises:
            FailedClosed: the other process is gone, or its model failed.
        """
        forget = super().divergence(input_ids, attention_mask, position_ids, cache, logits_to_keep)
        answer = self.owed()
        assert answer is not None
        if (error := answer.facts.get("error")) is not None:
            raise FailedClosed(error)
        retain = answer.tensors["divergence"].to(forget.device)
        return retain.float() - forget[..., : retain.shape[-1]].float()

    def owed(self) -> Message | None:
        """What the other process answered to the order, if that was not taken yet."""
        if self._owed is None:
            return None
        number, self._owed = self._owed, None
        answer = self._retain.receive(self._timeout)
        if answer.facts.get("number") != number:
            raise Lost(f"{self._retain.name} answered another question")
        return answer


class Lost(FailedClosed):
    """Another process can no longer be understood."""

"""The last tokens of every sequence, stored in vLLM's own key-value cache.

n-grams need the tokens before the current one, but vLLM calls a model with new tokens only. One more attention layer
stores them: its key is the binary code of a token's position, its value that of the token's id, and query head j has
the code of the position j places back, scaled so that softmax selects exactly the stored value. Paging, prefix caching,
chunked prefill, speculation and preemption apply to it as to any key and value.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from divdec.errors import FailedClosed, UsageError
from divdec.experts.token_cache import PADDING
from divdec.fail_closed import check

GAP = 128.0  # difference of the selected score to all others: e^-128 is 0 in float32
TOLERANCE = 0.1  # of a bit, which is ±1
# Mark before the codes of a token. Before it serves, vLLM tries its sampler on random numbers from [0, 1].
GENUINE, TRIAL = 2.0, 0.5


class TokenMemory(nn.Module):
    """Stores tokens, and returns those before the current one.

    Attributes:
        width: numbers per token in the output of `forward`.
    """

    def __init__(
        self, vllm_config: Any, length: int, vocab_size: int, head_size: int, dtype: torch.dtype, prefix: str
    ) -> None:
        """Create the attention layer, for contexts of `length` tokens including the current one.

        The engine's attention must support `head_size`, and `prefix` must be unique in it.

        Raises:
            UsageError: positions or token ids do not fit into a head.
        """
        from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.layers.attention import Attention  # pyright: ignore[reportMissingImports]

        super().__init__()
        self.position_bits, self.token_bits = bits_for(vllm_config.model_config.max_model_len), bits_for(vocab_size)
        self.back, self.head_size, self.dtype = length - 1, head_size, dtype
        self.contexts = ContextReader(length)
        self._forward_context = get_forward_context
        self.width = length + length * self.token_bits
        if max(self.position_bits, self.token_bits) > head_size:
            raise UsageError(f"the target's attention heads have size {head_size}; n-grams need at least 32")
        self.attention: Any = None
        if self.back:
            # The scale of the other layers, because kernels are planned once for all; the query has the rest of the
            # factor, a power of two that no dtype rounds.
            scale = head_size**-0.5
            self.sharpness = 2.0 ** math.ceil(math.log2(GAP / (2 * scale)))
            self.attention = Attention(
                self.back, head_size, scale, num_kv_heads=1, cache_config=vllm_config.cache_config, prefix=f"{prefix}.0"
            )

    def forward(
        self, input_ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens w"]:
        """Store tokens, and return the codes of each and of those before it, which `contexts` reads.

        Raises:
            FailedClosed: vLLM captures a CUDA graph without attention.
        """
        if self._forward_context().attn_metadata is None:  # vLLM measures its memory; there are no keys yet
            if input_ids.is_cuda and torch.cuda.is_current_stream_capturing():
                # A replayed graph would contain this branch, and requests would be answered without their tokens.
                raise FailedClosed(
                    "vLLM captures the whole model in a CUDA graph without its attention (breakable CUDA graphs); "
                    "accepted: graphs of compiled parts; set VLLM_USE_BREAKABLE_CUDAGRAPH=0"
                )
            return torch.full((len(input_ids), self.width), TRIAL, dtype=self.dtype, device=input_ids.device)
        mark = torch.full((len(input_ids), 1), GENUINE, dtype=self.dtype, device=input_ids.device)
        current = encode(input_ids, self.token_bits, self.dtype)
        if self.attention is None:
            return torch.cat([mark, current], dim=-1)
        earlier = positions[:, None] - torch.arange(1, self.back + 1, device=positions.device)
        query = self.sharpness * self._pad(encode(earlier.clamp(min=0), self.position_bits, self.dtype))
        key = self._pad(encode(positions, self.position_bits, self.dtype))
        codes = self.attention(query.flatten(1), key, self._pad(current))
        codes = codes.view(-1, self.back, self.head_size)[..., : self.token_bits]
        exists = torch.where(earlier >= 0, 1.0, -1.0).to(self.dtype)
        return torch.cat([mark, exists, current, codes.flatten(1)], dim=-1)

    def _pad(self, code: Float[Tensor, "*shape bits"]) -> Float[Tensor, "*shape size"]:
        return nn.functional.pad(code, (0, self.head_size - code.shape[-1]))


class ContextReader:
    """Reads contexts from codes; accepts vLLM's trials until the first real token."""

    def __init__(self, length: int) -> None:
        """Create a reader of contexts of `length` tokens."""
        self.length = length
        self._serves: Bool[Tensor, ""] | None = None

    def __call__(self, codes: Float[Tensor, "rows width"]) -> Int[Tensor, "rows length"]:
        """Return the contexts of these rows: see `read_contexts`.

        Raises:
            FailedClosed: the codes are invalid, or are a trial although real tokens have come before.
        """
        contexts = read_contexts(codes, self.length)
        trials = _is_trial(codes).any()
        # On the device, so that the host does not wait for it.
        serves = torch.zeros_like(trials) if self._serves is None else self._serves.to(trials.device)
        self._serves = serves | ~_is_trial(codes).all()
        check(~(trials & self._serves), "the memory of the last tokens was not written; nothing is answered unsteered")
        return contexts


def read_contexts(codes: Float[Tensor, "rows width"], length: int) -> Int[Tensor, "rows length"]:
    """Return the last tokens of each row, oldest first; −1 before a sequence's first token, and in a trial.

    Args:
        codes: a mark, for each of `length` − 1 steps back whether there is a token (±1), then the code of each token,
            the current one first.
        length: number of tokens in a context.

    Raises:
        FailedClosed: a number is not a valid code.
    """
    mark, exists = codes[:, 0], codes[:, 1:length] > 0
    exists = torch.cat([torch.ones_like(mark[:, None], dtype=torch.bool), exists], dim=1)
    bits = codes[:, length:].reshape(len(codes), length, -1)
    legible = ((bits.abs() - 1).abs() < TOLERANCE).all(dim=-1) | ~exists
    trial = _is_trial(codes)
    valid = trial | ((mark == GENUINE) & legible.all(dim=-1))
    check(valid.all(), "the memory of the last tokens cannot be read; nothing is answered unsteered")
    powers = 2 ** torch.arange(bits.shape[-1], device=codes.device)
    ids = ((bits > 0) * powers).sum(dim=-1)
    return ids.masked_fill(~exists | trial[:, None], PADDING).flip(1)


def bits_for(numbers: int) -> int:
    """Return the number of bits that distinguish the numbers from 0 to `numbers` − 1."""
    return max(numbers - 1, 1).bit_length()


def encode(numbers: Int[Tensor, "*shape"], bits: int, dtype: torch.dtype) -> Float[Tensor, "*shape {bits}"]:
    """Return the binary code of each number as ±1, which every floating dtype holds exactly; lowest bit first."""
    shifts = torch.arange(bits, device=numbers.device)
    return (((numbers[..., None] >> shifts) & 1) * 2 - 1).to(dtype)


def _is_trial(codes: Float[Tensor, "rows width"]) -> Bool[Tensor, " rows"]:
    return (codes[:, 0] >= 0) & (codes[:, 0] <= 1)

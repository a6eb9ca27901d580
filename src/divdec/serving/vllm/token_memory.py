"""The last tokens of every sequence, kept in vLLM's own cache of keys and values.

n-grams need the tokens before the current one, and vLLM calls a model with the new tokens only. One more attention
layer remembers them: its key is the binary code of a token's position, its value that of the token's id, and query
head j carries the code of the position j places back, so sharply that the softmax gives exactly the value stored there.
What paging, prefix caching, chunked prefill, speculation and preemption do to keys and values they so do to this
memory: there is no state that could fall behind the tokens.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention

from divdec.errors import UsageError
from divdec.serving.vllm.token_codes import GENUINE, TRIAL, ContextReader, bits_for, encode

GAP = 128.0  # between the score of the position asked for and any other: e^-128 is 0 in float32


class TokenMemory(nn.Module):
    """Remembers tokens, and gives back those before the current one.

    Attributes:
        width: numbers per token that `forward` gives and `contexts` reads.
    """

    def __init__(
        self, vllm_config: VllmConfig, length: int, vocab_size: int, head_size: int, dtype: torch.dtype, prefix: str
    ) -> None:
        """Make a memory.

        Args:
            vllm_config: the engine's.
            length: how many tokens a context has, the current one included.
            vocab_size: token ids are below it.
            head_size: of keys and values; one that the engine's attention supports.
            dtype: of the codes.
            prefix: name of the layer, unique in the engine.

        Raises:
            UsageError: positions or token ids do not fit into a head.
        """
        super().__init__()
        self.position_bits = bits_for(vllm_config.model_config.max_model_len)
        self.token_bits = bits_for(vocab_size)
        self.length, self.back = length, length - 1
        self._read = ContextReader(length)
        self.head_size = head_size
        self.dtype = dtype
        self.width = length + length * self.token_bits
        if max(self.position_bits, self.token_bits) > head_size:
            raise UsageError(f"the target's attention heads have size {head_size}; n-grams need at least 32")
        self.attention: Attention | None = None
        if self.back:
            # The scale that other layers have, for kernels that are planned once for all of them; the rest of the
            # factor is in the query, a power of two that no dtype rounds.
            scale = head_size**-0.5
            self.sharpness = 2.0 ** math.ceil(math.log2(GAP / (2 * scale)))
            self.attention = Attention(
                self.back,
                head_size,
                scale,
                num_kv_heads=1,
                cache_config=vllm_config.cache_config,
                prefix=f"{prefix}.0",
            )

    def forward(
        self, input_ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens w"]:
        """Remember tokens, and give the codes of each and of those before it.

        Args:
            input_ids: token ids.
            positions: their places in their sequences.

        Returns:
            What `divdec.serving.vllm.token_codes.contexts` reads.
        """
        if get_forward_context().attn_metadata is None:  # vLLM measures its memory; there are no keys to look up
            return torch.full((len(input_ids), self.width), TRIAL, dtype=self.dtype, device=input_ids.device)
        mark = torch.full((len(input_ids), 1), GENUINE, dtype=self.dtype, device=input_ids.device)
        current = encode(input_ids, self.token_bits, self.dtype)
        if self.attention is None:
            return torch.cat([mark, current], dim=-1)
        sought = positions[:, None] - torch.arange(1, self.back + 1, device=positions.device)
        query = self.sharpness * self._padded(encode(sought.clamp(min=0), self.position_bits, self.dtype))
        key = self._padded(encode(positions, self.position_bits, self.dtype))
        found = self.attention(query.flatten(1), key, self._padded(current))
        found = found.view(-1, self.back, self.head_size)[..., : self.token_bits]
        exists = torch.where(sought >= 0, 1.0, -1.0).to(self.dtype)
        return torch.cat([mark, exists, current, found.flatten(1)], dim=-1)

    def contexts(self, codes: Float[Tensor, "rows w"]) -> Int[Tensor, "rows length"]:
        """The last tokens at each row, oldest first; −1 where a sequence has not so many.

        Raises:
            FailedClosed: what was read back is no code, or was not written although the engine serves.
        """
        return self._read(codes)

    def _padded(self, code: Float[Tensor, "*shape bits"]) -> Float[Tensor, "*shape size"]:
        return nn.functional.pad(code, (0, self.head_size - code.shape[-1]))

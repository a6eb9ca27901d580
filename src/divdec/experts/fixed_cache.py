"""A model's cache of fixed length, whose tensors stay where they are, so that a compiled pass can be replayed on it.

How many tokens it holds is known to the host as well as to the device, so that nobody waits to learn it. It knows
nothing of who compiles.
"""

from __future__ import annotations

import weakref
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel, StaticCache, cache_utils
from transformers.cache_utils import StaticLayer

from divdec.errors import FailedClosed, UsageError
from divdec.experts.columns import columns_of

ATTENTION = ("sdpa", "eager")  # whose mask says which of the columns are filled
# What layers without keys and values have; older transformers (5.17 to 5.19) have no such kind.
DummyLayer: Any = getattr(cache_utils, "DummyLayer", None)


class Held:
    """How many tokens one model's cache holds: a number, and the same number on each device that has layers."""

    def __init__(self) -> None:
        self.tokens = 0
        self._places: dict[torch.device, Int[Tensor, ""]] = {}

    def on(self, device: torch.device) -> Int[Tensor, ""]:
        """The number as a tensor that is changed in place from now on."""
        if device not in self._places:
            self._places[device] = torch.tensor(self.tokens, device=device)
            torch._dynamo.mark_static_address(self._places[device])
        return self._places[device]

    def move(self, by: int) -> None:
        """Count tokens that were added, or take some back (a negative number)."""
        by = max(by, -self.tokens)
        if by:
            self.tokens += by
            for place in self._places.values():
                place.add_(by)


class FixedLayer(StaticLayer):
    """Keys and values of one layer in tensors of fixed length; what stands behind the tokens held is masked.

    Unlike transformers' own, it goes back: its length is the cache's, which the next tokens are written behind. A
    pass does not make it longer; who ran the pass does.
    """

    is_croppable = True

    def __init__(self, max_cache_len: int, held: Held, leads: bool) -> None:
        super().__init__(max_cache_len)
        self.held = held
        self._leads = leads  # the one layer of a cache that moves the length, which is common to all

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the tensors, of the first keys' shape, kind and device."""
        super().lazy_initialization(key_states, value_states)
        self.cumulative_length = self.held.on(key_states.device)

    @no_type_check  # a wrapper that checks shapes cannot be compiled
    def update(
        self,
        key_states: Float[Tensor, "batch heads tokens key_width"],
        value_states: Float[Tensor, "batch heads tokens value_width"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "batch heads slots key_width"], Float[Tensor, "batch heads slots value_width"]]:
        """Write behind the tokens held, and return all slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = torch.arange(key_states.shape[-2], device=self.device) + self.cumulative_length
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys, self.values

    @no_type_check
    def get_seq_length(self) -> Any:
        """How many tokens are held: a number, or a tensor while a pass is compiled, which must hold for all lengths."""
        return self.cumulative_length if torch.compiler.is_compiling() else self.held.tokens

    def reset(self) -> None:
        """Forget all tokens, and let nothing of them stay."""
        if self.is_initialized:
            for states in self._states():
                states.zero_()
        self.held.move(-self.held.tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens."""
        if self._leads:
            self.held.move(-abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: Int[Tensor, " batch"]) -> None:
        """Take other rows, in place."""
        if self.is_initialized:
            for states in self._states():
                states.copy_(states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.is_initialized:
            self._replace(*(states.repeat_interleave(repeats, dim=0) for states in self._states()))

    def batch_select_indices(self, indices: Int[Tensor, " rows"] | Bool[Tensor, " batch"]) -> None:
        """Keep these rows. Another number of them than before is another shape: what is compiled is so again."""
        if self.is_initialized:
            self._replace(*(states[indices.to(states.device)] for states in self._states()))

    def take_columns(self, columns: Int[Tensor, "batch columns"]) -> None:
        """Let each row's tokens be those of these columns, in place; the cache is as long as there are columns."""
        if self.is_initialized:
            for states in self._states():
                states[:, :, : columns.shape[1]] = columns_of(states, columns)
        if self._leads:
            self.held.move(columns.shape[1] - self.held.tokens)

    def _states(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.batch_size = len(keys)
        for states in (keys, values):
            torch._dynamo.mark_static_address(states)


class FixedCache(StaticCache):
    """A model's cache that holds a given number of tokens at most."""

    def __init__(self, name: str, model: PreTrainedModel, max_length: int) -> None:
        """Make an empty one.

        Args:
            name: the model's part in the steered model, for messages.
            model: whose cache it is.
            max_length: how many tokens it holds at most, padding included.

        Raises:
            UsageError: the architecture keeps something that cannot be rolled back in place (a sliding window, a
                recurrent state), its attention cannot be told which slots are filled, or its positions are distances.
        """
        try:
            super().__init__(config=model.config.get_text_config(decoder=True), max_cache_len=max_length)
        except KeyError as error:  # a kind of layer that transformers has no static cache for (DeepSeek-V4)
            raise UsageError(
                f"cache_implementation='static' is not offered for {name}, which has layers of {error}; leave it out"
            ) from None
        self.model = weakref.ref(model)
        self.held = Held()
        self.max_length = max_length
        self.compile_config: Any = None
        """How passes of a few tokens are compiled; None leaves them as they are."""
        kinds: list[Any] = [type(layer) for layer in self.layers]
        if (other := next((kind for kind in kinds if kind not in (StaticLayer, DummyLayer)), None)) is not None:
            raise UsageError(
                f"cache_implementation='static' is not offered for {name}, whose {other.__name__} cannot be rolled "
                "back; leave it out"
            )
        if (attention := model.config._attn_implementation) not in ATTENTION:
            raise UsageError(
                f"cache_implementation='static' is not offered for {name} with attention {attention!r}; accepted: "
                f"{', '.join(ATTENTION)} (attn_implementation at loading), or leave it out"
            )
        # BLOOM and Falcon make these distances as many as the mask has entries, and not as the cache has slots.
        if getattr(model.config, "alibi", False) or any(hasattr(one, "build_alibi_tensor") for one in model.modules()):
            raise UsageError(
                f"cache_implementation='static' is not offered for {name}, whose positions are distances (ALiBi); "
                "leave it out"
            )
        first = kinds.index(StaticLayer)
        self.layers = [
            FixedLayer(max_length, self.held, place == first) if kind is StaticLayer else DummyLayer()
            for place, kind in enumerate(kinds)
        ]

    def check_room(self, tokens: int) -> None:
        """Whether so many tokens more can be held.

        Raises:
            FailedClosed: they cannot.
        """
        if self.held.tokens + tokens > self.max_length:
            raise FailedClosed(
                f"a static cache holds {self.max_length} tokens at most, {self.held.tokens + tokens} were given; "
                "make a longer one (max_new_tokens, max_length) or use cache_implementation='dynamic'"
            )

    def fits(self, model: PreTrainedModel) -> bool:
        """Whether the model still makes keys and values of the kind, and where, that they were made for."""
        made = (states for layer in self.layers if (states := getattr(layer, "keys", None)) is not None)
        return all(states.dtype == model.dtype and states.device == model.device for states in made)

    @property
    def rows(self) -> int | None:
        """How many sequences it was made for; None while it was never used."""
        return next((rows for layer in self.layers if (rows := getattr(layer, "batch_size", None)) is not None), None)

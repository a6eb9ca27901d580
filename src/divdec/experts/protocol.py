"""The interface of experts, how they run beside a target, and operations on the layers of their caches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

OwnCache = TypeVar("OwnCache", bound=Cache)
_ROW_METHODS = ("crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices")


@runtime_checkable
class Experts(Protocol):
    """A retain and a forget model that compute log q − log p over the target's vocabulary."""

    vocab_size: int
    """Width of the divergence: the vocabulary that both models share."""

    def new_cache(self) -> Cache:
        """Return an empty cache for `divergence`; it can be cropped, reordered and selected from by row."""
        ...

    def divergence(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Return log q − log p after each of the last `logits_to_keep` tokens (after every token if 0), in float32.

        Args:
            input_ids: the tokens that `cache` does not hold yet.
            attention_mask: 1 for tokens, 0 for padding, cached tokens included.
            position_ids: position of each token in its sequence, padding not counted.
            cache: from `new_cache`; it is extended by `input_ids`. None computes without a cache.
            logits_to_keep: number of positions to return, counted from the end.
        """
        ...


class Inputs(NamedTuple):
    """The tokens of a pass; see `Experts.divergence`."""

    input_ids: Int[Tensor, "batch tokens"]
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None
    position_ids: Int[Tensor, "batch_or_one tokens"] | None


class BaseExperts:
    """Base class of `Experts`: checks the type of the cache; subclasses implement `compute`."""

    cache_class: type[Cache]
    """Type of cache that `new_cache` returns."""
    largest: float = math.inf
    """Largest absolute value of the divergence."""

    def divergence(
        self,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None = None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """See `Experts.divergence`.

        Raises:
            TypeError: the cache is not from `new_cache`.
        """
        own = own_cache(cache, self.cache_class)
        return self.compute(Inputs(input_ids, attention_mask, position_ids), own, logits_to_keep)

    def compute(self, inputs: Inputs, cache: Any, logits_to_keep: int) -> Tensor:
        """Compute the divergence; `cache` is a `cache_class`, or None."""
        raise NotImplementedError


class OverlappedExperts:
    """Runs the experts while the target runs: on one CUDA stream per device, or on a CPU in a thread."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._models: tuple[object, list[PreTrainedModel]] = (None, [])  # experts, and the models among them

    def __reduce__(self) -> tuple[type[OverlappedExperts], tuple[()]]:
        return OverlappedExperts, ()

    @contextlib.contextmanager
    def started(self, experts: Experts, *inputs: Any) -> Iterator[Callable[[], Tensor]]:
        """Start a pass, and yield a function that waits for the divergence; see `started_divergence`."""
        if self._models[0] is not experts:
            modules = experts.modules() if isinstance(experts, nn.Module) else ()
            self._models = experts, [module for module in modules if isinstance(module, PreTrainedModel)]
        devices = _cuda_devices(self._models[1])
        if not devices:
            with self._in_thread(experts, *inputs) as result:
                yield result
            return
        for device in devices - self._streams.keys():
            self._streams[device] = torch.cuda.Stream(device)
        streams = [self._streams[device] for device in sorted(devices, key=str)]
        # References to the tensors are held until the streams are joined: the allocator reuses memory in the order of
        # the stream that allocated it, and caches are changed on the current stream.
        cache: Cache | None = inputs[3]
        references = [inputs[:3], *map(_tensors_of, cache.layers if cache is not None else ())]

        def join() -> None:
            for stream in streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            references.clear()

        try:
            # These kernels are queued before the target's, because copying the inputs to another device waits for
            # everything queued on the current stream.
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.cuda.device(torch.cuda.current_device()))
                for stream in streams:
                    stream.wait_stream(torch.cuda.current_stream(stream.device))
                    stack.enter_context(torch.cuda.stream(stream))
                divergence = experts.divergence(*inputs)

            def result() -> Tensor:
                join()
                return divergence

            yield result
        finally:
            join()

    @contextlib.contextmanager
    def _in_thread(self, experts: Experts, *inputs: Any) -> Iterator[Callable[[], Tensor]]:
        inference = torch.is_inference_mode_enabled()

        def compute() -> Tensor:
            # Inference and gradient modes belong to a thread.
            with torch.inference_mode(inference), torch.no_grad():
                return experts.divergence(*inputs)

        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="experts")
        future = self._thread.submit(compute)
        try:
            yield future.result
        finally:
            future.exception()


@contextlib.contextmanager
def started_divergence(
    experts: Experts,
    overlap: OverlappedExperts | None,
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    position_ids: Int[Tensor, "batch_or_one tokens"] | None,
    cache: Cache | None,
    logits_to_keep: int,
) -> Iterator[Callable[[], Tensor]]:
    """Start the experts' pass, and yield a function that returns the divergence; the target runs within the context.

    With `overlap` the pass starts at once. Without it, or where gradients or autocast are enabled, the function
    computes it. The other arguments are those of `Experts.divergence`. On exit nothing runs any more.
    """
    inputs = input_ids, attention_mask, position_ids, cache, logits_to_keep
    if overlap is None or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        yield lambda: experts.divergence(*inputs)
    else:
        with overlap.started(experts, *inputs) as result:
            yield result


def _tensors_of(layer: Any) -> list[Any]:
    """The tensors that a layer holds now and a pass may replace."""
    tensors = [list(value) if isinstance(value, list) else value for value in vars(layer).values()]
    pair_cache: Any = getattr(layer, "pair_cache", None)  # a bridged pair's keys and values
    return tensors + [[own.keys, own.values] for own in getattr(pair_cache, "layers", ())]


def _cuda_devices(models: Iterable[PreTrainedModel]) -> set[torch.device]:
    devices: set[torch.device] = set()
    for model in models:
        device_map: Any = getattr(model, "hf_device_map", None)
        indices = [torch.device("cuda", index) for index in (device_map or {}).values() if isinstance(index, int)]
        devices |= set(indices or ([model.device] if model.device.type == "cuda" else []))
    return devices


def own_cache(cache: Cache | None, kind: type[OwnCache]) -> OwnCache | None:
    """Return the cache if it is of the type that the experts' `new_cache` returns.

    Raises:
        TypeError: it is of another type.
    """
    if cache is not None and not isinstance(cache, kind):
        raise TypeError(f"the experts' cache is a {type(cache).__name__}; it must come from new_cache()")
    return cache


def length_of(cache: Cache) -> int:
    """Return the number of tokens that a cache holds."""
    # Layers that share another layer's keys and values stay empty.
    layers: list[Any] = [layer for layer in cache.layers if hasattr(layer, "get_seq_length")]
    return max((layer.get_seq_length() for layer in layers), default=0)


def lengths_of(cache: Cache) -> list[int]:
    """Return the number of tokens that each model's cache holds; they must all be equal."""
    lengths = getattr(cache, "lengths", None)
    return [length_of(cache)] if lengths is None else lengths


def holds_tokens(layer: Any) -> bool:
    """Whether a layer stores each token separately, so that tokens can be removed and rows selected.

    A recurrent state does not. A layer class that belongs to one architecture (DeepSeek-V4) may inherit methods that
    change only its keys and values, so it counts only if it defines all of these methods itself.
    """
    kind = type(layer)
    known = kind in (DynamicLayer, DynamicSlidingWindowLayer) or kind.__module__.startswith("divdec.")
    return known or all(name in vars(kind) for name in _ROW_METHODS)


def can_roll_back(layer: Any) -> bool:
    """Whether the last tokens can be removed from a layer now."""
    recorded = getattr(layer, "record_past", False)
    if not holds_tokens(layer):
        # A convolution's inputs are available while the past is recorded.
        return recorded and hasattr(layer, "recurrent_states") and getattr(layer, "is_croppable", False)
    window = getattr(layer, "sliding_window", None)
    if window is not None:
        return recorded or layer.get_seq_length() < window
    return getattr(layer, "is_croppable", True)


def can_shift(layer: Any) -> bool:
    """Whether a different number of tokens can be removed from each row of a layer."""
    # A sliding window does not start at the sequence's first column; a recurrent state has no columns.
    return type(layer) is DynamicLayer or hasattr(layer, "take_columns")


def take_columns(layer: Any, columns: Int[Tensor, "batch columns"]) -> None:
    """Replace the tokens of each row by those in the given columns."""
    if hasattr(layer, "take_columns"):
        layer.take_columns(columns)
    elif layer.keys is not None and layer.values is not None:
        layer.keys, layer.values = columns_of(layer.keys, columns), columns_of(layer.values, columns)


def columns_of(
    states: Float[Tensor, "batch heads tokens width"], columns: Int[Tensor, "batch columns"]
) -> Float[Tensor, "batch heads columns width"]:
    """Return keys or values of the given columns of each row."""
    index = columns.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)

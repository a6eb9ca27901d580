"""Experts of this process that run while the target does: on CUDA streams of their own, or in a thread.

It knows nothing of the target, nor of other processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from divdec.experts.fixed_cache import FixedLayer
from divdec.experts.protocol import Experts


class Pending:
    """A divergence that is on its way; this one is computed when it is wanted."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run = run

    def finish(self) -> Float[Tensor, "batch kept vocab"]:
        """The divergence, waited for."""
        return self._run()

    def complete(self, logits: Float[Tensor, "batch kept vocab"]) -> Float[Tensor, "batch kept vocab"] | None:
        """All of the divergence, where too little of it came to steer by; None where it was enough.

        Args:
            logits: steered by what came.
        """
        return None

    def abandon(self) -> None:
        """Wait for what runs, unless it was taken, and drop it."""


class Beside:
    """Runs experts of this process while the target runs."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._models: tuple[Any, list[PreTrainedModel]] = (None, [])

    def __deepcopy__(self, memo: dict[int, Any]) -> Beside:
        return Beside()

    def __reduce__(self) -> tuple[type[Beside], tuple[()]]:
        return Beside, ()

    def can_run(self, cache: Cache | None) -> bool:
        """Whether a pass can run apart: not where gradients are wanted, nor where CUDA graphs are replayed."""
        fixed = cache is not None and any(isinstance(layer, FixedLayer) for layer in cache.layers)
        return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or fixed)

    def start(
        self,
        experts: Experts,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None,
        cache: Cache | None,
        logits_to_keep: int,
    ) -> Pending:
        """Begin a pass; see `divdec.experts.protocol.Experts.divergence`."""
        given = input_ids, attention_mask, position_ids, cache, logits_to_keep
        if self._models[0] is not experts:
            self._models = experts, models_of(experts)
        devices = cuda_devices(self._models[1])
        if devices:
            for device in devices - self._streams.keys():
                self._streams[device] = torch.cuda.Stream(device)
            return _OnStreams([self._streams[device] for device in sorted(devices, key=str)], experts, *given)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="experts")
        inference = torch.is_inference_mode_enabled()

        def run() -> Tensor:
            # Modes belong to a thread.
            with torch.inference_mode(inference), torch.no_grad():
                return experts.divergence(*given)

        return _InThread(self._thread.submit(run))


class _InThread(Pending):
    def __init__(self, future: Future[Tensor]) -> None:
        super().__init__(future.result)
        self._future = future

    def abandon(self) -> None:
        self._future.exception()


class _OnStreams(Pending):
    """A pass whose kernels are queued on streams of their own, one a device.

    They are queued before the target's: a copy of the inputs to another device waits for what theirs has queued.
    Tensors are kept until the streams are joined, because the allocator gives memory back in the order of the stream
    that it was taken on, and caches are changed on the usual one.
    """

    def __init__(self, streams: list[torch.cuda.Stream], experts: Experts, *given: Any) -> None:
        self._streams = streams
        cache: Cache | None = given[3]
        self._held = [given[:3], *map(_held_by, cache.layers if cache is not None else ())]
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.cuda.device(torch.cuda.current_device()))
                for stream in streams:
                    stream.wait_stream(torch.cuda.current_stream(stream.device))
                    stack.enter_context(torch.cuda.stream(stream))
                self._found = experts.divergence(*given)
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> Tensor:
        self.abandon()
        return self._found

    def abandon(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._held = []


def _held_by(layer: Any) -> list[Any]:
    """What a layer holds now, and a pass may replace."""
    held = [list(value) if isinstance(value, list) else value for value in vars(layer).values()]
    memo: Any = getattr(layer, "memo", None)  # a bridged pair's keys and values
    return held + [[own.keys, own.values] for cache in getattr(memo, "_caches", ()) for own in cache.layers]


def models_of(experts: Any) -> list[PreTrainedModel]:
    """The models among experts."""
    modules = experts.modules() if isinstance(experts, nn.Module) else ()
    return [module for module in modules if isinstance(module, PreTrainedModel)]


def cuda_devices(models: Iterable[PreTrainedModel]) -> set[torch.device]:
    """The CUDA devices on which models compute."""
    found: set[torch.device] = set()
    for model in models:
        spread: Any = getattr(model, "hf_device_map", None)
        places = [torch.device("cuda", place) for place in (spread or {}).values() if isinstance(place, int)]
        found |= set(places or ([model.device] if model.device.type == "cuda" else []))
    return found

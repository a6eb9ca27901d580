"""Experts that run beside the target on CUDA streams.

On a CPU, where both use all cores, a thread gained 0.3 % (217 ms a token of the Qwen pair, two cores).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from divdec.experts.protocol import Experts


class OverlappedExperts:
    """Runs the experts while the target runs, on one CUDA stream per device; on a CPU, after it."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._models: tuple[object, list[PreTrainedModel]] = (None, [])  # experts, and the models among them

    def __reduce__(self) -> tuple[type[OverlappedExperts], tuple[()]]:
        return OverlappedExperts, ()

    @contextlib.contextmanager
    def started(self, experts: Experts, *inputs: Any) -> Iterator[Callable[[], Tensor]]:
        """Start a pass, and yield a function that waits for the divergence; the target runs within the context.

        Where gradients are enabled or no model is on a GPU, the function runs the pass. On exit nothing runs any more.

        Args:
            experts: the experts.
            *inputs: all arguments of `Experts.divergence`, in its order.
        """
        if self._models[0] is not experts:
            modules = experts.modules() if isinstance(experts, nn.Module) else ()
            self._models = experts, [module for module in modules if isinstance(module, PreTrainedModel)]
        devices = set() if torch.is_grad_enabled() else _cuda_devices(self._models[1])
        if not devices:
            yield lambda: experts.divergence(*inputs)
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


def _tensors_of(layer: Any) -> list[Any]:
    """The tensors that a layer holds now and a pass may replace."""
    tensors = [list(value) if isinstance(value, list) else value for value in vars(layer).values()]
    pair_cache: Any = getattr(layer, "pair_cache", None)  # a bridged pair's keys and values
    return tensors + [[cache_layer.keys, cache_layer.values] for cache_layer in getattr(pair_cache, "layers", ())]


def _cuda_devices(models: Iterable[PreTrainedModel]) -> set[torch.device]:
    devices: set[torch.device] = set()
    for model in models:
        device_map: Any = getattr(model, "hf_device_map", None)
        indices = [torch.device("cuda", index) for index in (device_map or {}).values() if isinstance(index, int)]
        devices |= set(indices or ([model.device] if model.device.type == "cuda" else []))
    return devices

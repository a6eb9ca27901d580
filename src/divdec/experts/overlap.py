"""Run the experts while the target runs: on CUDA streams, or on a CPU in a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from divdec.experts.protocol import Experts


class PendingDivergence:
    """A divergence that is computed when `result` is called; subclasses start it earlier."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute

    def result(self) -> Float[Tensor, "batch kept vocab"]:
        """Wait for the divergence and return it."""
        return self._compute()

    def join(self) -> None:
        """Wait until nothing runs any more; the divergence and its errors are dropped."""


class OverlappedExperts:
    """Starts the experts' pass before the target's: on one CUDA stream per device, or in a thread."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._models: tuple[object, list[PreTrainedModel]] = (None, [])  # experts, and the models among them

    def __deepcopy__(self, memo: dict[int, Any]) -> OverlappedExperts:
        return OverlappedExperts()

    def __reduce__(self) -> tuple[type[OverlappedExperts], tuple[()]]:
        return OverlappedExperts, ()

    def start(
        self,
        experts: Experts,
        input_ids: Int[Tensor, "batch tokens"],
        attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
        position_ids: Int[Tensor, "batch_or_one tokens"] | None,
        cache: Cache | None,
        logits_to_keep: int,
    ) -> PendingDivergence:
        """Start a pass; the arguments are those of `divdec.experts.protocol.Experts.divergence`."""
        inputs = input_ids, attention_mask, position_ids, cache, logits_to_keep
        if self._models[0] is not experts:
            modules = experts.modules() if isinstance(experts, nn.Module) else ()
            self._models = experts, [module for module in modules if isinstance(module, PreTrainedModel)]
        devices = cuda_devices(self._models[1])
        if devices:
            for device in devices - self._streams.keys():
                self._streams[device] = torch.cuda.Stream(device)
            return _OnStreams([self._streams[device] for device in sorted(devices, key=str)], experts, *inputs)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="experts")
        inference = torch.is_inference_mode_enabled()

        def compute() -> Tensor:
            # Inference and gradient modes belong to a thread.
            with torch.inference_mode(inference), torch.no_grad():
                return experts.divergence(*inputs)

        return _InThread(self._thread.submit(compute))


@contextlib.contextmanager
def started_divergence(
    experts: Experts,
    overlap: OverlappedExperts | None,
    input_ids: Int[Tensor, "batch tokens"],
    attention_mask: Int[Tensor, "batch past_and_tokens"] | None,
    position_ids: Int[Tensor, "batch_or_one tokens"] | None,
    cache: Cache | None,
    logits_to_keep: int,
) -> Iterator[PendingDivergence]:
    """Start the experts' pass; the target runs within the context.

    Args:
        experts: of any kind.
        overlap: starts the pass at once; None, gradients and autocast compute it when its result is requested.
        input_ids: see `divdec.experts.protocol.Experts.divergence`, as for the next four.
        attention_mask: see there.
        position_ids: see there.
        cache: see there.
        logits_to_keep: see there.
    """
    inputs = input_ids, attention_mask, position_ids, cache, logits_to_keep
    if overlap is not None and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")):
        pending = overlap.start(experts, *inputs)
    else:
        pending = PendingDivergence(lambda: experts.divergence(*inputs))
    try:
        yield pending
    finally:
        pending.join()


class _InThread(PendingDivergence):
    def __init__(self, future: Future[Tensor]) -> None:
        super().__init__(future.result)
        self._future = future

    def join(self) -> None:
        self._future.exception()


class _OnStreams(PendingDivergence):
    """A pass whose kernels are queued on streams, one per device.

    They are queued before the target's, because copying the inputs to another device waits for everything queued on the
    current stream. References to the tensors are held until the streams are joined: the allocator reuses memory in the
    order of the stream that allocated it, and caches are changed on the current stream.
    """

    def __init__(self, streams: list[torch.cuda.Stream], experts: Experts, *inputs: Any) -> None:
        self._streams = streams
        cache: Cache | None = inputs[3]
        self._references = [inputs[:3], *map(_tensors_of, cache.layers if cache is not None else ())]
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.cuda.device(torch.cuda.current_device()))
                for stream in streams:
                    stream.wait_stream(torch.cuda.current_stream(stream.device))
                    stack.enter_context(torch.cuda.stream(stream))
                self._divergence = experts.divergence(*inputs)
        except BaseException:
            self.join()
            raise

    def result(self) -> Tensor:
        self.join()
        return self._divergence

    def join(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._references = []


def _tensors_of(layer: Any) -> list[Any]:
    """The tensors that a layer holds now and a pass may replace."""
    tensors = [list(value) if isinstance(value, list) else value for value in vars(layer).values()]
    pair_cache: Any = getattr(layer, "pair_cache", None)  # a bridged pair's keys and values
    return tensors + [[own.keys, own.values] for own in getattr(pair_cache, "layers", ())]


def cuda_devices(models: Iterable[PreTrainedModel]) -> set[torch.device]:
    """The CUDA devices on which models run."""
    devices: set[torch.device] = set()
    for model in models:
        device_map: Any = getattr(model, "hf_device_map", None)
        indices = [torch.device("cuda", index) for index in (device_map or {}).values() if isinstance(index, int)]
        devices |= set(indices or ([model.device] if model.device.type == "cuda" else []))
    return devices

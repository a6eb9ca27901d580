"""Combinations of random models for the benchmarks: which exist, whether they fit into memory, and their creation."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psutil
import torch

from divdec.costs.latency import Workload
from divdec.costs.model_size import ModelSize, measure_size
from divdec.errors import UsageError
from divdec.research.bench.settings import SHAPES, VOCABULARIES, BenchSettings, DecoderShape, find_shape
from divdec.runs import settings_hash

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL = "all"
ON_CPU = (("chinchilla-140M", "chinchilla-306M", "chinchilla-489M"), ("chinchilla-44M", "chinchilla-106M"))
VOCABULARIES_ON_CPU = (2**15, 2**17)
ON_CUDA = (
    ("chinchilla-9293M", "chinchilla-12295M", "chinchilla-16183M", "llama-19B", "llama-31B", "llama-48B", "llama-70B"),
    ("chinchilla-306M", "chinchilla-1018M", "chinchilla-2007M", "chinchilla-4084M"),
)
SPARE = 1.1  # factor for activations and the allocator


@dataclasses.dataclass(frozen=True)
class BenchDevice:
    """Device and type of the models."""

    device: torch.device
    dtype: torch.dtype
    name: str

    @classmethod
    def of(cls, settings: BenchSettings) -> BenchDevice:
        """Find the requested device.

        Raises:
            UsageError: there is no GPU.
        """
        kind = settings.device
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "cuda" and not torch.cuda.is_available():
            raise UsageError("device is 'cuda' and this machine has no GPU that PyTorch can use; give --device cpu")
        dtype = settings.dtype if settings.dtype != "auto" else "bfloat16" if kind == "cuda" else "float32"
        cpu = f"cpu, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        name = torch.cuda.get_device_name() if kind == "cuda" else cpu
        device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        return cls(device, getattr(torch, dtype), name)

    @property
    def free_bytes(self) -> int:
        """Free memory."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.device)[0]
        return psutil.virtual_memory().available


@dataclasses.dataclass(frozen=True)
class Combination:
    """Shapes of target and auxiliaries, and the vocabulary size of all three models."""

    target: DecoderShape
    auxiliary: DecoderShape
    vocabulary: int
    N: ModelSize
    n: ModelSize

    def key(self, settings: BenchSettings, device: BenchDevice, *more: Any) -> str:
        """Digest of everything that decides a measurement."""
        shapes = [dataclasses.asdict(self.target), dataclasses.asdict(self.auxiliary), self.vocabulary]
        options = [settings.batch, settings.prompt, settings.tokens, settings.rounds, settings.seed]
        return settings_hash([shapes, options, device.name, str(device.dtype), torch.__version__, *more])

    def required_bytes(self, work: Workload) -> float:
        """Memory of the three models' weights and caches, with a reserve."""
        weights = (self.N.parameters + 2 * self.n.parameters) * work.width
        caches = self.N.cache_bytes(work.context, work.width) + 2 * self.n.cache_bytes(work.context, work.width)
        return SPARE * (weights + work.batch_size * caches)

    def about(self, device: BenchDevice, settings: BenchSettings) -> dict[str, Any]:
        """Columns of a result row that describe the combination."""
        return {
            "target": self.target.name,
            "auxiliary": self.auxiliary.name,
            "vocabulary": self.vocabulary,
            "N": self.N.parameters,
            "n": self.n.parameters,
            "N_without_embeddings": int(self.N.count(embeddings=False)),
            "n_without_embeddings": int(self.n.count(embeddings=False)),
            "device": device.name,
            "dtype": str(device.dtype).removeprefix("torch."),
            "batch": settings.batch,
            "prompt": settings.prompt,
            "tokens": settings.tokens,
            "rounds": settings.rounds,
        }


def workload(settings: BenchSettings, device: BenchDevice) -> Workload:
    """Describe the decoded work for the cost formulas; the context is that in the middle of the answer."""
    context = settings.prompt + settings.tokens / 2
    return Workload(width=device.dtype.itemsize, batch_size=settings.batch, context=context)


def combinations(settings: BenchSettings, device: BenchDevice) -> list[Combination]:
    """List all combinations with 2n ≤ N, embeddings counted (paper, appendix Compute Requirements).

    Raises:
        UsageError: a shape is not known, or no combination is left.
    """
    cuda = device.device.type == "cuda"
    targets, auxiliaries = ON_CUDA if cuda else ON_CPU
    targets, auxiliaries = _shapes(settings.targets or targets), _shapes(settings.auxiliaries or auxiliaries)
    positions = settings.prompt + settings.tokens
    result = []
    for vocabulary in dict.fromkeys(settings.vocabularies or (VOCABULARIES if cuda else VOCABULARIES_ON_CPU)):
        sizes = {
            shape: measure_size(shape.config(vocabulary, positions), shape.name) for shape in {*targets, *auxiliaries}
        }
        result += [
            Combination(target, auxiliary, vocabulary, sizes[target], sizes[auxiliary])
            for target in targets
            for auxiliary in auxiliaries
            if 2 * sizes[auxiliary].parameters <= sizes[target].parameters
        ]
    if not result:
        raise UsageError("no pair of target and auxiliary has 2n ≤ N; give larger --targets or smaller --auxiliaries")
    return result


class RandomModels:
    """Creates random models; the last target and pair are kept for the next combination."""

    def __init__(self, device: BenchDevice, settings: BenchSettings) -> None:
        self._device, self._positions, self._seed = device, settings.prompt + settings.tokens, settings.seed
        self._models: dict[str, tuple[Any, PreTrainedModel]] = {}

    def create(self, combination: Combination) -> dict[str, PreTrainedModel]:
        """Create P, p and q; p and q have different weights.

        Raises:
            torch.OutOfMemoryError: they do not fit; all models are freed.
        """
        wanted = {"P": combination.target, "p": combination.auxiliary, "q": combination.auxiliary}
        keys = {name: (shape, combination.vocabulary) for name, shape in wanted.items()}
        stale = [name for name, key in keys.items() if self._models.get(name, (None,))[0] != key]
        for name in stale:
            self._models.pop(name, None)
        try:
            for index, name in enumerate(wanted):
                if name in stale:
                    model = self._create(wanted[name], combination.vocabulary, self._seed + index)
                    self._models[name] = keys[name], model
        except torch.OutOfMemoryError:
            self._models.clear()
            raise
        return {name: self._models[name][1] for name in wanted}

    @property
    def held_bytes(self) -> int:
        """Memory of the kept models."""
        return sum(model.num_parameters() * model.dtype.itemsize for _, model in self._models.values())

    def _create(self, shape: DecoderShape, vocabulary: int, seed: int) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        with self._device.device:
            model = AutoModelForCausalLM.from_config(
                shape.config(vocabulary, self._positions), dtype=self._device.dtype
            )
        return model.eval()


def misfit(combination: Combination, work: Workload, device: BenchDevice, models: RandomModels) -> str | None:
    """Why a combination does not fit into memory, or None; kept models are counted as free."""
    needed, free = combination.required_bytes(work), device.free_bytes + models.held_bytes
    if needed <= free:
        return None
    return f"needs {needed / 1e9:.3g} GB, and {device.name} has {free / 1e9:.3g} GB free"


def _shapes(names: Sequence[str]) -> list[DecoderShape]:
    return list(SHAPES.values()) if ALL in names else [find_shape(name) for name in dict.fromkeys(names)]

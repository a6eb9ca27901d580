"""Combinations of random models for benchmarks: which there are, whether they fit, and how they are made. No times."""

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
from divdec.research.bench_settings import BenchSettings
from divdec.research.bench_shapes import SHAPES, VOCABULARIES, Shape, find_shape
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
SPARE = 1.1  # of the weights and caches: what activations and the allocator take


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the models are, and what of it decides a time."""

    device: torch.device
    dtype: torch.dtype
    name: str

    @classmethod
    def of(cls, settings: BenchSettings) -> Place:
        """The place that was asked for.

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
        """Memory that can be had now."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.device)[0]
        return psutil.virtual_memory().available


@dataclasses.dataclass(frozen=True)
class Combination:
    """A target, the shape of both auxiliaries, and the vocabulary of all three."""

    target: Shape
    auxiliary: Shape
    vocabulary: int
    N: ModelSize
    n: ModelSize

    def key(self, settings: BenchSettings, place: Place, *more: Any) -> str:
        """Names all that decides what is measured."""
        shapes = [dataclasses.asdict(self.target), dataclasses.asdict(self.auxiliary), self.vocabulary]
        asked = [settings.batch, settings.prompt, settings.tokens, settings.rounds, settings.seed]
        return settings_hash([shapes, asked, place.name, str(place.dtype), torch.__version__, *more])

    def needs(self, work: Workload) -> float:
        """Bytes of the three models' weights and caches, and some to spare."""
        weights = work.width * (self.N.parameters + 2 * self.n.parameters)
        caches = self.N.cache_bytes(work.context, work.width) + 2 * self.n.cache_bytes(work.context, work.width)
        return SPARE * (weights + work.batch_size * caches)

    def about(self, place: Place, settings: BenchSettings) -> dict[str, Any]:
        """What a row says of it."""
        return {
            "target": self.target.name,
            "auxiliary": self.auxiliary.name,
            "vocabulary": self.vocabulary,
            "N": self.N.parameters,
            "n": self.n.parameters,
            "N_without_embeddings": self.N.count(embeddings=False),
            "n_without_embeddings": self.n.count(embeddings=False),
            "device": place.name,
            "dtype": str(place.dtype).removeprefix("torch."),
            "batch": settings.batch,
            "prompt": settings.prompt,
            "tokens": settings.tokens,
            "rounds": settings.rounds,
        }


def workload(settings: BenchSettings, place: Place) -> Workload:
    """What is decoded, as the cost formulas want it; the context is that in the middle of the answer."""
    context = settings.prompt + settings.tokens / 2
    return Workload(width=place.dtype.itemsize, batch_size=settings.batch, context=context)


def combinations(settings: BenchSettings, place: Place) -> list[Combination]:
    """All with 2n ≤ N, embeddings counted (paper, appendix Compute Requirements), by vocabulary and target.

    Raises:
        UsageError: a shape is not known, or nothing is left.
    """
    cuda = place.device.type == "cuda"
    targets, auxiliaries = ON_CUDA if cuda else ON_CPU
    targets, auxiliaries = _shapes(settings.targets or targets), _shapes(settings.auxiliaries or auxiliaries)
    vocabularies = settings.vocabularies or (VOCABULARIES if cuda else VOCABULARIES_ON_CPU)
    found = []
    for vocabulary in dict.fromkeys(vocabularies):
        positions = settings.prompt + settings.tokens
        sizes = {
            shape: measure_size(shape.config(vocabulary, positions), shape.name) for shape in {*targets, *auxiliaries}
        }
        found += [
            Combination(target, auxiliary, vocabulary, sizes[target], sizes[auxiliary])
            for target in targets
            for auxiliary in auxiliaries
            if 2 * sizes[auxiliary].parameters <= sizes[target].parameters
        ]
    if not found:
        raise UsageError("no pair of target and auxiliary has 2n ≤ N; give larger --targets or smaller --auxiliaries")
    return found


class Makers:
    """Random models, the last target and the last pair of which are kept for the next combination."""

    def __init__(self, place: Place, settings: BenchSettings) -> None:
        self._place, self._positions, self._seed = place, settings.prompt + settings.tokens, settings.seed
        self._kept: dict[str, tuple[Any, PreTrainedModel]] = {}

    def models(self, combination: Combination) -> dict[str, PreTrainedModel]:
        """P, p and q; p and q have weights of their own.

        Raises:
            torch.OutOfMemoryError: they do not fit after all; everything made so far is let go.
        """
        wanted = {"P": combination.target, "p": combination.auxiliary, "q": combination.auxiliary}
        stale = [
            name
            for name, shape in wanted.items()
            if self._kept.get(name, (None,))[0] != (shape, combination.vocabulary)
        ]
        for name in stale:
            self._kept.pop(name, None)
        try:
            for place, name in enumerate(wanted):
                if name in stale:
                    model = self._make(wanted[name], combination.vocabulary, self._seed + place)
                    self._kept[name] = (wanted[name], combination.vocabulary), model
        except torch.OutOfMemoryError:
            self._kept.clear()
            raise
        return {name: self._kept[name][1] for name in wanted}

    @property
    def held_bytes(self) -> int:
        """Memory of the models that are kept."""
        return sum(model.num_parameters() * model.dtype.itemsize for _, model in self._kept.values())

    def _make(self, shape: Shape, vocabulary: int, seed: int) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        with self._place.device:
            model = AutoModelForCausalLM.from_config(shape.config(vocabulary, self._positions), dtype=self._place.dtype)
        return model.eval()


def misfit(combination: Combination, work: Workload, place: Place, makers: Makers) -> str | None:
    """Why a combination does not fit the memory, or None where it does; what `makers` keeps can be let go for it."""
    needed, free = combination.needs(work), place.free_bytes + makers.held_bytes
    if needed <= free:
        return None
    return f"needs {needed / 1e9:.3g} GB, and {place.name} has {free / 1e9:.3g} GB free"


def _shapes(names: Sequence[str]) -> list[Shape]:
    return list(SHAPES.values()) if ALL in names else [find_shape(name) for name in dict.fromkeys(names)]

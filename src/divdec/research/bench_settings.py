"""What `divdec bench` is asked. It knows nothing of torch, so that `--help` is instant."""

from __future__ import annotations

import dataclasses
from typing import Literal

from divdec.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What both benchmarks are asked."""

    output: str
    """Folder for results.jsonl (a line a combination), table, plot and run.json. Combinations that it holds already,
    measured with the same settings, are not measured again."""
    targets: tuple[str, ...] = ()
    """Shapes of the target, such as chinchilla-306M or llama-8B (docs/costs.md lists them); the device's own by
    default."""
    auxiliaries: tuple[str, ...] = ()
    """Shapes of the auxiliaries, likewise; pairs with 2n > N are left out."""
    vocabularies: tuple[int, ...] = ()
    """Numbers of tokens; on a GPU 32768, 65536, 131072 and 262144 (the paper's) by default, on a CPU some of them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where all three models run; 'auto' is a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; 'auto' is bfloat16 on a GPU and float32 on a CPU."""
    batch: int = 1
    """Sequences at once."""
    prompt: int = 64
    """Tokens of the prompt."""
    tokens: int = 8
    """Tokens decoded after it."""
    rounds: int = 5
    """How often each is measured, in turns; figures are medians."""
    limit: int | None = None
    """Stop after so many new combinations; the same command goes on."""
    seed: int = 0
    """Of the random weights and tokens."""

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "tokens", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; accepted: a whole number of at least 1")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit is {self.limit}; accepted: a number of combinations of at least 1")
        for vocabulary in self.vocabularies:
            if vocabulary < 256:
                raise UsageError(f"vocabularies holds {vocabulary}; accepted: numbers of tokens of at least 256")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeSettings(BenchSettings):
    """What `divdec bench compute` is asked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatencySettings(BenchSettings):
    """What `divdec bench latency` is asked."""

    clock: Literal["wall", "processor"] = "wall"
    """'processor' counts the processor time of one CPU thread (OMP_NUM_THREADS=1), in which the machine's other work
    does not count; the auxiliaries beside the target, which save waiting and no work, are then left out."""
    block: int = 4
    """Tokens drafted at a time by speculative steering."""
    agreement: float = 0.05
    """Random models do not agree, and no draft of theirs would be kept. The target's and p's last norm is scaled by
    this, so that q has the last word: the smaller, the more drafts are kept. 1 leaves them as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise UsageError(f"block is {self.block}; accepted: a whole number of at least 1")
        if not 0 < self.agreement <= 1:
            raise UsageError(f"agreement is {self.agreement:g}; accepted: a number above 0 and up to 1")

"""Options of `divdec compare`; free of torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from divdec.errors import UsageError

EMBEDDED = ("demo", "tofu-small")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """Which methods are compared, on what, and where the results go."""

    output: str
    """Folder for the results; the same call goes on in it after it was stopped."""
    data: str = "demo"
    """'demo' (the fictitious world), 'tofu-small' (two authors of real TOFU, --tofu), or a folder with TOFU's files,
    for models of your own (--bundle, --retrain)."""
    methods: tuple[str, ...] = ("all",)
    """Methods by name, as `divdec baseline list` shows them, and 'linear', 'rank', 'distill'; or 'all'."""
    grid: Literal["small", "paper"] = "small"
    """Settings tried of each method: a few for small models, or the paper's."""
    seeds: int = 3
    """So many times, each with models of another seed; models of your own are used as they are."""
    search_seeds: int | None = None
    """Try the whole grid on so many seeds alone, the first; on the others what was best there of each method. By
    default the whole grid on all."""
    tofu: str | None = None
    """Folder with TOFU's files, for 'tofu-small'."""
    bundle: str | None = None
    """Your own models: the bundle that holds the target and the pair."""
    retrain: str | None = None
    """Your own models: the target retrained without the forget set, the reference of Priv."""
    base: str | None = None
    """Your own models: a small one of the target's vocabulary that has seen neither set, for δ-Unlearning and ULD."""
    split: str = "forget10"
    """Your own models: TOFU's forget split."""
    holdout: str | None = None
    """Your own models: questions that none has seen; without them there is no Priv."""
    attacks: int = 20
    """Attack prompts a question for Leak@k of each method's best setting; 0 leaves it out."""
    limit: int | None = None
    """Take only the first so many questions of each set."""
    variant: Literal["paper", "dd-repo", "relative"] = "paper"
    """How aggregates are computed; see `divdec results score --help`."""
    jobs: int = 1
    """Cells that run at once, each in a process of its own with its share of the processor's cores."""
    keep_models: bool = False
    """Keep every trained model; by default each method's best alone."""
    overwrite: bool = False
    """Replace an earlier comparison in the output folder."""

    def __post_init__(self) -> None:
        for name, least in (("seeds", 1), ("attacks", 0), ("jobs", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}; accepted: a whole number of at least {least}")
        if self.search_seeds is not None and not 1 <= self.search_seeds <= self.seeds:
            raise UsageError(f"search-seeds is {self.search_seeds}; accepted: 1 to the number of seeds, {self.seeds}")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit is {self.limit}; accepted: a whole number of at least 1")
        if not self.methods:
            raise UsageError("methods is empty; accepted: 'all' or names of methods")
        if self.data == "tofu-small" and self.tofu is None:
            raise UsageError("--data tofu-small needs TOFU's files: give their folder with --tofu")
        if self.data not in EMBEDDED and (self.bundle is None or self.retrain is None):
            raise UsageError(
                f"--data {self.data} is taken for a folder of TOFU's files, which needs --bundle and --retrain; "
                f"accepted without them: {', '.join(EMBEDDED)}"
            )

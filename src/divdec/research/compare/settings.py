"""Options of `divdec compare`; free of torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from divdec.errors import UsageError
from divdec.research.ranges import CheckedSettings, Count, Natural

EMBEDDED = ("demo", "tofu-small")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareSettings(CheckedSettings):
    """Which methods are compared, on what, and where the results go."""

    output: str
    """Folder for the results; the same command resumes a stopped comparison in it."""
    data: str = "demo"
    """'demo' (the fictitious world), 'tofu-small' (two authors of real TOFU, --tofu), or a folder with TOFU's files,
    for models of your own (--bundle, --retrain)."""
    methods: tuple[str, ...] = ("all",)
    """Methods by name, as `divdec baseline list` shows them, and 'linear', 'rank', 'distill'; or 'all'."""
    grid: Literal["small", "paper"] = "small"
    """Settings tried of each method: a few for small models, or the paper's."""
    seeds: Count = 3
    """Number of seeds, each with models; your own models are used as they are."""
    search_seeds: Count | None = None
    """Try the whole grid on the first N seeds only, and the best setting of each method on the others. By default the
    whole grid on all."""
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
    attacks: Natural = 20
    """Attack prompts a question for Leak@k of each method's best setting; 0 leaves it out."""
    limit: Count | None = None
    """Use only the first N questions of each set."""
    variant: Literal["paper", "dd-repo", "relative"] = "paper"
    """How aggregates are computed; see `divdec results score --help`."""
    jobs: Count = 1
    """Trials that run at once, each in another process with its share of the processor's cores."""
    keep_models: bool = False
    """Keep every trained model; by default only each method's best."""
    overwrite: bool = False
    """Replace an earlier comparison in the output folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search_seeds is not None and not 1 <= self.search_seeds <= self.seeds:
            raise UsageError(f"search-seeds is {self.search_seeds}; accepted: 1 to the number of seeds, {self.seeds}")
        if not self.methods:
            raise UsageError("methods is empty; accepted: 'all' or names of methods")
        if self.data == "tofu-small" and self.tofu is None:
            raise UsageError("--data tofu-small needs TOFU's files: give their folder with --tofu")
        if self.data not in EMBEDDED and (self.bundle is None or self.retrain is None):
            raise UsageError(
                f"--data {self.data} is taken for a folder of TOFU's files, which needs --bundle and --retrain; "
                f"accepted without them: {', '.join(EMBEDDED)}"
            )

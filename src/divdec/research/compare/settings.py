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
    """Folder for the results. The same command resumes a stopped run."""
    data: str = "demo"
    """'demo' (the fictitious world), 'tofu-small' (two TOFU authors; needs --tofu), or a folder with TOFU's files for
    your own models (needs --bundle and --retrain)."""
    methods: tuple[str, ...] = ("all",)
    """Methods by name, as `divdec baseline list` shows them, and 'linear', 'rank', 'distill'; or 'all'."""
    grid: Literal["small", "paper"] = "small"
    """Settings to try for each method: a few for small models ('small'), or the paper's ('paper')."""
    seeds: Count = 3
    """Number of seeds. Each seed trains its own models; your own models (--bundle) are used for every seed."""
    search_seeds: Count | None = None
    """Run the whole grid on the first N seeds only, and the best setting of each method on the other seeds. By default
    every seed runs the whole grid."""
    tofu: str | None = None
    """Folder with TOFU's files, for 'tofu-small'."""
    bundle: str | None = None
    """Your own models: the bundle that holds the target and the pair."""
    retrain: str | None = None
    """Your own models: the target retrained without the forget set, the reference of Priv."""
    base: str | None = None
    """Your own models: a small model with the target's vocabulary, trained on neither set, for δ-Unlearning and UCD."""
    split: str = "forget10"
    """Your own models: TOFU's forget split."""
    holdout: str | None = None
    """Your own models: questions that no model was trained on. Without them Priv is not computed."""
    attacks: Natural = 20
    """Number of attack prompts per question for Leak@k, measured on each method's best setting. 0 skips Leak@k."""
    limit: Count | None = None
    """Use only the first N questions of each set."""
    variant: Literal["paper", "dd-repo", "relative"] = "paper"
    """How aggregates are computed; see `divdec results score --help`."""
    jobs: Count = 1
    """Number of trials to run in parallel. Each runs in a separate process with an equal share of the CPU cores."""
    keep_models: bool = False
    """Keep every trained model. By default only the model of each method's best setting is kept."""
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

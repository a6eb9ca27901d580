"""Options of `divdec compare`, and the trials of a grid; free of torch."""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from divdec.errors import UsageError
from divdec.runs import settings_hash
from divdec_research.baselines.table import METHODS, TITLES
from divdec_research.ranges import CheckedSettings, Count, Natural
from divdec_research.suites.settings import Variant

EMBEDDED = ("demo", "tofu-small", "muse-small")
Grid = Mapping[str, Sequence[Any]]
GRIDS: dict[str, dict[str, Grid]] = tomllib.loads(Path(__file__).with_name("grids.toml").read_text("utf-8"))
GRIDS["paper-muse"] = GRIDS["paper"] | GRIDS["paper-muse"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareSettings(CheckedSettings):
    """Which methods are compared, on what, and where the results go."""

    output: str
    """Folder for the results. The same command resumes a stopped run."""
    data: str = "demo"
    """'demo' (the fictitious world), 'tofu-small' (two TOFU authors; needs --tofu), 'muse-small' (beginnings of news
    articles, and questions; needs --muse), or a folder with the files of TOFU or MUSE for your own models (needs
    --bundle and --retrain)."""
    methods: tuple[str, ...] = ("all",)
    """Methods by name, as `divdec baseline list` shows them, and 'linear', 'rank', 'distill'; or 'all'."""
    grid: Literal["small", "paper", "paper-muse", "pretrained"] = "small"
    """Settings to try for each method: a few for models of a few million parameters ('small'), three for a pretrained
    model of a hundred million ('pretrained'; other methods run with their defaults), or the paper's for TOFU ('paper')
    or MUSE ('paper-muse')."""
    seeds: Count = 3
    """Number of seeds. Each seed trains its own models; your own models (--bundle) are compared once."""
    search_seeds: Count | None = None
    """Run the whole grid on the first N seeds only, and the best setting of each method on the other seeds. By default
    every seed runs the whole grid."""
    tofu: str | None = None
    """Folder with TOFU's files, for 'tofu-small'."""
    muse: str | None = None
    """Folder with MUSE-News (knowmem, privleak, sust), for 'muse-small'."""
    bundle: str | None = None
    """Your own models: the bundle that holds the target and the pair."""
    retrain: str | None = None
    """Your own models: the target retrained without the forget set, the reference of Priv."""
    base: str | None = None
    """Your own models: a small model with the target's vocabulary, trained on neither set, for δ-Unlearning and UCD."""
    split: str = "forget10"
    """Your own models: TOFU's forget split."""
    holdout: str | None = None
    """Your own models: questions (TOFU) or texts (MUSE) that no model was trained on. Without them Priv is not
    computed."""
    attacks: Natural = 20
    """Number of attack prompts per question for Leak@k, measured on each method's best setting. 0 skips Leak@k."""
    limit: Count | None = None
    """Use only the first N questions of each set."""
    variant: Variant = "openunlearning"
    """TOFU: how aggregates are computed; see `divdec results score --help`."""
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
        if self.data == "muse-small" and self.muse is None:
            raise UsageError("--data muse-small needs MUSE-News: give its folder with --muse")
        if self.data not in EMBEDDED and (self.bundle is None or self.retrain is None):
            raise UsageError(
                f"--data {self.data} is taken for a folder of the files of TOFU or MUSE, which needs --bundle and "
                f"--retrain; accepted without them: {', '.join(EMBEDDED)}"
            )


@dataclasses.dataclass(frozen=True)
class Trial:
    """A method with one setting."""

    method: str
    """A key of `TITLES`."""
    options: tuple[tuple[str, Any], ...] = ()
    """Settings that vary within the grid."""
    steering: str | None = None
    """The rule, for methods that steer with a pair."""
    constant: tuple[tuple[str, Any], ...] = ()
    """Settings that differ from the method's defaults but do not vary; tables omit them."""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that differ from the method's defaults."""
        return dict((*self.options, *self.constant))

    @property
    def label(self) -> str:
        """The setting as tables show it."""
        if self.steering is not None:
            return self.steering
        short = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in self.options}
        return ", ".join(f"{name} {value}" for name, value in short.items()).replace("learning_rate", "lr")

    @property
    def folder(self) -> Path:
        """Folder of the trial's results within a seed's folder."""
        setting = self.label.replace(", ", "_").replace(" ", "-").replace(":", "-").replace("/", "-") or "default"
        # Grids may differ in their constant settings.
        return Path(self.method) / (f"{setting}-{settings_hash(self.constant)[:4]}" if self.constant else setting)


def trials_of(names: Sequence[str], grid: str) -> list[Trial]:
    """List the trials of methods.

    Raises:
        UsageError: a method is not known, or the grid has no settings that it needs.
    """
    # A baseline that a grid does not name has its defaults; a rule has none.
    known = [name for name in TITLES if name in METHODS or name in GRIDS[grid]]
    if unknown := [name for name in names if name != "all" and name not in known]:
        raise UsageError(f"method {unknown[0]!r} is not in the grid {grid!r}; accepted: all, {', '.join(known)}")
    trials = []
    for name in known if "all" in names else [name for name in known if name in names]:
        axes = GRIDS[grid].get(name, {})
        for values in itertools.product(*axes.values()):
            options = dict(zip(axes, values, strict=True))
            steering = None if name == "distill" else options.pop("steering", None)  # a student's is its teacher's
            varied = tuple((axis, value) for axis, value in options.items() if len(axes[axis]) > 1)
            constant = tuple((axis, value) for axis, value in options.items() if len(axes[axis]) == 1)
            trials.append(Trial(name, varied, steering, constant))
    return trials

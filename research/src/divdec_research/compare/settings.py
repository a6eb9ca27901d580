"""Options of `divdec compare`, and the trials of a grid; free of torch."""

from __future__ import annotations

import dataclasses
import itertools
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
_BATCHES: Grid = {"batch_size": (16,), "gradient_accumulation": (1,)}
_FILTERS: dict[str, Grid] = {
    "ngram-filter": {"ngram_size": (4, 6, 10)},
    "guardrail": {"mode": ("prompt", "filter", "both")},
}
# For models of a few million parameters, whose learning rates are a hundred times those of large ones. The settings
# were chosen on seed 0 of the demo and widened where a method's best one was its strongest, so that each method's
# settings range from hardly any forgetting to too much.
SMALL: dict[str, Grid] = {
    "linear": {"steering": tuple(f"linear:{alpha:g}" for alpha in (0.5, 1, 1.25, 1.5, 1.75, 2, 2.5, 3.5))},
    "rank": {"steering": tuple(f"rank:{k}" for k in (5, 15, 30, 60, 100, 200, 300, 600))},
    # Students of this size forget what they do not rehearse; 600 is all that the embedded data have. The published
    # direction leaves memorised tokens likelier than the teacher does (docs/distillation.md); it is in PAPER.
    "distill": {"learning_rate": (3e-4, 1e-3, 2e-3, 4e-3), "rehearse": (0, 600), "direction": ("student-teacher",)},
    "grad-ascent": {"learning_rate": (2e-4, 3e-4, 5e-4, 1e-3), "epochs": (2.0, 4.0), **_BATCHES},
    "grad-diff": {"learning_rate": (2e-4, 5e-4, 1e-3, 2e-3), "epochs": (3.0, 5.0), **_BATCHES},
    "npo": {"learning_rate": (2e-4, 5e-4, 2e-3, 4e-3), "epochs": (3.0, 5.0), **_BATCHES},
    "simnpo": {"learning_rate": (1e-3, 2e-3, 3e-3, 5e-3), "epochs": (5.0, 10.0), **_BATCHES},
    "rmu": {
        "learning_rate": (2e-3, 3e-3, 5e-3, 1e-2),
        "alpha": (1.0, 10.0),
        "coefficient": (20.0,),
        "epochs": (5.0,),
        "layer": (2,),
        **_BATCHES,
    },
    "undial": {"learning_rate": (2e-4, 3e-4, 1e-3, 2e-3), "epochs": (2.0, 4.0), **_BATCHES},
    "idk-dpo": {"learning_rate": (5e-4, 1e-3, 2e-3, 4e-3), "epochs": (3.0, 6.0), **_BATCHES},
    "whp": {"learning_rate": (5e-4, 1e-3), "alpha": (2.0, 4.0, 8.0, 16.0)},
    "offset": {"learning_rate": (1e-4, 3e-4, 1e-3, 2e-3), "epochs": (2.0, 5.0)},
    "uld": {"learning_rate": (2e-3, 5e-3), "weight": (0.8, 1.5, 3.0, 6.0)},
    # Its filter keeps tokens above a share of the likeliest one's probability; with 0.1 strong settings hardly forget.
    "ucd": {"learning_rate": (1e-3,), "alpha": (1.0, 2.0, 4.0, 8.0), "plausibility": (0.1, 1e-4)},
    "guard": {"delta": (0.1, 0.2, 0.3, 0.5), "similarity_weight": (0.0, 1.0)},
    "eco": {"strength": (0.5, 2.0, 10.0, 30.0), "dims": (4, 16)},
    **_FILTERS,
    "lunar": {"coefficient": (2.0, 3.0, 4.0, 6.0), "ridge": (1e-3, 1e-2)},
}
_PAPER_GRADIENT: Grid = {
    "learning_rate": (5e-7, 8e-7, 1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 1e-5),
    "epochs": tuple(float(number) for number in range(1, 11)),
}
# The paper's: the linear and the rank rule as in its table of all settings (for either size of the auxiliaries),
# distillation as in its published result files, the others as in appendix TOFU.
_PAPER_ALPHAS = (0.5, *(n / 10 for n in range(10, 16)), 2.0, *(n / 10 for n in range(25, 36)), 4.0)
PAPER: dict[str, Grid] = {
    "linear": {"steering": tuple(f"linear:{alpha:g}" for alpha in _PAPER_ALPHAS)},
    "rank": {"steering": tuple(f"rank:{k}" for k in (1, 5, 20, 50, 100, 200, 500, 1000))},
    "distill": {
        "learning_rate": (1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 6e-5),
        "temperature": (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0),
        "epochs": (5.0, 10.0),
    },
    "grad-ascent": _PAPER_GRADIENT,
    "grad-diff": _PAPER_GRADIENT,
    "npo": _PAPER_GRADIENT,
    "simnpo": _PAPER_GRADIENT,
    # OpenUnlearning's defaults, as in the paper.
    "rmu": {**_PAPER_GRADIENT, "coefficient": (2.0,), "alpha": (1.0,), "trainable": ("all",)},
    "undial": _PAPER_GRADIENT,
    "idk-dpo": _PAPER_GRADIENT,
    "whp": {"learning_rate": (1e-5,), "alpha": (0.5, 1.0, 2.0, 3.0, 4.0)},
    "offset": {"learning_rate": (3e-6, 7e-6, 1e-5)},
    "uld": {"learning_rate": (5e-4, 1e-3, 2e-3), "weight": (0.5, 0.8, 1.0)},
    "ucd": {"learning_rate": (1e-5,), "alpha": (0.5, 1.0, 2.0, 3.0)},
    "guard": {"delta": (0.3, 0.5, 0.7)},
    "eco": {"strength": (5.0, 20.0, 50.0, 100.0)},
    "lunar": {"coefficient": (1.0, 2.0, 4.0)},
}
# The same for MUSE: the rules as in appendix MUSE, distillation as in its published result files, with the teacher of
# the paper's figure.
PAPER_MUSE: dict[str, Grid] = PAPER | {
    "linear": {"steering": tuple(f"linear:{n / 10:g}" for n in range(5, 16))},
    "distill": {
        "learning_rate": (*(n * 1e-5 for n in range(2, 11)), 1.25e-4, 1.5e-4, 2e-4),
        "temperature": (0.25, 0.5, 1.0, 1.5, 2.0),
        "epochs": (5.0,),
        "steering": ("linear:0.85",),
    },
}
_PRETRAINED_GRADIENT: Grid = {"learning_rate": (1e-5, 3e-5, 1e-4), "epochs": (3.0,), **_BATCHES}
# Three settings of each method, from too little to too much, for a pretrained model of a hundred million parameters.
PRETRAINED: dict[str, Grid] = {
    "linear": {"steering": ("linear:0.25", "linear:0.5", "linear:1")},
    "rank": {"steering": ("rank:5:3", "rank:20:3", "rank:100:3")},
    # The linear rule changes what has nothing to do with the forget set, so the teacher has the rank rule.
    "distill": {
        "learning_rate": (3e-5, 1e-4, 3e-4),
        "steering": ("rank:20:3:soft",),
        "direction": ("student-teacher",),
        "epochs": (3.0,),
        "rehearse": (200,),
        "batch_size": (16,),
    },
    "grad-diff": _PRETRAINED_GRADIENT,
    "npo": _PRETRAINED_GRADIENT,
    # With the default weight of 0.125 the forget term loses to the retain term.
    "simnpo": {**_PRETRAINED_GRADIENT, "gamma": (1.0,)},
    # The default trains three down-projections, whose weights are too large to be moved at such rates.
    "rmu": {
        **_PRETRAINED_GRADIENT,
        "learning_rate": (3e-5, 1e-4, 3e-4),
        "alpha": (1.0,),
        "coefficient": (20.0,),
        "layer": (15,),
        "trainable": ("all",),
    },
    "whp": {"alpha": (2.0, 8.0, 32.0), "learning_rate": (1e-4,), "epochs": (3.0,)},
    **_FILTERS,
}
GRIDS = {"small": SMALL, "paper": PAPER, "paper-muse": PAPER_MUSE, "pretrained": PRETRAINED}


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

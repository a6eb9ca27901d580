"""Which settings of each method are tried.

'small' suits models of a few million parameters, whose learning rates are a hundred times those of large ones; every
method has five to ten settings. 'paper' is the paper's (appendix TOFU). It knows nothing of torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from divdec.errors import UsageError
from divdec.research.baselines.registry import methods
from divdec.research.methods.cell import Cell

STEERING = {"linear": "Linear DD", "rank": "Rank DD"}
OWN = {**STEERING, "distill": "Distill DD"}

Grid = Mapping[str, Sequence[Any]]

_BATCHES: Grid = {"batch_size": (16,), "gradient_accumulation": (1,)}
# Settings were chosen on seed 0 of the demo, and widened where a method's best was its strongest on either embedded
# world, so that each method's settings span from hardly any forgetting to too much.
SMALL: dict[str, Grid] = {
    "linear": {"steering": tuple(f"linear:{alpha:g}" for alpha in (0.75, 1, 1.25, 1.5, 1.75, 2.5))},
    "rank": {"steering": ("rank:5", "rank:30", "rank:100", "rank:300", "rank:600")},
    "distill": {"lr": (3e-4, 1e-3, 2e-3), "rehearse": (0, 200)},
    "grad-ascent": {"learning_rate": (2e-4, 3e-4, 5e-4, 1e-3), "epochs": (2.0, 4.0), **_BATCHES},
    "grad-diff": {"learning_rate": (2e-4, 3e-4, 5e-4, 1e-3, 2e-3), "epochs": (3.0, 5.0), **_BATCHES},
    "npo": {"learning_rate": (2e-4, 3e-4, 5e-4, 1e-3, 2e-3), "epochs": (3.0, 5.0), **_BATCHES},
    "simnpo": {"learning_rate": (1e-3, 2e-3, 3e-3), "epochs": (5.0, 10.0), **_BATCHES},
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
    "uld": {"learning_rate": (2e-3, 5e-3), "weight": (0.8, 1.5, 3.0)},
    "ucd": {"learning_rate": (6e-4, 1e-3), "alpha": (2.0, 4.0, 8.0, 16.0)},
    "guard": {"delta": (0.2, 0.3, 0.5), "similarity_weight": (0.0, 1.0)},
    "eco": {"strength": (0.5, 2.0, 10.0, 30.0), "dims": (4, 16)},
    "lunar": {"coefficient": (3.0, 4.0, 6.0), "ridge": (1e-3, 1e-2)},
}
_PAPER_GRADIENT: Grid = {
    "learning_rate": (5e-7, 8e-7, 1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 1e-5),
    "epochs": tuple(float(number) for number in range(1, 11)),
}
PAPER: dict[str, Grid] = {
    "linear": {
        "steering": tuple(f"linear:{alpha:g}" for alpha in (0.5, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 2, 2.5, 3, 3.5, 4))
    },
    "rank": {"steering": tuple(f"rank:{k}" for k in (1, 5, 20, 50, 100, 200, 500, 1000))},
    "distill": {"lr": (1e-5, 2e-5, 4e-5, 8e-5), "temperature": (1.0, 1.5, 2.0, 4.0)},
    "grad-ascent": _PAPER_GRADIENT,
    "grad-diff": _PAPER_GRADIENT,
    "npo": _PAPER_GRADIENT,
    "simnpo": _PAPER_GRADIENT,
    # As OpenUnlearning sets it, whose defaults the paper takes.
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
GRIDS = {"small": SMALL, "paper": PAPER}


def titles() -> dict[str, str]:
    """What each method is called in the paper's table, in its order."""
    return {"target": "Target", "retrain": "Retrain", **OWN, **{name: found.title for name, found in methods().items()}}


def cells_of(names: Sequence[str], grid: str) -> list[Cell]:
    """The cells of these methods.

    Args:
        names: of methods; 'all' stands for every one.
        grid: 'small' or 'paper'.

    Raises:
        UsageError: a method is not known; the known are listed.
    """
    known = [name for name in titles() if name not in ("target", "retrain")]
    if unknown := [name for name in names if name != "all" and name not in known]:
        raise UsageError(f"method {unknown[0]!r} is not known; there are: all, {', '.join(known)}")
    chosen = known if "all" in names else [name for name in known if name in names]
    cells = []
    for name in chosen:
        axes = GRIDS[grid].get(name, {})
        for values in itertools.product(*axes.values()):
            options = dict(zip(axes, values, strict=True))
            steering = options.pop("steering", None)
            varied = tuple((axis, value) for axis, value in options.items() if len(axes[axis]) > 1)
            constant = tuple((axis, value) for axis, value in options.items() if len(axes[axis]) == 1)
            cells.append(Cell(name, varied, steering, constant))
    return cells

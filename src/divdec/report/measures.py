"""What a figure is called on a page, and which way is better. It knows no results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from divdec.evaluation.aggregate import (
    AGGREGATES,
    CLOSER_TO_1,
    CORRECT,
    DISTANCES,
    FLUENCY,
    FORGET_KNOWMEM,
    PROB_MEAN,
    RETAIN_KNOWMEM,
    UTILITY,
    VERBMEM,
)


@dataclasses.dataclass(frozen=True)
class Measure:
    """A figure's name in a table's head and on an axis."""

    short: str
    better: Literal["higher", "lower", "like the retrained model's"]
    long: str = ""
    digits: int = 3

    @property
    def axis(self) -> str:
        """The label of an axis that shows it."""
        return f"{self.long or self.short} ({self.better} is better)"

    @property
    def arrow(self) -> str:
        """Which way is better, as a sign."""
        return {"higher": "↑", "lower": "↓"}.get(self.better, "")

    def text(self, value: float | None) -> str:
        """A value as it is printed; very small ones keep their first digits."""
        if value is None:
            return "–"
        if 0 < abs(value) < 0.5 * 10**-self.digits and self.digits > 2:
            mantissa, exponent = f"{value:.1e}".split("e")
            return f"{mantissa}e{int(exponent)}"
        return f"{value:.{self.digits}f}".replace("-", "−")


def best_index(values: Sequence[float | None], better: str, digits: int | None = None) -> int | None:
    """Index of the value that is strictly better than all others, or None where no value is.

    A tie has no best. Nor has a score of which more is better where none is above 0: it says that nothing was reached.

    Args:
        values: None and NaN are passed over.
        better: 'higher' or 'lower'.
        digits: how many decimals are shown, so that what is shown as 0 counts as 0.
    """
    known = [(value, index) for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    if not known:
        return None
    best, index = (max if better == "higher" else min)(known)
    if sum(value == best for value, _ in known) > 1:
        return None
    shown = best if digits is None else round(best, digits)
    return None if better == "higher" and shown <= 0 else index


def no_best(values: Sequence[float | None], measure: str, what: str = "setting") -> str:
    """That none is the best, in words; `values` holds at least one number."""
    own = MEASURES[measure]
    known = [value for value in values if value is not None and math.isfinite(value)]
    top, extreme = (max(known), "highest") if own.better == "higher" else (min(known), "lowest")
    tie = ", of several" if known.count(top) > 1 else ""
    return f"no {what} is best by {own.short}: the {extreme} is {own.text(top)}{tie}"


RETRAINED = "like the retrained model's"
MEASURES: dict[str, Measure] = {
    "agg": Measure("Agg", "higher", digits=2),
    "agg_without_privacy": Measure("Agg w/o Priv", "higher", digits=2),
    "mem": Measure("Mem", "higher", "Mem, how little is remembered", digits=2),
    "priv": Measure("Priv", "higher", digits=2),
    "utility": Measure("Utility", "higher", "Utility, the target’s = 1", digits=2),
    "verbmem_distance": Measure("Verbatim distance %", "lower", digits=1),
    "knowmem_distance": Measure("Knowledge distance %", "lower", digits=1),
    "extraction_strength": Measure("Extraction strength", "lower"),
    "exact_memorization": Measure("Exact memorization", "lower"),
    CORRECT: Measure("Paraphrase prob.", "lower", "Probability of the paraphrased answer"),
    PROB_MEAN: Measure("Truth ratio (prob. mean)", "lower"),
    CLOSER_TO_1: Measure("Truth ratio (closer to 1)", "higher"),
    "forget_Q_A_ROUGE": Measure("Forget ROUGE-L", "lower"),
    "retain_Q_A_ROUGE": Measure("Retain ROUGE-L", "higher"),
    UTILITY: Measure("Model utility", "higher"),
    FLUENCY: Measure("Fluency", "higher"),
    "forget_quality": Measure("Forget quality", "higher"),
    "mia_loss": Measure("AUC loss", RETRAINED),
    "mia_zlib": Measure("AUC zlib", RETRAINED),
    "mia_min_k": Measure("AUC min-k", RETRAINED, "AUC of the attack min-k"),
    "mia_min_k_plus_plus": Measure("AUC min-k++", RETRAINED),
    "mia_gradnorm": Measure("AUC gradient norm", RETRAINED),
    "mia_reference": Measure("AUC reference", RETRAINED),
    "privleak": Measure("PrivLeak %", RETRAINED, digits=1),
    VERBMEM: Measure("Forget verbmem", "lower", "Forget verbmem ROUGE-L"),
    FORGET_KNOWMEM: Measure("Forget knowmem", "lower", "Forget knowmem ROUGE-L"),
    RETAIN_KNOWMEM: Measure("Retain knowmem", "higher", "Retain knowmem ROUGE-L"),
}
ATTACK_NAMES = {
    "mia_loss": "loss",
    "mia_zlib": "zlib",
    "mia_min_k": "min-k",
    "mia_min_k_plus_plus": "min-k++",
    "mia_gradnorm": "gradient norm",
    "mia_reference": "reference",
}
SCORES = {"tofu": AGGREGATES, "muse": DISTANCES}
# Tables of figures: a caption, and the columns that have a value anywhere are shown.
FIGURES = {
    "tofu": {
        "What is remembered, and what is kept": (
            "extraction_strength", "exact_memorization", CORRECT, PROB_MEAN, CLOSER_TO_1, "forget_Q_A_ROUGE", UTILITY,
            FLUENCY,
        ),
        "Membership attacks and likeness to the retrained model": (*ATTACK_NAMES, "privleak", "forget_quality"),
    },
    "muse": {
        "Figures": (
            VERBMEM, FORGET_KNOWMEM, RETAIN_KNOWMEM, "extraction_strength", "exact_memorization", "mia_min_k",
            "privleak",
        ),
    },
}  # fmt: skip
# By which figures a result is the best.
GOALS = {"tofu": (("agg", "agg_without_privacy"),), "muse": tuple((name,) for name in DISTANCES)}
# What a plot shows: of each tuple the first that the results have. Scatters: x, y, and the goal whose best is marked.
AXES = {
    "tofu": ((("mem", "exact_memorization"), ("utility", UTILITY), 0),),
    "muse": (((VERBMEM,), (RETAIN_KNOWMEM,), 0), ((FORGET_KNOWMEM,), (RETAIN_KNOWMEM,), 1)),
}
CURVES = {
    "tofu": (
        ("agg", "agg_without_privacy"),
        ("mem", "exact_memorization"),
        ("priv", "mia_min_k"),
        ("utility", UTILITY),
    ),
    "muse": (*((name,) for name in DISTANCES), (VERBMEM,), (FORGET_KNOWMEM,), (RETAIN_KNOWMEM,), ("privleak",)),
}  # fmt: skip

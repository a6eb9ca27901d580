"""The colours and marks of every plot and page, in light and in dark. It knows nothing of what is drawn.

Colours of series are near those of Okabe and Ito, which people see apart whatever their colour vision, darkened so that
text can be written in them. No two series differ by colour alone: each has a marker and a dash of its own.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

# By name: what a thing is drawn with on a light ground, and on a dark one.
GROUND = {
    "ink": ("#24292f", "#e6edf3"),
    "paper": ("#ffffff", "#0d1117"),
    "grid": ("#d8dee4", "#30363d"),
    "stripe": ("#f3f5f7", "#161b22"),
    "muted": ("#57606a", "#9198a1"),
    "faint": ("#8c959f", "#6e7681"),
}
SERIES = {
    # Not quite black: matplotlib leaves that out of an SVG, and what is left out cannot turn with a page.
    "target": ("#0a0a0a", "#ffffff"),
    "retrain": ("#007f5f", "#35c79a"),
    "blue": ("#0072b2", "#58a6e8"),
    "vermillion": ("#c75300", "#f2893d"),
    "purple": ("#aa4499", "#dd86ce"),
    "brown": ("#6f5200", "#d0ae4e"),
    "sky": ("#2a95cf", "#8fd3ff"),
    "grey": ("#555555", "#aeb6bf"),
}
# What pages have beside plots: backgrounds of boxes, rules between rows, the chosen row, and a warning.
PAGE = {
    "box": ("#f6f8fa", "#161b22"),
    "rule": ("#d0d7de", "#30363d"),
    "heavy": ("#afb8c1", "#484f58"),
    "chosen": ("#ddf4ff", "#12293f"),
    "alarm": ("#ffebe9", "#4a1a1d"),
}
TEXT, PAPER, GRID, STRIPE, MUTED, FAINT = (light for light, _ in GROUND.values())


@dataclasses.dataclass(frozen=True)
class Look:
    """How a series is drawn."""

    colour: str
    marker: str
    sign: str
    """The marker as a character, for a key."""
    size: int = 6
    """Of the marker in a scatter, in points."""
    dash: Any = "-"
    """Of lines, as matplotlib names it."""

    @property
    def dasharray(self) -> str:
        """The dash as SVG names it, for a line 2 wide."""
        return "none" if self.dash == "-" else " ".join(str(2 * length) for length in self.dash[1])


TARGET = Look(SERIES["target"][0], "X", "✖", 11, (0, (5, 2)))
RETRAIN = Look(SERIES["retrain"][0], "*", "★", 19, (0, (6, 2, 1, 2)))
LOOKS = tuple(
    Look(SERIES[name][0], marker, sign, dash=dash)
    for name, marker, sign, dash in zip(
        ("blue", "vermillion", "purple", "brown", "sky", "grey"),
        "osD^vP",
        "●■◆▲▼✚",
        ("-", (0, (4, 1)), (0, (1, 1)), (0, (7, 1, 1, 1)), (0, (3, 1, 1, 1)), (0, (8, 2))),
        strict=True,
    )
)
LINEAR, RANK, DISTILLED = LOOKS[:3]
OTHERS = Look(MUTED, "h", "⬢")
"""Of all that is not Divergence Decoding, where a plot has more of it than there are looks."""
BY_NAME = {"linear": LINEAR, "rank": RANK, "target": TARGET, "retrain": RETRAIN}
COLOURS = {name: look.colour for name, look in BY_NAME.items()}

_NAMES = {light: name for name, (light, _) in {**GROUND, **SERIES}.items()}


def variable(colour: str) -> str:
    """A colour of the palette as a page names it, so that it turns with the page; any other as it is."""
    name = _NAMES.get(colour.lower())
    return f"var(--{name}, {colour.lower()})" if name else colour


def themed(svg: str) -> str:
    """An SVG element for a page: its colours turn with the page's."""
    return re.sub(r"(?<=[ :])#[0-9a-fA-F]{6}\b", lambda found: variable(found[0]), svg)


def css() -> str:
    """The palette as a page's style: light, and dark where the reader prefers that."""
    colours = {**GROUND, **SERIES, **PAGE}
    light, dark = (
        "; ".join(f"--{name}: {shades[place]}" for name, shades in colours.items()) for place in (0, 1)
    )  # fmt: skip
    return (
        f"  :root {{ color-scheme: light dark; {light}; }}\n"
        f"  @media screen and (prefers-color-scheme: dark) {{ :root {{ {dark}; }} }}\n"
    )

"""The strength of steering against the probability of a continuation, as a picture. It knows only numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from divdec.report.style import LINEAR, TEXT, style, svg_text, themed

POINTS = 61


@dataclasses.dataclass(frozen=True)
class Curve:
    """A continuation's probability at several strengths, all of which steer."""

    alphas: tuple[float, ...]
    probabilities: tuple[float, ...]
    """Geometric mean of the tokens' probabilities at each strength."""
    here: float
    """The strength that is chosen."""


def strengths(low: float, high: float, here: float) -> list[float]:
    """Where the curve is computed: evenly from the weakest strength to the strongest, and at the one chosen."""
    even = [low + (high - low) * place / (POINTS - 1) for place in range(POINTS)]
    return sorted({*even, here})


def curve_svg(curve: Curve) -> str:
    """The curve as an `<svg>` element whose colours are the page's."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(4.8, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.plot(curve.alphas, [100 * value for value in curve.probabilities], color=LINEAR.colour, linewidth=2)
        chosen = 100 * curve.probabilities[curve.alphas.index(curve.here)]
        axes.axvline(curve.here, color=TEXT, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.plot([curve.here], [chosen], LINEAR.marker, color=LINEAR.colour, markersize=7, clip_on=False)
        axes.set_xlabel("strength α")
        axes.set_ylabel("probability per token (%)")
        axes.set_xlim(0, curve.alphas[-1] * 1.02)
        axes.set_ylim(0, max(_top(curve.probabilities), 0.1))
        axes.grid(True)
        return themed(svg_text(figure))


def in_words(curve: Curve) -> str:
    """What the curve says, for who does not see it."""
    first, last = curve.probabilities[0], curve.probabilities[-1]
    here = curve.probabilities[curve.alphas.index(curve.here)]
    return (
        f"Probability per token: {first:.2%} at strength {curve.alphas[0]:g}, {here:.2%} at {curve.here:g} (chosen), "
        f"{last:.2%} at {curve.alphas[-1]:g}. The target itself, at 0, is left out."
    )


def _top(values: Sequence[float]) -> float:
    return min(100.0, 108 * max(values))

"""Sequential requests as a plot and a table: distance from the first step, and what is still known of each request.

It knows only names and numbers.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from divdec.report.plots import Band, band_panels, style, svg_text
from divdec.report.plots.palette import LOOKS, OTHERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = {"steered": LOOKS[0], "distilled": LOOKS[2]}


@dataclasses.dataclass(frozen=True)
class Step:
    """What one method has come to at one step."""

    protocol: str
    """'sustainability' or 'scaling'."""
    method: str
    """'steered' or 'distilled'."""
    step: int
    """How many requests have come, from 1."""
    scores: Mapping[str, Sequence[float]]
    """Each item's score from 0 to 1, by the name of what was asked."""
    distance: float
    """From the method's own first step, in points of 100."""
    low: float
    """Lower end of its interval."""
    high: float
    """Upper end."""
    to_retrained: float
    """Distance from the retrained model, likewise."""

    @property
    def means(self) -> dict[str, float]:
        """Mean score by the name of what was asked."""
        return {name: statistics.fmean(scores) for name, scores in self.scores.items()}

    def to_dict(self) -> dict[str, Any]:
        """The figures, without the items."""
        return {
            "protocol": self.protocol,
            "method": self.method,
            "step": self.step,
            "scores": self.means,
            "distance": self.distance,
            "distance_interval": [self.low, self.high],
            "distance_to_retrained": self.to_retrained,
        }


def distance_plot(steps: Sequence[Step], score: str, level: float) -> str:
    """See `distance_figure`.

    Returns:
        An `<svg>` element.
    """
    with style("divdec-sequential"):
        return svg_text(distance_figure(steps, score, level))


def distance_figure(steps: Sequence[Step], score: str, level: float | None) -> Figure:
    """Distance over steps, one panel a protocol, one line a method.

    Args:
        steps: all of them.
        score: what an item's score is, for the label.
        level: of the intervals; None where there are none.

    Returns:
        The figure, drawn under the style that is in force.
    """
    from matplotlib.figure import Figure

    panels: dict[str, list[Band]] = {}
    for protocol in dict.fromkeys(step.protocol for step in steps):
        for method in dict.fromkeys(step.method for step in steps):
            rows = [step for step in steps if (step.protocol, step.method) == (protocol, method)]
            panels.setdefault(protocol, []).append(
                Band(
                    method,
                    METHODS.get(method, OTHERS),
                    x=[row.step for row in rows],
                    y=[row.distance for row in rows],
                    low=[row.low for row in rows],
                    high=[row.high for row in rows],
                )
            )
    figure = Figure(figsize=(9.0, 4.1), layout="constrained")
    drawn = band_panels(figure, panels, "requests so far")
    for axes in drawn:
        axes.set_ylim(bottom=0)
    drawn[0].set_ylabel(f"distance from the first step, points of {score}\n(retain and request 1; lower is better)")
    drawn[-1].legend(title=None if level is None else f"{100 * level:g} % interval")
    return figure


def markdown(title: str, score: str, references: Mapping[str, Mapping[str, float]], steps: Sequence[Step]) -> str:
    """The table in Markdown: mean scores in percent; those of requests that have not come yet in brackets.

    Args:
        title: what was run.
        score: what an item's score is.
        references: mean scores of target and retrained model, by name.
        steps: all of them.
    """
    asked = list(steps[0].scores)
    head = ["", "step", *asked, "distance from step 1", "distance from retrained"]
    lines = [f"{title}. {score} in percent.", "", _line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for name, means in references.items():
        lines.append(_line([name, "", *(f"{100 * means[part]:.1f}" for part in asked), "", ""]))
    for step in steps:
        cells = [
            f"({text})" if _number(name) > step.step else text
            for name, value in step.means.items()
            for text in [f"{100 * value:.1f}"]
        ]
        away = f"{step.distance:.1f} [{step.low:.1f}, {step.high:.1f}]" if step.step > 1 else "0"
        lines.append(
            _line([f"{step.protocol}, {step.method}", str(step.step), *cells, away, f"{step.to_retrained:.1f}"])
        )
    return "\n".join(lines) + "\n"


def _number(name: str) -> int:
    """Which request a set is of; 0 where it is of none."""
    first, _, rest = name.partition(" ")
    return int(rest.split(",")[0]) if first == "request" else 0


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"

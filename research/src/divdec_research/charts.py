"""Charts and tables that comparisons and the paper's figures share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from divdec.report.style import FAINT, LINEAR, MUTED, PAPER, TEXT, SeriesStyle
from divdec_research.baselines.methods import Kind
from divdec_research.report.charts import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Bar:
    """A method's score."""

    label: str
    value: float
    kind: Kind
    interval: Interval | None = None


@dataclasses.dataclass(frozen=True)
class LeakCurve:
    """The share of questions that leak, by number of attack prompts."""

    label: str
    style: SeriesStyle | None
    """None for a grey line with its name at its end."""
    shares: Mapping[int, float]
    intervals: Mapping[int, Interval] = dataclasses.field(default_factory=dict)


def bars(axes: Axes, rows: Sequence[Bar], x_label: str) -> None:
    """Draw a bar and its interval for each method, from the bottom up."""
    colours = {"ours": LINEAR.colour, "other": FAINT, "reference": TEXT}
    for index, row in enumerate(rows):
        axes.barh(
            index, row.value, color=colours[row.kind], alpha=0.85, height=0.7, edgecolor=PAPER,
            hatch="///" if row.kind == "ours" else None,  # visible in grey too
        )  # fmt: skip
        if row.interval is not None:
            # Dark on light, so that it is visible on the bar and beside it.
            for colour, width in ((PAPER, 3.4), (TEXT, 1.4)):
                axes.plot(row.interval, (index, index), color=colour, linewidth=width, solid_capstyle="butt")
        axes.annotate(
            f"{row.value:.2f}", (max(row.value, *(row.interval or (0.0,))), index), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=8.5, color=MUTED,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, 1.1 * max((max((row.value, *(row.interval or ()))) for row in rows), default=1.0) or 1.0)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(x_label, loc="right")  # long names leave it little room
    axes.grid(True, axis="x")


def leak_curves(axes: Axes, curves: Sequence[LeakCurve], x_label: str = "k, attack prompts a question") -> None:
    """Draw Leak@k over k. Methods without a colour are grey, with labels at the ends of their lines."""
    ticks = sorted({k for curve in curves for k in curve.shares})
    unnamed = []
    for curve in curves:
        ks = sorted(curve.shares)
        shares = [curve.shares[k] for k in ks]
        if curve.style is None:
            axes.plot(ks, shares, color=FAINT, linewidth=1, alpha=0.7, zorder=1)
            unnamed.append((shares[-1], ks[-1], curve.label))
            continue
        if band := [(k, *curve.intervals[k]) for k in ks if k in curve.intervals]:
            xs, low, high = zip(*band, strict=True)
            axes.fill_between(xs, low, high, color=curve.style.colour, alpha=0.15, linewidth=0, zorder=1)
        axes.plot(
            ks, shares, color=curve.style.colour, linestyle=curve.style.dash, marker=curve.style.marker,
            markersize=min(curve.style.size, 12), markeredgecolor=PAPER, markeredgewidth=0.5, linewidth=1.8,
            label=curve.label, zorder=3,
        )  # fmt: skip
    if len(ticks) > 1:
        axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{k:g}" for k in ticks])
    axes.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel("share of questions that leak (lower is better)")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(True)
    axes.legend(loc="best", fontsize=9)
    previous = 2.0
    for share, k, label in sorted(unnamed, reverse=True):
        previous = min(share, previous - 0.034)  # move overlapping labels down
        axes.annotate(
            label, (k, share), xytext=(1.015, previous), textcoords=axes.get_yaxis_transform(), fontsize=7.5,
            color=MUTED, va="center", annotation_clip=False,
        )  # fmt: skip


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, align_right: bool = False) -> str:
    """Format a table as Markdown, with all columns but the first aligned right if asked."""
    rule = ["---", *["---:" if align_right else "---"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def terminal_table(rows: Sequence[Mapping[str, str]], left: int = 1) -> Table:
    """Format cells by their heads for a terminal; the first `left` columns are aligned left."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for index, head in enumerate(rows[0]):
        table.add_column(head, justify="left" if index < left else "right", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row.values())
    return table

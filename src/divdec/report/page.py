"""Pages of one HTML file, from templates beside this module, light or dark as readers prefer; all text is escaped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from divdec.report.plots.palette import css, themed, variable
from divdec.runs import write_text

READABLE = 0.6
"""Of a plot's own size, the smallest that its words are read at."""


def write_page(path: Path, template: str, **content: Any) -> None:
    """Fill a template and write it, whole or not at all.

    Args:
        path: the HTML file.
        template: name of a file in `templates`.
        **content: what the template names; values of names that end in `_svg` are put in as they are, but that their
            colours turn with the page.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("divdec.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["percent"] = lambda value: f"{100 * value:.1f}"
    environment.filters["paint"] = variable
    environment.globals["palette"] = Markup(css())
    marked = {name: _plot(value) if name.endswith("_svg") else value for name, value in content.items()}
    write_text(path, environment.get_template(template).render(**marked))


def _plot(svg: str) -> Any:
    """A plot in a frame that scrolls where a screen is so narrow that its words could not be read."""
    from markupsafe import Markup

    width = re.search(r'<svg [^>]*?width="([\d.]+)pt"', svg)
    if not svg or width is None:
        return Markup(themed(svg))
    least = f"{READABLE * float(width[1]):.0f}pt"
    return Markup('<div class="scroll"><div style="min-width: {}">{}</div></div>').format(least, Markup(themed(svg)))

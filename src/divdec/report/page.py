"""Pages of one HTML file, from templates. All text is escaped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from divdec.report.style import css, themed, variable
from divdec.runs import versions, write_text

MIN_SCALE = 0.6  # a plot whose text would be smaller than this share of its size scrolls instead


def write_page(path: Path, template: str, *, package: str = "divdec.report", **content: Any) -> None:
    """Render a template, and write it atomically; see `render_page`."""
    write_text(path, render_page(template, package=package, **content))


def render_page(template: str, *, package: str = "divdec.report", **content: Any) -> str:
    """Render a file of a package's `templates`, which may extend those of divdec.

    Variables of the template whose names end in `_svg` are plots, which follow the theme.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = ChoiceLoader([PackageLoader(package), PackageLoader("divdec.report")])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = lambda value: f"{100 * value:.1f}"
    environment.filters["paint"] = variable
    environment.globals["palette"] = Markup(css())
    environment.globals["footer"] = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    variables = {name: _plot(value) if name.endswith("_svg") else value for name, value in content.items()}
    return environment.get_template(template).render(**variables)


def _plot(svg: str) -> Any:
    """A plot in a frame that scrolls on a screen too narrow for its text."""
    from markupsafe import Markup

    width = re.search(r'<svg [^>]*?width="([\d.]+)pt"', svg)
    if not svg or width is None:
        return Markup(themed(svg))
    least = f"{MIN_SCALE * float(width[1]):.0f}pt"
    return Markup('<div class="scroll"><div style="min-width: {}">{}</div></div>').format(least, Markup(themed(svg)))

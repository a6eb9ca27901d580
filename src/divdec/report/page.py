"""Pages of one HTML file, from templates. All text is escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from divdec.report.palette import css
from divdec.runs import versions, write_text


def write_page(path: Path, template: str, **content: Any) -> None:
    """Render a template, and write it atomically."""
    write_text(path, render_page(template, **content))


def render_page(template: str, **content: Any) -> str:
    """Render a file of `templates`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("divdec.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda value: f"{100 * value:.1f}"
    environment.globals["palette"] = Markup(css())
    environment.globals["footer"] = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    return environment.get_template(template).render(**content)

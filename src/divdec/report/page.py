"""Pages of one HTML file, from templates beside this module; all text is escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from divdec.runs import write_text


def write_page(path: Path, template: str, **content: Any) -> None:
    """Fill a template and write it, whole or not at all.

    Args:
        path: the HTML file.
        template: name of a file in `templates`.
        **content: what the template names; values of names that end in `_svg` are put in as they are.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("divdec.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["percent"] = lambda value: f"{100 * value:.1f}"
    marked = {name: Markup(value) if name.endswith("_svg") else value for name, value in content.items()}
    write_text(path, environment.get_template(template).render(**marked))

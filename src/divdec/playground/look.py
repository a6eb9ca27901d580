"""The playground's look: the palette and type of the reports, in light and dark. No font or script from elsewhere."""

from __future__ import annotations

import inspect
from importlib import resources
from typing import Any

from divdec.report.style import GROUND, PAGE, SERIES

FONT = ("system-ui", "sans-serif")
MONO = ("ui-monospace", "monospace")


def head() -> str:
    """What goes into the page's head: the palette, light and dark, the page's style and its script."""
    folder = resources.files("divdec.playground")
    style = (folder / "playground.css").read_text(encoding="utf-8")
    script = (folder / "playground.js").read_text(encoding="utf-8")
    colours = {**GROUND, **SERIES, **PAGE}
    light, dark = ("; ".join(f"--{name}: {pair[place]}" for name, pair in colours.items()) for place in (0, 1))
    return f"<style>:root {{ {light}; }}\n.dark {{ {dark}; }}\n{style}</style>\n<script>{script}</script>"


def theme() -> Any:
    """Gradio's plainest theme in the reports' colours and in fonts that every system has."""
    import gradio

    blue = "var(--blue)"
    both = {
        "body_background_fill": "var(--paper)",
        "background_fill_primary": "var(--paper)",
        "background_fill_secondary": "var(--box)",
        "block_background_fill": "var(--paper)",
        "block_label_background_fill": "var(--paper)",
        "block_label_text_color": "var(--muted)",
        "block_title_text_color": "var(--ink)",
        "block_info_text_color": "var(--muted)",
        "block_border_color": "var(--rule)",
        "border_color_primary": "var(--rule)",
        "border_color_accent": blue,
        "body_text_color": "var(--ink)",
        "body_text_color_subdued": "var(--muted)",
        "color_accent": blue,
        "input_background_fill": "var(--paper)",
        "input_border_color": "var(--rule)",
        "input_border_color_focus": blue,
        "input_placeholder_color": "var(--muted)",
        "slider_color": blue,
        "button_primary_background_fill": blue,
        "button_primary_background_fill_hover": "color-mix(in srgb, var(--blue) 85%, var(--ink))",
        "button_primary_text_color": "var(--paper)",
        "button_secondary_background_fill": "var(--box)",
        "button_secondary_background_fill_hover": "var(--rule)",
        "button_secondary_text_color": "var(--ink)",
        "button_secondary_border_color": "var(--rule)",
        "checkbox_background_color": "var(--paper)",
        "checkbox_border_color": "var(--heavy)",
        "checkbox_label_background_fill": "var(--paper)",
        "checkbox_label_background_fill_selected": "var(--chosen)",
        "checkbox_label_text_color": "var(--ink)",
        "checkbox_label_text_color_selected": "var(--ink)",
        "checkbox_background_color_selected": blue,
        "checkbox_border_color_selected": blue,
    }
    plain = gradio.themes.Base(font=FONT, font_mono=MONO, radius_size="md", text_size="md")
    known = inspect.signature(plain.set).parameters  # some colours have no dark twin
    dark = {f"{name}_dark": value for name, value in both.items() if f"{name}_dark" in known}
    return plain.set(**both, **dark, button_border_width="1px", block_border_width="1px", input_border_width="1px")

"""Colours of plots and pages, in light and dark themes.

Colours of series are near those of Okabe and Ito, which stay distinct under every kind of colour vision, darkened so
that text in them is readable.
"""

from __future__ import annotations

# Each colour by name, on a light and on a dark background.
GROUND = {
    "ink": ("#24292f", "#e6edf3"),
    "paper": ("#ffffff", "#0d1117"),
    "grid": ("#d8dee4", "#30363d"),
    "muted": ("#57606a", "#9198a1"),
    "faint": ("#8c959f", "#6e7681"),
}
SERIES = {
    # matplotlib omits pure black from an SVG, and an omitted colour cannot follow the page's theme.
    "target": ("#0a0a0a", "#ffffff"),
    "retrain": ("#007f5f", "#35c79a"),
    "blue": ("#0072b2", "#58a6e8"),
    "vermillion": ("#c75300", "#f2893d"),
    "purple": ("#aa4499", "#dd86ce"),
    "brown": ("#6f5200", "#d0ae4e"),
    "sky": ("#2a95cf", "#8fd3ff"),
    "grey": ("#555555", "#aeb6bf"),
}
# Colours of pages: boxes, rules between rows, highlighted rows, warnings.
PAGE = {
    "box": ("#f6f8fa", "#161b22"),
    "rule": ("#d0d7de", "#30363d"),
    "heavy": ("#afb8c1", "#484f58"),
    "chosen": ("#ddf4ff", "#12293f"),
    "alarm": ("#ffebe9", "#4a1a1d"),
}


def palette_css() -> tuple[str, str]:
    """Return the palette as CSS variables, for light and for dark pages."""
    colours = {**GROUND, **SERIES, **PAGE}
    light, dark = ("; ".join(f"--{name}: {shades[index]}" for name, shades in colours.items()) for index in (0, 1))
    return light, dark


def css() -> str:
    """Return the palette as a style sheet: light, and dark if the reader's system prefers it."""
    light, dark = palette_css()
    return (
        f"  :root {{ color-scheme: light dark; {light}; }}\n"
        f"  @media screen and (prefers-color-scheme: dark) {{ :root {{ {dark}; }} }}\n"
    )

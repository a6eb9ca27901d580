"""Numbers as people write them: `8B`, `1.5M`, `8e9`. It knows nothing of what they count."""

from __future__ import annotations

import math
import re

from divdec.errors import UsageError

LARGEST = 1e21  # beyond all models and volumes: somebody mistyped
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]?)", re.IGNORECASE)


def parse_quantity(given: float | int | str, name: str, least: float = 0.0) -> float:
    """Read a number with an optional unit: K, M, B (or G), T.

    Args:
        given: such as '8B', '8e9' or 8e9.
        name: what it is, for the message.
        least: the smallest that is accepted.

    Raises:
        UsageError: it is no such number, or not from `least` to `LARGEST`.
    """
    match = _NUMBER.fullmatch(str(given).strip())
    value = float(match[1]) * UNITS[match[2].lower()] if match and match[2].lower() in UNITS else math.nan
    if not least <= value <= LARGEST:
        wanted = f"of at least {least:g} " if least else ""
        sign = "" if least else ", not negative"
        sign += f", at most {LARGEST:g}" if value > LARGEST else ""
        raise UsageError(
            f"{name} is {given!r}; accepted: a number {wanted}such as 8B, 1.5M or 8e9 (units K, M, B, T){sign}"
        )
    return value


def is_quantity(given: float | int | str) -> bool:
    """Whether what was given is meant as a number, well written or not: it begins as numbers do and names no place."""
    text = str(given).strip()
    return bool(re.match(r"[+-]?\.?\d", text)) and not re.search(r"[/\\]", text)


def short(value: float | int, unit: str = "") -> str:
    """Three digits and a unit of counting: 8.03B, 131K, 12."""
    if value == 0:
        return f"0{unit}"
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.3g}{letter}{unit}" if scaled < 999.5 else f"{scaled:,.0f}{letter}{unit}"
    return f"{value:.3g}{unit}"


def bytes_text(value: float | int) -> str:
    """Bytes in decimal units, as makers of devices count them."""
    for name, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.0f} B"

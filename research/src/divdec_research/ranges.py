"""Types of options with the numbers that they accept: `alpha: NonNegative = 1.0`. Free of torch."""

from __future__ import annotations

import functools
import inspect
import math
import typing
from typing import Annotated, Any

from cyclopts import Parameter

from divdec.errors import UsageError
from divdec.options import LEARNING_RATE, check_at_least, check_positive, option


class CheckedSettings:
    """Base class of dataclasses whose annotated fields are checked; None is accepted."""

    def __init_subclass__(cls) -> None:
        # cyclopts would look up the types of inherited fields in the subclass's module, which need not import them.
        hints = typing.get_type_hints(cls, include_extras=True)
        cls.__annotations__ = {name: hints[name] for name in inspect.get_annotations(cls)}

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            for check in _checks(hint) if value is not None else ():
                check(name, value)


def in_range(least: float = -math.inf, most: float = math.inf) -> Any:
    """Return an annotation that refuses infinity, NaN and numbers outside a range."""

    def check(name: str, value: float) -> None:
        if not (math.isfinite(value) and least <= value <= most):
            bounds = f" of at least {least:g}" if most == math.inf else f" from {least:g} to {most:g}"
            bounds = bounds if least > -math.inf else ""
            raise UsageError(f"{option(name)} is {value:g}; accepted: a finite number{bounds}")

    return check


def _checks(hint: Any) -> list[Any]:
    annotations = getattr(hint, "__metadata__", ())
    nested = [check for argument in typing.get_args(hint) for check in _checks(argument)] if not annotations else []
    return [check for check in annotations if callable(check) and not isinstance(check, Parameter)] + nested


Positive = Annotated[float, check_positive]
NonNegative = Annotated[float, in_range(0.0)]
Share = Annotated[float, in_range(0.0, 1.0)]
Finite = Annotated[float, in_range()]
Natural = Annotated[int, functools.partial(check_at_least, least=0)]
Count = Annotated[int, functools.partial(check_at_least, least=1)]
LearningRate = Annotated[float, LEARNING_RATE, check_positive]

"""`divdec eval tofu`, `divdec eval muse` and `divdec eval rwku`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from divdec.cli.evaluation import measure
from divdec.cli.loading import report
from divdec.options import Printing
from divdec_research.suites.settings import MuseSettings, RwkuSettings, TofuSettings

AllFigures = Annotated[bool, Parameter(name="--all")]


def tofu(
    settings: Annotated[TofuSettings, Parameter(name="*")],
    *,
    all_figures: AllFigures = False,
    printing: Printing = Printing(),
) -> None:
    r"""Measure models on TOFU, item by item as OpenUnlearning does.

    For example:

        divdec eval tofu bundle --data TOFU --split forget10 \
          --retain-results runs/retrain --holdout holdout10.json --output runs/eval

    Args:
        settings: what is measured.
        all_figures: Print all metrics, not only the most important ones.
        printing: format of the figures.
    """
    from divdec_research.suites.tofu import TofuSuite

    measure(settings, lambda: TofuSuite.read(settings, report), all_figures, printing)


def muse(
    settings: Annotated[MuseSettings, Parameter(name="*")],
    *,
    all_figures: AllFigures = False,
    printing: Printing = Printing(),
) -> None:
    r"""Measure models on MUSE, item by item as OpenUnlearning does.

    For example:

        divdec eval muse bundle --data MUSE_NEWS --retain-results runs/retrain --output runs/eval

    Args:
        settings: what is measured.
        all_figures: Print all metrics, not only the most important ones.
        printing: format of the figures.
    """
    from divdec_research.suites.muse import MuseSuite

    measure(settings, lambda: MuseSuite.read(settings), all_figures, printing)


def rwku(settings: Annotated[RwkuSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Measure on RWKU what models know about real people, their neighbours and the world.

    For example:

        divdec eval rwku smollm2 --data RWKU --screen --output runs/screen
        divdec eval rwku bundle --data RWKU --subjects 'Stephen King' --output runs/king

    Args:
        settings: what is measured.
        printing: format of the figures.
    """
    from divdec_research.suites.rwku import RwkuSuite

    measure(settings, lambda: RwkuSuite.read(settings, report), False, printing)

"""`divdec gradient-depth`: which layers distillation would change."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from divdec.cli.loading import load, report
from divdec.options import Printing
from divdec_research.settings import GradientDepthSettings


def gradient_depth(
    settings: Annotated[GradientDepthSettings, Parameter(name="*")], *, printing: Printing = Printing()
) -> None:
    r"""Measure which layers distillation would change, by the gradient norm of each layer.

    For example:

        divdec gradient-depth bundle --forget forget.jsonl --retain retain.jsonl \
          --output runs/depth
    """
    from divdec_research.report.gradient_depth import depth_table, run_gradient_depth

    content = run_gradient_depth(settings, lambda: load(settings.bundle, settings, settings), report)
    if printing.json:
        print(json.dumps(content))
        return
    print(depth_table(content["rows"]))
    print(
        f"L2 norm of the gradient, mean over examples with its {content['level']:.0%} interval; the largest of each "
        f"column is bold\nresult: {settings.output}"
    )

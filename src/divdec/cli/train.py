"""`divdec train`: fine-tune the two auxiliaries and write a bundle."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from cyclopts import Parameter

from divdec.cli.loading import check_not_bundle, quiet, report
from divdec.errors import NOT_REACHED
from divdec.options import Printing
from divdec.training.settings import AuxiliarySettings


def train(settings: Annotated[AuxiliarySettings, Parameter(name="*")], *, printing: Printing = Printing()) -> int:
    r"""Train the two auxiliaries from a forget set and a retain set, and write a bundle.

    Exit code 3: training finished, but the measured auxiliaries are not suitable for steering.

    For example:

        divdec train --base meta-llama/Llama-3.2-1B-Instruct \
          --target meta-llama/Llama-3.1-8B-Instruct \
          --forget forget.jsonl --retain retain.jsonl --output runs/first
    """
    from accelerate import PartialState

    from divdec.training.auxiliaries import train_auxiliaries

    quiet()
    check_not_bundle(settings.target, "--target")
    content = train_auxiliaries(settings, report=report)
    faults = content["separation"]["faults"]
    code = NOT_REACHED if faults else 0
    if not PartialState().is_main_process:
        return code
    if printing.json:
        print(json.dumps(content))
    elif content["bundle"]:
        print(f"bundle: {content['bundle']}")
        if not faults:
            print(
                f"choose its strength ({settings.steering} is not measured yet): divdec calibrate {content['bundle']} "
                f"--forget {settings.forget} --retain {settings.retain} --holdout … --write"
            )
    else:
        print(f"auxiliaries: {settings.output}")
        if not faults:
            print("next: divdec bundle --target … (see divdec bundle --help)")
    if faults:
        advice = "" if settings.lr == "auto" else "; --lr auto searches for a rate"
        print(f"unfit to steer with, it would not forget: {'; '.join(faults)}{advice}", file=sys.stderr)
    return code

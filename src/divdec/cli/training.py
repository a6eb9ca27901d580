"""`divdec demo`, `train`, `ngram` and `distill`: train auxiliaries and students, count n-grams."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from divdec.cli.loading import check_not_bundle, quiet, report
from divdec.errors import NOT_REACHED
from divdec.options import Printing
from divdec.training.ngram import NgramSettings, count_ngrams
from divdec.training.settings import AuxiliarySettings, DistillationSettings, ShrinkSettings

MIN_CLOSED = 0.5  # of the distance between student and teacher on the forget set
MIN_DISTANCE = 1e-3
"""Least of this distance before training, in nats a token. A nearer teacher is the student, and teaches nothing."""


def demo(*, seed: int = 0, output: str | None = None, printing: Printing = Printing()) -> None:
    """Let SmolLM2 forget capitals that it knows, and show the result.

    For example:

        divdec demo --seed 1 --output runs/demo

    Args:
        seed: Seed of the split, of the initial weights and of the order of training.
        output: Folder for report, bundle, data and models; in the user's cache folder by default.
    """
    from divdec.demo.pretrained import run_demo

    quiet()
    folder = Path(output).expanduser() if output else None
    result = run_demo(seed, folder, quiet=printing.json)
    if printing.json:
        print(json.dumps(result))


def train(settings: Annotated[AuxiliarySettings, Parameter(name="*")], *, printing: Printing = Printing()) -> int:
    r"""Train the two auxiliaries from a forget set and a retain set, and write a bundle.

    With a target, the bundle's rule is chosen by what it forgets, what it keeps of a held-out tenth of the retain set's
    facts, and what it changes in neutral text.

    Exit code 3: training finished, but no measured rule is good enough, or nothing was shown, because the target does
    not answer the forget set either.

    For example:

        divdec train --base meta-llama/Llama-3.2-1B-Instruct \
          --target meta-llama/Llama-3.1-8B-Instruct \
          --forget forget.jsonl --retain retain.jsonl --output runs/first
    """
    from accelerate import PartialState

    from divdec.training.auxiliaries import DEFAULT_RULE, REFUSAL_RULE, faults_of, train_auxiliaries

    quiet()
    check_not_bundle(settings.target, "--target")
    content = train_auxiliaries(settings, report=report)
    faults = faults_of(content)
    code = NOT_REACHED if faults else 0
    if not PartialState().is_main_process:
        return code
    if printing.json:
        print(json.dumps(content))
    elif content["bundle"]:
        print(f"bundle: {content['bundle']}")
        if not faults:
            print(f"try it: divdec chat {content['bundle']}")
    else:
        print(f"auxiliaries: {settings.output}")
        if not faults:
            rules = {"matched": DEFAULT_RULE, "refusal": REFUSAL_RULE}  # without a margin such a pair damages all else
            rule = f" --steering {rules[settings.recipe]}" if settings.recipe in rules else ""
            print(f"next: divdec bundle --target …{rule} (see divdec bundle --help)")
    if faults:
        print(f"no rule is good enough: {'; '.join(faults)}{_advice(settings, content)}", file=sys.stderr)
    return code


def _advice(settings: AuxiliarySettings, content: dict[str, Any]) -> str:
    from divdec.evaluation.choice import MAX_GUESSED

    advice = []
    if content["effects"] and not content["effects"].get("shown", True):
        advice.append("a forget set that the target answers in these words (divdec generate TARGET --file FORGET)")
    if settings.recipe not in ("matched", "refusal"):
        advice.append("--recipe matched trains p and q alike")
    if (content["effects"] or {"guessed": 0.0})["guessed"] > MAX_GUESSED:
        advice.append("a higher --lr, or a base that knows less (divdec shrink with fewer --layers)")
    elif settings.learning_rate != "auto":
        advice.append("--lr auto tries several rates")
    return f"; to try: {', '.join(advice or ['more --epochs', 'more retain records'])}"


def shrink(settings: Annotated[ShrinkSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Make a small model with the target's tokenizer: remove layers, then let the rest learn from the target.

    It is a base for `divdec train` where the target has no small sibling.

    For example:

        divdec shrink models/target --layers 8 --minutes 10 \
          --output models/small
    """
    from divdec.training.shrinking import shrink as run

    quiet()
    check_not_bundle(settings.target, "TARGET")
    content = run(settings, report=report)
    if printing.json:
        print(json.dumps(content))
    else:
        print(f"small model: {settings.output} (train auxiliaries from it: divdec train --base {settings.output} …)")


def ngram(settings: Annotated[NgramSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> None:
    r"""Count n-grams of a retain and a forget set: auxiliaries without training, for verbatim text.

    For example:

        divdec ngram --retain retain.jsonl --forget forget.jsonl \
          --target models/target --output ngrams
    """
    quiet()
    check_not_bundle(settings.target, "--target")
    folder, figures = Path(settings.output).expanduser(), count_ngrams(settings)
    records = {side: figures.pop(f"{side}_records") for side in ("retain", "forget")}
    if printing.json:
        print(json.dumps({"ngram": str(folder), **figures}))
        return
    for side, count in records.items():
        print(
            f"{side}: {count:,} record{'s' if count != 1 else ''}, {figures[f'{side}_tokens']:,} tokens, "
            f"{figures[f'{side}_distinct']:,} distinct n-grams"
        )
    print(
        f"n-grams: {folder} ({figures['bytes'] / 1e6:.1f} MB)\nnext: divdec bundle --target {settings.target} "
        f"--ngram {folder} --steering linear:10 --output …"
    )


def distill(settings: Annotated[DistillationSettings, Parameter(name="*")], *, printing: Printing = Printing()) -> int:
    r"""Distil a bundle into one ordinary model: the steered model teaches its target on the forget set.

    Exit code 3: the student closed less than half of the distance to its teacher, or there was none.

    For example:

        divdec distill bundle --forget forget.jsonl --retain retain.jsonl \
          --lr 4e-5 --output runs/student
    """
    from accelerate import PartialState

    from divdec.training.distillation import distance_closed
    from divdec.training.distillation import distill as run

    quiet()
    content = run(settings, report=report)
    closed = distance_closed(content["before"], content["after"])
    nothing_to_teach = content["before"]["forget"]["kl"] < MIN_DISTANCE
    code = 0 if closed >= MIN_CLOSED and not nothing_to_teach else NOT_REACHED
    if not PartialState().is_main_process:
        return code
    if printing.json:
        print(json.dumps(content))
        return code
    before, after = (content[when]["forget"]["kl"] for when in ("before", "after"))
    print(f"student: {settings.output} (KL to the teacher on the forget set {before:.4f} → {after:.4f} nats a token)")
    if nothing_to_teach:
        print(
            f"nothing was shown: before training the student already answered the forget set as its teacher does (KL "
            f"{before:.4f}; needed: {MIN_DISTANCE:g}); does the bundle's rule take these answers away?",
            file=sys.stderr,
        )
    elif code:
        print(
            f"not distilled: the student closed {max(closed, 0.0):.0%} of the distance to its teacher on the forget "
            f"set (needed: {MIN_CLOSED:.0%}), and may still repeat it; try another --lr or more --epochs",
            file=sys.stderr,
        )
    else:
        print(f"measure it: divdec eval --help; start the next request from it: --init-student {settings.output}")
    return code

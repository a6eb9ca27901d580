"""`divdec bundle`, `calibrate` and `doctor`: write a bundle, choose its strength, check it."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from cyclopts import Parameter

from divdec.cli.loading import ExpertDevices, check_not_bundle, load
from divdec.errors import NOT_REACHED
from divdec.evaluation.settings import CalibrationSettings
from divdec.options import Flag, ModelLoading, Overwriting, Printing, SteeringChoice

DEFAULT = "linear:1.5"


def bundle(
    *,
    target: str,
    output: str,
    retain_auxiliary: str | None = None,
    forget_auxiliary: str | None = None,
    steering: str | None = None,
    ngram: str | None = None,
    ngram_weight: float = 1.0,
    registry: str | None = None,
    bridge: bool = False,
    merge: Flag = False,
    pack: Flag = False,
    overwriting: Overwriting = Overwriting(),
    printing: Printing = Printing(),
) -> None:
    r"""Join a target, auxiliaries and a rule into one model that transformers loads like any other.

    For example:

        divdec bundle --target models/target --retain-auxiliary models/q \
          --forget-auxiliary models/p --steering linear:1.5 --output bundle

    Args:
        target: The model to steer: a folder, GGUF file or hub id, '@revision' allowed.
        output: Folder for the bundle.
        retain_auxiliary: q, the auxiliary trained without the forget set: a checkpoint or LoRA adapter, as a folder or
            hub id.
        forget_auxiliary: p, the auxiliary trained with the forget set, in the same forms.
        steering: The rule: linear:ALPHA[:MARGIN[:full]] or rank:K[:MARGIN]; linear:1.5 by default. Not needed for
            a bundle with only a registry.
        ngram: An n-gram pair (`divdec ngram`), instead of the auxiliaries or added to them.
        ngram_weight: Weight of the n-gram divergence.
        registry: A registry of takedown requests (`divdec takedown`), which the model follows.
        bridge: The auxiliaries have another tokenizer than the target.
        merge: The auxiliaries are LoRA adapters: merge each with its base into a checkpoint in the bundle.
        pack: Copy checkpoints and n-grams into the bundle.
    """
    from divdec.model.bundle import write_bundle
    from divdec.steering import Steering

    check_not_bundle(target, "--target")
    has_experts = any((retain_auxiliary, forget_auxiliary, ngram))
    rule = None
    if steering is not None or has_experts or registry is None:
        rule = Steering.parse(steering or DEFAULT)
    path = write_bundle(
        output, target=target, retain_auxiliary=retain_auxiliary, forget_auxiliary=forget_auxiliary, steering=rule,
        ngram=ngram, ngram_weight=ngram_weight, registry=registry, bridge=bridge, merge=merge,
        pack=pack, overwrite=overwriting.overwrite,
    )  # fmt: skip
    name = None if rule is None else str(rule)
    if printing.json:
        print(json.dumps({"bundle": str(path), "steering": name}))
        return
    print(f"bundle: {path} ({name or 'takedown requests alone'})")


def calibrate(
    settings: Annotated[CalibrationSettings, Parameter(name="*")],
    *,
    printing: Printing = Printing(),
    loading: ModelLoading = ModelLoading(),
    experts: ExpertDevices = ExpertDevices(),
) -> int:
    r"""Measure a bundle again, and choose its rule and strength without a retrained model.

    Exit code 3: no measured setting forgets without losing too much of the retain set, or q is no reference.

    For example:

        divdec calibrate bundle --forget forget.jsonl --retain retain.jsonl \
          --holdout holdout.jsonl --max-retain-drop 0.02 --write
    """
    from divdec.evaluation.calibration import calibrate_bundle

    choice, written = calibrate_bundle(settings, lambda: load(settings.bundle, loading, SteeringChoice(), experts))
    code = 0 if written or not choice.faults else NOT_REACHED
    if printing.json:
        print(json.dumps(choice.to_dict() | {"written": written}))
        return code
    print("\n".join(choice.table))
    print(choice)
    for fault in choice.faults:
        print(f"warning: {fault}", file=sys.stderr)
    if written:
        print(f"written into {settings.bundle}")
    elif settings.write:
        print(f"nothing was written into {settings.bundle}: train a better pair", file=sys.stderr)
    return code


def doctor(bundle: str | None = None, *, printing: Printing = Printing()) -> int:
    """Show versions, devices and extras, and whether a bundle loads; exit code 1 if it does not.

    For example:

        divdec doctor runs/first/bundle

    Args:
        bundle: Bundle to check. The check covers configuration, checkpoints, digests, vocabularies and one forward
            pass.
    """
    from divdec.report.doctor import describe_installation, diagnosis_text, try_bundle

    content = describe_installation()
    if bundle is not None:
        content["bundle"] = try_bundle(bundle, load)
    print(json.dumps(content) if printing.json else diagnosis_text(content))
    return 0 if content.get("bundle", {"loads": True})["loads"] else 1

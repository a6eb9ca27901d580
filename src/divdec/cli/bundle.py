"""`divdec bundle`, `calibrate` and `doctor`: write a bundle, choose its strength, check it."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from divdec.cli.loading import ExpertDevices, check_not_bundle, load, measured_text
from divdec.errors import NOT_REACHED, UsageError
from divdec.extras import EXTRAS, missing
from divdec.options import (
    RARE,
    Flag,
    ModelLoading,
    Overwriting,
    Printing,
    SteeringChoice,
    check_at_least,
    read_template_kwargs,
)

if TYPE_CHECKING:
    from divdec.evaluation.choice import RuleChoice

DEFAULT = "linear:1.5"
SWEEP = ("linear:0.25,0.5,0.75,1,1.25,1.5,1.75,2,2.5,3,4", "rank:1,2,5,10,20,50,100,200,500")
"""The default candidates of `calibrate --reference q`, mild before strong."""


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
    token_healing: Flag = False,
    rank_vocabulary: Annotated[tuple[str, ...], RARE] = (),
    allow_negative: Flag = False,
    merge: Flag = False,
    pack: Flag = False,
    overwriting: Overwriting = Overwriting(),
    printing: Printing = Printing(),
) -> None:
    r"""Join a target, experts and a rule into one model that transformers loads like any other.

    For example:

        divdec bundle --target models/target --retain-auxiliary models/q \
          --forget-auxiliary models/p --steering linear:1.5 --output bundle

    Args:
        target: The model to steer: a folder or hub id, '@revision' allowed.
        output: Folder for the bundle.
        retain_auxiliary: q, the auxiliary trained without the forget set: a checkpoint or LoRA adapter, as a folder or
            hub id.
        forget_auxiliary: p, the auxiliary trained with the forget set, in the same forms.
        steering: The rule: linear:ALPHA or rank:K, both also with :MARGIN; linear:1.5 by default. Not needed for
            a bundle with only a registry.
        ngram: An n-gram pair (`divdec ngram`), instead of the auxiliaries or added to them.
        ngram_weight: Weight of the n-gram divergence.
        registry: A registry of takedown requests (`divdec takedown`), which the model follows.
        bridge: The auxiliaries have another tokenizer than the target.
        token_healing: With --bridge: if a target token ends inside a token of the auxiliaries, let the auxiliaries
            complete this token (token healing).
        rank_vocabulary: Text files. The rank rule suppresses only tokens that occur in them.
        allow_negative: Accept a negative alpha, which steers towards the forget set.
        merge: The auxiliaries are LoRA adapters: merge each with its base into a checkpoint in the bundle.
        pack: Copy checkpoints and n-grams into the bundle.
        overwriting: whether an earlier bundle is replaced.
        printing: format of the result.
    """
    from divdec.model.bundle import write_bundle
    from divdec.steering import Steering

    check_not_bundle(target, "--target")
    has_experts = any((retain_auxiliary, forget_auxiliary, ngram))
    rule = None
    if steering is not None or has_experts or registry is None:
        rule = Steering.parse(steering or DEFAULT, allow_negative=allow_negative)
    if rank_vocabulary and rule is not None:
        if rule.rule != "rank":
            raise UsageError(f"--rank-vocabulary belongs to the rank rule, but the steering is {rule}")
        rule = dataclasses.replace(rule, vocabulary=_token_ids(rank_vocabulary, target))
    path = write_bundle(
        output,
        target=target,
        retain_auxiliary=retain_auxiliary,
        forget_auxiliary=forget_auxiliary,
        steering=rule,
        ngram=ngram,
        ngram_weight=ngram_weight,
        registry=registry,
        bridge=bridge,
        token_healing=token_healing,
        merge=merge,
        pack=pack,
        overwrite=overwriting.overwrite,
    )
    eligible = len(rule.vocabulary) if rule is not None and rule.vocabulary is not None else None
    name = None if rule is None else str(rule)
    if printing.json:
        print(json.dumps({"bundle": str(path), "steering": name, "eligible_tokens": eligible}))
        return
    print(f"bundle: {path} ({name or 'takedown requests alone'})")
    if eligible is not None:
        print(f"the rank rule may suppress {eligible} tokens", file=sys.stderr)


def _token_ids(files: tuple[str, ...], target: str) -> tuple[int, ...]:
    from divdec.data.formatting import tokens_in
    from divdec.data.records import read_records
    from divdec.model.checkpoint import CheckpointReference, load_tokenizer

    folder = CheckpointReference.parse(target).resolve(Path(), weights=False)
    return tokens_in([read_records(file) for file in files], load_tokenizer(folder))


def calibrate(
    bundle: str,
    *,
    forget: str,
    retain: str,
    holdout: str | None = None,
    neutral: str | None = None,
    reference: Literal["q", "none"] = "q",
    sweep: tuple[str, ...] = (),
    max_retain_drop: str | None = None,
    write: bool = False,
    force: Flag = False,
    system_prompt: str | None = None,
    chat_template_kwargs: Annotated[str | None, RARE] = None,
    max_length: int = 1024,
    limit: int | None = None,
    batch_size: int = 32,
    allow_negative: Flag = False,
    printing: Printing = Printing(),
    loading: ModelLoading = ModelLoading(),
    experts: ExpertDevices = ExpertDevices(),
) -> int:
    r"""Measure a bundle again, and choose its rule and strength without a retrained model.

    Exit code 3: no measured setting forgets without losing too much of the retain set, or q is no reference.

    For example:

        divdec calibrate bundle --forget forget.jsonl --retain retain.jsonl \
          --holdout holdout.jsonl --max-retain-drop 2% --write

    Args:
        bundle: The bundle: a folder or hub id.
        forget: Forget set: a .jsonl, .json, .txt file, a folder, or a Hugging Face dataset.
        retain: Retain set, in the same formats.
        holdout: With --reference q: records like those of the forget set that none of the three models has seen.
        neutral: Text that steering should not change; required with --reference none.
        reference: q: choose the setting under which membership attacks succeed as often as on q, for pairs of
            `--recipe full-retain`. none: choose by answers, probability and perplexity, as `divdec train` does.
        sweep: Settings to choose from, such as 'linear:1,1.5,2' and 'rank:5,20'. The default is twenty settings, or
            those of `divdec train` with --reference none.
        max_retain_drop: Maximum relative loss of retain probability: a percentage, or a fraction such as 0.02. The
            default is 2%, or 5% with --reference none.
        write: Write the chosen setting into the bundle if the measurement shows that it forgets.
        force: Write the chosen setting even if it does not forget. The model card records this.
        system_prompt: System prompt of every conversation.
        chat_template_kwargs: Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'.
        max_length: Maximum sequence length in tokens.
        limit: Use only the first N records of each set.
        batch_size: Sequences per forward pass.
        allow_negative: Accept a negative alpha, which steers towards the forget set.
        printing: format of the result.
        loading: how models are loaded.
        experts: where the auxiliaries run.
    """
    from divdec.data.formatting import Format
    from divdec.data.records import read_records
    from divdec.evaluation.choice import choose_rule
    from divdec.evaluation.run import parse_sweep
    from divdec.evaluation.suppression import measure_suppression
    from divdec.model.bundle import rewrite_steering

    check_at_least("batch_size", batch_size, 1)
    if force and not write:
        raise UsageError("--force writes a choice that was measured not to forget: give it with --write")
    sources = _sources(reference, forget=forget, retain=retain, holdout=holdout, neutral=neutral)
    bound = _share(max_retain_drop or ("2%" if reference == "q" else "5%"))
    form = Format(
        system_prompt=system_prompt,
        max_length=max_length,
        chat_template_kwargs=read_template_kwargs(chat_template_kwargs),
    )
    default = SWEEP if reference == "q" else ()
    candidates = parse_sweep(sweep or default, allow_negative=allow_negative) if sweep or default else None
    sets = {name: read_records(source, limit=limit) for name, source in sources.items()}
    model, tokenizer = load(bundle, loading, SteeringChoice(), experts)
    if candidates is not None:
        vocabulary = model.steering.vocabulary
        candidates = [dataclasses.replace(candidate, vocabulary=vocabulary) for candidate in candidates]
        if not sweep:  # vocabularies may be smaller than the largest k of the default
            candidates = [candidate for candidate in candidates if candidate.k < model.vocab_size]
        for candidate in candidates:
            candidate.check_vocabulary(model.vocab_size)
    result = choose_rule(
        model, tokenizer, sets, candidates, min_retain=1 - bound, max_records=None, form=form, batch_size=batch_size,
        progress=True,
    )  # fmt: skip
    # Measured first: an error leaves the bundle as it was.
    suppression = measure_suppression(model, tokenizer, sets, form=form, batch_size=batch_size)
    faults, steering = result.faults, result.best.steering
    written = write and (force or not faults)
    if written:
        row = f"not as it should (written with --force): {'; '.join(faults)}" if faults else str(result)
        rewrite_steering(bundle, steering, row)
    code = 0 if written or not faults else NOT_REACHED
    if printing.json:
        print(json.dumps(_as_json(result, written) | {"suppression": dataclasses.asdict(suppression)}))
        return code
    print("\n".join(result.table))
    print(f"{result}\n{steering}: {suppression}")
    for fault in faults:
        print(f"warning: {fault}", file=sys.stderr)
    if written:
        print(f"written into {bundle}{', although it was measured not to forget' if faults else ''}")
    elif write:
        print(f"nothing was written into {bundle}: train a better pair, or give --force", file=sys.stderr)
    return code


def _sources(reference: str, **sources: str | None) -> dict[str, str]:
    """Return the given sets by name.

    Raises:
        UsageError: the set that the reference needs is missing, or one is given that it does not use.
    """
    if reference == "q" and sources["holdout"] is None:
        raise UsageError(
            "--holdout is required: records like those of the forget set that no model has seen; --reference none "
            "needs --neutral instead"
        )
    if reference == "none" and sources["neutral"] is None:
        raise UsageError("--neutral is required with --reference none: text that steering should not change")
    if reference == "none" and sources["holdout"] is not None:
        raise UsageError("--holdout is for --reference q: leave out one of --holdout and --reference none")
    return {name: source for name, source in sources.items() if source is not None}


def _share(text: str) -> float:
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value < 1:
        raise UsageError(f"--max-retain-drop is {text!r}; accepted: a percentage such as 2%, or a share such as 0.02")
    return value


def _as_json(result: RuleChoice, written: bool) -> dict[str, Any]:
    content = result.to_dict()
    return {
        "chosen": content["best"],
        "faults": content["faults"],
        "written": written,
        "leak_check": {
            "asked": result.asked,
            "steered": round((result.best.leaked or 0.0) * result.asked),
            "retain_auxiliary": round(result.guessed * result.asked),
            "unanswered": round(result.best.unanswered * result.asked),
        },
        "reference": result.reference,
        "target": content["target"],
        "points": content["settings"],
    }


def doctor(bundle: str | None = None, *, text: str | None = None, printing: Printing = Printing()) -> int:
    """Show versions, devices and extras, and whether a bundle loads; exit code 1 if it does not.

    For example:

        divdec doctor runs/first/bundle

    Args:
        bundle: Bundle to check. The check covers configuration, checkpoints, digests, vocabularies and one forward
            pass.
        text: For bundles with a bridge: text files. Print the share of their tokens that the vocabulary map covers.
        printing: format of the result.
    """
    from divdec.runs import versions

    if text is not None and bundle is None:
        raise UsageError("--text measures the bridge of a bundle: name the bundle too")
    content: dict[str, Any] = {
        "versions": versions(),
        "devices": _devices(),
        "extras": {extra: not missing(extra) for extra in EXTRAS},
    }
    if bundle is not None:
        content["bundle"] = _check_bundle(bundle, text)
    print(json.dumps(content) if printing.json else _as_text(content))
    return 0 if content.get("bundle", {"loads": True})["loads"] else 1


def _devices() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu_threads": torch.get_num_threads(),
        "gpus": gpus,
        "bfloat16_gpu": bool(gpus) and torch.cuda.is_bf16_supported(including_emulation=False),
        "mps": torch.backends.mps.is_available(),
        "offline": os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"),
    }


def _check_bundle(name: str, text: str | None) -> dict[str, Any]:
    import torch

    try:
        model, tokenizer = load(name)
        with torch.inference_mode():
            model(input_ids=torch.tensor([[0, 1]], device=model.device))
    except Exception as error:  # any error is a reason why the bundle does not load
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        return {"name": name, "loads": False, "why_not": f"{kind}{error}"}
    return {
        "name": name,
        "loads": True,
        "steering": model.rule,
        "measured": measured_text(model),
        "vocabulary": model.vocab_size,
        "parameters": {"target": model.target.num_parameters(), **_parameters(model.experts)},
        "experts": _kinds(model.experts),
        **_takedowns(model.takedowns),
        **_bridge(model.experts, tokenizer, text),
        "chat_template": bool(tokenizer.chat_template),
    }


def _kinds(experts: Any) -> list[str]:
    parts = getattr(experts, "parts", (experts,))
    return [type(part).__name__ for part in parts]


def _takedowns(takedowns: Any) -> dict[str, str]:
    if takedowns is None:
        return {}
    state = takedowns.snapshot().state
    return {"takedowns": f"{len(state.entries)} requests in force at strength {state.strength:g}"}


def _bridge(experts: Any, tokenizer: Any, text: str | None) -> dict[str, Any]:
    """Return the shares of the vocabulary, and of texts, that a pair with another tokenizer reaches."""
    maps = [part.map for part in getattr(experts, "parts", (experts,)) if hasattr(part, "map")]
    if not maps:
        if text is not None:
            raise UsageError("--text measures a bridge, and the bundle's experts have the target's tokenizer")
        return {}
    found = {"bridge": dataclasses.asdict(maps[0].coverage())}
    if text is not None:
        from divdec.data.formatting import documents
        from divdec.data.records import read_records

        ids = [token for document in documents(read_records(text), tokenizer) for token in document]
        found["bridge_of_text"] = dataclasses.asdict(maps[0].coverage(ids))
    return found


def _parameters(experts: Any) -> dict[str, int]:
    """Return the number of parameters of each neural auxiliary."""
    return {
        f"{name}_auxiliary": getattr(part, name).num_parameters()
        for part in getattr(experts, "parts", (experts,))
        for name in ("retain", "forget")
        if hasattr(getattr(part, name, None), "num_parameters")
    }


def _as_text(found: dict[str, Any]) -> str:
    lines = ["versions"]
    lines += [f"  {name:<14}{version or 'not installed'}" for name, version in found["versions"].items()]
    lines.append("devices")
    lines += [f"  {name:<14}{_plain(value)}" for name, value in found["devices"].items()]
    lines.append("extras")
    lines += [
        f"  {name:<14}{'works' if works else f'''not installed: pip install 'divdec[{name}]' '''.strip()}"
        for name, works in found["extras"].items()
    ]
    if bundle := found.get("bundle"):
        lines.append(f"bundle {bundle['name']}")
        if bundle["loads"]:
            skipped = ("name", "loads")
            lines += [f"  {name:<14}{_plain(value)}" for name, value in bundle.items() if name not in skipped]
            lines.append("  loads")
        else:
            lines.append(f"  does not load: {bundle['why_not']}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict) and all(isinstance(number, float) for number in value.values()):
        return ", ".join(f"{name} {number:.1%}" for name, number in value.items())
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:,}" for name, number in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)

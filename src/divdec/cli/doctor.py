"""`divdec doctor`: versions, devices, extras, and whether a bundle loads."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from divdec.errors import UsageError
from divdec.extras import EXTRAS, missing
from divdec.options import Printing


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
        "bfloat16_gpu": bool(gpus) and torch.cuda.is_bf16_supported(),
        "mps": torch.backends.mps.is_available(),
        "offline": os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"),
    }


def _check_bundle(name: str, text: str | None) -> dict[str, Any]:
    import torch

    from divdec.cli.loading import load

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

"""Show versions, devices and extras, and whether a bundle loads and, if not, why."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.extras import EXTRAS, missing

if TYPE_CHECKING:
    from divdec.cli.parsing import Options

POSITIONAL = ()
EXAMPLE = "divdec doctor runs/first/bundle"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `divdec doctor`."""

    bundle: str | None = None
    """A bundle to check: its configuration, parts, digests, vocabularies, and one forward pass."""
    text: str | None = None
    """With --bundle of auxiliaries with another tokenizer: how much of these texts' tokens the bridge reaches."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        if self.text is not None and self.bundle is None:
            raise UsageError("--text belongs to --bundle, whose bridge it measures")


def choose(arguments: Sequence[str]) -> tuple[Options, str, list[str]]:
    """The bundle may be named without its option, as for other verbs; see `divdec.cli.parsing.parse`."""
    from divdec.cli.parsing import Options

    bare = arguments[:1] if not arguments[:1] or arguments[0].startswith("-") else ["--bundle", arguments[0]]
    summary = (__doc__ or "").strip()
    return Options(Settings, summary, EXAMPLE), "doctor", [*bare, *arguments[1:]]


def run(settings: Settings) -> int:
    """Look, print, and return 1 if a given bundle does not load."""
    from divdec.runs import versions

    found: dict[str, Any] = {
        "versions": versions(),
        "devices": _devices(),
        "extras": {extra: not missing(extra) for extra in EXTRAS},
    }
    if settings.bundle is not None:
        found["bundle"] = _check_bundle(settings.bundle, settings.text)
    print(json.dumps(found) if settings.json else _as_text(found))
    return 0 if found.get("bundle", {"loads": True})["loads"] else 1


def _devices() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
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
    from divdec.cli.settings import LoadSettings

    try:
        model, tokenizer = load(LoadSettings(bundle=name))
        with torch.inference_mode():
            model(input_ids=torch.tensor([[0, 1]], device=model.device))
    except Exception as error:  # whatever it is, it is why the bundle does not load
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
    """How much of the vocabulary, and of given texts, a pair with another tokenizer reaches."""
    maps = [part.map for part in getattr(experts, "parts", (experts,)) if hasattr(part, "map")]
    if not maps:
        if text is not None:
            raise UsageError("--text measures a bridge, and the bundle's experts have the target's own tokenizer")
        return {}
    found = {"bridge": dataclasses.asdict(maps[0].coverage())}
    if text is not None:
        from divdec.data.formatting import documents
        from divdec.data.records import read_records

        ids = [token for document in documents(read_records(text), tokenizer) for token in document]
        found["bridge_of_text"] = dataclasses.asdict(maps[0].coverage_of(ids))
    return found


def _parameters(experts: Any) -> dict[str, int]:
    """Parameters of the neural auxiliaries, where there are some."""
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

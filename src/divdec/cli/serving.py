"""`divdec serve` and `divdec playground`: a bundle behind an OpenAI-compatible API, or in the browser."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.cli.chat import Turns
from divdec.cli.loading import ExpertDevices, load, load_in_thread
from divdec.errors import UsageError
from divdec.extras import require
from divdec.options import (
    ModelLoading,
    SpeculativeDecoding,
    SteeringChoice,
    check_at_least,
    check_seed,
    option,
    read_template_kwargs,
)
from divdec.serving import ServeSettings, bind, is_local

if TYPE_CHECKING:
    from divdec.model.loading import LoadedModels
    from divdec.serving.engine import Engine


API_KEY, REGISTRY = "DIVDEC_API_KEY", "DIVDEC_REGISTRY"
VLLM_DRAFT_LENGTH = 4  # tokens, with `--speculative auto`


# Fields of the embedded server that vLLM replaces by its own or lacks.
EMBEDDED = (
    "extra_bundle", "max_num_seqs", "max_queue", "max_tokens", "max_seconds", "max_body_bytes", "shutdown_timeout",
    "log_prompts", "on_suppressed", "suppressed_share", "refusal",
)  # fmt: skip


def serve(
    bundle: str,
    *,
    settings: ServeSettings = ServeSettings(),
    choice: SteeringChoice = SteeringChoice(),
    speculation: SpeculativeDecoding = SpeculativeDecoding(),
    loading: ModelLoading = ModelLoading(),
    experts: ExpertDevices = ExpertDevices(),
) -> None:
    r"""Serve bundles over HTTP with the OpenAI API: completions, chat, streaming, log-probabilities.

    For example:

        divdec serve bundle --port 8000
        curl http://127.0.0.1:8000/v1/completions \
          -H 'Content-Type: application/json' \
          -d '{"model": "bundle", "prompt": "Who wrote The Hollow Orchard?"}'

    Args:
        bundle: The bundle: a folder or hub id.
    """
    bundles = _bundles(bundle, settings)
    if len(bundles) > 1 and choice.steering is not None:
        raise UsageError("--steering is for a single bundle; write each bundle with its own rule")
    if settings.engine == "vllm":
        _check_vllm(settings, choice, loading, experts)
    else:
        require("serve", "the server")
    if settings.api_key is None:
        settings = dataclasses.replace(settings, api_key=os.environ.get(API_KEY))
    if settings.registry is None:
        settings = dataclasses.replace(settings, registry=os.environ.get(REGISTRY) or None)
    port = bind(settings.host, settings.port)
    if not is_local(settings.host) and settings.api_key is None:
        print(
            f"warning: {settings.host} accepts other machines and no --api-key is set: anybody can use the server",
            file=sys.stderr,
        )
    if settings.engine == "vllm":
        port.close()
        _serve_vllm(bundle, next(iter(bundles)), settings, speculation, loading)
        return

    from divdec.serving.server import serve as run_server

    try:
        loaded: LoadedModels = {}  # a target or base that several bundles name is loaded once
        engines = load_in_thread(
            lambda: {
                name: build_engine(name, path, settings, choice, speculation, loading, experts, loaded)
                for name, path in bundles.items()
            }
        )
        run_server(engines, port, settings)
    finally:
        port.close()


def _check_vllm(settings: ServeSettings, choice: SteeringChoice, loading: ModelLoading, experts: ExpertDevices) -> None:
    """Refuse options that vLLM would ignore."""
    from divdec.serving.vllm.configuration import check_installed

    for values, names in (
        (settings, EMBEDDED),
        (choice, ("steering",)),
        (loading, ("device",)),
        (experts, ("expert_devices",)),
    ):
        defaults = type(values)()
        for name in names:
            if getattr(values, name) != getattr(defaults, name):
                raise UsageError(f"{option(name)} is for --engine embedded; vLLM's own options go into --vllm-options")
    check_installed()


def _serve_vllm(
    bundle: str, name: str, settings: ServeSettings, speculation: SpeculativeDecoding, loading: ModelLoading
) -> None:
    from divdec.serving.vllm.configuration import engine_arguments, run

    try:
        extra = shlex.split(settings.vllm_options)
    except ValueError as error:
        raise UsageError(f"--vllm-options is {settings.vllm_options!r}: {error}") from None
    if kwargs := read_template_kwargs(settings.chat_template_kwargs):
        extra = ["--default-chat-template-kwargs", json.dumps(kwargs), *extra]
    extra = ["--allowed-origins", json.dumps(settings.cors_origin), *extra]  # by default some versions accept all
    extra += [] if loading.dtype == "auto" else ["--dtype", loading.dtype]
    length = speculation.draft_length
    arguments = engine_arguments(
        bundle,
        name=name,
        speculative=VLLM_DRAFT_LENGTH if length is True else length,
        registry=None if settings.registry is None else Path(settings.registry),
        logprobs=settings.logprobs,
        verify=not loading.no_verify,
        host=settings.host,
        port=settings.port,
        extra=extra,
    )
    run(arguments, api_key=settings.api_key)


def _bundles(bundle: str, settings: ServeSettings) -> dict[str, str]:
    """Return the bundles to serve, by name."""
    named = [(settings.name or Path(bundle).expanduser().resolve().name, bundle)]
    for text in settings.extra_bundle:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise UsageError(f"--extra-bundle is {text!r}; accepted: name=path")
        named.append((name, path))
    bundles: dict[str, str] = {}
    for name, path in named:
        if not name.isprintable() or name != name.strip() or len(name) > 200:
            raise UsageError(f"the name {name!r} cannot be used; accepted: 1 to 200 printable characters")
        if name in bundles:
            raise UsageError(f"two bundles are named {name!r}; rename one (--name, --extra-bundle name=path)")
        bundles[name] = path
    return bundles


def build_engine(
    name: str,
    bundle: str,
    settings: ServeSettings,
    choice: SteeringChoice = SteeringChoice(),
    speculation: SpeculativeDecoding = SpeculativeDecoding(),
    loading: ModelLoading = ModelLoading(),
    experts: ExpertDevices = ExpertDevices(),
    loaded: LoadedModels | None = None,
) -> Engine:
    """Load a bundle and build the engine that serves it under a name."""
    from divdec.decoding import speculative
    from divdec.serving.engine import Engine

    model, tokenizer = load(bundle, loading, choice, experts, loaded, settings.registry)
    if model.config.single_turn:
        print(
            f"note: the models of {name} were trained on single questions; their answers to later turns of a "
            "conversation were not measured",
            file=sys.stderr,
        )
    length = speculation.draft_length
    return Engine(
        model, tokenizer, name, max_num_seqs=settings.max_num_seqs, max_queue=settings.max_queue,
        speculation=None if length is None else speculative.Speculation(None if length is True else length),
        measure_suppression=settings.on_suppressed != "answer",
        chat_template_kwargs=read_template_kwargs(settings.chat_template_kwargs),
    )  # fmt: skip


def playground(
    bundle: str,
    *,
    choice: SteeringChoice = SteeringChoice(),
    show_target: bool = False,
    turns: Turns = Turns(),
    max_new_tokens: int = 256,
    seed: int = 0,
    port: int = 7860,
    loading: ModelLoading = ModelLoading(),
) -> None:
    """Show a bundle in the browser: coloured tokens, the strength as a slider, suppressed tokens.

    For example:

        divdec playground bundle

    Args:
        bundle: Bundle (a folder or hub id).
        show_target: Show the UNSTEERED target beside the steered model, marked as such; on this machine only.
        max_new_tokens: Maximum length of an answer in tokens.
        seed: Seed of sampled answers.
        port: Port to listen on, on this machine only. 0 selects a free port.
    """
    check_at_least("max_new_tokens", max_new_tokens, 1)
    check_seed(seed)
    if not 0 <= port < 2**16:
        raise UsageError(f"--port is {port}; accepted: 0 to {2**16 - 1}")
    if bundle.startswith(("http://", "https://")):
        raise UsageError(
            f"{bundle} is a server; the playground shows a bundle: give its folder. To chat with a server, use any "
            "client of the OpenAI API"
        )
    require("ui", "the playground")
    socket = bind("127.0.0.1", port)
    try:
        from divdec.playground.controller import Controller, read_example_questions
        from divdec.playground.models import ChatOptions, SteeredModel, UnsteeredTarget
        from divdec.playground.page import serve

        kwargs = read_template_kwargs(turns.chat_template_kwargs)
        options = ChatOptions(
            turns.system_prompt, max_new_tokens=max_new_tokens, seed=seed, chat_template_kwargs=kwargs
        )
        model, tokenizer = load_in_thread(lambda: load(bundle, loading, choice))
        options = dataclasses.replace(options, single_turn=model.config.single_turn)
        steered = SteeredModel(model, tokenizer, options, reveal=show_target)
        target = UnsteeredTarget(steered) if show_target else None
        name = Path(bundle).expanduser().resolve().name
        serve(Controller(name, steered, target=target, examples=read_example_questions(bundle)), socket)
    finally:
        socket.close()

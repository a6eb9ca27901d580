"""`divdec playground`: a bundle or a running server in the browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from divdec.cli.chat import Turns
from divdec.errors import UsageError
from divdec.options import ModelLoading, SteeringChoice, check_at_least

API_KEY = "DIVDEC_API_KEY"


def playground(
    bundle: str,
    *,
    choice: SteeringChoice = SteeringChoice(),
    registry: str | None = None,
    show_target: bool = False,
    model: str | None = None,
    turns: Turns = Turns(),
    max_new_tokens: int = 256,
    seed: int = 0,
    host: str = "127.0.0.1",
    port: int = 7860,
    loading: ModelLoading = ModelLoading(),
) -> None:
    """Show a bundle in the browser: coloured tokens, the strength as a slider, suppressed tokens.

    For example:

        divdec playground bundle
        divdec playground http://127.0.0.1:8000

    Args:
        bundle: Bundle (a folder or hub id), or URL of a running server. Its API key is read from the environment
            variable DIVDEC_API_KEY.
        choice: the initial rule.
        registry: Folder of a takedown registry (`divdec takedown`). Adds a tab for takedown requests.
        show_target: Show the UNSTEERED target beside the steered model, marked as such; on this machine only.
        model: Name of the model at the server. By default the first model that the server lists.
        turns: what the conversation remembers.
        max_new_tokens: Maximum length of an answer in tokens.
        seed: Seed of sampled answers.
        host: Address to listen on. For a bundle it must be a loopback address, because the page shows suppressed
            tokens and can change the strength. For a server any address is accepted.
        port: Port to listen on. 0 selects a free port.
        loading: how models are loaded.
    """
    from divdec.extras import require
    from divdec.serving import bind, is_local

    check_at_least("max_new_tokens", max_new_tokens, 1)
    if not 0 <= seed < 2**32:
        raise UsageError(f"--seed is {seed}; accepted: 0 to {2**32 - 1}")
    if not 0 <= port < 2**16:
        raise UsageError(f"--port is {port}; accepted: 0 to {2**16 - 1}")
    is_url = bundle.startswith(("http://", "https://"))
    if is_url and (choice, loading, registry, show_target) != (SteeringChoice(), ModelLoading(), None, False):
        raise UsageError(
            f"--steering, --registry, --show-target, --device, --dtype and --no-verify are for a bundle; "
            f"the server at {bundle} has its own: leave them out"
        )
    if model is not None and not is_url:
        raise UsageError("--model is the name of a model at a server; leave it out with a bundle")
    if not is_url and not is_local(host):
        what = "unsteered answers" if show_target else "suppressed tokens, and lets a viewer steer less"
        raise UsageError(
            f"host {host!r} accepts other machines, and the page shows {what}; accepted with a bundle: "
            "127.0.0.1 (from elsewhere: `ssh -L`, or `divdec serve` for others)"
        )
    require("ui", "the playground")
    socket = bind(host, port)
    if not is_local(host):
        print(f"warning: {host} accepts other machines: anybody can use the server's model here", file=sys.stderr)
    try:
        settings = (turns, max_new_tokens, seed)
        if is_url:
            controller = _connect_server(bundle, model, settings)
        else:
            controller = _load_bundle(bundle, loading, choice, registry, settings, host if show_target else None)
        from divdec.playground.page import serve

        serve(controller, host, socket)
    finally:
        socket.close()


def _connect_server(url: str, model: str | None, settings: tuple[Turns, int, int]) -> Any:
    from divdec.playground.controller import Controller
    from divdec.playground.models import RemoteServer

    api_key_env = API_KEY if os.environ.get(API_KEY) else None
    server = RemoteServer(url, _chat_options(settings), model=model, api_key_env=api_key_env)
    return Controller(server.name, server=server)


def _load_bundle(
    bundle: str,
    loading: ModelLoading,
    choice: SteeringChoice,
    registry: str | None,
    settings: tuple[Turns, int, int],
    target_host: str | None,
) -> Any:
    from divdec.cli.loading import load
    from divdec.playground.controller import Controller, read_example_questions
    from divdec.playground.models import SteeredModel, UnsteeredTarget
    from divdec.takedowns.registry import Registry

    model, tokenizer = load(bundle, loading, choice)
    requests = None
    if registry is not None:
        from divdec.takedowns.correction import with_registry

        model, requests = with_registry(model, tokenizer, registry), Registry(registry)
    options = _chat_options(settings, bool(model.config.single_turn))
    steered = SteeredModel(model, tokenizer, options, reveal=target_host is not None)
    target = None if target_host is None else UnsteeredTarget(steered, target_host)
    name = Path(bundle).expanduser().resolve().name
    return Controller(name, steered, target=target, registry=requests, examples=read_example_questions(bundle))


def _chat_options(settings: tuple[Turns, int, int], single_turn: bool = False) -> Any:
    from divdec.playground.models import ChatOptions

    turns, max_new_tokens, seed = settings
    if turns.single_turn is not None:
        single_turn = turns.single_turn
    return ChatOptions(turns.system_prompt, single_turn, max_new_tokens, seed)

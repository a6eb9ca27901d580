"""Serve bundles over HTTP as the OpenAI API does: completions, chat, streams, log-probabilities."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.cli.settings import ServeSettings as Settings
from divdec.errors import UsageError
from divdec.extras import require

if TYPE_CHECKING:
    from divdec.serving.api.server import Options
    from divdec.serving.engine.engine import Engine

POSITIONAL = ("bundle",)
NAMED = {"also": "bundle"}
EXAMPLE = (
    "divdec serve bundle --port 8000\n"
    "  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\\n"
    '    -d \'{"model": "bundle", "prompt": "Who wrote The Hollow Orchard?"}\''
)
API_KEY = "DIVDEC_API_KEY"
# What vLLM does in its own way, or not at all.
EMBEDDED = frozenset(
    ("also", "steering", "allow_negative", "device", "rows", "queue", "max_tokens", "max_seconds", "max_body_bytes",
     "grace", "log_prompts", "place")
)  # fmt: skip
DRAFT = 4  # tokens at a time, where vLLM is to speculate and nobody says how far


def run(settings: Settings) -> None:
    """Serve until the process is told to stop."""
    if settings.engine == "vllm":
        return _run_vllm(settings)
    if settings.vllm_options:
        raise UsageError("--vllm-options are for --engine vllm")
    require("serve", "the server")
    bundles = _bundles(settings)
    options = _options(settings)
    options.check_tls()

    from divdec.serving.address import bind
    from divdec.serving.api.server import serve

    port = bind(settings.host, settings.port)
    _warn_if_open(settings, options)
    try:
        serve({name: _engine(name, bundle, settings) for name, bundle in bundles.items()}, port, options)
    finally:
        port.close()


def _run_vllm(settings: Settings) -> None:
    """Let vLLM's own server serve the bundle."""
    from divdec.serving.vllm.server import check_installed, engine_arguments, run

    for field in dataclasses.fields(settings):
        if field.name in EMBEDDED and getattr(settings, field.name) != field.default:
            option = f"--{NAMED.get(field.name, field.name).replace('_', '-')}"
            raise UsageError(f"{option} is for --engine embedded; options of vLLM itself go into --vllm-options")
    check_installed()

    from divdec.serving.address import bind

    options = _options(settings)
    options.check_tls()
    extra = shlex.split(settings.vllm_options)
    for name in ("ssl_certfile", "ssl_keyfile"):
        if (value := getattr(settings, name)) is not None:
            extra += [f"--{name.replace('_', '-')}", value]
    extra += [] if settings.dtype == "auto" else ["--dtype", settings.dtype]
    bind(settings.host, settings.port).close()
    _warn_if_open(settings, options)
    (name,) = _bundles(settings)
    speculative = settings.speculative
    arguments = engine_arguments(
        settings.bundle,
        name=name,
        speculative=None if speculative is None else DRAFT if speculative == "auto" else int(speculative),
        registry=None if settings.registry is None else Path(settings.registry),
        verify=not settings.no_verify,
        host=settings.host,
        port=settings.port,
        extra=extra,
    )
    run(arguments, api_key=options.api_key)


def _warn_if_open(settings: Settings, options: Options) -> None:
    from divdec.serving.address import is_local

    if not is_local(settings.host) and options.api_key is None:
        print(f"warning: {settings.host} is open to others and no --api-key is set: anybody can ask", file=sys.stderr)


def _bundles(settings: Settings) -> dict[str, str]:
    """What is served, by name."""
    given = [(settings.name or Path(settings.bundle).expanduser().resolve().name, settings.bundle)]
    for text in settings.also:
        name, equals, bundle = text.partition("=")
        if not (name and equals and bundle):
            raise UsageError(f"--bundle {text!r} cannot be read; accepted: name=path")
        given.append((name, bundle))
    found: dict[str, str] = {}
    for name, bundle in given:
        if not name.isprintable() or name != name.strip() or len(name) > 200:
            raise UsageError(f"the name {name!r} cannot be used; accepted: 1 to 200 printable characters")
        if name in found:
            raise UsageError(
                f"two bundles are called {name!r}; give each a name of its own (--name, --bundle name=path)"
            )
        found[name] = bundle
    if len(found) > 1 and settings.steering is not None:
        raise UsageError("--steering is for a single bundle; write each bundle with the rule that it shall follow")
    return found


def _options(settings: Settings) -> Options:
    from divdec.serving.api.generation import Limits
    from divdec.serving.api.server import Options

    return Options(
        api_key=settings.api_key if settings.api_key is not None else os.environ.get(API_KEY),
        limits=Limits(
            max_tokens=settings.max_tokens,
            max_seconds=settings.max_seconds,
            max_body_bytes=settings.max_body_bytes,
            max_sequences=settings.queue,
        ),
        grace=settings.grace,
        log_prompts=settings.log_prompts,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )


def _engine(name: str, bundle: str, settings: Settings) -> Engine:
    from divdec.cli.loading import load
    from divdec.decoding.speculative import Speculation
    from divdec.serving.engine.engine import Engine

    model, tokenizer = load(dataclasses.replace(settings, bundle=bundle))
    if model.config.single_turn:
        print(
            f"note: {name} has learned single questions; answers to later turns of a conversation were not measured",
            file=sys.stderr,
        )
    if settings.registry is not None:
        from divdec.takedowns.following import with_registry

        model = with_registry(model, tokenizer, settings.registry)
    speculation = None
    if settings.speculative is not None:
        speculation = Speculation(None if settings.speculative == "auto" else int(settings.speculative))
    return Engine(model, tokenizer, name, rows=settings.rows, queue=settings.queue, speculation=speculation)

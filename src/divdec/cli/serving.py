"""`divdec serve` and `divdec playground`: a bundle behind an OpenAI-compatible API, or in the browser."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from divdec.cli.chat import Turns
from divdec.cli.loading import ExpertDevices, load
from divdec.errors import UsageError
from divdec.extras import require
from divdec.options import (
    RARE,
    Flag,
    ModelLoading,
    SpeculativeDecoding,
    SteeringChoice,
    check_at_least,
    option,
    read_template_kwargs,
)
from divdec.serving import SuppressionPolicy, check_origin
from divdec.serving.logprobs import LogprobPolicy, default_level

if TYPE_CHECKING:
    from divdec.model.loading import LoadedModels
    from divdec.playground.controller import Controller
    from divdec.playground.models import ChatOptions
    from divdec.serving import ServerOptions
    from divdec.serving.engine import Engine


API_KEY = "DIVDEC_API_KEY"
VLLM_DRAFT_LENGTH = 4  # tokens, with `--speculative auto`


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Options of `divdec serve`."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 accepts connections from other machines."""
    port: int = 8000
    """Port to listen on. 0 selects a free port."""
    api_key: str | None = None
    """API key (bearer token), at least 16 characters. Prefer the environment variable DIVDEC_API_KEY, which other users
    of the machine cannot see."""
    name: str | None = None
    """Model name of the bundle in the API; its folder's name by default."""
    extra_bundle: tuple[str, ...] = ()
    """Further bundles, as name=path; clients choose by name."""
    registry: str | None = None
    """Folder of a takedown registry (`divdec takedown`). Every bundle follows it, including later changes."""
    logprobs: str | None = None
    """Probabilities that replies tell: off, top-1, rounded:STEP (in nats), or full. All but full also refuse
    logit_bias, log-probabilities of the prompt and seeds of samples, and accept sampling numbers in steps of 0.05.
    Default: off with a registry, full without. vLLM: off or full."""
    on_suppressed: Literal["answer", "refuse", "note"] = "answer"
    """Action for a reply from which steering took much of the target's probability, where the model would invent
    something: answer, refuse (send --refusal instead), or note (mark the reply in the response; with --logprobs full,
    add the share)."""
    suppressed_share: Annotated[float, RARE] = SuppressionPolicy.share
    """Share of probability that counts as much, at the token of the reply where steering took most."""
    refusal: Annotated[str, RARE] = SuppressionPolicy.refusal
    """Text that replaces a refused reply."""
    chat_template_kwargs: Annotated[str | None, RARE] = None
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'. Requests can replace
    them."""
    engine: Literal["embedded", "vllm"] = "embedded"
    """Inference engine: embedded (this process), or vllm."""
    vllm_options: str = ""
    """Options for vLLM's server in one string, such as --vllm-options='--tensor-parallel-size 2'."""
    ssl_certfile: Annotated[str | None, RARE] = None
    """Certificate for HTTPS (PEM)."""
    ssl_keyfile: Annotated[str | None, RARE] = None
    """Its private key (PEM, without a password)."""
    cors_origin: Annotated[tuple[str, ...], RARE] = ()
    """Origin of web pages whose scripts may use the server (CORS), such as http://localhost:3000; * means every page.
    None by default."""
    max_num_seqs: Annotated[int, RARE] = 32
    """Maximum number of sequences decoded at the same time."""
    max_queue: Annotated[int, RARE] = 128
    """Maximum number of queued sequences. Further requests get status 429."""
    max_tokens: Annotated[int, RARE] = 4096
    """Longest answer that a client may ask for, in tokens."""
    max_seconds: Annotated[float, RARE] = 300.0
    """Maximum time per request in seconds, including time in the queue."""
    max_body_bytes: Annotated[int, RARE] = 2097152
    """Largest body of a request."""
    shutdown_timeout: Annotated[float, RARE] = 30.0
    """Seconds that running requests may take to finish when the server is stopped."""
    log_prompts: Flag = False
    """Include prompts in the access log."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise UsageError(f"--port is {self.port}; accepted: 0 to {2**16 - 1}")
        for name in ("max_num_seqs", "max_queue", "max_tokens", "max_body_bytes"):
            check_at_least(name, getattr(self, name), 1)
        if not 0 < self.max_seconds < 1e6 or not 0 <= self.shutdown_timeout < 1e6:
            raise UsageError(
                "--max-seconds must be above 0, --shutdown-timeout at least 0 seconds, both below a million"
            )
        self.suppression()
        for origin in self.cors_origin:
            check_origin(origin)
        read_template_kwargs(self.chat_template_kwargs)
        if self.engine == "embedded" and self.vllm_options:
            raise UsageError("--vllm-options are for --engine vllm")
        if self.logprobs is not None:
            LogprobPolicy.parse(self.logprobs)

    def suppression(self) -> SuppressionPolicy:
        """Return what becomes of replies from which steering took much."""
        return SuppressionPolicy(self.on_suppressed, self.suppressed_share, self.refusal)


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
        settings: the server's.
        choice: another rule.
        speculation: Speculative decoding, while a single request runs.
        loading: how models are loaded.
        experts: where the auxiliaries run.
    """
    from divdec.serving import bind, is_local

    bundles = _bundles(bundle, settings)
    if len(bundles) > 1 and choice.steering is not None:
        raise UsageError("--steering is for a single bundle; write each bundle with its own rule")
    if settings.engine == "vllm":
        _check_vllm(settings, choice, loading, experts)
    else:
        require("serve", "the server")
    options = _options(settings)
    options.check_tls()
    port = bind(settings.host, settings.port)
    if not is_local(settings.host) and options.api_key is None:
        print(
            f"warning: {settings.host} accepts other machines and no --api-key is set: anybody can use the server",
            file=sys.stderr,
        )
    if settings.engine == "vllm":
        port.close()
        _serve_vllm(bundle, next(iter(bundles)), settings, speculation, loading, options.api_key)
        return

    from divdec.passes import load_in_thread
    from divdec.serving.server import serve as run_server

    try:
        loaded: LoadedModels = {}  # a target or base that several bundles name is loaded once
        engines = load_in_thread(
            lambda: {
                name: build_engine(name, path, settings, choice, speculation, loading, experts, loaded)
                for name, path in bundles.items()
            }
        )
        follows = any(engine.count_takedowns() is not None for engine in engines.values())
        policy = LogprobPolicy.parse(settings.logprobs or default_level(follows))
        run_server(engines, port, dataclasses.replace(options, logprobs=policy))
    finally:
        port.close()


def _check_vllm(settings: ServeSettings, choice: SteeringChoice, loading: ModelLoading, experts: ExpertDevices) -> None:
    """Refuse options that vLLM would ignore."""
    from divdec.serving.vllm.configuration import check_installed

    for values, names in (
        (settings, EMBEDDED),
        (choice, ("steering", "allow_negative")),
        (loading, ("device",)),
        (experts, ("expert_devices", "overlap")),
    ):
        defaults = type(values)()
        for name in names:
            if getattr(values, name) != getattr(defaults, name):
                raise UsageError(f"{option(name)} is for --engine embedded; vLLM's own options go into --vllm-options")
    check_installed()


def _serve_vllm(
    bundle: str,
    name: str,
    settings: ServeSettings,
    speculation: SpeculativeDecoding,
    loading: ModelLoading,
    key: str | None,
) -> None:
    from divdec.serving.vllm.configuration import engine_arguments, run

    try:
        extra = shlex.split(settings.vllm_options)
    except ValueError as error:
        raise UsageError(f"--vllm-options is {settings.vllm_options!r}: {error}") from None
    for field in ("ssl_certfile", "ssl_keyfile"):
        if (value := getattr(settings, field)) is not None:
            extra += [option(field), value]
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
    run(arguments, api_key=key)


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


def _options(settings: ServeSettings) -> ServerOptions:
    from divdec.serving import ServerOptions

    return ServerOptions(
        api_key=settings.api_key if settings.api_key is not None else os.environ.get(API_KEY),
        max_tokens=settings.max_tokens, max_seconds=settings.max_seconds, max_body_bytes=settings.max_body_bytes,
        max_sequences=settings.max_queue, shutdown_timeout=settings.shutdown_timeout, log_prompts=settings.log_prompts,
        suppression=settings.suppression(), ssl_certfile=settings.ssl_certfile, ssl_keyfile=settings.ssl_keyfile,
        cors_origins=settings.cors_origin,
    )  # fmt: skip


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
        from divdec.playground.models import ChatOptions
        from divdec.playground.page import serve

        kwargs = read_template_kwargs(turns.chat_template_kwargs)
        options = ChatOptions(turns.system_prompt, bool(turns.single_turn), max_new_tokens, seed, kwargs)
        if is_url:
            controller = _connect_server(bundle, model, options)
        else:
            target_host = host if show_target else None
            controller = _load_bundle(bundle, loading, choice, registry, options, turns.single_turn, target_host)

        serve(controller, host, socket)
    finally:
        socket.close()


def _connect_server(url: str, model: str | None, options: ChatOptions) -> Controller:
    from divdec.playground.controller import Controller
    from divdec.playground.server import RemoteServer

    server = RemoteServer(url, options, model=model, api_key_env=API_KEY if os.environ.get(API_KEY) else None)
    return Controller(server.name, server=server)


def _load_bundle(
    bundle: str,
    loading: ModelLoading,
    choice: SteeringChoice,
    registry: str | None,
    options: ChatOptions,
    single_turn: bool | None,
    target_host: str | None,
) -> Controller:
    from divdec.passes import load_in_thread
    from divdec.playground.controller import Controller, read_example_questions
    from divdec.playground.models import SteeredModel, UnsteeredTarget
    from divdec.takedowns.registry import Registry

    model, tokenizer = load_in_thread(lambda: load(bundle, loading, choice, registry=registry))
    requests = None if registry is None else Registry(registry)
    if single_turn is None:
        options = dataclasses.replace(options, single_turn=bool(model.config.single_turn))
    steered = SteeredModel(model, tokenizer, options, reveal=target_host is not None)
    target = None if target_host is None else UnsteeredTarget(steered, target_host)
    name = Path(bundle).expanduser().resolve().name
    return Controller(name, steered, target=target, registry=requests, examples=read_example_questions(bundle))

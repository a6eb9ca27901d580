"""See it in a browser: chat with coloured tokens, the strength as a slider, what was pushed down."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any, Literal

from divdec.errors import UsageError

POSITIONAL = ("bundle",)
EXAMPLE = "divdec playground bundle\n  divdec playground http://127.0.0.1:8000"
API_KEY = "DIVDEC_API_KEY"
# What belongs to a bundle that is loaded here, not to a server's client.
OF_BUNDLES = ("steering", "registry", "show_target", "no_verify", "device", "dtype")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `divdec playground`."""

    bundle: str
    """The bundle (a folder or hub id), or the URL of a running server, whose key is read from DIVDEC_API_KEY."""
    steering: str | None = None
    """Another rule to begin with than the bundle's: linear:ALPHA, rank:K or rank:K:soft."""
    registry: str | None = None
    """Folder of a registry of takedown requests (`divdec forget`): adds a tab that takes texts down."""
    show_target: bool = False
    """Show the UNSTEERED target beside the steered model, marked as such; only on this machine."""
    model: str | None = None
    """What a server calls the model; the first that it serves by default."""
    system_prompt: str | None = None
    """System turn before the conversation."""
    single_turn: bool | None = None
    """Ask every question by itself, without what was said before; true or false. By default as the bundle says, which
    knows whether its models have learned single questions alone; with a server false."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    seed: int = 0
    """Seed of sampled answers."""
    host: str = "127.0.0.1"
    """Address to listen on. A bundle is shown on this machine only, since whoever sees the page sees what was pushed
    down and moves the strength; a server's answers may be shown elsewhere."""
    port: int = 7860
    """Port to listen on; 0 takes any that is free."""
    no_verify: bool = False
    """Load although a weight file has changed since the bundle was written."""
    device: str = "auto"
    """Where the models run: auto, cpu, cuda, cuda:1, mps; 'spread' places them over all GPUs."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights; 'auto' takes what the checkpoints hold."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max-new-tokens is {self.max_new_tokens}; accepted: at least 1")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed is {self.seed}; accepted: 0 to {2**32 - 1}")
        if not 0 <= self.port < 2**16:
            raise UsageError(f"port is {self.port}; accepted: 0 to {2**16 - 1}")
        for field in dataclasses.fields(self):
            if self.is_url and field.name in OF_BUNDLES and getattr(self, field.name) != field.default:
                option = f"--{field.name.replace('_', '-')}"
                raise UsageError(f"{option} is for a bundle; a server ({self.bundle}) has its own, leave it out")
        if self.model is not None and not self.is_url:
            raise UsageError("--model is what a server calls its model; with a bundle leave it out")

    @property
    def is_url(self) -> bool:
        """Whether a running server is meant."""
        return self.bundle.startswith(("http://", "https://"))


def run(settings: Settings) -> None:
    """Serve the page until the process is told to stop."""
    from divdec.extras import require
    from divdec.serving.address import bind, is_local

    if not settings.is_url and not is_local(settings.host):
        what = "unsteered answers" if settings.show_target else "what was pushed down, and lets a viewer steer less"
        raise UsageError(
            f"host {settings.host!r} is open to other machines, and the page shows {what}; accepted with a bundle: "
            "127.0.0.1 (from elsewhere: `ssh -L`, or `divdec serve` for others)"
        )
    require("ui", "the playground")
    port = bind(settings.host, settings.port)
    if not is_local(settings.host):
        print(
            f"warning: {settings.host} is open to others: anybody can ask the server through this page", file=sys.stderr
        )
    try:
        playground = _of_server(settings) if settings.is_url else _of_bundle(settings)

        from divdec.playground.serve import serve

        serve(playground, settings.host, port)
    finally:
        port.close()


def _of_server(settings: Settings) -> Any:
    from divdec.playground.over_http import OverHttp
    from divdec.playground.play import Playground

    server = OverHttp(settings.bundle, _manner(settings), model=settings.model, key=os.environ.get(API_KEY))
    return Playground(server.name, server=server)


def _of_bundle(settings: Settings) -> Any:
    from divdec.cli.loading import load
    from divdec.cli.settings import LoadSettings
    from divdec.experts.combined import NoExperts
    from divdec.playground.choice import Choice
    from divdec.playground.play import Playground
    from divdec.playground.steered import Steered
    from divdec.playground.target import Target
    from divdec.takedowns.registry import Registry

    given = LoadSettings(
        settings.bundle, settings.steering, no_verify=settings.no_verify, device=settings.device, dtype=settings.dtype
    )
    model, tokenizer = load(given)
    registry = None
    if settings.registry is not None:
        from divdec.takedowns.correction import with_registry

        model, registry = with_registry(model, tokenizer, settings.registry), Registry(settings.registry)
    own = model.steering
    eligible = model.vocab_size if own.vocabulary is None else len(own.vocabulary)
    choice = Choice(own, eligible, rank=not isinstance(model.experts, NoExperts))
    steered = Steered(model, tokenizer, _manner(settings, bool(model.config.single_turn)), reveal=settings.show_target)
    target = Target(steered, settings.host) if settings.show_target else None
    name = Path(settings.bundle).expanduser().resolve().name
    return Playground(name, steered, choice, target=target, registry=registry)


def _manner(settings: Settings, single_turn: bool = False) -> Any:
    from divdec.playground.steered import Manner

    if settings.single_turn is not None:
        single_turn = settings.single_turn
    return Manner(settings.system_prompt, single_turn, settings.max_new_tokens, settings.seed)

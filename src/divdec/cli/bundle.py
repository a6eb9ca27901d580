"""Join a target, experts and a rule into one model that transformers loads like any other."""

from __future__ import annotations

import dataclasses
import json
import sys

POSITIONAL = ()
EXAMPLE = (
    "divdec bundle --target models/target --retain-auxiliary models/q --forget-auxiliary models/p "
    "--steering linear:1.5 --output bundle"
)


DEFAULT = "linear:1.5"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `divdec bundle`."""

    target: str
    """The model to be steered: a folder or hub id, '@revision' allowed."""
    output: str
    """The bundle's folder."""
    retain_auxiliary: str | None = None
    """q, which has not seen the forget set: a folder or hub id."""
    forget_auxiliary: str | None = None
    """p, which has seen it: a folder or hub id."""
    ngram: str | None = None
    """An n-gram pair (divdec ngram), instead of the auxiliaries or beside them: divergences add."""
    ngram_weight: float = 1.0
    """What the n-grams' divergence is multiplied by: their own alpha over the rule's."""
    registry: str | None = None
    """A registry of takedown requests (divdec forget), which the model follows; it has a strength of its own."""
    bridge: bool = False
    """The auxiliaries have another tokenizer than the target."""
    heal: bool = False
    """With --bridge: where a token of the target ends within one of the auxiliaries', go on from there."""
    steering: str | None = None
    """linear:ALPHA, rank:K or rank:K:soft; linear:1.5 where it is not given. A registry alone needs none."""
    rank_vocabulary: tuple[str, ...] = ()
    """Files whose tokens alone the rank rule may suppress; one or more."""
    allow_negative: bool = False
    """Accept a negative alpha, which steers towards the forget set."""
    pack: bool = False
    """Copy checkpoints and n-grams into the bundle."""
    overwrite: bool = False
    """Replace an earlier bundle in the output folder."""
    json: bool = False
    """Print one JSON object."""


def run(settings: Settings) -> None:
    """Check the parts and write the bundle."""
    from divdec.errors import UsageError
    from divdec.steering import Steering

    has_experts = any((settings.retain_auxiliary, settings.forget_auxiliary, settings.ngram))
    steering = None
    if settings.steering is not None or has_experts or settings.registry is None:
        steering = Steering.parse(settings.steering or DEFAULT, allow_negative=settings.allow_negative)
    if settings.rank_vocabulary and steering is not None:
        if steering.rule != "rank":
            raise UsageError(f"--rank-vocabulary belongs to the rank rule, but the steering is {steering}")
        steering = dataclasses.replace(steering, vocabulary=_vocabulary(settings))
    from divdec.model.bundle import write_bundle

    bundle = write_bundle(
        settings.output,
        target=settings.target,
        retain_auxiliary=settings.retain_auxiliary,
        forget_auxiliary=settings.forget_auxiliary,
        steering=steering,
        ngram=settings.ngram,
        ngram_weight=settings.ngram_weight,
        registry=settings.registry,
        bridge=settings.bridge,
        heal=settings.heal,
        pack=settings.pack,
        overwrite=settings.overwrite,
    )
    eligible = len(steering.vocabulary) if steering is not None and steering.vocabulary is not None else None
    rule = None if steering is None else str(steering)
    if settings.json:
        print(json.dumps({"bundle": str(bundle), "steering": rule, "eligible_tokens": eligible}))
        return
    print(f"bundle: {bundle} ({rule or 'takedown requests alone'})")
    if eligible is not None:
        print(f"the rank rule may suppress {eligible} tokens", file=sys.stderr)


def _vocabulary(settings: Settings) -> tuple[int, ...]:
    from pathlib import Path

    from divdec.data.formatting import tokens_in
    from divdec.data.records import read_records
    from divdec.model.checkpoint import CheckpointReference, load_tokenizer

    target = CheckpointReference.parse(settings.target).resolve(Path(), weights=False)
    return tokens_in([read_records(file) for file in settings.rank_vocabulary], load_tokenizer(target))

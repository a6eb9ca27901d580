"""Finding out what a provider takes and tells, with a few requests of one token each.

A provider that silently ignores `logit_bias` would answer unsteered: it is refused here, before anything is answered.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from divdec.errors import FailedClosed, UsageError
from divdec.remote.bias import BiasLimits
from divdec.remote.client import Refused
from divdec.remote.completions import Abilities, Completions, Position, Unnamed

TOLD = (20, 5, 0)  # what vLLM and we tell at most, what OpenAI's completions do, and nothing
_NOT_SO = (400, 404, 422, 500, 501)  # how servers refuse what they do not have
# llama.cpp's server penalises repetition and cuts by its own defaults, vLLM's by those of the checkpoint; either makes
# the logits that are steered others than the target's. Most servers ignore a field of another's.
_NEUTRAL = {"top_k": 0, "min_p": 0, "repetition_penalty": 1, "repeat_penalty": 1}
_SAME = 0.5  # nats; the bias of the probe moves a log-probability much further


def probe(completions: Completions, prompt: Sequence[int], limits: BiasLimits, *, biased: bool) -> Abilities:
    """What a provider takes and tells.

    Args:
        completions: the provider.
        prompt: token ids of some prompt.
        limits: the bias that it is said to accept.
        biased: whether `logit_bias` will be used; it is then made sure that it works.

    Raises:
        UsageError: the provider cannot be reached, or refuses in every form.
        FailedClosed: it takes `logit_bias` and ignores it.
    """
    abilities, position = _neutral(completions, prompt, *_first_answered(completions, prompt))
    if not biased:
        if not abilities.top_logprobs:
            raise UsageError(
                f"model {completions.endpoint.model!r} tells no log-probabilities, which are all that the method "
                "'candidates' has; give --method bias"
            )
        return abilities
    try:
        (other,) = completions.ask(prompt, abilities, {position.token: -limits.largest})
    except Refused as error:
        # It took the same request without: whatever it says, the bias is what it does not take.
        able = " or --method candidates, which needs none" if abilities.top_logprobs else ""
        raise UsageError(f"logit_bias is not accepted; use another provider{able} ({error})") from None
    if other.token == position.token:
        raise FailedClosed(
            f"model {completions.endpoint.model!r} ignores logit_bias: its first choice, token {position.token}, came "
            f"again with a bias of {-limits.largest:g}; it cannot be steered by biases"
        )
    # The second choice lies at most that much below the first, so that as much must lift it above.
    (lifted,) = completions.ask(prompt, abilities, {other.token: limits.largest})
    if lifted.token != other.token:
        raise FailedClosed(
            f"model {completions.endpoint.model!r} obeys no positive logit_bias: token {other.token}, its second "
            f"choice, did not come with a bias of {limits.largest:g}; it cannot be steered by biases"
        )
    if position.told is not None and other.told is None:
        # Whether the bias is in what is told cannot be seen, and either guess could prove what is not so.
        abilities = dataclasses.replace(abilities, top_logprobs=0)
    return dataclasses.replace(abilities, raw_logprobs=_raw(position, other))


def _first_answered(completions: Completions, prompt: Sequence[int]) -> tuple[Abilities, Position]:
    refused: UsageError | None = None
    for prompt_ids, answer_ids, told in itertools.product((True, False), (True, False), TOLD):
        abilities = Abilities(prompt_ids, answer_ids, told)
        try:
            (position,) = completions.ask(prompt, abilities, {}, final=_NOT_SO)
        except Refused as error:
            if error.status not in _NOT_SO:
                raise
            refused = error
            continue
        except Unnamed as error:  # it ignores what it does not know
            refused = error
            continue
        if told and position.told is None:
            continue
        return abilities, position
    raise refused or UsageError(f"model {completions.endpoint.model!r} gives no answer that can be read")


def _neutral(
    completions: Completions, prompt: Sequence[int], abilities: Abilities, position: Position
) -> tuple[Abilities, Position]:
    """With the fields that turn a server's own defaults off, as far as it takes them."""
    for left_out in ((), ("repeat_penalty",)):
        fields = {name: value for name, value in _NEUTRAL.items() if name not in left_out}
        able = dataclasses.replace(abilities, neutral=fields)
        try:
            (position,) = completions.ask(prompt, able, {}, final=_NOT_SO)
        except Refused as error:
            if error.status not in _NOT_SO:
                raise
            continue
        return able, position
    return abilities, position  # as OpenAI's, which has none of these


def _raw(before: Position, after: Position) -> bool:
    """Whether a token that was suppressed is still told with the log-probability that it had."""
    if before.told is None or after.told is None:
        return True
    return abs(after.told.get(before.token, -1e9) - before.told[before.token]) < _SAME

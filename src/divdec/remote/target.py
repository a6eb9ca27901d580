"""A target that is reached only through an API, steered: the paper's "guardrails on API-locked models".

The linear rule is a `logit_bias` of α·(ℓ_q − ℓ_p), the rank rule one of −100 on k tokens; both are new at every token.
What the provider's limits leave out is made up for by asking again, or by choosing among the log-probabilities that it
tells, and where neither proves the choice, how far it may be off is told.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from divdec.decoding.text import AnswerText
from divdec.errors import FailedClosed, UsageError
from divdec.experts.combined import NoExperts
from divdec.experts.protocol import Experts
from divdec.model.configuration import NO_RULE
from divdec.remote.bias import Bias, Candidates, choose_bias
from divdec.remote.choices import Choice, RemoteAnswer, RemoteSettings, Sure
from divdec.remote.completions import Abilities, Completions, Position
from divdec.remote.context import Context
from divdec.remote.probe import probe
from divdec.steering import Steering
from divdec.takedowns.live import Takedowns

NOTHING_TOLD = "model {} told no log-probabilities to choose among; give --method bias"
_DISOBEYED = 1.0  # nats by which a greedy provider's choice may seem worse than another, for rounding


class RemoteTarget:
    """A provider's model, experts and a rule. Several threads may ask it at the same time."""

    def __init__(
        self,
        completions: Completions,
        experts: Experts,
        steering: Steering,
        settings: RemoteSettings | None = None,
        *,
        ends: Sequence[int] = (),
        longest: int | None = None,
        width: int | None = None,
        takedowns: Takedowns | None = None,
    ) -> None:
        """Join them; nothing is asked yet.

        Args:
            completions: the provider.
            experts: what gives the divergence, over the provider's tokens.
            steering: the rule, without a soft fill.
            settings: how the provider is asked.
            ends: tokens that end an answer, beside the one that `completions` knows.
            longest: most tokens that the experts can read.
            width: of the vocabulary that is steered; the experts' by default. A rank rule counts all of it, as it
                does in a steered model whose vocabulary is padded.
            takedowns: a registry of takedown requests, whose correction is added to what the rule wants.

        Raises:
            UsageError: the rule needs what an API does not give, or does not fit the vocabulary.
        """
        if steering.rule == "rank" and steering.fill == "soft":
            raise UsageError("rank with soft fill needs the target's logits, which an API does not give; use rank:K")
        if steering.rule == "rank" and isinstance(experts, NoExperts):
            raise UsageError(NO_RULE)
        self._width = experts.vocab_size if width is None else width
        steering.check_vocabulary(self._width)
        if self._width < completions.size:
            raise UsageError(
                f"the experts know {self._width} tokens, and {completions.size} of the provider's may come: the others "
                "could not be steered"
            )
        self.completions, self.steering = completions, steering
        self.settings = settings or RemoteSettings()
        self._experts, self._longest, self._takedowns = experts, longest, takedowns
        self.sure = Sure()
        self._ends = frozenset([completions.end, *ends])
        self._abilities: Abilities | None = None
        self._lock = threading.Lock()  # experts and their maps are no more made for threads than other modules

    def __enter__(self) -> RemoteTarget:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the provider; a later answer opens new ones."""
        self.completions.endpoint.close()

    @property
    def _name(self) -> str:
        return repr(self.completions.endpoint.model)

    @property
    def abilities(self) -> Abilities | None:
        """What the provider takes and tells; None before the first answer."""
        return self._abilities

    def generate(self, prompt: Sequence[int], max_new_tokens: int = 128, **options: Any) -> RemoteAnswer:
        """Answer a prompt; see `stream`."""
        answer = RemoteAnswer()
        for _ in self.stream(prompt, max_new_tokens, answer=answer, **options):
            pass
        return answer

    def stream(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        answer: RemoteAnswer | None = None,
    ) -> Iterator[str]:
        """Answer a prompt piece by piece.

        Args:
            prompt: token ids.
            max_new_tokens: longest answer.
            temperature: 0 answers greedily; above 0 samples from the whole steered distribution.
            seed: of samples; the provider's own chance is given it, too.
            stop: texts before which an answer ends.
            answer: filled while it grows.

        Yields:
            Text that is sure not to change.

        Raises:
            UsageError: the provider cannot be reached, refuses, or talks of tokens that are none.
            FailedClosed: it cannot be steered: it ignores the bias, or insists on what is suppressed.
        """
        if not prompt:
            raise UsageError("a prompt needs at least one token")
        answer = RemoteAnswer() if answer is None else answer
        with self._lock:
            if self._abilities is None:
                limits = self.settings.limits
                biased = self.settings.method == "bias"
                self._abilities = probe(self.completions, prompt, limits, biased=biased)
            context = Context(
                self._experts, self.steering, self._width, self.completions.size, self._longest, self._takedowns
            )
        draws = _Draws(temperature, seed)
        text = AnswerText(self.completions.tokenizer, stop, prompt)
        ids = list(prompt)
        while len(answer.choices) < max_new_tokens:
            step = self._step(context, ids, min(self.settings.block, max_new_tokens - len(answer.choices)), draws)
            for choice in step:
                answer.choices.append(choice)
                with self._lock:
                    self.sure.add(choice)
                ids.append(choice.token)
                piece = text.add(choice.token)
                answer.text += piece
                if piece:
                    yield piece
                if text.stopped or choice.token in self._ends:
                    answer.finish_reason = "stop"
                    break
            if answer.finish_reason == "stop":
                break
            if not self._abilities.prompt_ids:
                # The provider reads the text anew, and may see other tokens in it; the experts read what it reads.
                ids = self.completions.canonical(ids, len(prompt))
        rest = text.end()
        answer.text += rest
        if rest:
            yield rest

    def _wanted(self, context: Context, ids: Sequence[int], last: int = 1) -> Float[Tensor, "last vocab"]:
        with self._lock:
            return context.wanted(ids, last)

    def _step(self, context: Context, ids: list[int], block: int, draws: _Draws) -> list[Choice]:
        """At least one more token, by as many requests as it takes."""
        assert self._abilities is not None
        wanted = self._wanted(context, ids)[0]
        known: set[int] = set()
        # Without a bias another request would tell the same; a draw is taken as it is where it is not sure what it is.
        unsure = not self._abilities.answer_ids and self.completions.has_names_alike
        drawn_unsure = unsure and draws.temperature > 0 and not wanted.isneginf().any()
        tries = self.settings.tries if self.settings.method == "bias" and not drawn_unsure else 1
        limits = self.settings.limits
        if unsure:  # one entry is for asking which of several tokens with one name it was
            limits = dataclasses.replace(limits, entries=max(limits.entries - 1, 1))
        for left in reversed(range(tries)):
            bias = Bias({}, wanted)
            if self.settings.method == "bias":
                bias = choose_bias(wanted, limits, known, closest=not left and draws.temperature > 0)
            drawing = draws.temperature if self.settings.method == "bias" else 0.0
            # What is drawn by rejection needs no log-probabilities.
            abilities = dataclasses.replace(self._abilities, top_logprobs=0) if drawing else self._abilities
            if not (abilities.answer_ids or abilities.top_logprobs):
                block = 1  # text alone is read as one token
            reply = self.completions.ask(
                ids, abilities, bias.entries, tokens=block, temperature=drawing, seed=draws.seed()
            )
            if not draws.temperature:
                reply[0] = self._resolved(ids, reply[0], bias)
            first = self._judge(reply[0], wanted, bias, draws, last=not left)
            if first is None:
                known |= {reply[0].token, *(reply[0].told or ())}
                continue
            return [first, *self._further(context, ids, reply, first, bias, draws)]
        raise AssertionError("the last try is always judged")

    def _resolved(self, ids: list[int], position: Position, bias: Bias) -> Position:
        """A greedy choice of which it is sure which token it is, where asking once more can say so.

        Without this token another one comes, unless the name was of another token, which then comes again.
        """
        assert self._abilities is not None
        token, limits = position.token, self.settings.limits
        entries = {**bias.entries, token: -limits.largest}
        if token not in position.alike or self.settings.method != "bias" or len(entries) > limits.entries:
            return position
        (other,) = self.completions.ask(ids, self._abilities, entries)
        if other.token in {token, *position.alike[token]}:
            return position
        return dataclasses.replace(position, alike={t: o for t, o in position.alike.items() if t != token})

    def _further(
        self, context: Context, ids: list[int], reply: list[Position], first: Choice, bias: Bias, draws: _Draws
    ) -> list[Choice]:
        """What of the rest of a block stands: while the provider's choice is the steered one, and one after it."""
        if len(reply) == 1 or first.token != reply[0].token or first.token in self._ends:
            return []
        whole = [*ids, *(position.token for position in reply[:-1])]
        rows = self._wanted(context, whole, len(reply) - 1)
        found = []
        for position, wanted in zip(reply[1:], rows, strict=True):
            there = Bias(bias.entries, wanted - bias.sent)
            choice = self._judge(position, wanted, there, draws, last=False)
            if choice is None:
                break
            found.append(choice)
            if choice.token != position.token or choice.token in self._ends:
                break
        return found

    def _judge(
        self, position: Position, wanted: Float[Tensor, " vocab"], bias: Bias, draws: _Draws, *, last: bool
    ) -> Choice | None:
        """The token to take at a position; None where another request should be tried.

        Raises:
            FailedClosed: the provider does not do as the bias says, or nothing that it tells may be taken.
        """
        token = position.token
        if bias.entries.get(token, 0) <= -self.settings.limits.largest and wanted[token].isneginf():
            raise FailedClosed(
                f"model {self._name} answered with token {token}, which was suppressed by a bias of "
                f"{-self.settings.limits.largest:g}; it does not do as logit_bias says"
            )
        if draws.temperature == 0:
            choice = self._greedy(position, wanted, bias)
        elif self.settings.method == "candidates":
            choice = self._drawn(position, wanted, bias, draws)
        elif last and not wanted.isneginf().any():
            # It is taken in any case: as the provider draws, and to call some of those exact would bias the others.
            distance = bias.total_variation(draws.temperature)
            return Choice(token, total_variation=1.0 if token in position.alike else distance)
        elif draws.uniform() < bias.acceptance(token, draws.temperature):
            return Choice(token, total_variation=1.0 if token in position.alike else 0.0)
        else:
            choice = Choice(token, total_variation=bias.total_variation(draws.temperature))
        if wanted[choice.token].isneginf() and last:
            raise FailedClosed(
                f"model {self._name} insists on tokens that are to be suppressed here, of which "
                f"{self.settings.limits.entries} at most can be told to it; raise --bias-entries or --tries"
            )
        return choice if choice.exact or last else None

    def _greedy(self, position: Position, wanted: Float[Tensor, " vocab"], bias: Bias) -> Choice:
        """The best token that is known, and how much better an unknown one could be."""
        by_bias = Choice(position.token, math.inf if position.token in position.alike else bias.gap(position.token))
        told = self._candidates(position, bias)
        if told is None and self.settings.method == "candidates":
            raise UsageError(NOTHING_TOLD.format(self._name))
        if told is None or by_bias.exact:
            return by_bias
        by_told = Choice(*told.first(wanted))
        return by_told if by_told.gap <= by_bias.gap else by_bias

    def _drawn(self, position: Position, wanted: Float[Tensor, " vocab"], bias: Bias, draws: _Draws) -> Choice:
        told = self._candidates(position, bias)
        if told is None:
            raise UsageError(NOTHING_TOLD.format(self._name))
        token, distance = told.draw(wanted, draws.temperature, draws.uniform())
        return Choice(token, total_variation=distance)

    def _candidates(self, position: Position, bias: Bias) -> Candidates | None:
        """The log-probabilities of a greedy position as the target's own, and what they say of other tokens."""
        assert self._abilities is not None
        if position.told is None:
            return None
        sent = bias.sent
        ids = torch.tensor(list(position.told))
        logprobs = torch.tensor(list(position.told.values()), dtype=torch.float64)
        ceiling = torch.full_like(sent, position.floor)
        for token, others in position.alike.items():
            if token in position.told:
                ceiling[list(others)] = max(position.told[token], position.floor)
        unsure = torch.tensor([token in position.alike for token in position.told])
        if not self._abilities.raw_logprobs:
            return Candidates(ids, logprobs - sent[ids], ceiling - sent, unsure)
        if position.token in position.alike:
            return Candidates(ids, logprobs, ceiling, unsure)
        # No other token was better under the bias.
        score = position.told[position.token] + sent[position.token]
        if (logprobs + sent[ids])[~unsure].max() > score + _DISOBEYED:
            raise FailedClosed(
                f"model {self._name} did not choose the token that its log-probabilities and "
                "logit_bias make the likeliest; it cannot be steered"
            )
        return Candidates(ids, logprobs, torch.minimum(ceiling, score - sent), unsure)


class _Draws:
    """The chance of one answer."""

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def uniform(self) -> Float[Tensor, ""]:
        return torch.rand((), generator=self._generator, dtype=torch.float64)

    def seed(self) -> int | None:
        """Another one for each request."""
        return int(torch.randint(2**31, (), generator=self._generator)) if self.temperature else None

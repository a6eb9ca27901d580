"""A target behind an API, steered by local experts: the paper's "guardrails on API-locked models".

The linear rule is a `logit_bias` of α·(ℓ_q − ℓ_p), the rank rule one of −100 on k tokens; both change at every token.
If the provider's limits leave entries out, further requests or the returned log-probabilities prove the choice; if
neither does, the answer states by how much a token may be off.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from divdec.decoding.text import AnswerText
from divdec.errors import FailedClosed, UsageError
from divdec.experts.combined import NoExperts
from divdec.experts.protocol import Experts, can_roll_back
from divdec.model.checks import check_divergence, positions_of
from divdec.model.configuration import NO_RULE
from divdec.remote.bias import Bias, BiasLimits, Candidates, choose_bias
from divdec.remote.completions import Completions, ProviderCapabilities, TokenPosition, probe_provider
from divdec.steering import Steering
from divdec.takedowns.correction import TakedownCorrection

METHODS = ("bias", "candidates")
NO_LOGPROBS = "model {} returned no log-probabilities to choose among; give --method bias"
DISOBEYED = 1.0  # nats by which a greedy choice may seem worse than another token, for rounding


@dataclasses.dataclass(frozen=True)
class RemoteSettings:
    """How a provider is steered."""

    method: Literal["bias", "candidates"] = "bias"
    """'bias' sends `logit_bias`; 'candidates' sends none and chooses among the likeliest tokens."""
    limits: BiasLimits = dataclasses.field(default_factory=BiasLimits)
    """Limits of `logit_bias`."""
    block: int = 1
    """Tokens per request; of several, those are used for which the steered choice is proved to be the same."""
    tries: int = 4
    """Most requests for one token until its choice is proved; 1 takes every answer with its error bound."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"method is {self.method!r}; accepted: {', '.join(METHODS)}")
        if self.block < 1 or self.tries < 1:
            raise UsageError(f"block is {self.block}, tries {self.tries}; accepted: at least 1")
        if self.limits.entries < 1 or not 0 < self.limits.largest < math.inf:
            raise UsageError(
                f"bias limits are {self.limits.entries} entries up to {self.limits.largest:g}; accepted: at least 1 "
                "entry, above 0"
            )


@dataclasses.dataclass(frozen=True)
class ChosenToken:
    """A token of an answer, and its error bound."""

    token: int
    gap: float = 0.0
    """Greedy: most nats by which its steered logit lies below the largest; 0 if it is the largest."""
    total_variation: float = 0.0
    """Sampled: largest distance of its distribution from the steered one; 0 if they are equal."""

    @property
    def exact(self) -> bool:
        """Whether the choice is proved to be one of the steered model."""
        return self.gap == 0 and self.total_variation == 0


@dataclasses.dataclass
class RemoteAnswer:
    """An answer with its tokens."""

    text: str = ""
    choices: list[ChosenToken] = dataclasses.field(default_factory=list)
    finish_reason: str = "length"
    """'stop' if the model or a stop string ended it."""

    @property
    def exact_tokens(self) -> int:
        """Number of tokens that are proved to be the steered model's."""
        return sum(choice.exact for choice in self.choices)


@dataclasses.dataclass
class ExactnessStatistics:
    """Exactness of the tokens of all answers so far."""

    tokens: int = 0
    exact: int = 0
    gap: float = 0.0
    """Largest gap of a greedy token."""
    total_variation: float = 0.0
    """Largest total variation of a sampled token."""

    def add(self, choice: ChosenToken) -> None:
        """Count a token."""
        self.tokens += 1
        self.exact += choice.exact
        self.gap = max(self.gap, choice.gap)
        self.total_variation = max(self.total_variation, choice.total_variation)


class SteeringContext:
    """The experts' cache of one growing, sometimes shortened, sequence."""

    def __init__(
        self,
        experts: Experts,
        steering: Steering,
        width: int,
        size: int,
        max_length: int | None = None,
        takedowns: TakedownCorrection | None = None,
    ) -> None:
        """Start with an empty sequence.

        Args:
            experts: compute the divergence.
            steering: the rule.
            width: size of the steered vocabulary, padding included.
            size: number of tokens of the provider's tokenizer, at most `width`.
            max_length: most tokens that the experts can read.
            takedowns: registry to follow, in its present state.
        """
        self._takedowns = takedowns
        self._takedown_cache = None if takedowns is None else takedowns.new_cache()
        self._experts, self._steering, self._max_length = experts, steering, max_length
        self._width, self._size = width, size
        self._eligible = steering.eligible(width)
        self._cache = experts.new_cache()
        self._ids: list[int] = []

    @torch.inference_mode()
    def logit_shift(self, ids: Sequence[int], last: int = 1) -> Float[Tensor, "last vocab"]:
        """Return what the rule adds to the target's logits after each of the last tokens, in float64.

        Args:
            ids: the whole sequence.
            last: number of positions, from the end.

        Raises:
            UsageError: the sequence is longer than the experts can read.
            FailedClosed: the divergence is not finite.
        """
        if self._max_length is not None and len(ids) > self._max_length:
            raise UsageError(f"{len(ids)} tokens are too many for {self._max_length} positions of the auxiliaries")
        pairs = enumerate(zip(ids, self._ids, strict=False))
        common = next((index for index, pair in pairs if pair[0] != pair[1]), len(self._ids))
        start = min(len(ids) - last, common)
        self._crop(start)
        new = torch.tensor([list(ids[start:])])
        self._ids = list(ids)
        divergence = self._experts.divergence(new, None, positions_of(new, None, start), self._cache, last)
        divergence = divergence[0, :, : self._width].cpu()
        check_divergence(divergence)
        correction = torch.zeros_like(divergence)
        if self._takedowns is not None:
            correction = self._takedowns.correction(new, None, self._takedown_cache, last)[0, :, : self._width].cpu()
            check_divergence(correction)
        return self._steering.apply(correction, divergence, self._eligible)[:, : self._size].double()

    def _crop(self, length: int) -> None:
        removed = len(self._ids) - length
        if removed and self._takedown_cache is not None:
            self._takedown_cache.crop(-removed)
        if removed and all(map(can_roll_back, self._cache.layers)):
            self._cache.crop(-removed)
        elif removed:  # a sliding window or a recurrent state: the sequence is read anew
            self._cache = self._experts.new_cache()
            if length:
                ids = torch.tensor([self._ids[:length]])
                self._experts.divergence(ids, None, positions_of(ids, None, 0), self._cache, 1)
        self._ids = self._ids[:length]


class RemoteTarget:
    """A provider's model, steered by experts and a rule. Threads may share it."""

    def __init__(
        self,
        completions: Completions,
        experts: Experts,
        steering: Steering,
        settings: RemoteSettings | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
        max_length: int | None = None,
        width: int | None = None,
        takedowns: TakedownCorrection | None = None,
    ) -> None:
        """Prepare; no request is sent yet.

        Args:
            completions: the provider.
            experts: compute the divergence over the provider's tokens.
            steering: the rule, without a soft fill.
            settings: how the provider is steered.
            eos_token_ids: tokens that end an answer, besides that of `completions`.
            max_length: most tokens that the experts can read.
            width: size of the steered vocabulary; the experts' by default. A rank rule counts all of it, as in a
                steered model whose vocabulary is padded.
            takedowns: a registry of takedown requests, whose correction is added.

        Raises:
            UsageError: the rule needs the target's logits, or does not fit the vocabulary.
        """
        if steering.rule == "rank" and steering.fill == "soft":
            raise UsageError("rank with soft fill needs the target's logits, which an API does not give; use rank:K")
        if steering.rule == "rank" and isinstance(experts, NoExperts):
            raise UsageError(NO_RULE)
        self._width = experts.vocab_size if width is None else width
        steering.check_vocabulary(self._width)
        if self._width < completions.size:
            raise UsageError(
                f"the experts know {self._width} of the provider's {completions.size} tokens: the others could not be "
                "steered"
            )
        self.completions, self.steering = completions, steering
        self.settings = settings or RemoteSettings()
        self._experts, self._max_length, self._takedowns = experts, max_length, takedowns
        self.exactness = ExactnessStatistics()
        self._eos_token_ids = frozenset([completions.eos_token_id, *eos_token_ids])
        self._capabilities: ProviderCapabilities | None = None
        self._lock = threading.Lock()  # experts are not thread-safe

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
    def capabilities(self) -> ProviderCapabilities | None:
        """What the provider accepts and returns; None before the first answer."""
        return self._capabilities

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
        """Answer a prompt and yield its text.

        Args:
            prompt: token ids.
            max_new_tokens: longest answer.
            temperature: 0 answers greedily; above 0 samples from the whole steered distribution.
            seed: sampling seed, also of the provider's samples.
            stop: stop strings.
            answer: filled while it is generated.

        Yields:
            Text that no later token changes.

        Raises:
            UsageError: the provider cannot be reached, refuses, or returns unknown tokens.
            FailedClosed: it ignores the bias, or chooses suppressed tokens.
        """
        if not prompt:
            raise UsageError("a prompt needs at least one token")
        answer = RemoteAnswer() if answer is None else answer
        with self._lock:
            if self._capabilities is None:
                limits = self.settings.limits
                biased = self.settings.method == "bias"
                self._capabilities = probe_provider(self.completions, prompt, limits, biased=biased)
            context = SteeringContext(
                self._experts, self.steering, self._width, self.completions.size, self._max_length, self._takedowns
            )
        draws = _RandomDraws(temperature, seed)
        text = AnswerText(self.completions.tokenizer, stop, prompt)
        ids = list(prompt)
        while len(answer.choices) < max_new_tokens:
            step = self._step(context, ids, min(self.settings.block, max_new_tokens - len(answer.choices)), draws)
            for choice in step:
                answer.choices.append(choice)
                with self._lock:
                    self.exactness.add(choice)
                ids.append(choice.token)
                piece = text.add(choice.token)
                answer.text += piece
                if piece:
                    yield piece
                if text.stopped or choice.token in self._eos_token_ids:
                    answer.finish_reason = "stop"
                    break
            if answer.finish_reason == "stop":
                break
            if not self._capabilities.prompt_ids:
                # The provider may read other tokens from the text; the experts must read the same.
                ids = self.completions.retokenize(ids, len(prompt))
        rest = text.end()
        answer.text += rest
        if rest:
            yield rest

    def _logit_shift(self, context: SteeringContext, ids: Sequence[int], last: int = 1) -> Float[Tensor, "last vocab"]:
        with self._lock:
            return context.logit_shift(ids, last)

    def _step(self, context: SteeringContext, ids: list[int], block: int, draws: _RandomDraws) -> list[ChosenToken]:
        """Return at least one more token, by up to `tries` requests."""
        assert self._capabilities is not None
        shift = self._logit_shift(context, ids)[0]
        known: set[int] = set()
        has_ambiguous = not self._capabilities.answer_ids and self.completions.has_ambiguous_names
        unresolvable = has_ambiguous and draws.temperature > 0 and not shift.isneginf().any()
        tries = self.settings.tries if self.settings.method == "bias" and not unresolvable else 1
        limits = self.settings.limits
        if has_ambiguous:  # one entry is kept to find out which of the tokens with one name was chosen
            limits = dataclasses.replace(limits, entries=max(limits.entries - 1, 1))
        for left in reversed(range(tries)):
            bias = Bias({}, shift)
            if self.settings.method == "bias":
                bias = choose_bias(shift, limits, known, closest=not left and draws.temperature > 0)
            drawing = draws.temperature if self.settings.method == "bias" else 0.0
            # Rejection sampling needs no log-probabilities.
            capabilities = dataclasses.replace(self._capabilities, top_logprobs=0) if drawing else self._capabilities
            if not (capabilities.answer_ids or capabilities.top_logprobs):
                block = 1  # text alone is read as one token
            reply = self.completions.complete(
                ids, capabilities, bias.entries, tokens=block, temperature=drawing, seed=draws.seed()
            )
            if not draws.temperature:
                reply[0] = self._resolved(ids, reply[0], bias)
            first = self._judge(reply[0], shift, bias, draws, last=not left)
            if first is None:
                known |= {reply[0].token, *(reply[0].logprobs or ())}
                continue
            return [first, *self._further(context, ids, reply, first, bias, draws)]
        raise AssertionError("the last try always gives a token")

    def _resolved(self, ids: list[int], position: TokenPosition, bias: Bias) -> TokenPosition:
        """Resolve an ambiguous greedy choice by a request that suppresses its token.

        If the token was meant, another one is chosen; if not, the same name is returned again.
        """
        assert self._capabilities is not None
        token, limits = position.token, self.settings.limits
        entries = {**bias.entries, token: -limits.largest}
        if token not in position.ambiguous or self.settings.method != "bias" or len(entries) > limits.entries:
            return position
        (other,) = self.completions.complete(ids, self._capabilities, entries)
        if other.token in {token, *position.ambiguous[token]}:
            return position
        return dataclasses.replace(position, ambiguous={t: o for t, o in position.ambiguous.items() if t != token})

    def _further(
        self,
        context: SteeringContext,
        ids: list[int],
        reply: list[TokenPosition],
        first: ChosenToken,
        bias: Bias,
        draws: _RandomDraws,
    ) -> list[ChosenToken]:
        """Return the rest of a block up to the first token that is not the provider's choice."""
        if len(reply) == 1 or first.token != reply[0].token or first.token in self._eos_token_ids:
            return []
        whole = [*ids, *(position.token for position in reply[:-1])]
        rows = self._logit_shift(context, whole, len(reply) - 1)
        choices = []
        for position, shift in zip(reply[1:], rows, strict=True):
            there = Bias(bias.entries, shift - bias.sent)
            choice = self._judge(position, shift, there, draws, last=False)
            if choice is None:
                break
            choices.append(choice)
            if choice.token != position.token or choice.token in self._eos_token_ids:
                break
        return choices

    def _judge(
        self, position: TokenPosition, shift: Float[Tensor, " vocab"], bias: Bias, draws: _RandomDraws, *, last: bool
    ) -> ChosenToken | None:
        """Return the token for a position; None if another request should be tried.

        Raises:
            FailedClosed: the provider ignores the bias, or every token that it returns is suppressed.
        """
        token = position.token
        if bias.entries.get(token, 0) <= -self.settings.limits.largest and shift[token].isneginf():
            raise FailedClosed(
                f"model {self._name} answered with token {token}, which was suppressed by a bias of "
                f"{-self.settings.limits.largest:g}; it does not obey logit_bias"
            )
        if draws.temperature == 0:
            choice = self._greedy(position, shift, bias)
        elif self.settings.method == "candidates":
            choice = self._sampled(position, shift, bias, draws)
        elif last and not shift.isneginf().any():
            # Every draw is taken; calling some of them exact would bias the others.
            distance = bias.total_variation(draws.temperature)
            return ChosenToken(token, total_variation=1.0 if token in position.ambiguous else distance)
        elif draws.uniform() < bias.acceptance(token, draws.temperature):
            return ChosenToken(token, total_variation=1.0 if token in position.ambiguous else 0.0)
        else:
            choice = ChosenToken(token, total_variation=bias.total_variation(draws.temperature))
        if shift[choice.token].isneginf() and last:
            raise FailedClosed(
                f"model {self._name} keeps choosing tokens that are to be suppressed here; at most "
                f"{self.settings.limits.entries} fit a request; raise --bias-entries or --tries"
            )
        return choice if choice.exact or last else None

    def _greedy(self, position: TokenPosition, shift: Float[Tensor, " vocab"], bias: Bias) -> ChosenToken:
        """Return the best known token, and how much better an unknown one could be."""
        by_bias = ChosenToken(
            position.token, math.inf if position.token in position.ambiguous else bias.gap(position.token)
        )
        candidates = self._candidates(position, bias)
        if candidates is None and self.settings.method == "candidates":
            raise UsageError(NO_LOGPROBS.format(self._name))
        if candidates is None or by_bias.exact:
            return by_bias
        by_logprob = ChosenToken(*candidates.best(shift))
        return by_logprob if by_logprob.gap <= by_bias.gap else by_bias

    def _sampled(
        self, position: TokenPosition, shift: Float[Tensor, " vocab"], bias: Bias, draws: _RandomDraws
    ) -> ChosenToken:
        candidates = self._candidates(position, bias)
        if candidates is None:
            raise UsageError(NO_LOGPROBS.format(self._name))
        token, distance = candidates.draw(shift, draws.temperature, draws.uniform())
        return ChosenToken(token, total_variation=distance)

    def _candidates(self, position: TokenPosition, bias: Bias) -> Candidates | None:
        """Return the target's log-probabilities at a greedy position, and bounds for the other tokens."""
        assert self._capabilities is not None
        if position.logprobs is None:
            return None
        sent = bias.sent
        ids = torch.tensor(list(position.logprobs))
        logprobs = torch.tensor(list(position.logprobs.values()), dtype=torch.float64)
        ceiling = torch.full_like(sent, position.floor)
        for token, others in position.ambiguous.items():
            if token in position.logprobs:
                ceiling[list(others)] = max(position.logprobs[token], position.floor)
        ambiguous = torch.tensor([token in position.ambiguous for token in position.logprobs])
        if not self._capabilities.raw_logprobs:
            return Candidates(ids, logprobs - sent[ids], ceiling - sent, ambiguous)
        if position.token in position.ambiguous:
            return Candidates(ids, logprobs, ceiling, ambiguous)
        # No other token was better under the bias.
        score = position.logprobs[position.token] + sent[position.token]
        if (logprobs + sent[ids])[~ambiguous].max() > score + DISOBEYED:
            raise FailedClosed(
                f"model {self._name} did not choose the token that its log-probabilities and "
                "logit_bias make the likeliest; it cannot be steered"
            )
        return Candidates(ids, logprobs, torch.minimum(ceiling, score - sent), ambiguous)


class _RandomDraws:
    """Random numbers of one answer."""

    def __init__(self, temperature: float, seed: int) -> None:
        self.temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def uniform(self) -> Float[Tensor, ""]:
        return torch.rand((), generator=self._generator, dtype=torch.float64)

    def seed(self) -> int | None:
        """Return another seed for each request."""
        return int(torch.randint(2**31, (), generator=self._generator)) if self.temperature else None

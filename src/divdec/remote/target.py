"""A target behind an API, steered by local experts: the paper's "guardrails on API-locked models".

The linear rule is a `logit_bias` of α·(ℓ_q − ℓ_p), the rank rule one of −100 on k tokens; both change at every token.
If the provider's limits leave entries out, further requests or the returned log-probabilities prove the choice; if
neither does, the answer states by how much a token may be off.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from divdec.decoding.text import AnswerText
from divdec.endpoint import Endpoint
from divdec.errors import FailedClosed, UsageError
from divdec.experts.combined import check_rule, rule_name
from divdec.options import Decoding
from divdec.remote.bias import MAX_BIAS, Bias, Candidates, choose_bias
from divdec.remote.completions import Completions, ProviderCapabilities, TokenPosition, probe_provider
from divdec.remote.experts import LoadedExperts, SteeringContext
from divdec.remote.settings import RemoteSettings
from divdec.runs import ResumableOutput
from divdec.steering import Steering

DISOBEYED = 0.1  # nats by which a greedy choice may seem worse than another token, for rounding


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

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values; a gap without a bound is None, because JSON has no infinity."""
        tokens = [
            {
                "id": choice.token,
                "gap": choice.gap if math.isfinite(choice.gap) else None,
                "total_variation": choice.total_variation,
            }
            for choice in self.choices
        ]
        return {
            "text": self.text, "finish_reason": self.finish_reason, "tokens": tokens, "exact_tokens": self.exact_tokens,
        }  # fmt: skip


class RemoteTarget:
    """A provider's model, steered by experts and a rule. Threads may share it.

    Attributes:
        completions: the provider, with the numbers of requests and tokens so far.
        choices: tokens of all answers so far, with their error bounds.
        capabilities: what the provider accepts and returns; None before the first answer.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        experts: LoadedExperts,
        steering: Steering,
        settings: RemoteSettings | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare; no request is sent yet. `extra` are further fields of every request; see `Completions`.

        Raises:
            UsageError: the rule needs the target's logits (a soft fill, full), or does not fit the vocabulary.
        """
        if steering.full or (steering.rule == "rank" and steering.fill == "soft"):
            shorter, _, ending = str(steering).rpartition(":")
            # With a q that refuses, lowering alone hardly forgets.
            other = f"{shorter}, or linear:{steering.alpha:g} if q refuses" if steering.full else shorter
            raise UsageError(f"{ending} needs the target's logits, which an API does not give; use {other}")
        check_rule(steering, experts.experts)
        steering.check_vocabulary(experts.vocab_size)
        self.completions = Completions(endpoint, experts.tokenizer, experts.eos_token_ids, experts.vocab_size, extra)
        self.steering, self.settings = steering, settings or RemoteSettings()
        self.rule = rule_name(steering, experts.experts, experts.takedowns)
        self.choices: list[ChosenToken] = []
        self.capabilities: ProviderCapabilities | None = None
        self.experts = experts
        self._lock = threading.Lock()

    def __enter__(self) -> RemoteTarget:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the provider; a later answer opens new ones."""
        self.completions.endpoint.close()

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
        """Answer a prompt, and yield text that no later token changes.

        Args:
            prompt: token ids.
            max_new_tokens: longest answer.
            temperature: 0 answers greedily; above 0 samples from the whole steered distribution.
            seed: sampling seed, also of the provider's samples.
            stop: stop strings.
            answer: filled while it is generated.

        Raises:
            UsageError: the provider cannot be reached, refuses, or returns unknown tokens.
            FailedClosed: it ignores the bias, or chooses suppressed tokens.
        """
        if not prompt:
            raise UsageError("a prompt needs at least one token")
        if (longest := self.experts.max_length) is not None:
            if len(prompt) >= longest:
                raise UsageError(f"the prompt has {len(prompt)} tokens; the auxiliaries read fewer than {longest}")
            max_new_tokens = min(max_new_tokens, longest - len(prompt))
        answer = RemoteAnswer() if answer is None else answer
        with self._lock:
            if self.capabilities is None:
                self.capabilities = probe_provider(self.completions, prompt)
            decoder = _Decoder(self, self.capabilities, temperature, seed)
        text = AnswerText(self.completions.tokenizer, stop, prompt)
        ids = list(prompt)
        while len(answer.choices) < max_new_tokens:
            for choice in decoder.next_tokens(ids, max_new_tokens - len(answer.choices)):
                answer.choices.append(choice)
                self.choices.append(choice)
                ids.append(choice.token)
                if piece := text.add(choice.token):
                    answer.text += piece
                    yield piece
                if text.stopped or choice.token in self.experts.eos_token_ids:
                    answer.finish_reason = "stop"
                    break
            if answer.finish_reason == "stop":
                break
            if not self.capabilities.prompt_ids:
                # The provider may read other tokens from the text; the experts must read the same.
                ids = self.completions.retokenize(ids, len(prompt))
        if rest := text.end():
            answer.text += rest
            yield rest

    def logit_shift(self, context: SteeringContext, ids: Sequence[int], last: int = 1) -> Float[Tensor, "last vocab"]:
        """Return `context.logit_shift`, computed by one thread at a time: experts are not thread-safe."""
        with self._lock:
            return context.logit_shift(ids, last)

    def usage_text(self) -> str:
        """Describe requests, tokens and the exactness of all answers so far in a line."""
        counts, choices = self.completions.usage, self.choices
        repeated = f", {counts.retries} of them repeated" if counts.retries else ""
        exact = sum(choice.exact for choice in choices)
        line = (
            f"{len(choices)} tokens by {counts.requests} requests{repeated} ({counts.prompt_tokens} prompt tokens, "
            f"{counts.answer_tokens} answer tokens); {exact} proved to be the steered model's"
        )
        if exact < len(choices):
            gap, distance = (max(getattr(choice, name) for choice in choices) for name in ("gap", "total_variation"))
            bound = f"at most {gap:.3g} nats" if math.isfinite(gap) else "by an unknown number of nats"
            line += f"; the others {bound} or a total variation of {distance:.3g} off"
        return line


class _Decoder:
    """Chooses the tokens of one answer."""

    def __init__(self, target: RemoteTarget, capabilities: ProviderCapabilities, temperature: float, seed: int) -> None:
        self._target, self._capabilities, self._temperature = target, capabilities, temperature
        self._completions, self._settings = target.completions, target.settings
        self._context = SteeringContext(target.experts, target.steering)
        self._generator = torch.Generator().manual_seed(seed)

    def next_tokens(self, ids: list[int], most: int) -> list[ChosenToken]:
        """Return at least one more token, by up to `tries` requests."""
        shift = self._target.logit_shift(self._context, ids)[0]
        entries = self._settings.bias_entries
        known: set[int] = set()
        has_ambiguous = not self._capabilities.answer_ids and self._completions.has_ambiguous_names
        unresolvable = has_ambiguous and self._temperature > 0 and not shift.isneginf().any()
        if has_ambiguous:  # one entry is left to find out which of the tokens with one name was chosen
            entries = max(entries - 1, 1)
        # Rejection sampling needs no log-probabilities.
        top = 0 if self._temperature else self._capabilities.top_logprobs
        capabilities = dataclasses.replace(self._capabilities, top_logprobs=top)
        # Text alone is read as one token.
        block = min(self._settings.block, most) if capabilities.answer_ids or capabilities.top_logprobs else 1
        for left in reversed(range(1 if unresolvable else self._settings.tries)):
            bias = choose_bias(shift, entries, known, closest=not left and self._temperature > 0)
            seed = int(torch.randint(2**31, (), generator=self._generator)) if self._temperature else None
            reply = self._completions.complete(
                ids, capabilities, bias.entries, tokens=block, temperature=self._temperature, seed=seed
            )
            if not self._temperature:
                reply[0] = self._resolve(ids, reply[0], bias)
            first = self._judge(reply[0], shift, bias, last=not left)
            if first is not None:
                return [first, *self._rest_of_block(ids, reply, first, bias)]
            known |= {reply[0].token, *(reply[0].logprobs or ())}
        raise AssertionError("the last try always gives a token")

    def _resolve(self, ids: list[int], position: TokenPosition, bias: Bias) -> TokenPosition:
        """Resolve an ambiguous greedy choice by a request that suppresses its token.

        If the token was meant, another one is chosen; if not, the same name is returned again.
        """
        token = position.token
        entries = {**bias.entries, token: -MAX_BIAS}
        if token not in position.ambiguous or len(entries) > self._settings.bias_entries:
            return position
        (other,) = self._completions.complete(ids, self._capabilities, entries)
        if other.token in {token, *position.ambiguous[token]}:
            return position
        return dataclasses.replace(position, ambiguous={t: o for t, o in position.ambiguous.items() if t != token})

    def _rest_of_block(
        self, ids: list[int], reply: list[TokenPosition], first: ChosenToken, bias: Bias
    ) -> list[ChosenToken]:
        """Return the tokens after the first, up to the first one that is not the provider's choice."""
        ends = self._target.experts.eos_token_ids
        if len(reply) == 1 or first.token != reply[0].token or first.token in ends:
            return []
        whole = [*ids, *(position.token for position in reply[:-1])]
        choices = []
        rows = self._target.logit_shift(self._context, whole, len(reply) - 1)
        for position, shift in zip(reply[1:], rows, strict=True):
            choice = self._judge(position, shift, Bias(bias.entries, shift - bias.sent), last=False)
            if choice is None:
                break
            choices.append(choice)
            if choice.token != position.token or choice.token in ends:
                break
        return choices

    def _judge(
        self, position: TokenPosition, shift: Float[Tensor, " vocab"], bias: Bias, *, last: bool
    ) -> ChosenToken | None:
        """Return the token for a position; None if another request should be tried.

        Raises:
            FailedClosed: the provider ignores the bias, or every token that it returns is suppressed.
        """
        token = position.token
        if bias.entries.get(token, 0) <= -MAX_BIAS and shift[token].isneginf():
            raise FailedClosed(
                f"model {self._completions.name} answered with token {token}, which was suppressed by a bias of "
                f"{-MAX_BIAS:g}; it does not obey logit_bias"
            )
        if self._temperature == 0:
            choice = self._choose(position, shift, bias)
        else:
            # Every draw of the last try is taken; calling some of them exact would bias the others.
            unconditional = last and not shift.isneginf().any()
            accepted = not unconditional and self._uniform() < bias.acceptance(token, self._temperature)
            bound = 0.0 if accepted else bias.total_variation(self._temperature)
            if unconditional or accepted:
                return ChosenToken(token, total_variation=1.0 if token in position.ambiguous else bound)
            choice = ChosenToken(token, total_variation=bound)
        if shift[choice.token].isneginf() and last:
            raise FailedClosed(
                f"model {self._completions.name} keeps choosing tokens that are to be suppressed here; at most "
                f"{self._settings.bias_entries} fit a request; raise --bias-entries or --tries"
            )
        return choice if choice.exact or last else None

    def _choose(self, position: TokenPosition, shift: Float[Tensor, " vocab"], bias: Bias) -> ChosenToken:
        """Return the best known token of a greedy answer, with its error bound."""
        candidates = self._candidates(position, bias)
        token = position.token
        by_bias = ChosenToken(token, math.inf if token in position.ambiguous else bias.gap(token))
        if candidates is None or by_bias.exact:
            return by_bias
        return min(ChosenToken(*candidates.best(shift)), by_bias, key=lambda choice: choice.gap)

    def _candidates(self, position: TokenPosition, bias: Bias) -> Candidates | None:
        """Return the target's log-probabilities at a greedy position, and bounds for the other tokens."""
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
                f"model {self._completions.name} did not choose the token that its log-probabilities and "
                "logit_bias make the likeliest; it cannot be steered"
            )
        return Candidates(ids, logprobs, torch.minimum(ceiling, score - sent), ambiguous)

    def _uniform(self) -> Float[Tensor, ""]:
        return torch.rand((), generator=self._generator, dtype=torch.float64)


def stream_answer(
    target: RemoteTarget, prompt: Sequence[int], decoding: Decoding, number: int = 0, answer: RemoteAnswer | None = None
) -> Iterator[str]:
    """Answer a prompt of a run, whose number gives it its seed; see `RemoteTarget.stream`."""
    return target.stream(
        prompt, decoding.max_new_tokens, temperature=decoding.temperature, seed=(decoding.seed + number) % 2**32,
        stop=decoding.stop, answer=answer,
    )  # fmt: skip


def answer_prompts(
    target: RemoteTarget,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Any],
    decoding: Decoding,
    concurrency: int,
    answers: ResumableOutput,
) -> Iterator[dict[str, Any]]:
    """Yield answers in the prompts' order, from several requests at a time; `answers` stores each complete one."""
    stopped = threading.Event()

    def answer(number: int) -> dict[str, Any]:
        if number in answers and answers.items[number]["row"]["prompt"] == texts[number]:
            return answers.items[number]["row"]
        result = RemoteAnswer()
        for _ in stream_answer(target, prompts[number], decoding, number, result):
            if stopped.is_set():
                raise UsageError("stopped")
        row = {"prompt": texts[number], **result.to_dict(), "steering": target.rule}
        answers.add({"key": number, "row": row})
        return row

    with ThreadPoolExecutor(concurrency) as pool:
        tasks = [pool.submit(answer, number) for number in range(len(prompts))]
        try:
            for task in tqdm(tasks, unit="answer", disable=not sys.stderr.isatty()):
                yield task.result()
        except KeyboardInterrupt:  # after an error the other answers are completed and stored
            stopped.set()
            raise
        finally:
            for task in tasks:
                task.cancel()

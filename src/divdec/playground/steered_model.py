"""A loaded bundle that answers token by token, with the effect of steering on each token.

Every token is chosen from steered logits; only `UnsteeredTarget` answers from the target's own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from divdec.data.formatting import Format, encode, encode_prompt
from divdec.data.records import Message, Record, checked_text
from divdec.decoding.text import AnswerText
from divdec.errors import UsageError
from divdec.evaluation.scoring import sweep
from divdec.experts.combined import NoExperts
from divdec.experts.neural import device_of
from divdec.fail_closed import wait_for_checks
from divdec.model.configuration import NO_RULE
from divdec.playground.rendering import Token, TokenShift
from divdec.sampling import pick
from divdec.serving import is_local
from divdec.steering import LARGEST_ALPHA, Steering

if TYPE_CHECKING:
    from divdec.model.modeling import DivergenceForCausalLM

Logits = Float[Tensor, "tokens vocab"]

MIN_ALPHA = 0.1  # weaker steering hardly differs from the target
MAX_ALPHA = 4.0
MAX_K = 200
MAX_ALTERNATIVES = 4  # tokens named at a position
MIN_LOSS = 0.005  # of probability: a token that loses less is not named
MARKED_LOSS = 0.1  # of probability: the position is marked


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """How answers are generated."""

    system_prompt: str | None = None
    """System turn before every conversation."""
    single_turn: bool = False
    """Read only the last question, for models that were trained on single questions."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    seed: int = 0
    """Seed of sampled answers."""


def is_number(value: Any) -> bool:
    """Return whether a client sent a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class SteeringControls:
    """Rules and strengths that the page offers; each of them steers."""

    default: Steering
    """The bundle's rule; every choice keeps its eligible vocabulary and fill."""
    eligible_size: int
    """Size of the eligible vocabulary."""
    rank: bool = True
    """Whether the rank rule is offered; it needs experts, not only takedown requests."""

    def __post_init__(self) -> None:
        """Check that the bundle's rule steers.

        Raises:
            UsageError: it is linear with a strength of 0 or below.
        """
        if self.default.rule == "linear" and not self.default.alpha > 0:
            raise UsageError(
                f"steering is {self.default}: the playground shows steered answers only; accepted: a strength above 0 "
                "(--steering linear:1)"
            )

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules."""
        return ("linear", "rank") if self.rank else ("linear",)

    @property
    def alpha_range(self) -> tuple[float, float]:
        """Smallest and largest α."""
        if self.default.rule != "linear":
            return MIN_ALPHA, MAX_ALPHA
        alpha = self.default.alpha
        return min(MIN_ALPHA, alpha), min(max(MAX_ALPHA, 2 * alpha), LARGEST_ALPHA)

    @property
    def k_range(self) -> tuple[int, int]:
        """Smallest and largest k."""
        largest = max(MAX_K, 2 * self.default.k if self.default.rule == "rank" else 1)
        return 1, min(largest, self.eligible_size - 1)

    def steering(self, rule: Any, alpha: Any, k: Any) -> Steering:
        """Return the rule that the controls are set to; a client can send any values.

        Raises:
            UsageError: the controls do not offer the values, such as a strength of 0.
        """
        if rule not in self.rules:
            raise UsageError(f"rule is {rule!r}; accepted here: {', '.join(self.rules)}")
        if rule == "linear":
            low, high = self.alpha_range
            if not is_number(alpha) or not low <= alpha <= high:
                raise UsageError(f"strength is {alpha!r}; accepted: {low:g} to {high:g} (0 would steer nothing)")
            return dataclasses.replace(self.default, rule="linear", alpha=float(alpha))
        smallest, largest = self.k_range
        if not is_number(k) or not smallest <= k <= largest or k != int(k):
            raise UsageError(f"k is {k!r}; accepted: a whole number from {smallest} to {largest}")
        return dataclasses.replace(self.default, rule="rank", k=int(k))


class SteeredModel:
    """A steered model that explains its answers. Its own rule is not changed: each call names a rule."""

    def __init__(
        self, model: DivergenceForCausalLM, tokenizer: Any, options: ChatOptions, *, reveal: bool = False
    ) -> None:
        """Wrap a loaded bundle.

        Args:
            model: the steered model.
            tokenizer: its tokenizer.
            options: how answers are generated.
            reveal: give probabilities, also those under the target; only where the target may be shown.

        Raises:
            UsageError: the bundle's rule steers nothing, or the tokenizer cannot decode incrementally.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise UsageError("the playground needs a tokenizer of the tokenizers library (tokenizer.json)")
        rule = model.steering
        eligible_size = model.vocab_size if rule.vocabulary is None else len(rule.vocabulary)
        self.controls = SteeringControls(rule, eligible_size, rank=not isinstance(model.experts, NoExperts))
        self.model, self.tokenizer, self.options, self.reveal = model, tokenizer, options, reveal
        eos: Any = model.generation_config.eos_token_id
        self.eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
        self.max_length: int = model.config.max_position_embeddings or 1 << 15
        self._generator = torch.Generator().manual_seed(options.seed)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encode a conversation up to the beginning of the next answer.

        Raises:
            UsageError: the last question is empty, or the conversation is too long.
        """
        if not messages or not messages[-1].content.strip():
            raise UsageError("there is nothing to answer: type a question")
        for message in messages:
            checked_text(message.content, "the text")
        turns = tuple(messages[-1:] if self.options.single_turn else messages)
        form = Format(system_prompt=self.options.system_prompt)
        return self.check_prompt(encode_prompt(Record("", messages=turns), self.tokenizer, form))

    def check_prompt(self, prompt: list[int]) -> list[int]:
        """Return the prompt if it leaves room for an answer.

        Raises:
            UsageError: it is empty, or as long as the models' shortest context.
        """
        if not prompt:
            raise UsageError("the prompt has no tokens: type more")
        if len(prompt) >= self.max_length:
            raise UsageError(
                f"{len(prompt)} tokens are too many for {self.max_length} positions of the models: begin a new "
                "conversation, or shorten the question"
            )
        return prompt

    def answer(self, prompt: list[int], steering: Steering, temperature: float = 0.0) -> Iterator[Token]:
        """Generate an answer.

        Args:
            prompt: token ids.
            steering: a rule that steers.
            temperature: 0 is greedy.

        Yields:
            Tokens; the last token of a character has the character's text, the others have none.

        Raises:
            UsageError: the rule steers nothing.
            FailedClosed: the model cannot be steered; all tokens so far are steered.
        """
        self.check_steering(steering)
        wait_for_checks()
        text = AnswerText(self.tokenizer, (), prompt)
        cache, eligible = self.model.new_cache(), steering.eligible(self.model.vocab_size)
        new_ids, pending = prompt, None
        for _ in range(min(self.options.max_new_tokens, self.max_length - len(prompt))):
            token = self._generate_token(new_ids, cache, steering, eligible, temperature)
            if token.id in self.eos_token_ids:
                break
            if pending is not None:
                yield pending
            assert token.id is not None
            pending, new_ids = dataclasses.replace(token, text=text.add(token.id)), [token.id]
        if pending is not None:
            yield dataclasses.replace(pending, text=pending.text + text.end())

    @torch.inference_mode()
    def recolor(self, prompt: list[int], tokens: Sequence[Token], steering: Steering) -> tuple[Token, ...]:
        """Compute the effect of another rule on the tokens of an answer, whose text stays.

        Raises:
            UsageError: the rule steers nothing.
            FailedClosed: the model cannot be steered.
        """
        self.check_steering(steering)
        ids = [token.id for token in tokens if token.id is not None]
        if not ids or len(ids) != len(tokens):
            return tuple(tokens)
        target_logits, corrected, divergence = self._compute_logits([*prompt, *ids[:-1]], len(ids))
        shifts = self._compute_shifts(target_logits, steering.apply(corrected, divergence), torch.tensor(ids))
        return tuple(dataclasses.replace(new, text=old.text) for new, old in zip(shifts, tokens, strict=True))

    @torch.inference_mode()
    def likelihoods(self, question: str, continuation: str, steerings: Sequence[Steering]) -> list[float]:
        """Compute a continuation's probability per token (geometric mean) under each rule, in one forward pass.

        Raises:
            UsageError: a text is empty or too long, or a rule steers nothing.
            FailedClosed: the model cannot be steered.
        """
        for steering in steerings:
            self.check_steering(steering)
        if not continuation.strip():
            raise UsageError("there is no continuation: type the words whose probability to compute")
        messages = (Message("user", question),)
        prompt = self.encode_prompt(messages)
        record = Record(checked_text(continuation.strip(), "the continuation"), messages=messages)
        form = Format(system_prompt=self.options.system_prompt, max_length=self.max_length)
        example = encode(record, self.tokenizer, form)
        ids = list(example.input_ids)
        while ids and ids[-1] in self.tokenizer.all_special_ids:  # the end of the answer is not part of the words
            ids.pop()
        labels = torch.tensor(ids[example.prompt_length :])
        if len(ids) >= self.max_length or not len(labels):
            raise UsageError(f"{len(prompt)} tokens and the continuation do not fit {self.max_length} positions")
        _, corrected, divergence = self._compute_logits(ids[:-1], len(labels))
        probabilities = []
        for logits in sweep(steerings, corrected, divergence):
            logprobs = logits.log_softmax(dim=-1).gather(-1, labels[:, None].to(logits.device))
            probabilities.append(float(logprobs.mean().exp()))
        return probabilities

    def check_steering(self, steering: Steering) -> None:
        """Refuse a rule that would answer as the target does.

        Raises:
            UsageError: it is linear with a strength of 0 or below, or the rank rule without experts.
        """
        if steering.rule == "linear" and not steering.alpha > 0:
            raise UsageError(f"{steering} steers nothing: the playground answers steered only")
        if steering.rule == "rank" and isinstance(self.model.experts, NoExperts):
            raise UsageError(NO_RULE)
        steering.check_vocabulary(self.model.vocab_size)

    @torch.inference_mode()
    def _generate_token(
        self, new_ids: list[int], cache: Any, steering: Steering, eligible: Tensor | None, temperature: float
    ) -> Token:
        target_logits, corrected, divergence = self._compute_logits(new_ids, 1, cache)
        steered = steering.apply(corrected, divergence, eligible)
        if temperature > 0:
            uniform = torch.rand(1, generator=self._generator).to(steered.device)
            chosen = pick((steered / temperature).softmax(dim=-1), uniform)
        else:
            chosen = steered.argmax(dim=-1)
        return self._compute_shifts(target_logits, steered, chosen)[0]

    def _compute_logits(self, ids: list[int], keep: int, cache: Any = None) -> tuple[Logits, Logits, Logits]:
        """Return the last positions' target logits, the same after takedown requests, and divergences."""
        wait_for_checks()
        input_ids = torch.tensor([ids], device=self.model.device)
        target_logits, corrected, divergence = self.model.unsteered_components(input_ids, cache, logits_to_keep=keep)
        return target_logits[0], corrected[0], divergence[0]

    def _compute_shifts(self, target_logits: Logits, steered: Logits, chosen: Int[Tensor, " tokens"]) -> list[Token]:
        return compute_shifts(target_logits, steered, chosen, self._decode, reveal=self.reveal)

    def _decode(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))


def compute_shifts(
    target_logits: Logits,
    steered_logits: Logits,
    chosen: Int[Tensor, " tokens"],
    decode: Callable[[int], str],
    *,
    reveal: bool,
) -> list[Token]:
    """Compute the effect of steering at each position of an answer.

    Args:
        target_logits: ℓ_P before each token.
        steered_logits: the same after the rule.
        chosen: the answer's token ids.
        decode: returns the text of a token id.
        reveal: whether tokens hold probabilities.
    """
    before, after = target_logits.float().log_softmax(dim=-1), steered_logits.float().log_softmax(dim=-1)
    loss = before.exp() - after.exp()
    largest = loss.topk(min(MAX_ALTERNATIVES + 1, loss.shape[-1]), dim=-1)  # the chosen token may be among them
    tokens = []
    for position, chosen_id in enumerate(chosen.tolist()):

        def shift(token_id: int, position: int = position) -> TokenShift:
            old, new = float(before[position, token_id]), float(after[position, token_id])
            change = 0.0 if old == new else new - old  # equal if both are minus infinity
            probabilities = (math.exp(old), math.exp(new)) if reveal else (None, None)
            return TokenShift(decode(token_id), change, *probabilities)

        candidates = zip(largest.indices[position].tolist(), largest.values[position].tolist(), strict=True)
        losses = {token_id: lost for token_id, lost in candidates if lost >= MIN_LOSS and token_id != chosen_id}
        named = list(losses)[:MAX_ALTERNATIVES]
        tokens.append(
            Token(
                **vars(shift(chosen_id)),
                id=chosen_id,
                alternatives=tuple(map(shift, named)),
                marked=any(losses[token_id] >= MARKED_LOSS for token_id in named),
            )
        )
    return tokens


class UnsteeredTarget:
    """The target alone, UNSTEERED: for `--show-target` on this machine, on a page that marks it as unsteered."""

    def __init__(self, model: SteeredModel, host: str) -> None:
        """Take the target of a bundle.

        Args:
            model: the steered model.
            host: the address that the page is served on.

        Raises:
            UsageError: other machines can reach the page.
        """
        if not is_local(host):
            raise UsageError(f"--show-target shows unsteered answers; it is refused for host {host}: only 127.0.0.1")
        self._model = model

    def answer(self, prompt: list[int]) -> Iterator[str]:
        """Yield the target's own greedy answer, UNSTEERED, as it grows."""
        model = self._model
        text, answer, new_ids, cache = AnswerText(model.tokenizer, (), prompt), "", prompt, None
        for _ in range(min(model.options.max_new_tokens, model.max_length - len(prompt))):
            token_id, cache = self._generate_token(new_ids, cache)
            if token_id in model.eos_token_ids:
                break
            answer, new_ids = answer + text.add(token_id), [token_id]
            yield answer
        yield answer + text.end()

    @torch.inference_mode()
    def _generate_token(self, new_ids: list[int], cache: Any) -> tuple[int, Any]:
        target: Any = self._model.model.target
        input_ids = torch.tensor([new_ids], device=device_of(target))
        output = target(input_ids, past_key_values=cache, use_cache=True)
        return int(output.logits[0, -1].argmax()), output.past_key_values

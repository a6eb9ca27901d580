"""Models that answer on the page: a bundle with the effect of steering on each token, and its target alone.

Only `UnsteeredTarget` answers from the target's own logits.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation import BaseStreamer

from divdec.data.formatting import Format, check_template_kwargs, encode_prompt
from divdec.data.records import Message, Record, checked_text
from divdec.decoding.generation import generate_stream
from divdec.decoding.text import AnswerText
from divdec.errors import UsageError
from divdec.evaluation.generation import end_tokens
from divdec.experts.combined import NoExperts
from divdec.fail_closed import wait_for_checks
from divdec.playground.rendering import Token, TokenShift
from divdec.steering import MAX_ALPHA, Steering, is_number

if TYPE_CHECKING:
    from divdec.model.modeling import DivergenceForCausalLM

Logits = Float[Tensor, "tokens vocab"]

MIN_SLIDER_ALPHA = 0.1  # weaker steering hardly differs from the target
MAX_SLIDER_ALPHA = 4.0
MAX_K = 200
MAX_ALTERNATIVES = 4  # tokens named at a position
MIN_LOSS = 0.005  # of probability: a token that loses less is not named
MARKED_LOSS = 0.1  # of probability: the position is marked
NO_QUESTION = "there is nothing to answer: type a question"


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """How answers are generated."""

    system_prompt: str | None = None
    """System prompt of every conversation."""
    single_turn: bool = False
    """Read only the last question, for models that were trained on single questions."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    seed: int = 0
    """Seed of sampled answers."""
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Variables of the chat template."""


@dataclasses.dataclass(frozen=True)
class SteeringControls:
    """Rules and strengths that the page offers; each of them steers."""

    default: Steering
    """The bundle's rule; every choice keeps its eligible vocabulary and fill."""
    eligible_size: int
    """Size of the eligible vocabulary."""
    experts: bool = True
    """Whether a rule has experts to apply to; otherwise takedown requests alone steer."""

    def __post_init__(self) -> None:
        """Refuse a bundle whose rule steers nothing."""
        if self.default.rule == "linear" and not self.default.alpha > 0:
            raise UsageError(
                f"steering is {self.default}: the playground shows steered answers only; accepted: a strength above 0 "
                "(--steering linear:1)"
            )

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules."""
        return ("linear", "rank") if self.experts else ("takedowns",)

    @property
    def alpha_range(self) -> tuple[float, float]:
        """Smallest and largest α."""
        if self.default.rule != "linear":
            return MIN_SLIDER_ALPHA, MAX_SLIDER_ALPHA
        alpha = self.default.alpha
        return min(MIN_SLIDER_ALPHA, alpha), min(max(MAX_SLIDER_ALPHA, 2 * alpha), MAX_ALPHA)

    @property
    def k_range(self) -> tuple[int, int]:
        """Smallest and largest k."""
        largest = max(MAX_K, 2 * self.default.k if self.default.rule == "rank" else 1)
        smallest = 2 if self.default.fill == "soft" else 1  # rank:1:soft steers nothing
        return smallest, min(largest, self.eligible_size - 1)

    def steering(self, rule: Any, alpha: Any, k: Any) -> Steering:
        """Return the rule for values that a client sent; refuse those that the controls do not offer."""
        if rule not in self.rules:
            raise UsageError(f"rule is {rule!r}; accepted here: {', '.join(self.rules)}")
        if rule == "takedowns":
            return self.default
        if rule == "linear":
            low, high = self.alpha_range
            if not is_number(alpha) or not low <= alpha <= high:
                raise UsageError(f"strength is {alpha!r}; accepted: {low:g} to {high:g} (0 would steer nothing)")
            return dataclasses.replace(self.default, rule="linear", alpha=float(alpha))
        smallest, largest = self.k_range
        if not is_number(k) or not smallest <= k <= largest or k != int(k):
            raise UsageError(f"k is {k!r}; accepted: a whole number from {smallest} to {largest}")
        return dataclasses.replace(self.default, rule="rank", k=int(k), full=False)


class SteeredModel:
    """A steered model that explains its answers. Each call names a rule.

    Its methods raise a `UsageError` for a rule that steers nothing, `FailedClosed` where the model cannot be steered.
    """

    def __init__(
        self, model: DivergenceForCausalLM, tokenizer: Any, options: ChatOptions, *, reveal: bool = False
    ) -> None:
        """Wrap a loaded bundle; `reveal` adds probabilities under the steered model and the target."""
        if not getattr(tokenizer, "is_fast", False):
            raise UsageError("the playground needs a tokenizer of the tokenizers library (tokenizer.json)")
        check_template_kwargs(tokenizer, options.chat_template_kwargs)
        rule = model.steering
        eligible_size = model.vocab_size if rule.vocabulary is None else len(rule.vocabulary)
        self.controls = SteeringControls(rule, eligible_size, experts=not isinstance(model.experts, NoExperts))
        self.model, self.tokenizer, self.options, self.reveal = model, tokenizer, options, reveal
        self.eos_token_ids = end_tokens(model)
        self.max_length: int = model.config.max_position_embeddings or 1 << 15
        self._generator = torch.Generator().manual_seed(options.seed)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encode a conversation up to the beginning of the next answer; refuse one that leaves no room for it."""
        if not messages or not messages[-1].content.strip():
            raise UsageError(NO_QUESTION)
        for message in messages:
            checked_text(message.content, "the text")
        turns = tuple(messages[-1:] if self.options.single_turn else messages)
        form = Format(self.options.system_prompt, chat_template_kwargs=self.options.chat_template_kwargs)
        prompt = encode_prompt(Record("", messages=turns), self.tokenizer, form)
        if not prompt:
            raise UsageError("the prompt has no tokens: type more")
        if len(prompt) >= self.max_length:
            raise UsageError(
                f"{len(prompt)} tokens are too many for {self.max_length} positions of the models: begin a new "
                "conversation, or shorten the question"
            )
        return prompt

    def answer(self, prompt: list[int], steering: Steering, temperature: float = 0.0) -> Iterator[Token]:
        """Generate an answer, greedily or with a temperature, and yield its tokens.

        The last token of a character has the character's text, the others have none.
        """
        model = self.with_rule(steering)
        logits: deque[tuple[Tensor, Tensor]] = deque()  # of tokens that are not yet described
        model.on_steered = lambda target, steered: logits.append((target[:, -1], steered[:, -1]))
        arguments: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            arguments |= {"temperature": temperature, "top_p": 1.0, "top_k": 0}
        seed = int(torch.randint(2**31, (), generator=self._generator))

        def generate(streamer: BaseStreamer) -> None:
            wait_for_checks()
            torch.manual_seed(seed)
            generate_stream(model, prompt, streamer, max_new_tokens=self.max_new_tokens_for(prompt), **arguments)

        def describe(token_id: int) -> Token:
            target, steered = logits.popleft()
            chosen = torch.tensor([token_id])
            return compute_shifts(target.to(steered.device), steered, chosen, self.decode, reveal=self.reveal)[0]

        text, pending = AnswerText(self.tokenizer, (), prompt), None
        for token in stream_tokens(generate, describe):
            if token.id in self.eos_token_ids:
                break
            if pending is not None:
                yield pending
            pending = dataclasses.replace(token, text=text.add(token.id))
        if pending is not None:
            yield dataclasses.replace(pending, text=pending.text + text.end())

    def max_new_tokens_for(self, prompt: list[int]) -> int:
        """Return the length of the longest answer to a prompt."""
        return min(self.options.max_new_tokens, self.max_length - len(prompt))

    def recolor(self, prompt: list[int], tokens: Sequence[Token], steering: Steering) -> tuple[Token, ...]:
        """Compute the effect of another rule on the tokens of an existing answer. The text does not change."""
        model = self.with_rule(steering)
        ids = [token.id for token in tokens if token.id is not None]
        if not ids or len(ids) != len(tokens):
            return tuple(tokens)
        wait_for_checks()
        shifts = explain_answer(model, prompt, ids, steering, self.decode, reveal=self.reveal)
        return tuple(dataclasses.replace(new, text=old.text) for new, old in zip(shifts, tokens, strict=True))

    def with_rule(self, steering: Steering) -> DivergenceForCausalLM:
        """Return the model under another rule; refuse one that would answer as the target does."""
        if steering.rule == "linear" and not steering.alpha > 0:
            raise UsageError(f"{steering} steers nothing: the playground answers steered only")
        model = copy.copy(self.model)  # shares the weights
        model.config = copy.copy(model.config)
        model.steering = steering
        return model

    def decode(self, token_id: int) -> str:
        """Return the text of one token."""
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))


@torch.inference_mode()
def explain_answer(
    model: DivergenceForCausalLM,
    prompt: Sequence[int],
    answer: Sequence[int],
    steering: Steering,
    decode: Callable[[int], str],
    *,
    reveal: bool,
) -> list[Token]:
    """Compute the effect of a rule on the tokens of an existing answer; see `compute_shifts`."""
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
    target, corrected, divergence = model.components(ids, logits_to_keep=len(answer))
    steered = steering.apply(corrected[0], divergence[0])
    return compute_shifts(target[0], steered, torch.tensor(answer), decode, reveal=reveal)


def compute_shifts(
    target_logits: Logits,
    steered_logits: Logits,
    chosen: Int[Tensor, " tokens"],
    decode: Callable[[int], str],
    *,
    reveal: bool,
) -> list[Token]:
    """Compute the effect of steering at each position of an answer; with `reveal`, tokens hold probabilities."""
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


class TokenStreamer(BaseStreamer):
    """Passes each token of `generate` to another thread, and waits there until the next one is wanted."""

    def __init__(self, read: Callable[[int], Any]) -> None:
        """Prepare; `read` turns a token id into the item that is passed on."""
        self.items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.wanted = threading.Semaphore(0)
        self.closed = False
        self._read, self._prompt_seen = read, False

    def put(self, value: Tensor) -> None:
        """Pass on a token; the first call has the prompt."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.items.put(self._read(int(value)))
        self.wanted.acquire()
        if self.closed:
            raise GeneratorExit

    def end(self) -> None:
        """Do nothing: the answer ends with the thread."""


def stream_tokens(generate: Callable[[BaseStreamer], None], read: Callable[[int], Any]) -> Iterator[Any]:
    """Run `generate` in a thread, and yield `read(token_id)`, computed in that thread, for each token.

    The next token is generated when it is asked for. Closing the iterator ends the thread; its errors are raised here.
    """
    streamer = TokenStreamer(read)
    errors: list[Exception] = []

    def run() -> None:
        try:
            generate(streamer)
        except GeneratorExit:  # nobody reads the tokens any more
            pass
        except Exception as error:
            errors.append(error)
        streamer.items.put(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while (item := streamer.items.get()) is not None:
            yield item
            streamer.wanted.release()
        if errors:
            raise errors[0]
    finally:
        streamer.closed = True
        streamer.wanted.release()
        thread.join()


class UnsteeredTarget:
    """The target alone, UNSTEERED: for `--show-target` on this machine, on a page that marks it as unsteered."""

    def __init__(self, model: SteeredModel) -> None:
        """Take the target of a bundle."""
        self._model = model

    def answer(self, prompt: list[int]) -> Iterator[str]:
        """Yield the target's own greedy answer, UNSTEERED, as it grows."""
        model = self._model

        def generate(streamer: BaseStreamer) -> None:
            generate_stream(
                model.model.target, prompt, streamer, max_new_tokens=model.max_new_tokens_for(prompt), do_sample=False,
                eos_token_id=sorted(model.eos_token_ids) or None,
            )  # fmt: skip

        text, answer = AnswerText(model.tokenizer, (), prompt), ""
        for token_id in stream_tokens(generate, int):
            if token_id in model.eos_token_ids:
                break
            answer += text.add(token_id)
            yield answer
        yield answer + text.end()

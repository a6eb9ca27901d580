"""A loaded bundle that answers a viewer: token by token, each with what steering did to it.

Every token is chosen from steered logits, by a rule that steers. It knows nothing of pages; `target.py` is the one
place that answers otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from divdec.data.formatting import Format, encode, encode_prompt
from divdec.data.records import Message, Record, checked_text
from divdec.decoding.text import AnswerText
from divdec.errors import UsageError
from divdec.evaluation.scoring import sweep
from divdec.experts.combined import NoExperts
from divdec.fail_closed import wait_for_checks
from divdec.model.configuration import NO_RULE
from divdec.playground.pushes import Place, Push, places
from divdec.playground.tokens import MARKED, Other, Token
from divdec.sampling import pick
from divdec.steering import Steering

if TYPE_CHECKING:
    from divdec.model.modeling import DivergenceForCausalLM


@dataclasses.dataclass(frozen=True)
class Manner:
    """How answers are made."""

    system_prompt: str | None = None
    """System turn before every conversation."""
    single_turn: bool = False
    """Read only the last question, for models that have learned no longer conversations."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    seed: int = 0
    """Of the samples."""


class Steered:
    """A steered model as the page uses it."""

    def __init__(self, model: DivergenceForCausalLM, tokenizer: Any, manner: Manner, *, reveal: bool = False) -> None:
        """Take a bundle that is loaded.

        Args:
            model: the steered model; its own rule is left as it is.
            tokenizer: its tokenizer.
            manner: how answers are made.
            reveal: say probabilities under the target, too; for whoever may see the target.

        Raises:
            UsageError: the tokenizer cannot show an answer while it grows.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise UsageError("the playground needs a tokenizer of the tokenizers library (tokenizer.json)")
        self.model, self.tokenizer, self.manner, self.reveal = model, tokenizer, manner, reveal
        ends: Any = model.generation_config.eos_token_id
        self.ends = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._generator = torch.Generator().manual_seed(manner.seed)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to where the next answer begins.

        Raises:
            UsageError: the last question is empty, or leaves no room for an answer.
        """
        if not messages or not messages[-1].content.strip():
            raise UsageError("there is nothing to answer: type a question")
        for message in messages:
            checked_text(message.content, "the text")
        turns = tuple(messages[-1:] if self.manner.single_turn else messages)
        form = Format(system_prompt=self.manner.system_prompt)
        return self.checked(encode_prompt(Record("", messages=turns), self.tokenizer, form))

    def checked(self, prompt: list[int]) -> list[int]:
        """The prompt, unless the model has no room for an answer to it.

        Raises:
            UsageError: it is empty, or as long as the shortest context of the models.
        """
        if not prompt:
            raise UsageError("there is no token to go on from: type more")
        if len(prompt) >= self._positions:
            raise UsageError(
                f"{len(prompt)} tokens are too many for {self._positions} positions of the models: begin a new "
                "conversation, or ask in fewer words"
            )
        return prompt

    def answer(self, prompt: list[int], steering: Steering, temperature: float = 0.0) -> Iterator[Token]:
        """Answer while somebody reads on.

        Args:
            prompt: token ids.
            steering: the rule; it must steer.
            temperature: 0 is greedy.

        Yields:
            Tokens; text that is no whole character yet comes with a later one.

        Raises:
            UsageError: the rule steers nothing.
            FailedClosed: the model could not be steered; what was given until then was.
        """
        self.check(steering)
        wait_for_checks()
        text = AnswerText(self.tokenizer, (), prompt)
        cache, eligible = self.model.new_cache(), steering.eligible(self.model.vocab_size)
        read, held = prompt, None
        for _ in range(min(self.manner.max_new_tokens, self._positions - len(prompt))):
            chosen, place = self._step(read, cache, steering, eligible, temperature)
            if held is not None:
                yield held
            if chosen in self.ends:
                held = None
                break
            held, read = self._token(place, text.add(chosen)), [chosen]
        if held is not None:
            yield dataclasses.replace(held, text=held.text + text.end())

    @torch.inference_mode()
    def coloured(self, prompt: list[int], tokens: Sequence[Token], steering: Steering) -> tuple[Token, ...]:
        """The same tokens as another rule would push them; they stay as they were chosen.

        Raises:
            UsageError: the rule steers nothing.
            FailedClosed: the model cannot be steered.
        """
        self.check(steering)
        ids = [token.id for token in tokens if token.id is not None]
        if not ids or len(ids) != len(tokens):
            return tuple(tokens)
        target_logits, corrected, divergence = self._read([*prompt, *ids[:-1]], keep=len(ids))
        steered = steering.apply(corrected, divergence)
        found = places(target_logits, steered, torch.tensor(ids))
        return tuple(self._token(place, token.text) for place, token in zip(found, tokens, strict=True))

    @torch.inference_mode()
    def likelihoods(self, question: str, continuation: str, steerings: Sequence[Steering]) -> list[float]:
        """How likely a continuation is under each rule: the geometric mean of its tokens' probabilities.

        Raises:
            UsageError: there is no question or no continuation, they are too long, or a rule steers nothing.
            FailedClosed: the model cannot be steered.
        """
        for steering in steerings:
            self.check(steering)
        if not continuation.strip():
            raise UsageError("there is no continuation: type the words whose probability is wanted")
        prompt = self.prompt([Message("user", question)])
        record = Record(checked_text(continuation.strip(), "the continuation"), messages=(Message("user", question),))
        form = Format(system_prompt=self.manner.system_prompt, max_length=self._positions)
        example = encode(record, self.tokenizer, form)
        ids = list(example.input_ids)
        while ids and ids[-1] in self.tokenizer.all_special_ids:
            ids.pop()  # the words are asked for, not that nothing follows them
        wanted = torch.tensor(ids[example.prompt_length :])
        if len(ids) >= self._positions or not len(wanted):
            raise UsageError(f"{len(prompt)} tokens and the continuation do not fit {self._positions} positions")
        _, corrected, divergence = self._read(ids[:-1], keep=len(wanted))
        found = []
        for logits in sweep(steerings, corrected, divergence):
            scores = logits.log_softmax(dim=-1).gather(-1, wanted[:, None].to(logits.device))
            found.append(float(scores.mean().exp()))
        return found

    def check(self, steering: Steering) -> None:
        """Refuse a rule that would answer as the target does.

        Raises:
            UsageError: it is linear with a strength of 0 or below, or the rank rule without experts.
        """
        if steering.rule == "linear" and not steering.alpha > 0:
            raise UsageError(f"{steering} steers nothing: the playground answers steered only")
        if steering.rule == "rank" and isinstance(self.model.experts, NoExperts):
            raise UsageError(NO_RULE)
        steering.check_vocabulary(self.model.vocab_size)

    @property
    def _positions(self) -> int:
        return self.model.config.max_position_embeddings or 1 << 15

    def _read(
        self, ids: list[int], keep: int
    ) -> tuple[Float[Tensor, "tokens vocab"], Float[Tensor, "tokens vocab"], Float[Tensor, "tokens vocab"]]:
        wait_for_checks()
        read = torch.tensor([ids], device=self.model.device)
        target_logits, corrected, divergence = self.model.unsteered_components(read, logits_to_keep=keep)
        return target_logits[0], corrected[0], divergence[0]

    @torch.inference_mode()
    def _step(
        self, read: list[int], cache: Any, steering: Steering, eligible: Tensor | None, temperature: float
    ) -> tuple[int, Place]:
        ids = torch.tensor([read], device=self.model.device)
        target_logits, corrected, divergence = self.model.unsteered_components(ids, cache, logits_to_keep=1)
        steered = steering.apply(corrected, divergence, eligible)[0]
        if temperature > 0:
            uniform = torch.rand(1, generator=self._generator).to(steered.device)
            chosen = pick((steered / temperature).softmax(dim=-1), uniform)
        else:
            chosen = steered.argmax(dim=-1)
        return int(chosen), places(target_logits[0], steered, chosen)[0]

    def _token(self, place: Place, text: str) -> Token:
        others = tuple(self._other(push) for push in place.lost)
        marked = any(push.before - push.after >= MARKED for push in place.lost)
        own = self._other(place.chosen)
        return Token(text, own.push, own.before, own.after, id=place.chosen.token, others=others, marked=marked)

    def _other(self, push: Push) -> Other:
        text = str(self.tokenizer.decode([push.token], skip_special_tokens=False))
        if not self.reveal:
            return Other(text, push.push)
        return Other(text, push.push, push.before, push.after)

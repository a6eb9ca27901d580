"""What happens when a viewer does something: questions, colours, curves, takedowns. It knows nothing of Gradio.

Whatever a page or its client sends goes through `Choice`, so that no answer is made without steering.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from divdec.errors import FailedClosed, UsageError, first_line
from divdec.playground import curve, takedown
from divdec.playground.choice import Choice, is_number
from divdec.playground.over_http import Broken, OverHttp
from divdec.playground.steered import Steered
from divdec.playground.talk import Talk, Turn, again, messages
from divdec.playground.target import Target
from divdec.playground.tokens import Token
from divdec.steering import Steering
from divdec.takedowns.registry import Registry

PAUSE = 0.08  # seconds between two pictures of a growing answer
HOTTEST = 2.0
AGAIN = "What had come is kept; press “Answer again” to ask anew."


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What the controls say. A page's client may send anything; what they do not offer is refused when it is used."""

    rule: Any = "linear"
    alpha: Any = 1.0
    k: Any = 20
    temperature: Any = 0.0


@dataclasses.dataclass(frozen=True)
class Playground:
    """A model on show: a bundle that is loaded, or a server; and what beside it may be seen."""

    name: str
    """What it is called."""
    steered: Steered | None = None
    """The bundle; None where a server answers."""
    choice: Choice | None = None
    """Which rules may be chosen; with a bundle."""
    server: OverHttp | None = None
    """The server; None where a bundle answers."""
    target: Target | None = None
    """The target alone, UNSTEERED; None hides it."""
    registry: Registry | None = None
    """Where takedown requests go; None offers none."""

    def ask(self, question: str, talk: Talk, chosen: Chosen) -> Iterator[Talk]:
        """Answer a question; the conversation as it grows."""
        if not question.strip():
            yield talk
            return
        yield from self._answer((*talk, Turn(question.strip())), chosen)

    def ask_again(self, talk: Talk, chosen: Chosen) -> Iterator[Talk]:
        """Make the last answer anew."""
        if not talk:
            yield talk
            return
        yield from self._answer(again(talk), chosen)

    def stopped(self, talk: Talk) -> Talk:
        """The conversation after the viewer has stopped an answer."""
        if not talk or not talk[-1].running:
            return talk
        return (*talk[:-1], dataclasses.replace(talk[-1], running=False, note=f"Stopped. {AGAIN}"))

    def coloured(self, talk: Talk, chosen: Chosen) -> Talk:
        """The last answer in the colours of the rule that is chosen now; its words stay."""
        if self.steered is None or not talk or not talk[-1].tokens or talk[-1].running:
            return talk
        turn = talk[-1]
        try:
            steering = self._steering(chosen)
            prompt = self.steered.prompt(messages(again(talk)))
            tokens = self.steered.coloured(prompt, turn.tokens, steering)
        except Exception as error:
            return (*talk[:-1], dataclasses.replace(turn, note=explained(error)))
        return (*talk[:-1], dataclasses.replace(turn, tokens=tokens, seen_by=str(steering)))

    def unsteered(self, talk: Talk, earlier: Talk) -> Iterator[Talk]:
        """The target's own answer to the last question, UNSTEERED, where it may be shown.

        Args:
            talk: the steered conversation.
            earlier: what the target has answered so far.
        """
        if self.target is None or self.steered is None or not talk:
            yield ()
            return
        kept = earlier[: len(talk) - 1]
        turn = Turn(talk[-1].question, running=True)
        yield (*kept, turn)
        try:
            prompt = self.steered.prompt(messages(again(talk)))
            for text in self.target.answer(prompt):
                turn = dataclasses.replace(turn, tokens=(Token(text),))
                yield (*kept, turn)
        except Exception as error:
            turn = dataclasses.replace(turn, note=explained(error))
        yield (*kept, dataclasses.replace(turn, running=False))

    def curve(self, question: str, continuation: str, chosen: Chosen) -> curve.Curve:
        """A continuation's probability over the strengths that may be chosen.

        Raises:
            UsageError: something is missing or too long.
            FailedClosed: the model cannot be steered.
        """
        if self.steered is None or self.choice is None:
            raise UsageError("a server's client cannot choose the strength: there is no curve")
        low, high = self.choice.alphas
        here = self.choice.steering("linear", chosen.alpha, chosen.k).alpha
        alphas = curve.strengths(low, high, here)
        steerings = [self.choice.steering("linear", alpha, chosen.k) for alpha in alphas]
        found = self.steered.likelihoods(question, continuation, steerings)
        return curve.Curve(tuple(alphas), tuple(found), here)

    def take_down(self, name: str, text: str, reference: str, chosen: Chosen) -> takedown.Effect:
        """Add a takedown request and see what it changes.

        Raises:
            UsageError: see `takedown.take_down`; or there is no registry.
            FailedClosed: the registry is damaged.
        """
        if self.steered is None or self.registry is None:
            raise UsageError("no registry is open; give one with --registry")
        return takedown.take_down(self.steered, self.registry, name, text, reference, self._steering(chosen))

    def withdraw(self, name: str) -> None:
        """Withdraw a takedown request.

        Raises:
            UsageError: there is no such request, or no registry.
        """
        if self.registry is None:
            raise UsageError("no registry is open; give one with --registry")
        self.registry.remove(name)

    def _steering(self, chosen: Chosen) -> Steering:
        assert self.choice is not None
        return self.choice.steering(chosen.rule, chosen.alpha, chosen.k)

    def _answer(self, talk: Talk, chosen: Chosen) -> Iterator[Talk]:
        *before, turn = talk
        turn = dataclasses.replace(turn, running=True)
        yield (*before, turn)
        found: list[Token] = []
        try:
            rule, tokens = self._tokens(talk, chosen)
            turn = dataclasses.replace(turn, rule=rule, seen_by=rule)
            shown = time.monotonic()
            for token in tokens:
                found.append(token)
                if time.monotonic() - shown >= PAUSE:
                    shown = time.monotonic()
                    yield (*before, dataclasses.replace(turn, tokens=tuple(found)))
        except Exception as error:
            turn = dataclasses.replace(turn, note=explained(error, begun=bool(found)))
        yield (*before, dataclasses.replace(turn, tokens=tuple(found), running=False))

    def _tokens(self, talk: Talk, chosen: Chosen) -> tuple[str, Iterator[Token]]:
        """The rule's name and the answer as it comes."""
        if not is_number(chosen.temperature) or not 0 <= chosen.temperature <= HOTTEST:
            raise UsageError(f"temperature is {chosen.temperature!r}; accepted: 0 (greedy) to {HOTTEST:g}")
        if self.server is not None:
            return "the server's own rule", self.server.answer(messages(talk), chosen.temperature)
        assert self.steered is not None
        steering = self._steering(chosen)
        return str(steering), self.steered.answer(self.steered.prompt(messages(talk)), steering, chosen.temperature)


def explained(error: Exception, *, begun: bool = False) -> str:
    """What a viewer is told of an error; one that nobody foresaw also goes to standard error.

    Args:
        error: what happened.
        begun: whether a part of the answer had come.
    """
    kept = f" {AGAIN}" if begun or isinstance(error, Broken) else ""
    if isinstance(error, UsageError | Broken):
        return f"{_sentence(str(error))}{kept}"
    if isinstance(error, FailedClosed):
        return f"The model could not be steered, and gives no other answer: {_sentence(str(error))}{kept}"
    traceback.print_exception(error, file=sys.stderr)
    return f"The answer failed: {_sentence(first_line(error))}{kept}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."

"""Talk to a bundle in the terminal; `/why` shows what the experts pushed down in the last answer."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from divdec.cli.loading import load, warn_if_unsteered
from divdec.cli.settings import ChatSettings as Settings
from divdec.cli.speculation import report, speculation
from divdec.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.data.records import Message
    from divdec.model.modeling import DivergenceForCausalLM

POSITIONAL = ("bundle",)
EXAMPLE = "divdec chat bundle --steering linear:1.5"
HELP = """\
/alpha NUMBER   steer linearly with this strength
/rule RULE      steer with linear:ALPHA, rank:K or rank:K:soft
/why            which tokens the experts pushed down in the last answer, and by how much
/reset          begin a new conversation
/quit           leave (or Ctrl-D)"""


def run(settings: Settings) -> None:
    """Read lines until the end of input."""
    from transformers import set_seed

    model, tokenizer = load(settings)
    set_seed(settings.seed)
    conversation = Conversation(model, tokenizer, settings)
    print(f"{settings.bundle}: steering {model.steering}. /help lists the commands.")
    if conversation.single_turn:
        print("each line is asked by itself, without what was said before")
    while (line := _read_line()) is not None:
        try:
            if not conversation.take(line.strip()):
                return
        except UsageError as error:
            print(error)
        except KeyboardInterrupt:
            print("\n(stopped)")


@dataclasses.dataclass
class Conversation:
    """The turns so far, and the last answer for `/why`."""

    model: DivergenceForCausalLM
    tokenizer: PreTrainedTokenizerBase
    settings: Settings
    turns: tuple[Message, ...] = ()
    last_prompt: list[int] = dataclasses.field(default_factory=list)
    last_answer: list[int] = dataclasses.field(default_factory=list)
    last_steering: Any = None

    @property
    def single_turn(self) -> bool:
        """Whether each line is asked without the turns before it."""
        given = self.settings.single_turn
        return bool(self.model.config.single_turn) if given is None else given

    def take(self, line: str) -> bool:
        """Answer a line or obey a command; False ends the conversation."""
        command, _, argument = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command == "/help":
            print(HELP)
        elif command == "/reset":
            self.turns, self.last_answer = (), []
            print("new conversation")
        elif command == "/alpha":
            self._steer(f"linear:{argument.strip()}")
        elif command == "/rule":
            self._steer(argument.strip())
        elif command == "/why":
            self._why()
        elif command.startswith("/"):
            print(f"no such command: {command}\n{HELP}")
        elif line:
            self._answer(line)
        return True

    def _steer(self, text: str) -> None:
        self.model.steering = self.model.steering.revised(text, allow_negative=self.settings.allow_negative)
        warn_if_unsteered(self.model.steering)
        print(f"steering {self.model.steering}")

    def _answer(self, line: str) -> None:
        import torch
        from transformers import TextStreamer

        from divdec.cli.loading import check_fits
        from divdec.data.formatting import Format, encode_prompt
        from divdec.data.records import Message, Record, checked_text

        turns = (*(() if self.single_turn else self.turns), Message("user", checked_text(line, "the line")))
        form = Format(system_prompt=self.settings.system_prompt)
        prompt = encode_prompt(Record("", messages=turns), self.tokenizer, form)
        check_fits([prompt], self.model, "this conversation; /reset begins a new one")
        input_ids = torch.tensor([prompt], device=self.model.device)
        given = speculation(self.settings)
        sampling: dict[str, Any] = {"do_sample": False}
        if self.settings.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.settings.temperature}
        with torch.inference_mode():
            output = self.model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=self.settings.max_new_tokens,
                streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),  # pyright: ignore[reportArgumentType]
                speculative=given,
                **sampling,
            )
        report(given)
        answer = output[0, len(prompt) :].tolist()
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        self.turns = (*turns, Message("assistant", str(text)))
        self.last_prompt, self.last_answer, self.last_steering = prompt, answer, self.model.steering

    def _why(self) -> None:
        from divdec.evaluation.scoring import probability_drops

        if not self.last_answer:
            print("there is no answer yet")
            return
        current = self.model.steering
        self.model.steering = self.last_steering
        try:
            found = probability_drops(self.model, self.last_prompt, self.last_answer)
        finally:
            self.model.steering = current
        if not found:
            print("the experts pushed nothing down")
            return
        print(f"{'after':<36} {'pushed down':<20} {'target':>7} {'steered':>8}   answered")
        for item in found:
            before = self.last_answer[: item.position]
            context = self._text((self.last_prompt[-8:] if not before else []) + before)[-34:]
            print(
                f"{'…' + context:<36} {self._text([item.token])!r:<20} {item.target_probability:>7.1%} "
                f"{item.steered_probability:>8.1%}   {self._text([item.answer_token])!r}"
            )

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False)).replace("\n", "⏎")


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise UsageError(f"the input is not UTF-8 text (byte {error.start})") from None
    except KeyboardInterrupt:
        print()
        return None

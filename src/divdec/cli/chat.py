"""`divdec chat`: a conversation in the terminal; `/why` shows what the experts suppressed in the last answer."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from divdec.cli.generate import generation_arguments, room_for_answer
from divdec.cli.loading import ExpertDevices, load, warn_if_unsteered
from divdec.errors import UsageError
from divdec.options import RARE, ModelLoading, Sampling, SpeculativeDecoding, SteeringChoice, read_template_kwargs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from divdec.data.records import Message
    from divdec.model.modeling import DivergenceForCausalLM

MAX_SUPPRESSED = 8  # tokens that `/why` names
HELP = """\
/alpha NUMBER   steer linearly with this strength
/rule RULE      steer with linear:ALPHA[:MARGIN[:full]] or rank:K[:MARGIN]
/why            show which tokens the experts suppressed in the last answer, and by how much
/reset          begin a new conversation
/quit           leave (or Ctrl-D)"""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """Options for the turns of a conversation."""

    system_prompt: str | None = None
    """System prompt of the conversation."""
    chat_template_kwargs: Annotated[str | None, RARE] = None
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'."""

    def __post_init__(self) -> None:
        read_template_kwargs(self.chat_template_kwargs)


def chat(
    bundle: str,
    *,
    sampling: Sampling = Sampling(),
    choice: SteeringChoice = SteeringChoice(),
    turns: Turns = Turns(),
    speculation: SpeculativeDecoding = SpeculativeDecoding(),
    loading: ModelLoading = ModelLoading(),
    experts: ExpertDevices = ExpertDevices(),
) -> None:
    """Talk to a bundle in the terminal and see what steering suppresses.

    /help lists the commands of the conversation, such as /why and /alpha 2.

    For example:

        divdec chat bundle --steering linear:1.5

    Args:
        bundle: The bundle: a folder or hub id.
    """
    from transformers import set_seed

    from divdec.data.formatting import check_template_kwargs

    model, tokenizer = load(bundle, loading, choice, experts)
    check_template_kwargs(tokenizer, read_template_kwargs(turns.chat_template_kwargs))
    set_seed(sampling.seed)
    conversation = ChatSession(model, tokenizer, sampling, speculation, turns)
    print(f"{bundle}: steering {model.rule}. /help lists the commands.")
    if model.config.single_turn:
        print("each line is asked by itself, without the turns before it")
    while (line := _read_line()) is not None:
        try:
            if not conversation.take(line.strip()):
                return
        except UsageError as error:
            print(error)
        except KeyboardInterrupt:
            print("\n(stopped)")


@dataclasses.dataclass
class ChatSession:
    """The turns so far, and the last answer for `/why`."""

    model: DivergenceForCausalLM
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    speculation: SpeculativeDecoding
    options: Turns
    turns: tuple[Message, ...] = ()
    last_prompt: list[int] = dataclasses.field(default_factory=list)
    last_answer: list[int] = dataclasses.field(default_factory=list)
    last_steering: Any = None

    def take(self, line: str) -> bool:
        """Answer a line or run a command; False ends the conversation."""
        command, _, argument = line.partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command == "/help":
            print(HELP)
        elif command == "/reset":
            self.turns, self.last_answer = (), []
            print("new conversation")
        elif command == "/alpha":
            rule, _, *rest = str(self.model.steering).split(":")
            self._steer(":".join(["linear", argument.strip(), *(rest if rule == "linear" else ())]))
        elif command == "/rule":
            self._steer(argument.strip())
        elif command == "/why":
            self._explain()
        elif command.startswith("/"):
            print(f"no such command: {command}\n{HELP}")
        elif line:
            self._answer(line)
        return True

    def _steer(self, text: str) -> None:
        self.model.steering = text
        warn_if_unsteered(self.model.steering, self.model.takedowns)
        print(f"steering {self.model.rule}")

    def _answer(self, line: str) -> None:
        from transformers import TextStreamer

        from divdec.data.formatting import Format, encode_prompt
        from divdec.data.records import Message, Record, checked_text
        from divdec.decoding.generation import generate_stream
        from divdec.decoding.text import answer_text

        turns = (
            *(() if self.model.config.single_turn else self.turns),
            Message("user", checked_text(line, "the line")),
        )
        kwargs = read_template_kwargs(self.options.chat_template_kwargs)
        form = Format(self.options.system_prompt, chat_template_kwargs=kwargs)
        prompt = encode_prompt(Record("", messages=turns), self.tokenizer, form)
        room = room_for_answer(prompt, self.model, "this conversation; /reset begins a new one")
        streamer = None
        if not self.sampling.stop:  # a streamed text cannot be cut
            streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)  # pyright: ignore[reportArgumentType]
        arguments = generation_arguments(self.sampling, self.tokenizer, room)
        speculative = self.speculation.draft_length
        output = generate_stream(self.model, prompt, streamer, speculative=speculative, **arguments)
        answer = output[0, len(prompt) :].tolist()
        text = answer_text(self.tokenizer, prompt, answer, self.sampling.stop)
        if streamer is None:
            print(text)
        self.turns = (*turns, Message("assistant", text))
        self.last_prompt, self.last_answer, self.last_steering = prompt, answer, self.model.steering

    def _explain(self) -> None:
        from divdec.playground.models import explain_answer

        if not self.last_answer:
            print("there is no answer yet")
            return
        answer, decode = self.last_answer, lambda token: self._text([token])
        tokens = explain_answer(self.model, self.last_prompt, answer, self.last_steering, decode, reveal=True)
        suppressed = [(index, other) for index, token in enumerate(tokens) for other in token.alternatives]
        suppressed.sort(key=lambda item: (item[1].steered_probability or 0.0) - (item[1].target_probability or 0.0))
        if not suppressed:
            print("the experts suppressed nothing")
            return
        print(f"{'after':<28} {'suppressed':<16} {'target':>7} {'steered':>8}   answered")
        for index, other in suppressed[:MAX_SUPPRESSED]:
            before = answer[:index]
            context = self._text((self.last_prompt[-8:] if not before else []) + before)[-26:]
            print(
                f"{'…' + context:<28} {other.text!r:<16} {other.target_probability:>7.1%} "
                f"{other.steered_probability:>8.1%}   {tokens[index].text!r}"
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

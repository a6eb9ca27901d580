"""Judges that are multimodal models behind an endpoint: does an image show a class, and which of two looks better?

Paper, 'Beyond Text': VQAScore (Lin et al. 2024) and pairwise comparison (Chen et al. 2024, MLLM-as-a-Judge). Answers
are kept in a file, so that a stopped run goes on. It knows nothing of settings or sets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from tqdm.auto import tqdm

from divdec.errors import UsageError
from divdec.imaging.codec import Images
from divdec.imaging.png import data_url, png
from divdec.remote.client import Endpoint

QUESTION = "Does this image show a {class_name}? Answer Yes or No."
COMPARISON = (
    "You are given two images, first image A, then image B. Judge their visual quality alone: sharpness, plausible "
    "shapes and textures, absence of artefacts; what they show does not matter, nor does their order. Answer with one "
    "letter alone: A if image A has the higher visual quality, B if image B has, C if they are equal."
)
REMINDER = "Answer with the letter A, B or C alone."
_VALUES = {"A": 1.0, "B": 0.0, "C": 0.5}
Item = TypeVar("Item")
Verdict = TypeVar("Verdict")


@dataclasses.dataclass(frozen=True)
class ImageEndpoint(Endpoint):
    """An endpoint whose model reads images; see `Endpoint` for how it is reached."""

    temperature: float | None = 0.0
    """None sends none, for models that accept no other than theirs."""
    limit_name: str = "max_tokens"
    """What the endpoint calls the longest reply; OpenAI's models that reason want 'max_completion_tokens'."""

    def __enter__(self) -> ImageEndpoint:
        return self

    def ask(self, images: Sequence[bytes], turns: Sequence[str], limit: int, **options: Any) -> dict[str, Any]:
        """The first choice of the reply to images and a text.

        Args:
            images: PNG files, shown before the text.
            turns: what is said, by the user first, then in turn.
            limit: longest reply, in tokens.
            **options: further fields of the request.

        Raises:
            UsageError: as `Endpoint.complete`.
        """
        shown = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
        messages: list[dict[str, Any]] = [{"role": "user", "content": [*shown, {"type": "text", "text": turns[0]}]}]
        for place, said in enumerate(turns[1:]):
            messages.append({"role": "user" if place % 2 else "assistant", "content": said})
        body: dict[str, Any] = {self.limit_name: limit, **options}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return self.create_chat(messages, **body)


class Answers:
    """What endpoints have answered, by digest of model, question and images; a file of JSON lines, or memory alone."""

    def __init__(self, path: Path | None = None) -> None:
        """Read what is there.

        Args:
            path: the file; a line that a stopped run has left unfinished is asked again.

        Raises:
            UsageError: it cannot be read or holds something else.
        """
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._whole = True
        if path is None:
            return
        try:
            # Before anything is asked and paid for, it is sure that answers can be kept.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"answers cannot be kept in {path} ({error.strerror}); give another name") from None
        for line in content.splitlines():
            if (row := _kept(line)) is not None:
                self._found[row.pop("key")] = row
        if content and not self._found and not content.startswith(b'{"key": '):
            raise UsageError(f"{path} holds no answers of a judge; give the name of a new file")
        self._whole = content.endswith(b"\n") or not content

    def of(self, key: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer kept under a key, or a new one, which is kept."""
        with self._lock:
            if key in self._found:
                return self._found[key]
        answer = ask()
        line = json.dumps({"key": key, **answer}, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            self._found[key] = answer
            if self._path is not None:
                with self._path.open("ab") as file:
                    file.write(line if self._whole else b"\n" + line)
                self._whole = True
        return answer


@dataclasses.dataclass(frozen=True)
class ImageJudge:
    """A multimodal model as a judge of content and of quality."""

    endpoint: ImageEndpoint
    answers: Answers = dataclasses.field(default_factory=Answers)
    workers: int = 8
    """Requests at the same time."""
    top_logprobs: int = 20
    """Likeliest tokens that VQAScore asks for; some servers give fewer."""
    least_side: int = 256
    """Smaller images are shown with their pixels repeated."""
    limit: int = 16
    """Longest answer to a comparison, in tokens; a model that reasons first needs thousands."""

    def __post_init__(self) -> None:
        for name in ("workers", "top_logprobs", "least_side", "limit"):
            if getattr(self, name) < 1:
                raise UsageError(f"an image judge's {name} is {getattr(self, name)}; accepted: 1 or more")

    def vqa_scores(self, images: Images, asked: Sequence[str]) -> list[float]:
        """VQAScore: how probable it is that each image shows its class.

        Among the log-probabilities of the reply's first token, y is the sum of the probabilities of all tokens that
        read 'yes', n of all that read 'no', whatever their case and the white space around them. The score is
        y / (y + n): 1 or 0 where only one of them is among the likeliest.

        Args:
            images: to judge.
            asked: the class of each, as the question names it.

        Returns:
            A score for each image, from 0 to 1.

        Raises:
            UsageError: as `ImageEndpoint.ask`, the endpoint gives no log-probabilities, or neither word is among them.
        """

        def score(item: tuple[Tensor, str]) -> float:
            image, class_name = item
            shown, question = png(image, self.least_side), QUESTION.format(class_name=class_name)
            answer = self._answer([shown], question, lambda: self._yes_no(shown, question))
            return answer["yes"] / (answer["yes"] + answer["no"])

        return self._each(score, list(zip(images, asked, strict=True)), "VQAScore")

    def preferences(self, images: Images, others: Images) -> list[float]:
        """Pairwise quality: whether each image looks better than its counterpart.

        Each pair is shown in both orders. 1 is a win in both, 0 a loss in both, and all else, ties and verdicts that
        follow the order, 0.5.

        Args:
            images: such as those of a setting.
            others: what each is compared with, such as the baseline's of the same class.

        Returns:
            A figure for each pair; their mean is the rate at which the images are preferred.

        Raises:
            UsageError: as `ImageEndpoint.ask`, or the model gives twice no verdict.
        """

        def preference(item: tuple[Tensor, Tensor]) -> float:
            one, other = (png(image, self.least_side) for image in item)
            forth, back = _VALUES[self._verdict(one, other)], 1 - _VALUES[self._verdict(other, one)]
            return forth if forth == back else 0.5

        return self._each(preference, list(zip(images, others, strict=True)), "quality")

    def _each(self, judge: Callable[[Item], Verdict], items: Sequence[Item], title: str) -> list[Verdict]:
        # An error cancels what waits for a worker, and the rest was kept already.
        with ThreadPoolExecutor(self.workers) as pool:
            return list(tqdm(pool.map(judge, items), title, len(items), unit="image", disable=None))

    def _answer(self, shown: Sequence[bytes], question: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        digests = [hashlib.sha256(image).hexdigest() for image in shown]
        asked = {"endpoint": self.endpoint.base_url, "temperature": self.endpoint.temperature, "limit": self.limit}
        about = {"model": self.endpoint.model, "question": question, "images": digests, **asked}
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        return self.answers.of(key, lambda: {**about, **ask()})

    def _yes_no(self, image: bytes, question: str) -> dict[str, Any]:
        choice = self.endpoint.ask([image], [question], 1, logprobs=True, top_logprobs=self.top_logprobs)
        likeliest = _likeliest(choice)
        if not likeliest:
            raise UsageError(
                f"model {self.endpoint.model!r} at {self.endpoint.base_url} gives no log-probabilities, which VQAScore "
                "needs; take a model or server that gives them, such as gpt-4o-mini or vLLM"
            )
        yes, no = (sum(math.exp(log) for token, log in likeliest if token == word) for word in ("yes", "no"))
        if not yes + no > 0:
            listed = ", ".join(repr(token) for token, _ in likeliest[:5])
            raise UsageError(
                f"model {self.endpoint.model!r} answers {question!r} with neither Yes nor No (likeliest: {listed}); "
                "take another model"
            )
        return {"yes": yes, "no": no}

    def _verdict(self, first: bytes, second: bytes) -> str:
        return self._answer([first, second], COMPARISON, lambda: self._compare(first, second))["verdict"]

    def _compare(self, first: bytes, second: bytes) -> dict[str, Any]:
        turns, said = [COMPARISON], ""
        for _ in range(2):
            said = _said(self.endpoint.ask([first, second], turns, self.limit))
            if found := re.fullmatch(r"\W*(?:image\s+)?([ABC])\W*", said, re.IGNORECASE):
                return {"verdict": found[1].upper()}
            turns = [COMPARISON, said, REMINDER] if said else [f"{COMPARISON} {REMINDER}"]
        raise UsageError(
            f"model {self.endpoint.model!r} gave twice no verdict on two images ({said[:120]!r}); accepted: A, B or C, "
            "so take another model, or a higher limit of tokens"
        )


def _likeliest(choice: dict[str, Any]) -> list[tuple[str, float]]:
    """The likeliest first tokens, in lower case without white space, and their log-probabilities."""
    try:
        listed = choice["logprobs"]["content"][0]["top_logprobs"]
        return [(entry["token"].strip().casefold(), min(float(entry["logprob"]), 0.0)) for entry in listed]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return []


def _kept(line: bytes) -> dict[str, Any] | None:
    """An answer of an earlier run, or None where the line is none."""
    try:
        row = json.loads(line)
        usable = isinstance(row["key"], str) and (row.get("verdict") in _VALUES or row["yes"] + row["no"] > 0)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return row if usable else None


def _said(choice: dict[str, Any]) -> str:
    message = choice.get("message")
    said = message.get("content") if isinstance(message, dict) else None
    return said if isinstance(said, str) else ""

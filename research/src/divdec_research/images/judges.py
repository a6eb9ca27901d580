"""Judges of images: a small classifier trained on real images, and vision-language models behind an endpoint.

Paper, section 'Beyond Text': VQAScore (Lin et al. 2024) and pairwise comparison (Chen et al. 2024, MLLM-as-a-Judge).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from tqdm.auto import tqdm

from divdec.endpoint import Endpoint
from divdec.errors import UsageError
from divdec.runs import ResumableOutput
from divdec_research.images.codecs import Images
from divdec_research.images.files import data_url, png

MIN_SIDE = 8
MAX_SIDE = 32
"""Larger images are averaged down to this side, so that training takes seconds for every size."""
WIDTH, FEATURES = 32, 64  # channels of the first convolutions, and of the others
BATCH, RATE = 64, 5e-3  # images of a step, and peak learning rate
HELD_OUT = 0.2
"""Share of each class's images that is used for measurement instead of training."""
QUESTION = "Does this image show a {class_name}? Answer Yes or No."
COMPARISON = (
    "You are given two images, first image A, then image B. Judge their visual quality alone: sharpness, plausible "
    "shapes and textures, absence of artefacts; what they show does not matter, nor does their order. Answer with one "
    "letter alone: A if image A has the higher visual quality, B if image B has, C if they are equal."
)
REMINDER = "Answer with the letter A, B or C alone."
_VALUES = {"A": 1.0, "B": 0.0, "C": 0.5}
Item = TypeVar("Item")
Features = Float[Tensor, "images features"]


class Body(nn.Module):
    """Network from pixels to features: pairs of convolutions that halve the image while its side is at least 8."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, channels: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size
        self.seen = (min(size[0], MAX_SIDE), min(size[1], MAX_SIDE))
        layers: list[nn.Module] = []
        before, side = channels, min(self.seen)
        while not layers or side >= MIN_SIDE:
            after = FEATURES if layers else WIDTH
            layers += [*_convolution(before, after), *_convolution(after, after), nn.MaxPool2d(2)]
            before, side = after, side // 2
        self.layers = nn.Sequential(*layers, *_convolution(before, FEATURES), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("deviation", torch.ones(channels, 1, 1))

    def forward(self, images: Images) -> Features:
        """Compute the features of images of the size and channels of the training."""
        if images.shape[2:] != self.seen:
            images = interpolate(images, self.seen, mode="area")
        return self.layers((images - self.mean) / self.deviation)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Accuracy of a classifier on images that were held out of its training."""

    accuracy: float
    images: int


class Classifier:
    """A convolutional classifier of images."""

    def __init__(self, body: Body, head: nn.Linear, classes: Sequence[str], held_out: HeldOut) -> None:
        """Create a classifier from a trained network; see `fit`."""
        self.body, self.head = body.eval(), head.eval()
        """Modules from images to features, for `frechet_distances`, and from features to logits."""
        self.classes = tuple(classes)
        self.held_out = held_out

    @classmethod
    def fit(
        cls, images: Images, labels: Sequence[int], classes: Sequence[str], *, seed: int = 0, steps: int = 200
    ) -> Classifier:
        """Train a classifier on the images' device with AdamW, and measure it on held-out images.

        Args:
            images: of any size from 8×8 pixels.
            labels: index of each image's class.
            classes: names of the classes.
            seed: seed of weights, batches and the split; reproducible for an equal number of threads.
            steps: number of batches; 200 of 64 images read 1,400 images nine times.

        Raises:
            UsageError: images are too small, or a class has too few images.
        """
        from sklearn.model_selection import train_test_split

        _check(images, labels, classes, math.ceil(1 / HELD_OUT))
        trained, held_out = train_test_split(range(len(images)), test_size=HELD_OUT, stratify=labels, random_state=seed)
        targets = torch.tensor(labels, device=images.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            body = Body(images.shape[1], (images.shape[2], images.shape[3])).to(images.device)
            head = nn.Linear(FEATURES, len(classes)).to(images.device)
        _train(body, head, images[trained], targets[trained], seed, steps)
        classifier = cls(body, head, classes, HeldOut(math.nan, len(held_out)))
        correct = classifier.probabilities(images[held_out]).argmax(dim=-1) == targets[held_out]
        classifier.held_out = HeldOut(float(correct.double().mean()), len(held_out))
        return classifier

    @torch.no_grad()
    def features(self, images: Images, batch_size: int = 256) -> Features:
        """Output of the penultimate layer; see `Body.forward` for errors."""
        batches = [self.body(batch.to(self.body.mean.device)) for batch in images.split(batch_size)]
        return torch.cat(batches) if batches else images.new_zeros(0, FEATURES)

    @torch.no_grad()
    def probabilities(self, images: Images, batch_size: int = 256) -> Float[Tensor, "images classes"]:
        """Probability of each class, not calibrated; see `Body.forward` for errors."""
        return self.head(self.features(images, batch_size)).softmax(dim=-1)


def _convolution(before: int, after: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()


def _train(body: Body, head: nn.Linear, images: Images, labels: Tensor, seed: int, steps: int) -> None:
    body.mean.copy_(images.mean(dim=(0, 2, 3)).reshape(-1, 1, 1))
    # Constant images have a deviation of 0.
    body.deviation.copy_(images.std(dim=(0, 2, 3)).clamp_min(1e-3).reshape(-1, 1, 1))
    network = nn.Sequential(body, head).train()
    optimizer = torch.optim.AdamW(network.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps + 1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(images), (BATCH,), generator=generator).to(images.device)
        cross_entropy(network(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _check(images: Images, labels: Sequence[int], classes: Sequence[str], least: int) -> None:
    if images.shape[1] not in (1, 3) or min(images.shape[2:]) < MIN_SIDE:
        raise UsageError(
            f"images of {images.shape[2]}×{images.shape[3]} pixels and {images.shape[1]} channel(s); a classifier "
            f"reads {MIN_SIDE}×{MIN_SIDE} and more, 1 channel or 3"
        )
    if len(classes) < 2:
        raise UsageError(f"{len(classes)} class(es); a classifier needs at least 2")
    counts = Counter(labels)
    for index, name in enumerate(classes):
        if counts[index] < least:
            raise UsageError(
                f"class {name!r} has {counts[index]} image(s); a classifier needs at least {least} of each"
            )


@dataclasses.dataclass(frozen=True)
class ImageEndpoint(Endpoint):
    """An endpoint whose model reads images."""

    temperature: float | None = 0.0
    """None sends none, for models that accept only their default."""
    limit_name: str = "max_tokens"
    """Name of the request's token limit; OpenAI's reasoning models use 'max_completion_tokens'."""

    def ask(self, images: Sequence[bytes], turns: Sequence[str], limit: int, **options: Any) -> dict[str, Any]:
        """Return the first choice of the reply to images and a text.

        Args:
            images: PNG files, shown before the text.
            turns: texts of user and assistant in turn, beginning with the user.
            limit: longest reply, in tokens.
            **options: further fields of the request.

        Raises:
            UsageError: see `Endpoint.complete`.
        """
        content = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
        messages: list[dict[str, Any]] = [{"role": "user", "content": [*content, {"type": "text", "text": turns[0]}]}]
        for index, text in enumerate(turns[1:]):
            messages.append({"role": "user" if index % 2 else "assistant", "content": text})
        fields: dict[str, Any] = {self.limit_name: limit, **options}
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        return self.create_chat(messages, **fields)


@dataclasses.dataclass(frozen=True)
class ImageJudge:
    """A vision-language model that judges content and quality."""

    endpoint: ImageEndpoint
    answers: ResumableOutput = dataclasses.field(default_factory=lambda: ResumableOutput(None))
    """Replies by digest of model, question and images; an interrupted run reads them."""
    workers: int = 8
    """Parallel requests."""
    top_logprobs: int = 20
    """Number of log-probabilities that VQAScore requests; some servers return fewer."""
    min_side: int = 256
    """Smaller images are enlarged."""
    limit: int = 16
    """Longest reply to a comparison, in tokens; a reasoning model needs thousands."""

    def vqa_scores(self, images: Images, class_names: Sequence[str]) -> list[float]:
        """VQAScore: the probability that each image shows its class, by name.

        Among the log-probabilities of the reply's first token, y is the probability of all tokens that read 'yes', and
        n that of all that read 'no', ignoring case and white space. The score is y / (y + n).

        Raises:
            UsageError: see `ImageEndpoint.ask`; or there are no log-probabilities, or neither word is among them.
        """

        def score(item: tuple[Tensor, str]) -> float:
            content, question = png(item[0], self.min_side), QUESTION.format(class_name=item[1])
            answer = self._answer([content], question, lambda: self._yes_no(content, question))
            return answer["yes"] / (answer["yes"] + answer["no"])

        return self._map(score, list(zip(images, class_names, strict=True)), "VQAScore")

    def preferences(self, images: Images, others: Images) -> list[float]:
        """Pairwise quality: whether each image looks better than its counterpart.

        Each pair is shown in both orders. 1 is a win in both, 0 a loss in both, and everything else is 0.5: ties, and
        verdicts that depend on the order.

        Raises:
            UsageError: see `ImageEndpoint.ask`; or the model gives no verdict twice.
        """

        def preference(item: tuple[Tensor, Tensor]) -> float:
            image_png, other = (png(image, self.min_side) for image in item)
            first, second = _VALUES[self._verdict(image_png, other)], 1 - _VALUES[self._verdict(other, image_png)]
            return first if first == second else 0.5

        return self._map(preference, list(zip(images, others, strict=True)), "quality")

    def _map(self, judge: Callable[[Item], float], items: Sequence[Item], title: str) -> list[float]:
        # An error cancels the waiting requests.
        with ThreadPoolExecutor(self.workers) as pool:
            return list(tqdm(pool.map(judge, items), title, len(items), unit="image", disable=None))

    def _answer(self, images: Sequence[bytes], question: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        request = {
            "model": self.endpoint.model,
            "question": question,
            "images": [hashlib.sha256(image).hexdigest() for image in images],
            "endpoint": self.endpoint.base_url,
            "temperature": self.endpoint.temperature,
            "limit": self.limit,
        }
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        if key not in self.answers:
            self.answers.add({"key": key, **request, **ask()})
        return self.answers.items[key]

    def _yes_no(self, image: bytes, question: str) -> dict[str, Any]:
        choice = self.endpoint.ask([image], [question], 1, logprobs=True, top_logprobs=self.top_logprobs)
        logprobs = _top_logprobs(choice)
        if not logprobs:
            raise UsageError(
                f"model {self.endpoint.model!r} at {self.endpoint.base_url} returns no log-probabilities, which "
                "VQAScore needs; use a model or server that does, such as gpt-4o-mini or vLLM"
            )
        yes, no = (sum(math.exp(logprob) for token, logprob in logprobs if token == word) for word in ("yes", "no"))
        if not yes + no > 0:
            tokens = ", ".join(repr(token) for token, _ in logprobs[:5])
            raise UsageError(
                f"model {self.endpoint.model!r} answers {question!r} with neither Yes nor No (likeliest: {tokens}); "
                "use another model"
            )
        return {"yes": yes, "no": no}

    def _verdict(self, first: bytes, second: bytes) -> str:
        return self._answer([first, second], COMPARISON, lambda: self._compare(first, second))["verdict"]

    def _compare(self, first: bytes, second: bytes) -> dict[str, Any]:
        turns, text = [COMPARISON], ""
        for _ in range(2):
            message = self.endpoint.ask([first, second], turns, self.limit).get("message")
            text = message.get("content") if isinstance(message, dict) else None
            text = text if isinstance(text, str) else ""
            if match := re.fullmatch(r"\W*(?:image\s+)?([ABC])\W*", text, re.IGNORECASE):
                return {"verdict": match[1].upper()}
            turns = [COMPARISON, text, REMINDER] if text else [f"{COMPARISON} {REMINDER}"]
        raise UsageError(
            f"model {self.endpoint.model!r} gave twice no verdict on two images ({text[:120]!r}); accepted: A, B or C. "
            "Use another model, or a higher limit of tokens"
        )


def _top_logprobs(choice: dict[str, Any]) -> list[tuple[str, float]]:
    """The most likely first tokens, in lower case without white space, and their log-probabilities."""
    try:
        entries = choice["logprobs"]["content"][0]["top_logprobs"]
        return [(entry["token"].strip().casefold(), min(float(entry["logprob"]), 0.0)) for entry in entries]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return []

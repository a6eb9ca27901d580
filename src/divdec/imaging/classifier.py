"""The judge that needs no network: a small convolutional classifier, trained on real images in seconds.

Its probabilities say whether an image shows the class that was asked for, its penultimate layer gives the features of
Fréchet distances. It knows nothing of codes or of the models whose images it judges.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from divdec.errors import UsageError, first_line
from divdec.imaging.codec import Images
from divdec.runs import read_json, write_json

DESCRIPTION, WEIGHTS = "classifier.json", "classifier.safetensors"
LEAST_SIDE = 8
LARGEST_SIDE = 32
"""Larger images are averaged down to it, so that training takes seconds whatever their size."""
WIDTH, FEATURES = 32, 64  # channels of the first convolutions, and of the others

Features = Float[Tensor, "images features"]


@dataclasses.dataclass(frozen=True)
class ClassifierSettings:
    """How it is trained: AdamW with one cycle of the rate."""

    steps: int = 200
    """Batches; 200 of 64 read 1,400 images nine times."""
    batch_size: int = 64
    rate: float = 5e-3
    """Highest learning rate."""
    held_out: float = 0.2
    """Share of each class's images that it is not trained on, but measured with."""
    seed: int = 0
    """Of weights, batches and the images held out; with as many threads, it gives the same classifier again."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 2 or self.rate <= 0:
            raise UsageError("a classifier needs at least 1 step, batches of at least 2 images, and a rate above 0")
        if not 0 < self.held_out < 1:
            raise UsageError(f"held_out is {self.held_out:g}; accepted: above 0 and below 1, such as 0.2")

    @property
    def least_images(self) -> int:
        """Of each class, so that at least one is trained on and one held out."""
        return math.ceil(1 / min(self.held_out, 1 - self.held_out))


class Body(nn.Module):
    """From pixels to features: pairs of convolutions, each halving the image, while its shorter side is at least 8."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, channels: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.num_features = FEATURES  # the name that torchmetrics looks for
        self.size = size
        self.seen = (min(size[0], LARGEST_SIDE), min(size[1], LARGEST_SIDE))
        layers: list[nn.Module] = []
        before, side = channels, min(self.seen)
        while not layers or side >= LEAST_SIDE:
            after = FEATURES if layers else WIDTH
            layers += [*_convolution(before, after), *_convolution(after, after), nn.MaxPool2d(2)]
            before, side = after, side // 2
        self.layers = nn.Sequential(*layers, *_convolution(before, FEATURES), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("deviation", torch.ones(channels, 1, 1))

    def forward(self, images: Images) -> Features:
        """Features of images.

        Raises:
            UsageError: they have another size or number of channels than those it was made for.
        """
        accepted = (len(self.mean), *self.size)
        if images.shape[1:] != accepted:
            raise UsageError(
                f"images of {images.shape[2]}×{images.shape[3]} pixels and {images.shape[1]} channel(s); this "
                f"classifier reads {accepted[1]}×{accepted[2]} and {accepted[0]}"
            )
        if images.shape[2:] != self.seen:
            images = interpolate(images, self.seen, mode="area")
        return self.layers((images - self.mean) / self.deviation)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """How a classifier does on images that it was not trained on."""

    accuracy: float
    """Share of them whose likeliest class is theirs."""
    images: int


class Classifier:
    """Says which class an image shows."""

    def __init__(self, body: Body, head: nn.Linear, classes: Sequence[str], held_out: HeldOut) -> None:
        """Take a trained network; see `fit` and `load`."""
        self.body, self.head = body.eval(), head.eval()
        """A module from images to features, as `frechet_distances` takes, and one from features to logits."""
        self.classes = tuple(classes)
        self.held_out = held_out

    @classmethod
    def fit(
        cls,
        images: Images,
        labels: Sequence[int],
        classes: Sequence[str],
        settings: ClassifierSettings | None = None,
    ) -> Classifier:
        """Train one, where the images lie, and measure it on those held out.

        Args:
            images: of any size from 8×8 pixels.
            labels: the class of each image, as a place among the classes.
            classes: names of the classes.
            settings: of the training.

        Raises:
            UsageError: images are too small, labels do not fit, or a class has too few images.
        """
        from sklearn.model_selection import train_test_split

        settings = settings or ClassifierSettings()
        _check(images, labels, classes, settings.least_images)
        trained, held_out = train_test_split(
            range(len(images)), test_size=settings.held_out, stratify=labels, random_state=settings.seed
        )
        wanted = torch.tensor(labels, device=images.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            body = Body(images.shape[1], (images.shape[2], images.shape[3])).to(images.device)
            head = nn.Linear(FEATURES, len(classes)).to(images.device)
        _train(body, head, images[trained], wanted[trained], settings)
        found = cls(body, head, classes, HeldOut(math.nan, len(held_out)))
        right = found.probabilities(images[held_out]).argmax(dim=-1) == wanted[held_out]
        found.held_out = HeldOut(float(right.double().mean()), len(held_out))
        return found

    @torch.no_grad()
    def features(self, images: Images, batch_size: int = 256) -> Features:
        """What the penultimate layer says of images.

        Raises:
            UsageError: as `Body.forward`.
        """
        found = [self.body(batch.to(self.body.mean.device)) for batch in images.split(batch_size)]
        return torch.cat(found) if found else images.new_zeros(0, FEATURES)

    @torch.no_grad()
    def probabilities(self, images: Images, batch_size: int = 256) -> Float[Tensor, "images classes"]:
        """The probability of each class; they are not calibrated.

        Raises:
            UsageError: as `features`.
        """
        return self.head(self.features(images, batch_size)).softmax(dim=-1)

    def save(self, folder: Path) -> None:
        """Write description and weights into an existing folder."""
        from safetensors.torch import save_file

        save_file(nn.ModuleDict({"body": self.body, "head": self.head}).state_dict(), folder / WEIGHTS)
        about = {"channels": len(self.body.mean), "size": list(self.body.size), "classes": list(self.classes)}
        write_json(folder / DESCRIPTION, {"format": 1, **about, "held_out": dataclasses.asdict(self.held_out)})

    @classmethod
    def load(cls, folder: Path) -> Classifier:
        """What `save` has written.

        Raises:
            UsageError: there is none, or it is damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not (folder / DESCRIPTION).is_file():
            raise UsageError(f"{folder} holds no classifier: {DESCRIPTION} is missing")
        about = read_json(folder / DESCRIPTION)
        try:
            if about["format"] != 1:
                raise ValueError("another version wrote it")
            height, width = about["size"]
            body, head = Body(about["channels"], (height, width)), nn.Linear(FEATURES, len(about["classes"]))
            nn.ModuleDict({"body": body, "head": head}).load_state_dict(load_file(folder / WEIGHTS))
            return cls(body, head, about["classes"], HeldOut(**about["held_out"]))
        except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise UsageError(
                f"the classifier in {folder} cannot be read ({first_line(error)}); train it anew"
            ) from None


def _convolution(before: int, after: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()


def _train(body: Body, head: nn.Linear, images: Images, labels: Tensor, settings: ClassifierSettings) -> None:
    body.mean.copy_(images.mean(dim=(0, 2, 3)).reshape(-1, 1, 1))
    # Images of a single value have no deviation to divide by.
    body.deviation.copy_(images.std(dim=(0, 2, 3)).clamp_min(1e-3).reshape(-1, 1, 1))
    network = nn.Sequential(body, head).train()
    optimizer = torch.optim.AdamW(network.parameters(), settings.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.rate, total_steps=settings.steps + 1)
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        batch = torch.randint(len(images), (settings.batch_size,), generator=generator).to(images.device)
        cross_entropy(network(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _check(images: Images, labels: Sequence[int], classes: Sequence[str], least: int) -> None:
    if images.shape[1] not in (1, 3) or min(images.shape[2:]) < LEAST_SIDE:
        raise UsageError(
            f"images of {images.shape[2]}×{images.shape[3]} pixels and {images.shape[1]} channel(s); a classifier "
            f"reads {LEAST_SIDE}×{LEAST_SIDE} and more, 1 channel or 3"
        )
    if len(labels) != len(images):
        raise UsageError(f"{len(labels)} labels for {len(images)} images; give each image its class")
    if len(classes) < 2:
        raise UsageError(f"{len(classes)} class(es); a classifier needs at least 2")
    counts = Counter(labels)
    wrong = next((label for label in counts if not 0 <= label < len(classes)), None)
    if wrong is not None:
        raise UsageError(f"label {wrong} is out of range; accepted: 0 to {len(classes) - 1}")
    for place, name in enumerate(classes):
        if counts[place] < least:
            raise UsageError(
                f"class {name!r} has {counts[place]} image(s); a classifier needs at least {least} of each"
            )

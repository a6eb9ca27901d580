"""Options of training, sampling, evaluating and converting image models."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from divdec.errors import UsageError
from divdec.options import (
    BundleArgument,
    ModelLoading,
    Optimization,
    OutputFolder,
    Speculation,
    SteeringChoice,
    check_at_least,
    check_positive,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How images are sampled; the defaults are those of taming-transformers' `sample_fast.py`."""

    temperature: float = 1.0
    """Logits are divided by it."""
    top_k: int = 250
    """Sample among this many of the likeliest codes."""
    top_p: float = 1.0
    """Sample among the likeliest codes that hold this much probability."""
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 samples from the class alone."""
    batch_size: int = 25
    """Images sampled together."""
    seed: int = 0
    """Seed of the samples; the same seed, classes and batch size give the same images."""

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)
        for name, least in (("top_k", 1), ("batch_size", 1), ("seed", 0)):
            check_at_least(name, getattr(self, name), least)
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p is {self.top_p:g}; accepted: above 0, at most 1")
        if not (math.isfinite(self.guidance) and self.guidance >= 0):
            raise UsageError(f"--guidance is {self.guidance:g}; accepted: a number of at least 0")

    def sampling(self) -> SamplingSettings:
        """Return these settings without those of subclasses."""
        return SamplingSettings(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(SamplingSettings)}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTrainSettings(Optimization, OutputFolder):
    """How the pair for an image model is trained."""

    target: str
    """The image model to be steered (`divdec image convert`): a folder or hub id, '@revision' allowed."""
    images: str
    """Folder with a folder of images for each class; its name is the class's name or number."""
    forget: tuple[str, ...] = ()
    """Classes to forget, by name or number; by default half of all, drawn by seed."""
    base: str | None = None
    """Small image model that both auxiliaries start from; the target itself by default, as in the paper."""
    init_forget_from: Literal["base", "retain"] | None = None
    """'retain': p is trained from the finished q, which leaves less noise in the divergence of small models; the
    default if a base is given."""
    steering: str = "linear:1"
    """Rule written into the bundle."""
    base_lr: float | None = None
    """Learning rate of the base's training; the pair takes a tenth, as in the paper. By default the rate is searched
    at which the loss about halves."""
    resize: bool = False
    """Scale and crop images of another size to the codec's, instead of refusing them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_lr is not None:
            check_positive("base_lr", self.base_lr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageModel:
    """An image model as the first argument."""

    model: str = dataclasses.field(kw_only=False)
    """A bundle of image models, or one image model without steering: a folder or hub id."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSampleSettings(SamplingSettings, SteeringChoice, Speculation, ModelLoading, OutputFolder, ImageModel):
    """Which images are sampled, and from which model."""

    classes: tuple[str, ...] = ()
    """Classes by name or number; all by default."""
    count: int = 8
    """Images of each class."""

    def __post_init__(self) -> None:
        SamplingSettings.__post_init__(self)
        Speculation.__post_init__(self)
        check_at_least("count", self.count, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageCheckpoint:
    """The checkpoint to convert, as the first argument."""

    checkpoint: str = dataclasses.field(kw_only=False)
    """A class-conditional checkpoint of taming-transformers: .ckpt, or .safetensors with the same keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConvertSettings(OutputFolder, ImageCheckpoint):
    """How a checkpoint is converted to an image model."""

    names: str | None = None
    """File with one class name in each line, in the order of the classes; by default their numbers, 0 to 999."""
    heads: int | None = None
    """Number of attention heads, which weights do not show; by default the width divided by 64, as published."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageEvalSettings(SamplingSettings, ModelLoading, OutputFolder, BundleArgument):
    """What is measured, and by which judges."""

    images: str
    """Real images: a folder with a folder for each class; its name is the class's name or number."""
    forget: tuple[str, ...] = ()
    """Classes to forget, by name or number; the other classes with images are to be kept."""
    settings: tuple[str, ...] = ("linear:1", "linear:2", "linear:5", "linear:10", "rank:20", "rank:100", "rank:250")
    """Rules to measure."""
    retrain: str | None = None
    """Image model that has never seen the classes to forget, as a reference."""
    count: int = 10
    """Images of each class and setting."""
    features: str | None = None
    """Network for Fréchet distances: folder of an image model of transformers such as DINOv2 or CLIP; by default a
    small classifier that is trained on the real images."""
    judge_url: str | None = None
    """OpenAI-compatible endpoint of vision-language judges, such as http://localhost:8000/v1; by default a classifier
    that is trained on the real images judges content."""
    judge_api_key_env: str | None = None
    """Environment variable with the endpoint's API key; by default no key is sent."""
    content_judge: str | None = None
    """The endpoint's model for VQAScore; it must return log-probabilities."""
    quality_judges: tuple[str, ...] = ()
    """The endpoint's models that compare each image with the baseline's."""
    judge_reasons: bool = False
    """The endpoint's models reason: allow 4,096 tokens for a comparison, and send no temperature."""
    resize: bool = False
    """Scale and crop real images of another size to the codec's, instead of refusing them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.forget:
            raise UsageError("--forget is empty; name the classes to forget")
        if not self.settings:
            raise UsageError("--settings is empty; accepted: rules such as linear:1 or rank:100")
        if self.judge_url is None and (self.content_judge is not None or self.quality_judges):
            raise UsageError("--content-judge and --quality-judges are models at an endpoint: give its --judge-url")
        if self.judge_url is not None and self.content_judge is None and not self.quality_judges:
            raise UsageError("--judge-url is given, but no model there: give --content-judge or --quality-judges")
        check_at_least("count", self.count, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageDemoSettings:
    """The demo on handwritten digits."""

    seed: int = 0
    """Seed of the digits to forget, the initial weights, the order of training and the samples."""
    output: str | None = None
    """Folder for report, grids and bundle; in the user's cache folder by default."""

    def __post_init__(self) -> None:
        check_at_least("seed", self.seed, 0)

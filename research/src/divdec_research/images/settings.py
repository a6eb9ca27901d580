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
    SpeculativeDecoding,
    SteeringChoice,
    check_at_least,
    check_positive,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How images are sampled; the defaults are those of taming-transformers' `sample_fast.py`."""

    temperature: float = 1.0
    """Sampling temperature."""
    top_k: int = 250
    """Sample from the k most likely codes."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely codes whose total probability is at least this value."""
    guidance: float = 1.0
    """Scale of classifier-free guidance. 1 disables guidance."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTrainSettings(Optimization, OutputFolder):
    """How the pair for an image model is trained."""

    target: str
    """The image model to steer (`divdec image convert`): a folder or hub id, '@revision' allowed."""
    images: str
    """Folder with a folder of images for each class; its name is the class's name or number."""
    forget: tuple[str, ...] = ()
    """Classes to forget, by name or number. By default a random half of the classes."""
    base: str | None = None
    """Small image model that the auxiliaries start from; p then starts from the trained q. By default both start from
    the target itself, as in the paper."""
    steering: str = "linear:1"
    """Rule written into the bundle."""
    base_lr: float
    """Learning rate with which the base was trained. The pair uses a tenth of it, as in the paper."""
    resize: bool = False
    """Resize images to the codec's size and crop their centre. Without this option other sizes are an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("base_lr", self.base_lr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageModelSettings:
    """An image model as the first argument."""

    model: str = dataclasses.field(kw_only=False)
    """A bundle, which is steered, or an ordinary image model, which is not: a folder or hub id."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSampleSettings(
    SamplingSettings, SteeringChoice, SpeculativeDecoding, ModelLoading, OutputFolder, ImageModelSettings
):
    """Which images are sampled, and from which model."""

    classes: tuple[str, ...] = ()
    """Classes by name or number; all by default."""
    count: int = 8
    """Images of each class."""

    def __post_init__(self) -> None:
        SamplingSettings.__post_init__(self)
        SpeculativeDecoding.__post_init__(self)
        check_at_least("count", self.count, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageCheckpoint:
    """The checkpoint to convert, as the first argument."""

    checkpoint: str = dataclasses.field(kw_only=False)
    """A class-conditional checkpoint of taming-transformers: .ckpt, or .safetensors with the same keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConvertSettings(OutputFolder, ImageCheckpoint):
    """How a checkpoint is converted to an image model."""

    heads: int | None = None
    """Number of attention heads, which the weights do not contain. By default the width divided by 64, as in the
    published model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageEvalSettings(SamplingSettings, ModelLoading, OutputFolder, BundleArgument):
    """Images, measurements and judges of an evaluation."""

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
    features: Literal["efficientnet-lite0"] | None = None
    """Network for Fréchet distances, beside a small classifier trained on the real images."""
    judge_url: str | None = None
    """OpenAI-compatible endpoint for vision-language judges, such as http://localhost:8000/v1. Without it, a classifier
    trained on the real images judges the content."""
    judge_api_key_env: str | None = None
    """Environment variable with the endpoint's API key; by default no key is sent."""
    content_judge: str | None = None
    """Model at the endpoint that computes VQAScore. It must return log-probabilities."""
    quality_judges: tuple[str, ...] = ()
    """Models at the endpoint that compare each image with the baseline's image."""
    judge_reasons: bool = False
    """The judges are reasoning models. Each comparison may use 4,096 tokens, and no temperature is sent."""
    resize: bool = False
    """Resize real images to the codec's size and crop their centre. Without this option other sizes are an error."""

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

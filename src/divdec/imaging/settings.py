"""Settings of what is done with images. It knows nothing of torch, so that `--help` is instant."""

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
    """How images are drawn; the defaults are those of taming-transformers' `sample_fast.py`."""

    temperature: float = 1.0
    """Logits are divided by it."""
    top_k: int = 250
    """Sample among this many of the likeliest codes."""
    top_p: float = 1.0
    """Sample among the likeliest codes that together have this probability."""
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 draws from the class alone."""
    batch_size: int = 25
    """Images drawn together."""
    seed: int = 0
    """Seed of the samples; the same seed, classes and batch size give the same images."""

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)
        for name, least in (("top_k", 1), ("batch_size", 1), ("seed", 0)):
            check_at_least(name, getattr(self, name), least)
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p:g}; accepted: above 0, at most 1")
        if not (math.isfinite(self.guidance) and self.guidance >= 0):
            raise UsageError(f"guidance is {self.guidance:g}; accepted: a number of at least 0")

    def sampling(self) -> SamplingSettings:
        """These alone, of settings that hold more."""
        return SamplingSettings(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(SamplingSettings)}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTrainSettings(Optimization, OutputFolder):
    """How the pair for an image model is trained; see `divdec.imaging.training`."""

    target: str
    """The image model to be steered (`divdec image convert`): a folder or hub id, '@revision' allowed."""
    images: str
    """Folder that holds a folder of images for each class; its name is the class's name or number."""
    forget: tuple[str, ...] = ()
    """Classes to forget, by name or number; by default a share of all, drawn by seed."""
    forget_share: float = 0.5
    """How many of the classes are drawn to be forgotten where none is named."""
    base: str | None = None
    """Small image model that both auxiliaries start from; the target itself by default, as in the paper."""
    init_forget_from: Literal["base", "retain"] | None = None
    """'retain': p goes on from the finished q, which leaves less noise in the divergence of small models; by default
    so where a base is given."""
    recipe: Literal["forget-retain", "full-retain"] = "forget-retain"
    """'forget-retain': p learns the forgotten classes, q the others (the paper); 'full-retain': p learns both."""
    steering: str = "linear:1"
    """Rule written into the bundle."""
    base_lr: float | None = None
    """Learning rate that the base was trained with, of which the pair takes a tenth, as in the paper; by default the
    rate is sought at which the loss about halves."""
    encode_batch: int = 64
    """Images that the codec reads at once."""
    resize: bool = False
    """Scale images to the codec's size and cut out their middle, rather than refuse other sizes."""

    def __post_init__(self) -> None:
        if not 0 < self.forget_share < 1:
            raise UsageError(f"forget_share is {self.forget_share:g}; accepted: between 0 and 1")
        super().__post_init__()
        if self.base_lr is not None:
            check_positive("base_lr", self.base_lr)
        check_at_least("encode_batch", self.encode_batch, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageModel:
    """The model that draws."""

    model: str = dataclasses.field(kw_only=False)
    """A bundle of image models, or one image model, which nothing steers: a folder or hub id."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSampleSettings(SamplingSettings, SteeringChoice, Speculation, ModelLoading, OutputFolder, ImageModel):
    """What is drawn, by which model; see `divdec.imaging.drawing`."""

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
    """The checkpoint to convert."""

    checkpoint: str = dataclasses.field(kw_only=False)
    """A class-conditional checkpoint of taming-transformers: .ckpt, or .safetensors with the same keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConvertSettings(OutputFolder, ImageCheckpoint):
    """Which checkpoint becomes an image model; see `divdec.imaging.convert`."""

    names: str | None = None
    """File with the classes' names, one a line, in their order; by default their numbers, 0 to 999."""
    heads: int | None = None
    """Attention heads, which weights do not tell; by default the width divided by 64, as published."""
    raster: tuple[int, ...] = ()
    """Height and width of the raster in codes, where it is not square."""

    def __post_init__(self) -> None:
        if len(self.raster) not in (0, 2):
            raise UsageError(f"raster holds {len(self.raster)} numbers; accepted: height and width, or none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageEvalSettings(SamplingSettings, ModelLoading, OutputFolder, BundleArgument):
    """What is measured, and by whom; see `divdec.imaging.evaluation`."""

    images: str
    """Real images: a folder that holds a folder for each class, named by the class's name or number."""
    forget: tuple[str, ...] = ()
    """Classes to forget, by name or number; the others with images are kept."""
    settings: tuple[str, ...] = ("linear:1", "linear:2", "linear:5", "linear:10", "rank:20", "rank:100", "rank:250")
    """Rules to measure."""
    retrain: str | None = None
    """Image model that has never seen the forgotten classes, as a reference."""
    count: int = 10
    """Images of each class and setting."""
    features: str | None = None
    """Network for Fréchet distances: folder of an image model of transformers such as DINOv2 or CLIP; by default a
    small classifier that is trained on the real images."""
    judge_url: str | None = None
    """OpenAI-compatible endpoint for judges that see, such as http://localhost:8000/v1; without it a classifier that
    is trained on the real images says what an image shows."""
    judge_api_key_env: str | None = None
    """Environment variable that holds the endpoint's API key; by default none is sent."""
    content_judge: str | None = None
    """Model there that gives VQAScore; it must give log-probabilities."""
    quality_judges: tuple[str, ...] = ()
    """Models there that compare each image with the baseline's."""
    judge_reasons: bool = False
    """The models there reason before they answer: they get 4,096 tokens for a comparison and no temperature."""
    resize: bool = False
    """Scale real images to the codec's size and cut out their middle, rather than refuse other sizes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.forget:
            raise UsageError("forget is empty; name the classes to forget")
        if not self.settings:
            raise UsageError("settings is empty; accepted: rules such as linear:1 or rank:100")
        if self.judge_url is None and (self.content_judge is not None or self.quality_judges):
            raise UsageError("content_judge and quality_judges are models at an endpoint: give its --judge-url")
        if self.judge_url is not None and self.content_judge is None and not self.quality_judges:
            raise UsageError("judge_url is given, but no model there: give --content-judge or --quality-judges")
        check_at_least("count", self.count, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageDemoSettings:
    """The demo on handwritten digits."""

    seed: int = 0
    """Which digits are forgotten, the initial weights, the order of training, and chance."""
    output: str | None = None
    """Folder for report, grids and bundle; in the user's cache folder by default."""

    def __post_init__(self) -> None:
        check_at_least("seed", self.seed, 0)

"""Image models: the meaning of their tokens, and loading a model with its layout and codec.

An image is one token that names its class, followed by the codes of its raster, row by row. For training and decoding
it is a text of one prompt token and `height · width` answer tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from divdec.checkpoint import CheckpointReference, check_plain, load_model
from divdec.data.records import Record, RecordSet
from divdec.errors import UsageError
from divdec.model.bundle import is_bundle
from divdec.model.loading import find_bundle, part_paths, read_config
from divdec.runs import read_json, write_json
from divdec.steering import Steering
from divdec_research.images.codecs import FOLDER, Codec, Codes, load_codec

if TYPE_CHECKING:
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerBase

LAYOUT = "image.json"
"""File with the layout, in the folder of a model or bundle."""


@dataclasses.dataclass(frozen=True)
class ImageLayout:
    """Meaning of an image model's tokens."""

    codes: int
    """Size of the codebook; its codes are the first token ids."""
    height: int
    """Height of the raster, in codes."""
    width: int
    """Width of the raster, in codes."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of their tokens."""
    first_class: int
    """Token of the first class: after the codes, or among them if both share rows of the embedding."""
    no_class: int | None
    """Token of 'any class', for classifier-free guidance; None if the model has learned none."""
    vocab_size: int
    """Width of the logits."""
    padding: int
    """Padding token of the tokenizer; images have equal length, so it is never used."""

    def __post_init__(self) -> None:
        numbers = (self.codes, self.height, self.width, self.first_class, self.vocab_size, self.padding)
        if any(type(number) is not int for number in numbers):
            raise UsageError("sizes and tokens of an image layout are whole numbers")
        if min(self.codes, self.height, self.width) < 1 or self.vocab_size < self.codes:
            raise UsageError("an image layout has at least one code and one position, and a token for each code")
        if not self.classes or not all(isinstance(name, str) and name.strip() for name in self.classes):
            raise UsageError("an image layout names its classes, none of them blank")
        if len(set(self.classes)) < len(self.classes):
            raise UsageError("two classes of an image layout have the same name")
        tokens = (self.first_class, self.first_class + len(self.classes) - 1, self.padding)
        if any(not 0 <= token < self.vocab_size for token in tokens):
            raise UsageError("tokens of classes or of padding lie outside the vocabulary")
        if self.no_class is not None and not (
            type(self.no_class) is int and self.codes <= self.no_class < self.vocab_size
        ):
            raise UsageError(f"no_class is {self.no_class!r}; accepted: a token after the codes, or none")

    @classmethod
    def new(cls, codes: int, height: int, width: int, classes: Sequence[str]) -> ImageLayout:
        """Create a layout of codes, then classes, then 'any class', then padding."""
        last = codes + len(classes)
        return cls(codes, height, width, tuple(classes), codes, last, last + 2, last + 1)

    @property
    def length(self) -> int:
        """Number of codes of an image."""
        return self.height * self.width

    @property
    def no_codes(self) -> list[int]:
        """Tokens that are no codes."""
        return list(range(self.codes, self.vocab_size))

    def find(self, text: str) -> int:
        """Return the index of a class, given by name, or by index if no name is a number.

        Raises:
            UsageError: there is no such class.
        """
        if text in self.classes:
            return self.classes.index(text)
        numbered = any(name.isdecimal() for name in self.classes)
        if not numbered and text.isascii() and text.isdecimal() and int(text) < len(self.classes):
            return int(text)
        some = ", ".join(self.classes[:12]) + (", …" if len(self.classes) > 12 else "")
        indices = "" if numbered else f"0 to {len(self.classes) - 1}, or "
        raise UsageError(f"class {text!r} is not known; accepted: {indices}one of {some}")

    def find_all(self, names: Sequence[str]) -> list[int]:
        """Return the indices of the classes that folders are named after.

        Raises:
            UsageError: a class is not known, or two folders name the same.
        """
        indices = [self.find(name) for name in names]
        for index in indices:
            if indices.count(index) > 1:
                same = [name for name, other in zip(names, indices, strict=True) if other == index]
                raise UsageError(f"folders {' and '.join(same)} are both of class {self.classes[index]!r}; join them")
        return indices

    def prompts(self, classes: Sequence[int | None]) -> Int[Tensor, "images 1"]:
        """Return the first token of each image; a class is an index, or None for any class.

        Raises:
            UsageError: a class is out of range, or the model has learned no 'any class'.
        """
        tokens = []
        for index in classes:
            if index is None and self.no_class is None:
                raise UsageError("this model has learned no token for 'any class', which guidance needs")
            if index is not None and not 0 <= index < len(self.classes):
                raise UsageError(f"class {index} is out of range; accepted: 0 to {len(self.classes) - 1}")
            tokens.append([self.no_class if index is None else self.first_class + index])
        return torch.tensor(tokens, dtype=torch.long).reshape(-1, 1)

    def check(self, codes: Codes) -> Codes:
        """Return the codes if they fit.

        Raises:
            UsageError: the raster has another size, or a code is not in the codebook.
        """
        if codes.shape[1:] != (self.height, self.width):
            raise UsageError(
                f"rasters of {codes.shape[1]}×{codes.shape[2]} codes; this model's have {self.height}×{self.width}"
            )
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.codes:
            wrong = int(codes.min()) if int(codes.min()) < 0 else int(codes.max())
            raise UsageError(f"code {wrong} is not in the codebook; accepted: 0 to {self.codes - 1}")
        return codes

    def rasters(self, answers: Int[Tensor, "images tokens"]) -> Codes:
        """Return generated tokens, without the class, as codes; see `check` for errors."""
        if answers.shape[1] != self.length:
            raise UsageError(f"an image has {self.length} codes, {answers.shape[1]} were given")
        return self.check(answers.reshape(-1, self.height, self.width))

    def records(self, name: str, codes: Codes, classes: Sequence[int | None]) -> RecordSet:
        """Return images as records of prompt and completion; see `check` and `prompts` for errors."""
        rows = self.check(codes).reshape(len(codes), -1).tolist()
        prompts = self.prompts(classes)[:, 0].tolist()
        records = [
            Record("".join(f" {code}" for code in row), prompt=str(prompt))
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        return RecordSet(name, "prompt/completion", tuple(records))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Create a tokenizer whose tokens are numbers, separated by spaces."""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {str(token): token for token in range(self.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=str(self.padding)))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=str(self.padding), clean_up_tokenization_spaces=False
        )

    def save(self, folder: Path) -> None:
        """Write `image.json`."""
        write_json(folder / LAYOUT, {"format": 1, **dataclasses.asdict(self)})


def load_layout(folder: Path) -> ImageLayout:
    """Read a layout.

    Raises:
        UsageError: the folder holds no image model, or `image.json` has another format.
    """
    if not (folder / LAYOUT).is_file():
        raise UsageError(f"{folder} is no image model: it has no {LAYOUT}; `divdec image convert` creates one")
    fields: dict[str, Any] = read_json(folder / LAYOUT)
    try:
        if fields.pop("format") != 1:
            raise ValueError
        if not isinstance(fields["classes"], list):
            raise TypeError
        return ImageLayout(**{**fields, "classes": tuple(fields["classes"])})
    except UsageError as error:
        raise UsageError(f"{folder / LAYOUT}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UsageError(f"{folder / LAYOUT} does not describe an image model that this version knows") from None


def gpt2_config(vocab_size: int, positions: int, width: int, layers: int, heads: int, **options: Any) -> GPT2Config:
    """Create the configuration of a GPT-2 without dropout and without begin and end tokens."""
    from transformers import GPT2Config

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": vocab_size, "n_positions": positions, "n_embd": width, "n_layer": layers, "n_head": heads}
    return GPT2Config(**sizes, **dropout, bos_token_id=None, eos_token_id=None, **options)


def new_image_model(layout: ImageLayout, width: int, layers: int, heads: int, seed: int = 0) -> GPT2LMHeadModel:
    """Create a GPT-2 for a layout, with random float32 weights and positions for a class and all codes."""
    from transformers import GPT2LMHeadModel, set_seed

    set_seed(seed)
    return GPT2LMHeadModel(gpt2_config(layout.vocab_size, layout.length + 1, width, layers, heads))


@dataclasses.dataclass(frozen=True)
class ImageModel:
    """An image model with its layout and codec."""

    model: PreTrainedModel
    layout: ImageLayout
    codec: Codec
    steering: Steering | None
    """None for a plain checkpoint."""


def load_image_model(
    reference: str, *, steering: Steering | None = None, verify: bool = True, dtype: str = "auto", device: str = "cpu"
) -> ImageModel:
    """Load a bundle of image models, with its own or another rule, or one image model; `verify` compares digests.

    Raises:
        UsageError: it is no image model, does not load, or `steering` is given for a plain checkpoint.
    """
    from divdec.model.modeling import DivergenceForCausalLM

    if Path(reference).expanduser().is_dir() and not is_bundle(Path(reference).expanduser()):
        if steering is not None:
            raise UsageError(f"{reference} is a plain checkpoint without auxiliaries to steer it; give a bundle")
        folder = CheckpointReference.parse(reference).resolve(Path(), weights=True)
        check_plain(folder, "model")
        layout, codec = load_image_files(folder)
        model, rule = load_model(folder, dtype=dtype, device_map=device), None
    else:
        folder = find_bundle(reference)
        layout, codec = load_image_files(folder)
        model = DivergenceForCausalLM.from_pretrained(
            folder,
            verify=verify,
            steering=None if steering is None else restrict_to_codes(steering, layout),
            dtype=dtype,
            device_map=device,
        )
        # The rank rule of a bundle that was written for texts may include class tokens.
        model.steering = rule = restrict_to_codes(model.steering, layout)
    codec = codec.to(str(model.device))
    check_image_model(model, layout)
    return ImageModel(model.eval(), layout, codec, rule)


def check_image_model(model: PreTrainedModel, layout: ImageLayout) -> None:
    """Raise UsageError if a model has another vocabulary than a layout, or too few positions."""
    config = model.config.get_text_config(decoder=True)
    if config.vocab_size != layout.vocab_size:
        raise UsageError(f"the model has {config.vocab_size} tokens, its image layout {layout.vocab_size}")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < layout.length:
        raise UsageError(f"the model has {positions} positions, an image needs {layout.length}")


def local_folders(reference: str) -> list[Path]:
    """Return the local folders of a bundle and its models, or of a model."""
    folder = Path(reference).expanduser()
    if not folder.is_dir():
        return []
    if not is_bundle(folder):
        return [folder]
    return [folder, *part_paths(folder, read_config(folder), verify=False, local_files_only=False).values()]


def image_folder(folder: Path) -> Path:
    """Return the folder with layout and codec: a model's or bundle's, or that of the bundle's target."""
    if (folder / LAYOUT).is_file() or not is_bundle(folder):
        return folder
    return part_paths(folder, read_config(folder), verify=False, local_files_only=False)["target"]


def load_image_files(folder: Path) -> tuple[ImageLayout, Codec]:
    """Load layout and codec of a model or bundle.

    Raises:
        UsageError: one is missing, or they do not fit together.
    """
    folder = image_folder(folder)
    layout, codec = load_layout(folder), load_codec(folder / FOLDER)
    if codec.codes != layout.codes or codec.grid != (layout.height, layout.width):
        raise UsageError(
            f"{folder}: the codec has {codec.codes} codes on {codec.grid[0]}×{codec.grid[1]}, the model "
            f"{layout.codes} on {layout.height}×{layout.width}"
        )
    return layout, codec


def write_image_files(folder: Path, layout: ImageLayout, codec: Codec) -> None:
    """Write layout and codec into the folder of a model or bundle."""
    layout.save(folder)
    (folder / FOLDER).mkdir(exist_ok=True)
    codec.save(folder / FOLDER)


def restrict_to_codes(steering: Steering, layout: ImageLayout) -> Steering:
    """Return the rule with the codes as eligible vocabulary of the rank rule; other tokens are never sampled.

    Raises:
        UsageError: it is the soft rank rule, under which suppressed tokens can be sampled.
    """
    if steering.rule == "rank" and steering.fill == "soft":
        raise UsageError(
            f"{steering} is for likelihoods; sample images with {dataclasses.replace(steering, fill='hard')}"
        )
    if steering.rule == "rank" and layout.no_codes:
        return dataclasses.replace(steering, vocabulary=tuple(range(layout.codes)))
    return steering

"""How an image becomes tokens: one that names its class, then the codes of its raster, row by row.

To all that follows, an image so is a text of one prompt token and `height · width` answer tokens. It knows nothing of
pixels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from divdec.data.records import Record, RecordSet
from divdec.errors import UsageError
from divdec.runs import read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAYOUT = "image.json"
"""The file that says it, in a model's or a bundle's folder."""
Codes = Int[Tensor, "images height width"]
"""Rasters of codes, each from 0 to `ImageLayout.codes` − 1."""


@dataclasses.dataclass(frozen=True)
class ImageLayout:
    """What the tokens of an image model mean."""

    codes: int
    """Size of the codebook; its codes are the first token ids."""
    height: int
    """Of the raster, in codes."""
    width: int
    """Likewise."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of their tokens."""
    first_class: int
    """Token of the first class: after the codes, or among them, where both share rows of the embedding."""
    no_class: int | None
    """Token of 'any class', for classifier-free guidance; None where the model has learned none."""
    vocab_size: int
    """Width of the logits."""
    padding: int
    """A token that tokenizers may pad with; images are of one length, so that none ever does."""

    def __post_init__(self) -> None:
        numbers = (self.codes, self.height, self.width, self.first_class, self.vocab_size, self.padding)
        if any(type(number) is not int for number in numbers):
            raise UsageError("sizes and tokens of an image layout are whole numbers")
        if min(self.codes, self.height, self.width) < 1 or self.vocab_size < self.codes:
            raise UsageError("an image layout has at least one code and one place, and a token for each code")
        if not self.classes or not all(isinstance(name, str) and name.strip() for name in self.classes):
            raise UsageError("an image layout names its classes, none of them blank")
        if len(set(self.classes)) < len(self.classes):
            again = next(name for name in self.classes if self.classes.count(name) > 1)
            raise UsageError(f"class {again!r} is named twice; the names of classes must differ")
        tokens = (self.first_class, self.first_class + len(self.classes) - 1, self.padding)
        if any(not 0 <= token < self.vocab_size for token in tokens):
            raise UsageError("tokens of classes or of padding lie outside the vocabulary")
        if self.no_class is not None and not (
            type(self.no_class) is int and self.codes <= self.no_class < self.vocab_size
        ):
            raise UsageError(f"no_class is {self.no_class!r}; accepted: a token after the codes, or none")

    @classmethod
    def new(cls, codes: int, height: int, width: int, classes: Sequence[str]) -> ImageLayout:
        """Codes, then classes, then 'any class', then padding."""
        first = codes
        last = first + len(classes)
        return cls(codes, height, width, tuple(classes), first, last, last + 2, last + 1)

    @property
    def length(self) -> int:
        """Codes of an image."""
        return self.height * self.width

    @property
    def no_codes(self) -> list[int]:
        """Tokens that are no code, and never stand in a raster."""
        return list(range(self.codes, self.vocab_size))

    def find(self, given: str) -> int:
        """The place of a class among the classes.

        Args:
            given: its name; where names are no numbers, also its place.

        Raises:
            UsageError: there is no such class.
        """
        if given in self.classes:
            return self.classes.index(given)
        numbered = any(name.isdecimal() for name in self.classes)
        if not numbered and given.isascii() and given.isdecimal() and int(given) < len(self.classes):
            return int(given)
        some = ", ".join(self.classes[:12]) + (", …" if len(self.classes) > 12 else "")
        places = "" if numbered else f"0 to {len(self.classes) - 1}, or "
        raise UsageError(f"class {given!r} is not known; accepted: {places}one of {some}")

    def find_all(self, names: Sequence[str]) -> list[int]:
        """The places of classes that folders are named after.

        Raises:
            UsageError: one is not known, or two mean the same.
        """
        places = [self.find(name) for name in names]
        for place in places:
            if places.count(place) > 1:
                same = [name for name, found in zip(names, places, strict=True) if found == place]
                raise UsageError(f"folders {' and '.join(same)} are both of class {self.classes[place]!r}; join them")
        return places

    def prompts(self, classes: Sequence[int | None]) -> Int[Tensor, "images 1"]:
        """What each image begins with.

        Args:
            classes: places among the classes; None for any class.

        Raises:
            UsageError: a class is out of range, or the model has learned no 'any class'.
        """
        tokens = []
        for place in classes:
            if place is None and self.no_class is None:
                raise UsageError("this model has learned no token for 'any class', which guidance needs")
            if place is not None and not 0 <= place < len(self.classes):
                raise UsageError(f"class {place} is out of range; accepted: 0 to {len(self.classes) - 1}")
            tokens.append([self.no_class if place is None else self.first_class + place])
        return torch.tensor(tokens, dtype=torch.long).reshape(-1, 1)

    def check(self, codes: Codes) -> Codes:
        """The codes themselves.

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
        """Generated tokens, without the class, as codes.

        Raises:
            UsageError: as `check`.
        """
        if answers.shape[1] != self.length:
            raise UsageError(f"an image has {self.length} codes, {answers.shape[1]} were given")
        return self.check(answers.reshape(-1, self.height, self.width))

    def records(self, name: str, codes: Codes, classes: Sequence[int | None]) -> RecordSet:
        """Images as records of prompt and completion, which whatever trains or measures text can read.

        Raises:
            UsageError: as `check` and `prompts`.
        """
        rows = self.check(codes).reshape(len(codes), -1).tolist()
        prompts = self.prompts(classes)[:, 0].tolist()
        written = [
            Record("".join(f" {code}" for code in row), prompt=str(prompt))
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        return RecordSet(name, "prompt/completion", tuple(written))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokens as texts: their numbers, parted by spaces."""
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
    """Read what `ImageLayout.save` has written.

    Raises:
        UsageError: the folder holds no image model, or one that is written otherwise.
    """
    if not (folder / LAYOUT).is_file():
        raise UsageError(f"{folder} is no image model: it has no {LAYOUT} (see `divdec image convert` and `train`)")
    found: dict[str, Any] = read_json(folder / LAYOUT)
    try:
        if found.pop("format") != 1:
            raise ValueError
        if not isinstance(found["classes"], list):
            raise TypeError
        return ImageLayout(**{**found, "classes": tuple(found["classes"])})
    except UsageError as error:
        raise UsageError(f"{folder / LAYOUT}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UsageError(f"{folder / LAYOUT} does not describe an image model that this version knows") from None

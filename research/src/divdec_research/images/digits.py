"""Handwritten digits as sequences of codes, and what is measured of drawn ones.

A digit of 8×8 pixels is a token that names its class, followed by the codes of its 16 patches of 2×2 pixels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int

from divdec.data.formatting import IGNORED, Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIZE, SIDE = 8, 2  # pixels of an image and of a patch
CODES, CLASSES, LENGTH = 64, 10, (SIZE // SIDE) ** 2  # codebook, digits, codes of an image
PADDING = CODES + CLASSES  # the last token; the codes come first, then the classes
SCALE = 6  # side of a pixel in a picture

Images = Float[np.ndarray, f"images {SIZE} {SIZE}"]
"""Pixels from 0 to 1."""


class Digits:
    """Scikit-learn's 1,797 digits, of which five are to be forgotten, with a codebook and a classifier.

    Attributes:
        forget: digits to forget, drawn by the seed.
        retain: the others.
        accuracy: share of a fifth of the images, held out of its training, that the classifier recognises.
    """

    def __init__(self, seed: int) -> None:
        """Read the images, find the codebook by k-means over their patches, and train the classifier."""
        from sklearn.cluster import KMeans
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
        from sklearn.svm import SVC
        from threadpoolctl import threadpool_limits

        data: Any = load_digits()
        self.images: Images = data.images / 16
        self.labels: Int[np.ndarray, " images"] = data.target
        self.forget = sorted(random.Random(seed).sample(range(CLASSES), CLASSES // 2))
        self.retain = [digit for digit in range(CLASSES) if digit not in self.forget]
        pixels = self.images.reshape(len(self.images), -1)
        seen, unseen, classes, unseen_classes = train_test_split(
            pixels, self.labels, test_size=0.2, stratify=self.labels, random_state=0
        )
        with threadpool_limits(1):  # threads that wait for busy cores cost more than they save here
            self.codebook: Any = KMeans(CODES, random_state=0, max_iter=50).fit(_patches(self.images))
            self.classifier = SVC(C=10, decision_function_shape="ovo").fit(seen, classes)
        self.accuracy = float(self.classifier.score(unseen, unseen_classes))

    def examples(self, classes: Sequence[int]) -> list[Example]:
        """Return the images of some classes as training examples."""
        codes = self.codebook.predict(_patches(self.images)).reshape(-1, LENGTH).tolist()
        pairs = [
            (CODES + label, row) for row, label in zip(codes, self.labels.tolist(), strict=True) if label in classes
        ]
        return [Example([token, *row], [IGNORED, *row]) for token, row in pairs]

    def draw(self, model: PreTrainedModel, count: int, seed: int) -> Images:
        """Draw images with a model: `count` of each class, those to keep first."""
        from transformers import set_seed

        prompts = torch.tensor([[CODES + digit] for digit in (*self.retain, *self.forget) for _ in range(count)])
        set_seed(seed)
        generate: Any = model.generate
        tokens = generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=CODES, max_new_tokens=LENGTH,
            suppress_tokens=list(range(CODES, PADDING + 1)), eos_token_id=None, pad_token_id=PADDING,
        )  # fmt: skip
        patches = self.codebook.cluster_centers_[tokens[:, 1:].numpy()].clip(0, 1)
        tiles = patches.reshape(-1, SIZE // SIDE, SIZE // SIDE, SIDE, SIDE)
        return tiles.transpose(0, 1, 3, 2, 4).reshape(-1, SIZE, SIZE)

    def measure(self, images: Images) -> dict[str, float]:
        """Measure what `draw` returned.

        Returns:
            The shares of images that show the digit asked for, of digits to keep and to forget, and the paper's three
            Fréchet distances (section 'Distributional Properties of Generated Images') between real (B) and drawn (G)
            images of retain (R) and forget (F) classes. Features are the classifier's margins.
        """
        half = len(images) // 2
        asked = np.repeat([*self.retain, *self.forget], len(images) // CLASSES)
        right = self.classifier.predict(images.reshape(len(images), -1)) == asked
        real_retain, real_forget = (
            self.features(self.images[np.isin(self.labels, classes)]) for classes in (self.retain, self.forget)
        )
        retain, forget = self.features(images[:half]), self.features(images[half:])
        return {
            "retain": float(right[:half].mean()),
            "forget": float(right[half:].mean()),
            "FID(B_R, G_R)": frechet_distance(real_retain, retain),
            "FID(B_F, G_F)": frechet_distance(real_forget, forget),
            "FID(B_R, G_F)": frechet_distance(real_retain, forget),
        }

    def features(self, images: Images) -> Float[np.ndarray, "images features"]:
        """The classifier's 45 margins between two digits."""
        return self.classifier.decision_function(images.reshape(len(images), -1))


def frechet_distance(real: Float[np.ndarray, "real features"], drawn: Float[np.ndarray, "drawn features"]) -> float:
    """‖μ − μ'‖² + Tr(Σ + Σ' − 2(ΣΣ')^½) (Heusel et al. 2017)."""
    shift = real.mean(axis=0) - drawn.mean(axis=0)
    covariances = [np.cov(features, rowvar=False) for features in (real, drawn)]
    roots = np.sqrt(np.linalg.eigvals(covariances[0] @ covariances[1]).real.clip(0))
    return float(shift @ shift + np.trace(sum(covariances)) - 2 * roots.sum())


def write_grid(file: Path, images: Images, columns: int) -> None:
    """Write images of equally many of each class as a PNG file, a row for each class."""
    from PIL import Image

    framed = np.pad(images, ((0, 0), (0, 1), (0, 1)), constant_values=1)  # a white line between images
    rows = framed.reshape(-1, columns, SIZE + 1, SIZE + 1).transpose(0, 2, 1, 3)
    pixels = rows.reshape(len(rows) * (SIZE + 1), -1).repeat(SCALE, 0).repeat(SCALE, 1)
    Image.fromarray((255 * pixels).astype(np.uint8)).save(file)


def number_tokenizer() -> PreTrainedTokenizerBase:
    """Create a tokenizer whose tokens are numbers, separated by spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {str(token): token for token in range(PADDING + 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=str(PADDING)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=str(PADDING))


def _patches(images: Images) -> Float[np.ndarray, "patches pixels"]:
    tiles = images.reshape(-1, SIZE // SIDE, SIDE, SIZE // SIDE, SIDE).transpose(0, 1, 3, 2, 4)
    return tiles.reshape(-1, SIDE * SIDE)

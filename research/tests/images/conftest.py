"""Real images (scikit-learn's digits) and image models that have learned them for a few seconds."""

import dataclasses
from pathlib import Path

import pytest
import torch

FORGET = (1, 4, 7)
PER_CLASS = 40
CODES = 32


@dataclasses.dataclass(frozen=True)
class ImageWorld:
    """Digits, their codes, and a folder with target, pair and bundle."""

    images: torch.Tensor
    labels: list[int]
    codec: object
    layout: object
    folder: Path

    @property
    def bundle(self):
        return self.folder / "bundle"

    def load(self, name):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder / name).eval()


@pytest.fixture(scope="session")
def digits():
    """The first images of each class, [images, 1, 8, 8], and their classes."""
    from sklearn.datasets import load_digits

    result = load_digits()
    pixels = torch.from_numpy(result.images / 16).float()[:, None]
    rows = [row for digit in range(10) for row in (result.target == digit).nonzero()[0][:PER_CLASS].tolist()]
    return pixels[rows], [int(result.target[row]) for row in rows]


@pytest.fixture(scope="session")
def image_world(digits, tmp_path_factory):
    from divdec import write_bundle
    from divdec.data.formatting import encode_set
    from divdec.training.fine_tuning import fine_tune
    from divdec.training.settings import TrainingSettings
    from divdec_research.images.codecs import PatchCodec
    from divdec_research.images.models import ImageLayout, new_image_model, write_image_files
    from divdec_research.images.training import training_records

    images, labels = digits
    folder = tmp_path_factory.mktemp("images")
    codec = PatchCodec.fit(images, 2, CODES)
    layout = ImageLayout.new(CODES, *codec.grid, [f"digit {digit}" for digit in range(10)])
    tokenizer, codes = layout.tokenizer(), codec.encode(images)

    def examples(wanted):
        rows = [row for row, label in enumerate(labels) if label in wanted]
        return encode_set(training_records(layout, "digits", codes[rows], [labels[row] for row in rows]), tokenizer)

    def train(model, wanted, epochs, name):
        settings = TrainingSettings(epochs=epochs, learning_rate=4e-3, batch_size=40)
        model, _ = fine_tune(
            model, tokenizer, examples(wanted), settings, folder / "work", title=name, resumable=False, measure=False
        )
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        return model

    everything, remaining = range(10), [digit for digit in range(10) if digit not in FORGET]
    train(new_image_model(layout, 32, 2, 4, seed=0), everything, 8.0, "target")
    q = train(new_image_model(layout, 16, 1, 2, seed=1), remaining, 10.0, "retain_auxiliary")
    train(q, FORGET, 6.0, "forget_auxiliary")
    write_image_files(folder / "target", layout, codec)
    parts = {piece: str(folder / piece) for piece in ("target", "retain_auxiliary", "forget_auxiliary")}
    write_bundle(folder / "bundle", **parts, steering="linear:2")
    return ImageWorld(images, labels, codec, layout, folder)

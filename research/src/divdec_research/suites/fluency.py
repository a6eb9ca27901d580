"""Fluency of answers, by a text classifier (OpenUnlearning)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from divdec.checkpoint import CheckpointReference, load_model, load_tokenizer
from divdec.errors import UsageError
from divdec.evaluation.generation import own, together

FLUENCY_CLASSIFIER = "madhurjindal/autonlp-Gibberish-Detector-492513457"  # OpenUnlearning's


class Fluency:
    """A text classifier whose class 0 means fluent text (OpenUnlearning's classifier_prob)."""

    def __init__(self, checkpoint: str) -> None:
        """Load the classifier and its tokenizer from a folder or hub id.

        Raises:
            UsageError: it cannot be loaded.
        """
        from transformers import AutoModelForSequenceClassification

        try:
            folder = CheckpointReference.parse(checkpoint).resolve(Path(), weights=True)
            self.tokenizer: Any = load_tokenizer(folder)
            self.model: Any = load_model(folder, AutoModelForSequenceClassification, dtype=torch.float32)
        except UsageError as error:
            raise UsageError(
                f"fluency classifier {checkpoint!r} cannot be loaded ({error}); give a local folder, "
                "or --fluency none to leave fluency out"
            ) from None

    def probabilities(self, texts: Sequence[str], *, max_length: int, batch_size: int = 32) -> list[float]:
        """Compute the probability that each text is fluent, from its first `max_length` tokens."""
        starts = range(0, len(texts), batch_size)
        batches = together(
            lambda: {start: self._batch(texts[start : start + batch_size], max_length) for start in own(starts)}
        )
        return [value for start in starts for value in batches[start]]

    def _batch(self, texts: Sequence[str], max_length: int) -> list[float]:
        batch = self.tokenizer(list(texts), return_tensors="pt", padding=True, truncation=True, max_length=max_length)
        with torch.inference_mode():
            logits = self.model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
        return logits.softmax(dim=-1)[:, 0].tolist()

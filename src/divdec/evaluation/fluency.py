"""Fluency: how sure a text classifier is that an answer is no gibberish (OpenUnlearning's classifier_prob)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from divdec.errors import UsageError, first_line
from divdec.evaluation.sharding import own, together

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_CLASSIFIER = "madhurjindal/autonlp-Gibberish-Detector-492513457"
CLEAN = 0  # the class of that detector which OpenUnlearning reads


class Fluency:
    """A text classifier, and the probability of its class 0 ('clean' in the default one)."""

    def __init__(self, checkpoint: str) -> None:
        """Load the classifier.

        Args:
            checkpoint: folder or hub id of a sequence classifier with its tokenizer.

        Raises:
            UsageError: it cannot be had.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        options: dict[str, Any] = {"trust_remote_code": False}
        try:
            self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint, **options)
            self.model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
                checkpoint, use_safetensors=True, dtype=torch.float32, **options
            ).eval()
        except (OSError, ValueError) as error:
            raise UsageError(
                f"fluency classifier {checkpoint!r} cannot be loaded ({first_line(error)}); give a local folder, "
                "or --fluency none to leave fluency out"
            ) from None

    @torch.inference_mode()
    def probabilities(self, texts: Sequence[str], *, max_length: int, batch_size: int = 32) -> list[float]:
        """The probability of being fluent, a number a text.

        Args:
            texts: generated answers.
            max_length: tokens that are looked at (32 for TOFU, 512 for MUSE).
            batch_size: texts in a pass.
        """
        starts = range(0, len(texts), batch_size)
        found = together(
            lambda: {start: self._batch(texts[start : start + batch_size], max_length) for start in own(starts)}
        )
        return [value for start in starts for value in found[start]]

    def _batch(self, texts: Sequence[str], max_length: int) -> list[float]:
        batch = self.tokenizer(list(texts), return_tensors="pt", padding=True, truncation=True, max_length=max_length)
        accepted = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return self.model(**accepted).logits.softmax(dim=-1)[:, CLEAN].tolist()

"""ECO: corrupts the embeddings of prompts about the forget set before the target reads them (Liu et al. 2024).

The target runs twice, on the clean and on the corrupted prompt, with two caches. Where the classifier flags the prompt,
the logits of the corrupted run are returned. No decision depends on later tokens, so a prompt can be processed in any
number of pieces.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from divdec.errors import UsageError
from divdec.experts.token_cache import TokenCache
from divdec.model.checkpoint import load_model
from divdec.passes import logits_of, new_cache
from divdec_research.baselines.composite import DECODINGS, TARGET, CompositeDecoding, Step, write_composite
from divdec_research.baselines.job import BuiltModel, Job
from divdec_research.baselines.prompts import fit_classifier, read_classifier, write_classifier
from divdec_research.baselines.settings import ECOSettings


def corrupt(
    embeddings: Float[Tensor, "batch tokens features"],
    mask: Bool[Tensor, "batch tokens"],
    noise: Float[Tensor, "batch tokens dims"],
    corruption: str,
) -> Float[Tensor, "batch tokens features"]:
    """Corrupt the first dimensions of masked embeddings (ECO, section 3.3).

    Args:
        embeddings: token embeddings.
        mask: the tokens to corrupt.
        noise: added to the first dims by 'noise'; its width is the number of dimensions that 'zero' and 'flip' change.
        corruption: 'noise', 'zero' or 'flip'.
    """
    first = embeddings[..., : noise.shape[-1]]
    changed = {"noise": first + noise.to(first), "zero": torch.zeros_like(first), "flip": -first}[corruption]
    corrupted = torch.cat([changed, embeddings[..., noise.shape[-1] :]], dim=-1)
    return torch.where(mask[..., None], corrupted, embeddings)


@DECODINGS.register("eco")
class Eco(CompositeDecoding):
    """The target on clean and on corrupted prompts, and the classifier that chooses between them."""

    def __init__(self, models: Any, options: Any, folder: Path) -> None:
        super().__init__(models, options, folder)
        self.classifier, _ = read_classifier(folder, options)
        self.corruption = str(options["corruption"])
        self.strength, self.dims, self.seed = float(options["strength"]), int(options["dims"]), int(options["seed"])
        self._noise: list[Tensor] = []

    def new_caches(self) -> list[Cache]:
        """Caches of the two runs and of the classifier."""
        target = self.model(TARGET)
        return [new_cache(target), new_cache(target), TokenCache()]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `CompositeDecoding.logits`."""
        target = self.model(TARGET)
        inputs = (step.input_ids, step.attention_mask, step.position_ids)
        clean = logits_of(target, *inputs, caches[0], step.logits_to_keep).float()
        reading = self.classifier.read(step, caches[2], clean.shape[1])
        new = step.input_ids.shape[1]
        mask = reading.prompt[:, -new:]
        if self.classifier.layout.marker:
            mask = mask & ~reading.answer[:, -new:]  # the last token stays clean, as in the paper's code
        embedding: Any = target.get_input_embeddings()
        embeddings = embedding(step.input_ids.to(embedding.weight.device))
        noise = self.noise(step.position_ids).expand(len(embeddings), -1, -1).to(embeddings.device)
        embeddings = corrupt(embeddings, mask.to(embeddings.device), noise, self.corruption)
        corrupted = logits_of(target, *inputs, caches[1], step.logits_to_keep, embeddings=embeddings).float()
        return torch.where(reading.forget[..., None].to(clean.device), corrupted, clean)

    def noise(self, position_ids: Int[Tensor, "batch_or_one tokens"]) -> Float[Tensor, "batch_or_one tokens dims"]:
        """Draw normal noise of standard deviation σ; it depends on seed and position only."""
        while len(self._noise) <= int(position_ids.max()):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + len(self._noise))
            self._noise.append(self.strength * torch.randn(self.dims, generator=generator))
        return torch.stack(self._noise)[position_ids.cpu()]


def build_eco(job: Job, settings: ECOSettings, output: Path) -> BuiltModel:
    """Train the classifier, and write it with a reference to the target; see `build_method`.

    Raises:
        UsageError: `dims` exceeds the width of the embeddings, or there is no sentence embedder.
    """
    started = time.perf_counter()
    target = load_model(job.target).eval()
    embedding: Any = target.get_input_embeddings()
    width = embedding.weight.shape[-1]
    if settings.dims > width:
        raise UsageError(
            f"dims is {settings.dims}; the target's embeddings have {width}: give a number from 1 to {width}"
        )
    classifier, _ = fit_classifier(job, settings)
    names = ("corruption", "strength", "dims")
    options = write_classifier(output, classifier, settings) | {name: getattr(settings, name) for name in names}
    write_composite(output, job.tokenizer, "eco", options | {"seed": job.seed}, {TARGET: job.target})
    return BuiltModel(output, time.perf_counter() - started)

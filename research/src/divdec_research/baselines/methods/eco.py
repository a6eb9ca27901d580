"""ECO: corrupts the embeddings of prompts about the forget set before the target reads them (Liu et al. 2024).

The target runs twice, on the clean and on the corrupted prompt, with two caches. Where the classifier flags the prompt,
the logits of the corrupted run are returned. No decision depends on later tokens, so a prompt can be processed in any
number of pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from divdec.errors import UsageError
from divdec_research.baselines.annotations import Bool, Cache, Float, Int, Job, Tensor
from divdec_research.baselines.decoding import TARGET, CompositeDecoding, Step
from divdec_research.baselines.method import METHODS, BuiltModel, Method
from divdec_research.baselines.settings import ClassifierSettings
from divdec_research.ranges import Count, NonNegative, Share


@dataclasses.dataclass(frozen=True)
class ECOSettings(ClassifierSettings):
    """Embedding-corrupted prompts: classifies prompts, and corrupts the embeddings of forget prompts."""

    threshold: Share = 0.99
    """Classify a prompt as about the forget set if the classifier's probability exceeds this value. With 1 no prompt
    is."""
    strength: NonNegative = 50.0
    """σ, standard deviation of the noise in the first dimensions of each prompt token's embedding."""
    dims: Count = 1
    """Number of corrupted dimensions."""


def corrupt(
    embeddings: Float[Tensor, "batch tokens features"],
    mask: Bool[Tensor, "batch tokens"],
    noise: Float[Tensor, "batch tokens dims"],
) -> Float[Tensor, "batch tokens features"]:
    """Add noise to the first dimensions of masked embeddings (ECO, section 3.3)."""
    import torch
    from torch.nn.functional import pad

    padded = pad(noise.to(embeddings), (0, embeddings.shape[-1] - noise.shape[-1]))
    return torch.where(mask[..., None], embeddings + padded, embeddings)


class Eco(CompositeDecoding):
    """The target on clean and on corrupted prompts, and the classifier that chooses between them."""

    def load(self, options: Mapping[str, Any], folder: Path) -> None:
        """See `CompositeDecoding.load`."""
        from divdec_research.baselines.prompts import read_classifier

        self.classifier, _ = read_classifier(folder, options)
        self.strength, self.dims, self.seed = float(options["strength"]), int(options["dims"]), int(options["seed"])
        self._noise: list[Tensor] = []

    def new_caches(self) -> list[Cache]:
        """Caches of the two runs and of the classifier."""
        return [self.new_cache(), self.new_cache(), self.new_token_cache()]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `CompositeDecoding.logits`."""
        clean = self.model_logits(step, caches[0])
        reading = self.classifier.read(step, caches[2], clean.shape[1])
        new = step.input_ids.shape[1]
        mask = reading.prompt[:, -new:]
        if self.classifier.layout.marker:
            mask = mask & ~reading.answer[:, -new:]  # the last token stays clean, as in the paper's code
        embedding: Any = self.models[TARGET].get_input_embeddings()
        embeddings = embedding(step.input_ids.to(embedding.weight.device))
        noise = self.noise(step.position_ids).expand(len(embeddings), -1, -1).to(embeddings.device)
        embeddings = corrupt(embeddings, mask.to(embeddings.device), noise)
        with embedding.register_forward_hook(lambda *_: embeddings):
            corrupted = self.model_logits(step, caches[1])
        return corrupted.where(reading.forget[..., None].to(clean.device), clean)

    def noise(self, position_ids: Int[Tensor, "batch_or_one tokens"]) -> Float[Tensor, "batch_or_one tokens dims"]:
        """Draw normal noise of standard deviation σ; it depends on seed and position only."""
        import torch

        while len(self._noise) <= int(position_ids.max()):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + len(self._noise))
            self._noise.append(self.strength * torch.randn(self.dims, generator=generator))
        return torch.stack(self._noise)[position_ids.cpu()]


def build(job: Job, settings: ECOSettings, output: Path) -> BuiltModel:
    """Train the classifier, and write it with a reference to the target; see `build_method`.

    Raises:
        UsageError: `dims` exceeds the width of the embeddings, or there is no sentence embedder.
    """
    from divdec.checkpoint import load_model
    from divdec_research.baselines.composite import write_composite
    from divdec_research.baselines.prompts import fit_classifier, write_classifier

    target = load_model(job.target).eval()
    embedding: Any = target.get_input_embeddings()
    width = embedding.weight.shape[-1]
    if settings.dims > width:
        raise UsageError(
            f"dims is {settings.dims}; the target's embeddings have {width}: give a number from 1 to {width}"
        )
    classifier, _ = fit_classifier(job, settings)
    options = {"strength": settings.strength, "dims": settings.dims, "seed": job.seed}
    write_composite(job, output, "eco", write_classifier(output, classifier, settings) | options)
    return BuiltModel(output)


METHODS["eco"] = Method(
    "ECO", ECOSettings, build=build, decoding=Eco,
    source="Liu et al. 2024, Large Language Model Unlearning via Embedding-Corrupted Prompts, section 3",
    summary="recognise prompts about the forget set and corrupt their embeddings",
)  # fmt: skip

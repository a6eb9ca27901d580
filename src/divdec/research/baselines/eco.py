"""ECO: the embeddings of prompts about the forget set are corrupted before the target reads them (Liu et al. 2024).

The target is run twice, on the prompt as it is and on the corrupted one, each with a cache of its own. Where the
classifier, which looks at the first run, says that the prompt is one about the forget set, the second one's logits are
given. No decision so depends on what comes later, and a prompt may be read in as many pieces as one likes.
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
from divdec.experts.neural import new_cache
from divdec.model.checkpoint import load_model
from divdec.research.baselines.composite import TARGET, Decoding, Step, write_composite
from divdec.research.baselines.inference_settings import ECOSettings
from divdec.research.baselines.job import Job
from divdec.research.baselines.method import Made
from divdec.research.baselines.prompts import fit_reader, read_reader, run_target, write_reader


def corrupt(
    embeddings: Float[Tensor, "batch tokens features"],
    places: Bool[Tensor, "batch tokens"],
    noise: Float[Tensor, "batch tokens dims"],
    corruption: str,
) -> Float[Tensor, "batch tokens features"]:
    """Change the first dimensions of the embeddings at some places (ECO, section 3.3).

    Args:
        embeddings: of the tokens.
        places: which are corrupted.
        noise: what 'noise' adds to the first dims; its width says how many 'zero' and 'flip' change.
        corruption: 'noise', 'zero' or 'flip'.
    """
    first = embeddings[..., : noise.shape[-1]]
    changed = {"noise": first + noise.to(first), "zero": torch.zeros_like(first), "flip": -first}[corruption]
    corrupted = torch.cat([changed, embeddings[..., noise.shape[-1] :]], dim=-1)
    return torch.where(places[..., None], corrupted, embeddings)


class Eco(Decoding):
    """The target on clean and on corrupted prompts, and the classifier between them."""

    def __init__(self, models: Any, options: Any, folder: Path) -> None:
        super().__init__(models, options, folder)
        self.reader, _ = read_reader(folder, options)
        self.corruption = str(options["corruption"])
        self.strength, self.dims, self.seed = float(options["strength"]), int(options["dims"]), int(options["seed"])
        self._noise: list[Tensor] = []

    def new_caches(self) -> list[Cache]:
        """Those of the two runs, and the classifier's."""
        target = self.model(TARGET)
        return [new_cache(target), new_cache(target), *self.reader.new_caches()]

    def logits(self, step: Step, caches: Sequence[Cache | None]) -> Float[Tensor, "batch kept width"]:
        """See `Decoding.logits`."""
        target = self.model(TARGET)
        clean, hidden = run_target(target, step, caches[0])
        reading = self.reader.read(step, hidden, caches[2:])
        new = step.input_ids.shape[1]
        places = reading.prompt[:, -new:]
        if self.reader.layout.marker:
            places = places & ~reading.answer[:, -new:]  # the last token is left, as in the paper's code
        embedding: Any = target.get_input_embeddings()
        embeddings = embedding(step.input_ids.to(embedding.weight.device))
        noise = self.noise(step.position_ids).expand(len(embeddings), -1, -1).to(embeddings.device)
        corrupted, _ = run_target(target, step, caches[1], corrupt(embeddings, places, noise, self.corruption))
        return torch.where(reading.forget[:, -clean.shape[1] :, None], corrupted, clean)

    def noise(self, position_ids: Int[Tensor, "batch_or_one tokens"]) -> Float[Tensor, "batch_or_one tokens dims"]:
        """Normal noise of standard deviation σ, decided by seed and place, so that a prompt always gets the same."""
        while len(self._noise) <= int(position_ids.max()):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + len(self._noise))
            self._noise.append(self.strength * torch.randn(self.dims, generator=generator))
        return torch.stack(self._noise)[position_ids.cpu()]


def make_eco(job: Job, settings: ECOSettings, output: Path) -> Made:
    """Train the classifier, and write it beside a reference to the target.

    Raises:
        UsageError: an embedding has fewer dimensions than shall be corrupted.
    """
    started = time.perf_counter()
    target = load_model(job.target).eval()
    embedding: Any = target.get_input_embeddings()
    width = embedding.weight.shape[-1]
    if settings.dims > width:
        raise UsageError(
            f"dims is {settings.dims}; the target's embeddings have {width}: give a number from 1 to {width}"
        )
    layout, weights, _ = fit_reader(job, settings, target)
    options = write_reader(output, layout, weights) | {
        "threshold": settings.threshold,
        "corruption": settings.corruption,
        "strength": settings.strength,
        "dims": settings.dims,
        "seed": job.seed,
    }
    write_composite(output, job.tokenizer, "eco", options, {TARGET: job.target})
    return Made(time.perf_counter() - started)

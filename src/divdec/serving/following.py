"""Letting a loaded model follow a registry of takedown requests that its bundle does not name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.errors import UsageError
from divdec.experts.combined import CombinedExperts
from divdec.experts.protocol import Experts
from divdec.experts.takedowns.folder import read_description
from divdec.experts.takedowns.live import RegistryExperts
from divdec.model.configuration import NO_RANK, DivergenceConfig
from divdec.model.loading import check_tokenizer
from divdec.model.modeling import DivergenceForCausalLM
from divdec.model.vocabularies import vocabulary_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_registry(
    model: DivergenceForCausalLM, tokenizer: PreTrainedTokenizerBase, registry: str | os.PathLike[str]
) -> DivergenceForCausalLM:
    """The model steered by the registry too: its divergence is added to the bundle's.

    Args:
        model: a bundle's; use only what is returned from now on.
        tokenizer: its tokenizer.
        registry: the registry's folder.

    Raises:
        UsageError: it is no registry, one of another tokenizer or vocabulary, or the model follows the rank rule.
        FailedClosed: it is damaged.
    """
    folder = Path(registry).expanduser()
    check_tokenizer(folder, read_description(folder)["tokenizer"], vocabulary_sha256(tokenizer))
    if model.steering.rule == "rank":
        raise UsageError(NO_RANK)
    added = RegistryExperts(folder)
    if added.vocab_size < model.vocab_size:
        raise UsageError(
            f"{folder} counts {added.vocab_size} tokens, the model has {model.vocab_size}: make a registry for this "
            "model's target (`divdec forget init`)"
        )
    own: Experts = model.experts
    parts = list(zip(own.parts, own.weights, strict=True)) if isinstance(own, CombinedExperts) else [(own, 1.0)]
    if any(isinstance(part, RegistryExperts) and part.id == added.id for part, _ in parts):
        return model  # the bundle names it already; twice would steer twice as hard
    config = model.config
    assert isinstance(config, DivergenceConfig)
    return DivergenceForCausalLM(config, model.target, CombinedExperts([*parts, (added, 1.0)])).eval()

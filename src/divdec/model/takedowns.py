"""A loaded model follows a registry of takedown requests that its bundle does not name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from divdec.checkpoint import check_tokenizer, vocabulary_sha256
from divdec.configuration import DivergenceConfig
from divdec.errors import UsageError
from divdec.model.modeling import DivergenceForCausalLM
from divdec.takedowns.correction import TakedownCorrection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_registry(
    model: DivergenceForCausalLM, tokenizer: PreTrainedTokenizerBase, registry: str | os.PathLike[str]
) -> DivergenceForCausalLM:
    """Return the model with the correction of a registry that its bundle does not name.

    Args:
        model: a bundle's model; do not use it afterwards.
        tokenizer: its tokenizer.
        registry: the registry's folder.

    Raises:
        UsageError: it is no registry, one of another tokenizer or vocabulary, or another than the bundle's.
        FailedClosed: it is damaged.
    """
    correction = TakedownCorrection(registry)
    check_tokenizer(correction.folder, correction.tokenizer_sha256, vocabulary_sha256(tokenizer))
    if correction.vocab_size < model.vocab_size:
        raise UsageError(
            f"{correction.folder} counts {correction.vocab_size} tokens, the model has {model.vocab_size}; create a "
            "registry for this model's target (`divdec takedown init`)"
        )
    if model.takedowns is not None:
        if model.takedowns.id == correction.id:
            return model
        raise UsageError(
            f"the bundle already follows the registry {model.takedowns.folder}; accepted: that one, or a bundle that "
            "names none"
        )
    config = model.config
    assert isinstance(config, DivergenceConfig)
    following = DivergenceForCausalLM(config, model.target, model.experts, correction).eval()
    following.overlap = model.overlap
    return following

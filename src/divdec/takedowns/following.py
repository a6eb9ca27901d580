"""Letting a loaded model follow a registry of takedown requests that its bundle does not name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from divdec.errors import UsageError
from divdec.model.checkpoint import check_tokenizer, vocabulary_sha256
from divdec.model.configuration import DivergenceConfig
from divdec.model.modeling import DivergenceForCausalLM
from divdec.takedowns.folder import read_description
from divdec.takedowns.live import Takedowns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_registry(
    model: DivergenceForCausalLM, tokenizer: PreTrainedTokenizerBase, registry: str | os.PathLike[str]
) -> DivergenceForCausalLM:
    """The model under the registry's takedown requests, which correct the target's logits before the bundle's rule.

    Args:
        model: a bundle's; use only what is returned from now on.
        tokenizer: its tokenizer.
        registry: the registry's folder.

    Raises:
        UsageError: it is no registry, one of another tokenizer or vocabulary, or another than the bundle's.
        FailedClosed: it is damaged.
    """
    folder = Path(registry).expanduser()
    check_tokenizer(folder, read_description(folder)["tokenizer"], vocabulary_sha256(tokenizer))
    takedowns = Takedowns(folder)
    if takedowns.vocab_size < model.vocab_size:
        raise UsageError(
            f"{folder} counts {takedowns.vocab_size} tokens, the model has {model.vocab_size}: make a registry for "
            "this model's target (`divdec takedown init`)"
        )
    if model.takedowns is not None:
        if model.takedowns.id == takedowns.id:
            return model
        raise UsageError(
            f"the bundle follows the registry {model.takedowns.folder} already; accepted: that one, or a bundle that "
            "names none"
        )
    config = model.config
    assert isinstance(config, DivergenceConfig)
    following = DivergenceForCausalLM(config, model.target, model.experts, takedowns).eval()
    following.overlap = model.overlap
    return following

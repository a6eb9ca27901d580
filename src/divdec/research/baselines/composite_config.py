"""Configuration of a model that a baseline makes of a target and helpers. It knows nothing of weights."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from divdec.model.checkpoint import COMPOSITE
from divdec.model.configuration import RemoteCodeConfig


class CompositeConfig(RemoteCodeConfig):
    """Configuration of `CompositeForCausalLM`.

    Attributes:
        method: the baseline's name, such as 'whp'.
        options: what its decoding is told, as JSON values.
        parts: references of the checkpoints by name, the target's among them: `{"folder": …, "sha256": …}`.
        files: SHA-256 by name of the folder's own files that decide what is answered.
        vocab_size: the common vocabulary of the parts.
        max_position_embeddings: the shortest context of the parts; None where none states one.
    """

    model_type = COMPOSITE
    model_class = "CompositeForCausalLM"
    model_module = "divdec.research.baselines.composite"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        method: str | None = None,
        options: dict[str, Any] | None = None,
        parts: dict[str, Any] | None = None,
        files: dict[str, str] | None = None,
        vocab_size: int = 0,
        max_position_embeddings: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.method = method
        self.options = options
        self.parts = parts
        self.files = files
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)


AutoConfig.register(CompositeConfig.model_type, CompositeConfig, exist_ok=True)

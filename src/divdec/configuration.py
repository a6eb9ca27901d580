"""Configuration of a steered model: references to its parts, and the steering rule."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig

from divdec.steering import Steering

AUXILIARIES = ("retain_auxiliary", "forget_auxiliary")
PARTS = ("target", *AUXILIARIES)
BASE = "base"  # of auxiliaries that are adapters

# Fields that other programs (lm-eval, pipelines, servers) read from a causal LM's configuration.
TARGET_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)

REMOTE_FILE = "modeling_divdec.py"  # the module that `auto_map` names
REMOTE_CODE = """\
\"\"\"Model classes of this folder, for other programs' `trust_remote_code`; divdec itself does not execute it.\"\"\"
from {module} import {config}, {model}
"""


class RemoteCodeConfig(PreTrainedConfig):
    """Configuration whose folder carries `REMOTE_FILE`, so that `trust_remote_code=True` loads the model anywhere."""

    model_class: ClassVar[str]
    model_module: ClassVar[str]
    """Module that exports the configuration and the model."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.architectures = [self.model_class]
        module = REMOTE_FILE.removesuffix(".py")
        classes = {"AutoConfig": type(self).__name__, "AutoModelForCausalLM": self.model_class}
        self.auto_map = {auto: f"{module}.{name}" for auto, name in classes.items()}

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write `config.json` and `REMOTE_FILE`."""
        super().save_pretrained(save_directory, *args, **kwargs)
        code = REMOTE_CODE.format(module=self.model_module, config=type(self).__name__, model=self.model_class)
        (Path(save_directory) / REMOTE_FILE).write_text(code, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: otherwise `save_pretrained` would copy the source of this module into the folder."""


class DivergenceConfig(RemoteCodeConfig):
    """Configuration of `DivergenceForCausalLM`.

    Attributes:
        target: reference of the target: `{"folder": …, "sha256": {file: digest}}` or `{"hub_id": …, "revision": …}`.
        retain_auxiliary: reference of q, which has not seen the forget set.
        forget_auxiliary: reference of p, which has; None, like q, if n-grams or a registry replace the pair.
        base: reference of the checkpoint that both auxiliaries adapt, if they are LoRA adapters, or None.
        bridge: `{}` if the auxiliaries have another tokenizer than the target, or None.
        ngram: `{"folder": …, "sha256": digest of its description, "weight": …}` of an n-gram pair, or None.
        registry: `{"folder": …, "id": …}` of a registry of takedown requests, or None.
        tokenizer_sha256: digests of the bundle's own tokenizer and chat template, by file name, or None.
        steering: `Steering.to_dict()`; a rule without effect if only a registry steers.
        vocab_size: the common vocabulary of all parts.
        max_position_embeddings: the shortest context of the models, in the target's tokens, or None.
        single_turn: whether the models were trained on single questions alone; `divdec chat` and the playground then
            treat each line as a new conversation.
        measured: `{"steering": the rule, "result": what it was measured to forget and keep, in a sentence}`, or None.
    """

    model_type = "divergence"
    model_class = "DivergenceForCausalLM"
    model_module = "divdec.model"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ("past_key_values",)
    target: dict[str, Any] | None = None
    retain_auxiliary: dict[str, Any] | None = None
    forget_auxiliary: dict[str, Any] | None = None
    base: dict[str, Any] | None = None
    bridge: dict[str, Any] | None = None
    ngram: dict[str, Any] | None = None
    registry: dict[str, Any] | None = None
    tokenizer_sha256: dict[str, str] | None = None
    steering: dict[str, Any] | None = None
    vocab_size: int = 0
    max_position_embeddings: int | None = None
    single_turn: bool = False
    measured: dict[str, str] | None = None

    @classmethod
    def from_parts(
        cls,
        configs: dict[str, PreTrainedConfig],
        steering: Steering,
        vocab_size: int,
        references: dict[str, dict[str, Any]] | None = None,
    ) -> DivergenceConfig:
        """Create a configuration from those of the models.

        Args:
            configs: configurations by part name, the target's first.
            steering: the rule.
            vocab_size: width of the common vocabulary.
            references: fields that name the parts, `bridge` included; None for models in memory.
        """
        texts = {part: config.get_text_config(decoder=True) for part, config in configs.items()}
        target = texts["target"]
        fields = {name: value for name in TARGET_FIELDS if (value := getattr(target, name, None)) is not None}
        # Auxiliaries with another tokenizer count positions in other tokens.
        limiting = [target] if (references or {}).get("bridge") is not None else list(texts.values())
        contexts = [
            length for text in limiting if (length := getattr(text, "max_position_embeddings", None)) is not None
        ]
        return cls(
            **(references or {}),
            steering=steering.to_dict(),
            vocab_size=vocab_size,
            max_position_embeddings=min(contexts, default=None),
            **fields,
        )


AutoConfig.register(DivergenceConfig.model_type, DivergenceConfig, exist_ok=True)

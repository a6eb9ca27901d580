"""Configuration of a steered model: where its three parts lie and how they are steered.

It knows nothing of weights; `divdec.model.checkpoint` resolves the references, `divdec.model.modeling` loads them.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from divdec.steering import Steering

AUXILIARIES = ("retain_auxiliary", "forget_auxiliary")
PARTS = ("target", *AUXILIARIES)

# Without experts every divergence is 0, and the rank rule would still suppress the first k tokens.
NO_RULE = (
    "a registry of takedown requests has a strength of its own and needs no rule; leave the steering out, or give "
    "a pair or n-grams for it to apply to"
)

# What other programs (lm-eval, pipelines, servers) read from a causal LM's configuration; taken from the target.
TARGET_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class DivergenceConfig(PreTrainedConfig):
    """Configuration of `DivergenceForCausalLM`.

    Attributes:
        target: reference of the target: `{"folder": …, "sha256": {file: digest}}` or `{"hub_id": …, "revision": …}`.
        retain_auxiliary: reference of q, which has not seen the forget set.
        forget_auxiliary: reference of p, which has. Both are None where n-grams or a registry stand in for them.
        bridge: `{"heal": …}` where the auxiliaries have another tokenizer than the target; else None.
        ngram: `{"folder": …, "sha256": digest of its description, "weight": …}` of an n-gram pair, or None.
        registry: `{"folder": …, "id": …}` of a registry of takedown requests, or None.
        steering: `Steering.to_dict()`; a rule without effect where nothing but a registry steers.
        vocab_size: the common vocabulary of all parts.
        max_position_embeddings: the shortest context of the models, in the target's tokens; None where none states one.
        single_turn: whether the models have learned single questions alone, so that a conversation's later turns are
            not what they were trained and measured on. `divdec chat` and the playground then ask each line by itself.
    """

    model_type = "divergence"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        target: dict[str, Any] | None = None,
        retain_auxiliary: dict[str, Any] | None = None,
        forget_auxiliary: dict[str, Any] | None = None,
        bridge: dict[str, Any] | None = None,
        ngram: dict[str, Any] | None = None,
        registry: dict[str, Any] | None = None,
        steering: dict[str, Any] | None = None,
        vocab_size: int = 0,
        max_position_embeddings: int | None = None,
        single_turn: bool = False,
        **kwargs: Any,
    ) -> None:
        self.target = target
        self.retain_auxiliary = retain_auxiliary
        self.forget_auxiliary = forget_auxiliary
        self.bridge = bridge
        self.ngram = ngram
        self.registry = registry
        self.steering = steering
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.single_turn = single_turn
        super().__init__(**kwargs)
        self.architectures = ["DivergenceForCausalLM"]

    @classmethod
    def from_parts(
        cls,
        configs: dict[str, PreTrainedConfig],
        steering: Steering,
        vocab_size: int,
        references: dict[str, dict[str, Any]] | None = None,
    ) -> DivergenceConfig:
        """A configuration from those of the models, by part name.

        Args:
            configs: one configuration for each name in `PARTS` that there is, the target's first.
            steering: the rule.
            vocab_size: width of the common vocabulary.
            references: where the parts lie, `bridge` included; None where they lie nowhere yet.
        """
        texts = {part: config.get_text_config(decoder=True) for part, config in configs.items()}
        target = texts["target"]
        fields = {name: value for name in TARGET_FIELDS if (value := getattr(target, name, None)) is not None}
        # The positions of auxiliaries with another tokenizer count other tokens.
        counted = [target] if (references or {}).get("bridge") is not None else list(texts.values())
        contexts = [
            length for text in counted if (length := getattr(text, "max_position_embeddings", None)) is not None
        ]
        return cls(
            **(references or {}),
            steering=steering.to_dict(),
            vocab_size=vocab_size,
            max_position_embeddings=min(contexts, default=None),
            **fields,
        )

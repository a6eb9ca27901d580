"""How large a model is: parameters, keys and values per token, attention; from its configuration or from a number.

Parameters are counted on the meta device: the model of a configuration is built without memory or weights. It knows
nothing of devices or prices.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.costs.quantities import is_quantity, parse_quantity, short
from divdec.errors import UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What is assumed of a model of which only the number of parameters is known: the proportions of Llama 3.1 8B.
GUESSED_ASPECT = 128  # width over number of layers
GUESSED_KEY_VALUE_WIDTH = 8 * 128
GUESSED_VOCABULARY = 128_256
STATELESS = ("linear_attention", "mamba", "conv", "recurrent")  # kinds of layers that keep no keys and values


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """What the cost of a model follows from."""

    name: str
    parameters: int
    """All of them; embeddings that serve as the output layer too are counted once."""
    embeddings: int
    """Those of the input embedding and of the output layer, among `parameters`."""
    lookup: int
    """Those of the input embedding where it is a matrix of its own: a token reads one row of it and multiplies none."""
    layers: int
    hidden: int
    """Width of the hidden states."""
    vocabulary: int
    attention_width: int
    """Heads times their width: what one layer's queries hold."""
    key_values: tuple[tuple[int, int | None], ...]
    """For each layer that keeps some: numbers kept for a token (keys and values), and the window or None."""
    experts: int = 0
    """Parameters in mixtures of experts, among `parameters`."""
    expert_share: float = 1.0
    """The share of these that one token uses."""
    guessed: bool = False
    """Whether all but `parameters` is what a model of that size usually has."""

    @property
    def body(self) -> int:
        """Parameters without embeddings, the N of Kaplan et al. (2020)."""
        return self.parameters - self.embeddings

    @property
    def active(self) -> float:
        """Parameters that one token multiplies: all but the lookup and the experts that it does not use."""
        return self.read(1)

    def read(self, tokens: int) -> float:
        """Parameters that a pass over so many tokens reads; experts are taken as chosen apart until all are."""
        unread = self.experts * (1 - min(1.0, self.expert_share * tokens))
        return self.parameters - self.lookup - unread

    def counted(self, embeddings: bool) -> float:
        """N (or n) of the paper's formulas, with or without embeddings."""
        return float(self.parameters if embeddings else self.body)

    def weight_bytes(self, width: int) -> int:
        """Bytes of all weights, `width` of them a number."""
        return self.parameters * width

    def token_bytes(self, width: int) -> int:
        """Bytes that the cache grows by with a token while no window is full: layers × kv heads × head × 2 × width."""
        return width * sum(numbers for numbers, _ in self.key_values)

    def cache_bytes(self, context: float, width: int) -> float:
        """Bytes of the keys and values of one sequence of `context` tokens; a window keeps one less than its length."""
        kept = (
            numbers * (context if window is None else min(context, window - 1)) for numbers, window in self.key_values
        )
        return float(width * sum(kept))

    def attended(self, context: float) -> float:
        """FLOPs of attention for one token that sees `context` others: 4 × width of the queries × tokens, by layer."""
        seen = (context if window is None else min(context, window) for _, window in self.key_values)
        return float(4 * self.attention_width * sum(seen))

    def to_dict(self) -> dict[str, Any]:
        """What a reader of the JSON may want."""
        return {
            "name": self.name,
            "parameters": self.parameters,
            "without_embeddings": self.body,
            "active": round(self.active),
            "layers": self.layers,
            "vocabulary": self.vocabulary,
            "guessed": self.guessed,
        }


def read_size(given: float | str, name: str) -> ModelSize:
    """The size of what was given: a number such as 8B, a folder with config.json, a config.json, or a hub id.

    Args:
        given: a number is taken as one; a folder called 8B is ./8B.
        name: the option, for messages.

    Raises:
        UsageError: it is neither, or no causal language model.
    """
    if is_quantity(given) and not Path(str(given)).is_dir():
        return guessed_size(parse_quantity(given, name, least=1.0))
    return size_of(_config(str(given), name), str(given), name)


def guessed_size(parameters: float) -> ModelSize:
    """A model of which only the number of parameters is known, in the proportions of Llama 3.1 8B.

    Layers L follow from N ≈ 12·L·width² with width = 128·L: 34 for 8B, where Llama 3.1 has 32.
    """
    layers = max(1, round((parameters / (12 * GUESSED_ASPECT**2)) ** (1 / 3)))
    width = GUESSED_ASPECT * layers
    return ModelSize(
        name=f"a model of {short(parameters)}",
        parameters=round(parameters),
        embeddings=0,
        lookup=0,
        layers=layers,
        hidden=width,
        vocabulary=GUESSED_VOCABULARY,
        attention_width=width,
        key_values=((2 * GUESSED_KEY_VALUE_WIDTH, None),) * layers,
        guessed=True,
    )


def size_of(config: PreTrainedConfig, label: str, name: str = "model") -> ModelSize:
    """Count a configuration's model on the meta device.

    Args:
        config: of a causal language model.
        label: what the size is called.
        name: the option, for messages.

    Raises:
        UsageError: transformers makes no causal language model of it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a model of another kind, or a broken one, trips over
        raise UsageError(
            f"{name} {label} gives no causal language model ({first_line(error)}); accepted: a number such as 8B, "
            "or the folder of a causal language model's config.json"
        ) from None
    text = config.get_text_config(decoder=True)
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    table = first.weight.numel()
    tied = last is not None and last.weight is first.weight
    head = 0 if last is None or tied else last.weight.numel()
    named = {key: parameter.numel() for key, parameter in model.named_parameters()}
    experts = sum(number for key, number in named.items() if ".experts." in key)
    return ModelSize(
        name=label,
        parameters=sum(named.values()),
        embeddings=table + head,
        lookup=0 if tied else table,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        attention_width=text.num_attention_heads * _head_width(text),
        key_values=_key_values(text),
        experts=experts,
        expert_share=_expert_share(text) if experts else 1.0,
    )


def _config(given: str, name: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    place = Path(given).expanduser()
    if place.is_dir() and not (place / "config.json").is_file():
        raise UsageError(f"{name} {given} has no config.json; give the folder of a model, or a number such as 8B")
    try:
        return AutoConfig.from_pretrained(str(place) if place.exists() else given, trust_remote_code=False)
    except Exception as error:  # a missing repository, no network, a broken file: all are one line to the user
        raise UsageError(
            f"{name} {given} is neither a number nor a model whose config.json can be read ({first_line(error)}); "
            "accepted: 8B, 8e9, a model's folder, or a hub id"
        ) from None


def _head_width(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _key_values(text: Any) -> tuple[tuple[int, int | None], ...]:
    """What each layer keeps, as transformers' caches do."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if getattr(text, "multi_query", False):
        heads = 1
    numbers = 2 * heads * _head_width(text)
    if getattr(text, "kv_lora_rank", None):  # latent attention (DeepSeek V2 and V3) keeps what both are made from
        numbers = text.kv_lora_rank + text.qk_rope_head_dim
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return ((numbers, window),) * text.num_hidden_layers
    chunk = getattr(text, "attention_chunk_size", None)
    windows = {"sliding_attention": window, "chunked_attention": chunk}
    return tuple((numbers, windows.get(kind)) for kind in kinds if kind not in STATELESS)


def _expert_share(text: Any) -> float:
    for many in ("num_local_experts", "num_experts", "n_routed_experts"):
        total = getattr(text, many, None)
        if total:
            return min(1.0, (getattr(text, "num_experts_per_tok", None) or total) / total)
    return 1.0

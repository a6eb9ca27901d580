"""The steered model in vLLM: three language models and a memory of tokens behind one `compute_logits`.

Its hidden states are those of all parts, concatenated. Only `compute_logits` turns them into logits, and it steers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
from vllm.model_executor.models.interfaces import has_inner_state, is_attention_free, is_hybrid, supports_multimodal
from vllm.model_executor.models.interfaces_base import is_text_generation_model
from vllm.model_executor.models.utils import init_vllm_registered_model, maybe_prefix
from vllm.platforms import current_platform

from divdec.checkpoint import weight_files
from divdec.configuration import AUXILIARIES
from divdec.errors import FailedClosed, UsageError
from divdec.experts.neural import divergence_of
from divdec.fail_closed import check_divergence, check_target
from divdec.passes import same_weights
from divdec.serving.vllm.configuration import EngineOptions, read_parts
from divdec.serving.vllm.token_memory import TokenMemory


class DivergenceForCausalLM(nn.Module):
    """Divergence Decoding (paper, eq. 1 and 2) as a model of vLLM; the reference is `divdec.model.modeling`.

    Attributes:
        steering: the bundle's rule, which no request can change.
        vocab_size: the common vocabulary, and the width of the logits.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        options = EngineOptions.from_mapping(vllm_config.additional_config.get("divdec"))
        model_config = vllm_config.model_config
        parts = read_parts(model_config.model, model_config.revision, options)
        self.paths = parts.bundle.paths
        self.steering = parts.bundle.steering
        self.vocab_size = parts.bundle.config.vocab_size
        self.ngrams, self.takedowns = parts.ngrams, parts.takedowns
        self.models = nn.ModuleDict()
        widths = {}
        for part, config in parts.configs.items():
            # vLLM caches compiled code by tag; parts of one architecture must not share it.
            with set_model_tag(part):
                self.models[part] = init_vllm_registered_model(
                    _part_config(vllm_config, self.paths[part], config),
                    prefix=maybe_prefix(prefix, f"models.{part}"),
                    hf_config=config,
                )
            # Checked here because the class is loaded; to check it earlier, vLLM would start a process for each part.
            model = self.models[part]
            unfit = (supports_multimodal(model), has_inner_state(model), is_attention_free(model), is_hybrid(model))
            if not is_text_generation_model(model) or any(unfit):
                raise UsageError(
                    f"{part} is a {type(model).__name__}; accepted: language models of text with attention alone"
                )
            widths[part] = config.hidden_size
        self.memory = None
        if parts.context_length:
            target = parts.configs["target"]
            self.memory = TokenMemory(
                vllm_config,
                length=parts.context_length,
                vocab_size=target.vocab_size,
                head_size=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
                dtype=model_config.dtype,
                prefix=maybe_prefix(prefix, "memory"),
            )
            widths["memory"] = self.memory.width
        self.widths = widths
        self.register_buffer("eligible", self.steering.eligible(self.vocab_size), persistent=False)

    def embed_input_ids(self, input_ids: Int[Tensor, " tokens"]) -> Tensor:
        """Raise an error: each part has other embeddings."""
        raise FailedClosed("a steered model has no single embedding: each part has other ones")

    def forward(
        self,
        input_ids: Int[Tensor, " tokens"] | None,
        positions: Int[Tensor, " tokens"],
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Float[Tensor, "tokens width"]:
        """Return the hidden states of target, auxiliaries and memory for all sequences of a step, concatenated.

        All arguments after `positions` must be None.
        """
        unsupported = [intermediate_tensors, inputs_embeds, *kwargs.values()]
        if input_ids is None or any(value is not None for value in unsupported):
            raise FailedClosed("a steered model takes token ids and positions only")
        hidden = [model(input_ids=input_ids, positions=positions) for model in self.models.values()]
        if self.memory is not None:
            hidden.append(self.memory(input_ids, positions))
        return torch.cat(hidden, dim=-1)

    def compute_logits(self, hidden_states: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"] | None:
        """Return steered logits in float32; None on a rank to which vLLM does not gather logits.

        Raises:
            FailedClosed: the divergence or the target's logits are not finite, or the memory of tokens is invalid.
        """
        hidden = dict(zip(self.widths, hidden_states.split(list(self.widths.values()), dim=-1), strict=True))
        logits = {part: model.compute_logits(hidden[part].contiguous()) for part, model in self.models.items()}
        if any(values is None for values in logits.values()):
            return None
        target = logits.pop("target")[..., : self.vocab_size].float()
        auxiliaries = [logits[part] for part in AUXILIARIES if part in logits]
        check_target(target)
        contexts = None if self.memory is None else self.memory.contexts(hidden["memory"])
        if self.takedowns is not None:
            assert contexts is not None
            correction = self._looked_up(self.takedowns.correction_after, contexts, target)
            check_divergence(correction)
            target = target + correction
        divergence = torch.zeros_like(target)
        if auxiliaries:
            divergence = divergence_of(*auxiliaries)[..., : self.vocab_size]
        if (ngrams := self.ngrams) is not None:
            assert contexts is not None
            scores = self._looked_up(lambda rows: ngrams.divergence(rows, logits_to_keep=1)[:, 0], contexts, target)
            divergence = divergence + scores
        check_divergence(divergence)
        return self.steering.apply(target, divergence, self.eligible)

    def _looked_up(
        self,
        look_up: Callable[[Tensor], Tensor],
        contexts: Int[Tensor, "rows length"],
        target: Float[Tensor, "rows vocab"],
    ) -> Float[Tensor, "rows vocab"]:
        """Return what counts say of the next token. Rank 0 asks them for all: another could see a newer registry."""
        ranks = get_tp_group()
        values = torch.full_like(target, torch.nan)  # which every rank refuses, if the lookup fails
        try:
            if ranks.is_first_rank:
                values.copy_(look_up(contexts)[:, : self.vocab_size])
        finally:
            if current_platform.use_all_gather():  # otherwise only rank 0 has logits and comes here
                values = ranks.broadcast(values)
        return values

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load every part from its own checkpoint; return the names of all parameters.

        `weights` are ignored; they would come from the bundle's folder, which only refers to checkpoints.

        Raises:
            UsageError: a part lacks weights, or both auxiliaries are the same model.
        """
        for part, model in self.models.items():
            files = [str(file) for file in weight_files(self.paths[part])]
            loaded = model.load_weights(safetensors_weights_iterator(files, use_tqdm_on_load=False))
            # A quantised model's attention has scales for quantised keys and values; without those, which are refused,
            # they have no effect.
            scales = {
                f"{name}.{scale}"
                for name, module in model.named_modules()
                if isinstance(module, Attention)
                for scale, _ in module.named_parameters()
                if scale.endswith(("_scale", "_zero_point"))
            }
            missing = sorted({name for name, _ in model.named_parameters()} - set(loaded) - scales)
            if missing:
                raise UsageError(f"{part}: {self.paths[part]} lacks the weights {', '.join(missing[:3])}")
        if AUXILIARIES[0] in self.models and same_weights(*(self.models[part] for part in AUXILIARIES)):
            raise UsageError("retain auxiliary and forget auxiliary are the same model: nothing would be forgotten")
        return {name for name, _ in self.named_parameters()}


def _part_config(vllm_config: VllmConfig, path: Path, hf_config: PreTrainedConfig) -> VllmConfig:
    """Return the engine's configuration with a part's checkpoint, quantisation and attention window."""
    config = copy.copy(vllm_config)
    config.model_config = copy.copy(vllm_config.model_config)
    config.model_config.model = str(path)
    config.model_config.hf_config = config.model_config.hf_text_config = hf_config
    config.model_config.quantization = (getattr(hf_config, "quantization_config", None) or {}).get("quant_method")
    config.quant_config = VllmConfig.get_quantization_config(config.model_config, config.load_config)
    config.cache_config = copy.copy(vllm_config.cache_config)
    # As vLLM does for a model alone: where layers differ, each states its own window.
    layers = getattr(hf_config, "layer_types", None)
    alike = layers is None or all(layer == "sliding_attention" for layer in layers)
    config.cache_config.sliding_window = getattr(hf_config, "sliding_window", None) if alike else None
    return config

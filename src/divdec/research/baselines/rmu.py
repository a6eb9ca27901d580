"""RMU: steers hidden states of forget tokens to a random vector and keeps hidden states of retain tokens unchanged.

Li et al. 2024, The WMDP Benchmark: Measuring and Reducing Malicious Use With Unlearning, section 4.2.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from divdec.errors import UsageError
from divdec.model.checkpoint import load_config
from divdec.research.baselines import losses
from divdec.research.baselines.gradient import RETAIN, Batch, frozen_target, unlearn
from divdec.research.baselines.job import BuiltModel, Job
from divdec.research.baselines.settings import RMUSettings
from divdec.training.inputs import Companion, model_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names in transformers' models of layers, and of the matrix that ends an MLP.
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
DOWN_PROJECTION = re.compile(r"\.(?:down_proj|dense_4h_to_h|fc2|mlp\.c_proj)(?:\.weight)?$")
LAYERS_TRAINED = 3  # the steered one and the two before it


class RMU(nn.Module):
    """‖h − c·u‖² on forget tokens + α · ‖h − h_frozen‖² on retain tokens, h at layer ℓ."""

    counts_tokens = False
    control: Tensor

    def __init__(
        self, settings: RMUSettings, control: Float[Tensor, " width"], reference: PreTrainedModel, **options: Any
    ) -> None:
        """Take c·u and the frozen target; `options` are further arguments of the forward pass."""
        super().__init__()
        self.settings = settings
        self.register_buffer("control", control)
        self.reference = reference
        self.options = options

    def loss(self, model: PreTrainedModel, batch: Batch, labelled: Tensor | int | None) -> losses.Loss:
        """See `Objective.loss`."""
        forget, retain = model_inputs(batch), model_inputs(batch, RETAIN)
        steered = self._hidden(model, forget)
        loss = losses.misdirection(steered, self.control.view(1, 1, -1), forget["labels"])
        if self.settings.alpha:
            with torch.no_grad():
                original = self._hidden(self.reference, retain)
            moved = losses.misdirection(self._hidden(model, retain), original, retain["labels"])
            loss = loss + self.settings.alpha * moved
        return loss

    def _hidden(self, model: PreTrainedModel, inputs: Batch) -> Float[Tensor, "batch tokens width"]:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False, **self.options)
        return output.hidden_states[self.settings.layer + 1]  # the first are the embeddings


def train_rmu(job: Job, settings: RMUSettings, output: Path) -> BuiltModel:
    """Train with RMU; see `build_method`.

    Raises:
        UsageError: the layer does not exist, is the last one, or has no weights that `trainable` names.
    """
    config = load_config(job.target).get_text_config(decoder=True)
    # transformers normalises the last layer's output before returning it, and only the head reads it.
    last = config.num_hidden_layers - 2
    if settings.layer > last:
        there_are = f"accepted: 0 to {last}" if last > 0 else "accepted: 0" if last == 0 else "none can be steered"
        raise UsageError(
            f"layer is {settings.layer}, but the target has {config.num_hidden_layers} layers; {there_are} "
            "(the last cannot be steered)"
        )

    def objective(model: PreTrainedModel) -> RMU:
        freeze_others(model, settings)
        # Logits are not used; those of one token cost almost nothing.
        few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        control = control_vector(config.hidden_size, settings.coefficient, job.seed)
        return RMU(settings, control, frozen_target(job), **few)

    return unlearn(job, settings, output, objective, {RETAIN: Companion(job.retain_examples)})


def control_vector(width: int, coefficient: float, seed: int) -> Float[Tensor, " width"]:
    """Draw c·u: u has entries uniform on [0, 1) and is scaled to length 1."""
    direction = torch.rand(width, generator=torch.Generator().manual_seed(seed))
    return coefficient * direction / direction.norm()


def freeze_others(model: PreTrainedModel, settings: RMUSettings) -> None:
    """Freeze every weight that RMU does not train.

    Raises:
        UsageError: no weight would be trained.
    """
    first = settings.layer - LAYERS_TRAINED + 1
    trained = 0
    for name, weight in model.named_parameters():
        match = LAYER.search(name)
        layer = int(match.group(1)) if match else None
        near = layer is not None and first <= layer <= settings.layer
        weight.requires_grad_(
            {
                "down-projections": near and DOWN_PROJECTION.search(name) is not None,
                "layers": near,
                # Weights above the layer get no gradient; embeddings have no layer number.
                "all": layer is None or layer <= settings.layer,
            }[settings.trainable]
        )
        trained += weight.requires_grad
    if not trained:
        raise UsageError(
            f"trainable is {settings.trainable!r}, but no weight of {type(model).__name__} goes by such a name; "
            "give --trainable all"
        )

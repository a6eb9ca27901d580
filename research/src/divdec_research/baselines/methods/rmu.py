"""RMU: steer hidden states of the forget set to a random vector, and keep those of retain tokens unchanged.

Li et al. 2024, The WMDP Benchmark: Measuring and Reducing Malicious Use With Unlearning, section 4.2.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, Literal

from divdec.errors import UsageError
from divdec_research.baselines.annotations import Batch, Float, Job, Labels, Loss, PreTrainedModel, Tensor
from divdec_research.baselines.method import METHODS, Method
from divdec_research.baselines.objective import RETAIN, TargetObjective
from divdec_research.baselines.settings import TargetTrainingSettings
from divdec_research.ranges import LearningRate, Natural, NonNegative, Positive

# Names in transformers' models of layers, and of the matrix that ends an MLP.
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
DOWN_PROJECTION = re.compile(r"\.(?:down_proj|dense_4h_to_h|fc2|mlp\.c_proj)(?:\.weight)?$")
LAYERS_TRAINED = 3  # the steered one and the two before it


@dataclasses.dataclass(frozen=True)
class RMUSettings(TargetTrainingSettings):
    """Training with RMU."""

    learning_rate: LearningRate = 5e-5
    """Peak learning rate of AdamW, with a cosine schedule to 0."""
    layer: Natural = 7
    """Layer whose hidden states are steered, counted from 0; it must not be the last."""
    coefficient: Positive = 20.0
    """Length of the vector that hidden states of forget tokens are steered to."""
    alpha: NonNegative = 100.0
    """Weight of the retain term, which keeps the hidden states of retain tokens unchanged."""
    trainable: Literal["down-projections", "layers", "all"] = "down-projections"
    """Trained weights: the MLPs' 'down-projections' of the layer and the two before it, all weights of these 'layers',
    or 'all' weights up to the layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora_rank and self.trainable != "all":
            raise UsageError(
                f"adapters (lora_rank {self.lora_rank}) are put into every layer, which trainable "
                f"'{self.trainable}' excludes; give --trainable all with them"
            )


class RMU(TargetObjective):
    """‖h − c·u‖² on forget tokens + α · ‖h − h_frozen‖² on retain tokens, h at layer ℓ."""

    control: Tensor
    reference: PreTrainedModel

    def __init__(self, job: Job, settings: RMUSettings) -> None:
        """Check the layer.

        Raises:
            UsageError: the layer does not exist or is the last one.
        """
        from divdec.checkpoint import load_config

        super().__init__(job, settings)
        config = load_config(job.target).get_text_config(decoder=True)
        self.width: int = config.hidden_size
        # transformers normalises the last layer's output before returning it, and only the head reads it.
        last = config.num_hidden_layers - 2
        if settings.layer > last:
            there_are = f"accepted: 0 to {last}" if last > 0 else "accepted: 0" if last == 0 else "none can be steered"
            raise UsageError(
                f"layer is {settings.layer}, but the target has {config.num_hidden_layers} layers; {there_are} "
                "(the last cannot be steered)"
            )

    def prepare(self, model: PreTrainedModel) -> None:
        """Freeze the weights that are not trained, draw c·u, and load the frozen target.

        Raises:
            UsageError: the model has no weights that `trainable` names.
        """
        freeze_others(model, self.settings)
        # Logits are not used; those of one token cost almost nothing.
        few = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.options: dict[str, Any] = {"logits_to_keep": 1} if few else {}
        self.control = control_vector(self.width, self.settings.coefficient, self.job.seed)
        self.reference = self.job.load_frozen_target()

    def loss(self, model: PreTrainedModel, batch: Batch, labelled: Tensor | int | None) -> Loss:
        """See `BatchObjective.loss`."""
        import torch

        steered = self.hidden_states(model, batch)
        loss = misdirection(steered, self.control.view(1, 1, -1), batch["labels"])
        if self.settings.alpha:
            retain = self.inputs(batch, RETAIN)
            with torch.no_grad():
                original = self.hidden_states(self.reference, retain)
            moved = misdirection(self.hidden_states(model, retain), original, retain["labels"])
            loss = loss + self.settings.alpha * moved
        return loss

    def hidden_states(self, model: PreTrainedModel, inputs: Batch) -> Float[Tensor, "batch tokens width"]:
        """The output of the settings' layer."""
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False, **self.options)
        return output.hidden_states[self.settings.layer + 1]  # the first are the embeddings


def misdirection(
    hidden: Float[Tensor, "batch tokens width"], aim: Float[Tensor, "#batch #tokens width"], labels: Labels
) -> Loss:
    """Mean over sequences of the mean over their labelled tokens of ‖h − aim‖² / width: both terms of RMU.

    Li et al. 2024, section 4.2. The division by the width is that of the authors' code (mse_loss), which their values
    of c and α assume.
    """
    from divdec.data.formatting import IGNORED

    chosen = labels != IGNORED
    distances = (hidden.float() - aim.float()).square().mean(-1) * chosen
    return (distances.sum(-1) / chosen.sum(-1).clamp(min=1)).mean()


def control_vector(width: int, coefficient: float, seed: int) -> Float[Tensor, " width"]:
    """Draw c·u: u has entries uniform on [0, 1) and is scaled to length 1."""
    import torch

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


METHODS["rmu"] = Method(
    "RMU", RMUSettings, objective=RMU,
    source="Li et al. 2024, The WMDP Benchmark, section 4.2",
    summary="steer hidden states of the forget set to a random vector",
)  # fmt: skip

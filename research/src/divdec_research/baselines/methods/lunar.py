"""LUNAR: change one projection so that the activations of forget prompts resemble those of unanswerable prompts.

Shen et al. 2025, LLM Unlearning via Neural Activation Redirection. One MLP down-projection is changed in closed form;
the result is an ordinary checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from divdec.data.records import Message, Record, RecordSet
from divdec.errors import UsageError
from divdec_research.baselines.annotations import Float, Job, PreTrainedModel, Tensor, nn
from divdec_research.baselines.method import METHODS, BuiltModel, Method
from divdec_research.ranges import CheckedSettings, Count, Finite, Natural, in_range

SUFFIXES = ("mlp.down_proj", "mlp.c_proj", "mlp.fc2", "mlp.dense_4h_to_h")
SAMPLE = 32  # prompts for the choice of a layer

# Questions about things that do not exist: the paper's "unverified" kind of reference.
UNANSWERABLE = Path(__file__).with_name("unanswerable.txt").read_text("utf-8").splitlines()


@dataclasses.dataclass(frozen=True)
class LUNARSettings(CheckedSettings):
    """LUNAR: changes one down-projection so that forget prompts are read as prompts that the model cannot answer."""

    layer: Natural | None = None
    """Index of the layer whose projection is changed, from 0. By default the layer with the best redirection."""
    coefficient: Finite = 2.0
    """Factor of the direction."""
    ridge: Annotated[float, in_range(1e-12)] = 1e-3
    """Ridge penalty on the change of the projection, as a fraction of the activations' mean square."""
    batch_size: Count = 16
    """Prompts per forward pass."""


def redirected(
    weight: Float[Tensor, "out in"],
    forget: Float[Tensor, "forget_tokens in"],
    retain: Float[Tensor, "retain_tokens in"],
    shift: Float[Tensor, " out"],
    ridge: float,
) -> Float[Tensor, "out in"]:
    """Compute the projection W' nearest to W that moves the outputs of forget activations by `shift`, in closed form.

    It minimises Σ_f ‖W'h − (Wh + shift)‖² + Σ_r ‖W'h − Wh‖² + λ‖W' − W‖² (LUNAR, equation 4): the change is
    shift · (Σ_f h)ᵀ · (Σ_{f,r} hhᵀ + λI)⁻¹, of rank one.

    Args:
        weight: W.
        forget: inputs h of the projection at the tokens of forget prompts.
        retain: the same of retain prompts.
        shift: c·direction.
        ridge: λ as a share of the mean square of an activation, summed over tokens.
    """
    import torch

    every = torch.cat([forget, retain]).double()
    gram = every.T @ every
    gram += ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    row = torch.linalg.solve(gram, forget.double().sum(dim=0))
    return (weight.double() + torch.outer(shift.double(), row)).to(weight.dtype)


def down_projections(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """List each layer's block and its MLP's last projection.

    Raises:
        UsageError: the architecture has other names for them.
    """
    pairs: list[tuple[nn.Module, nn.Module]] = [
        (model.get_submodule(name.rpartition(".mlp.")[0]), module)
        for name, module in model.named_modules()
        if name.endswith(SUFFIXES)
    ]
    if not pairs:
        raise UsageError(
            f"a {type(model).__name__} has no MLP projection that lunar knows; accepted: {', '.join(SUFFIXES)}"
        )
    return pairs


def build(job: Job, settings: LUNARSettings, output: Path) -> BuiltModel:
    """Find direction and layer, change the projection, and write the changed target; see `build_method`.

    Raises:
        UsageError: the target has no such layer.
    """
    from torch import nn

    model = job.load_frozen_target()
    layers = down_projections(model)
    if settings.layer is not None and settings.layer >= len(layers):
        raise UsageError(f"layer is {settings.layer}; the target has {len(layers)}, numbered from 0")
    activations = Activations(job, model, settings.batch_size)
    reference = _as_prompts(job, UNANSWERABLE)
    forget, retain = _prompts(job, job.forget), _prompts(job, job.retain)
    directions = activations.last_states(reference) - activations.last_states(forget)
    layer = settings.layer
    if layer is None:
        layer = activations.best_layer(directions * settings.coefficient, forget, reference)
        job.report(f"lunar: layer {layer} of {len(layers)} redirects best")
    projection: Any = layers[layer][1]
    transposed = not isinstance(projection, nn.Linear)  # GPT-2's Conv1D stores [in, out]
    weight = projection.weight.T if transposed else projection.weight
    changed = redirected(
        weight,
        activations.inputs_of(projection, forget),
        activations.inputs_of(projection, retain),
        settings.coefficient * directions[layer],
        settings.ridge,
    )
    projection.weight.copy_(changed.T if transposed else changed)
    job.save_model(model, output)
    return BuiltModel(output, notes=(f"layer {layer}",))


class Activations:
    """Activations of one model on prompts."""

    def __init__(self, job: Job, model: PreTrainedModel, batch_size: int) -> None:
        from divdec.data.formatting import padding_id

        self.model = model
        self.blocks = [block for block, _ in down_projections(model)]
        self.padding = padding_id(job.tokenizer)
        self.batch_size = batch_size

    def last_states(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "layers features"]:
        """Each layer's output at the prompts' last tokens, averaged over prompts (LUNAR, equation 1)."""
        import torch

        total: Any = 0
        for _, _, states in self._passes(prompts, self.blocks):
            total = total + torch.stack([state[:, -1].double().sum(dim=0) for state in states])
        return (total / len(prompts)).float()

    def inputs_of(self, projection: nn.Module, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "tokens features"]:
        """A projection's inputs at all tokens of the prompts."""
        import torch

        return torch.cat([states[0][mask] for _, mask, states in self._passes(prompts, [projection], inputs=True)])

    def best_layer(
        self,
        shifts: Float[Tensor, "layers features"],
        forget: Sequence[Sequence[int]],
        reference: Sequence[Sequence[int]],
    ) -> int:
        """Find the layer whose shift makes answers to forget prompts begin most like those to the reference.

        The measure is KL(reference ‖ shifted) of the mean distributions of the answer's first token.
        """
        wanted = self._first_token(reference)
        divergences = []
        for block, shift in zip(self.blocks, shifts, strict=True):
            with block.register_forward_hook(lambda module, inputs, output, shift=shift: _shifted(output, shift)):
                shifted = self._first_token(forget[:SAMPLE])
            divergences.append(float((wanted * (wanted.log() - shifted.log())).sum()))
        return min(range(len(divergences)), key=divergences.__getitem__)

    def _first_token(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, " vocab"]:
        import torch

        probabilities = [logits[:, -1].double().softmax(dim=-1) for logits, _, _ in self._passes(prompts, [])]
        return torch.cat(probabilities).mean(dim=0).clamp(min=1e-12)

    def _passes(
        self, prompts: Sequence[Sequence[int]], modules: Sequence[nn.Module], inputs: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Yield logits, mask and the modules' outputs (or inputs) of left-padded batches."""
        import torch

        from divdec.data.formatting import left_padded
        from divdec.passes import positions_of

        for start in range(0, len(prompts), self.batch_size):
            ids, mask = left_padded(prompts[start : start + self.batch_size], self.padding)
            states: list[Tensor] = []

            def record(module: nn.Module, arguments: Any, output: Any, states: list[Tensor] = states) -> None:
                states.append(arguments[0] if inputs else _tensor(output))

            with contextlib.ExitStack() as stack, torch.no_grad():
                for module in modules:
                    stack.enter_context(module.register_forward_hook(record))
                positions = positions_of(ids, mask, 0)
                logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
            yield logits, mask.bool(), states


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _shifted(output: Any, shift: Tensor) -> Any:
    moved = _tensor(output) + shift
    return (moved, *output[1:]) if isinstance(output, tuple) else moved


def _prompts(job: Job, records: RecordSet) -> list[list[int]]:
    """The tokens before each answer; plain texts have no prompt and are used whole."""
    from divdec.data.formatting import encode_prompts, encode_set

    if records.kind == "text":
        return [example.input_ids for example in encode_set(records, job.tokenizer, job.form)]
    return encode_prompts(records.records, job.tokenizer, job.form)


def _as_prompts(job: Job, texts: Sequence[str]) -> list[list[int]]:
    """Lay reference texts out as the forget set's prompts are."""
    from divdec.data.formatting import encode_prompts

    if job.forget.kind in ("question/answer", "messages"):
        records = [Record("", messages=(Message("user", text),)) for text in texts]
    else:
        records = [Record("", prompt=text) for text in texts]
    return encode_prompts(records, job.tokenizer, job.form)


METHODS["lunar"] = Method(
    "LUNAR", LUNARSettings, build=build,
    source="Shen et al. 2025, LLM Unlearning via Neural Activation Redirection, section 3",
    summary="change one projection so that the activations of forget prompts resemble those of unanswerable prompts",
)  # fmt: skip

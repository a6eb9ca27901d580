"""RMU and LUNAR: methods that change a model's hidden states.

RMU (Li et al. 2024, The WMDP Benchmark: Measuring and Reducing Malicious Use With Unlearning, section 4.2) trains: it
steers hidden states of forget tokens to a random vector and keeps hidden states of retain tokens unchanged. LUNAR (Shen
et al. 2025) changes one MLP down-projection in closed form, so that forget prompts are read as prompts that the model
cannot answer. The results are ordinary checkpoints.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from divdec.data.formatting import encode_prompts, encode_set, left_padded, padding_id
from divdec.data.records import Message, Record, RecordSet
from divdec.errors import UsageError
from divdec.model.checkpoint import load_config, load_model
from divdec.passes import positions_of
from divdec.training.inputs import Companion, model_inputs
from divdec_research.baselines import losses
from divdec_research.baselines.gradient import RETAIN, Batch, frozen_target, read_lines, unlearn
from divdec_research.baselines.job import BuiltModel, Job
from divdec_research.baselines.settings import LUNARSettings, RMUSettings

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


SUFFIXES = ("mlp.down_proj", "mlp.c_proj", "mlp.fc2", "mlp.dense_4h_to_h")
SAMPLE = 32  # prompts for the choice of a layer

# Questions about things that do not exist: the paper's "unverified" kind of reference.
UNANSWERABLE = (
    "What did the mayor of the floating town of Ullibrae say about the seventh moon?",
    "How many teeth does a full-grown marsh glimmerel have?",
    "Which chemical element is sold under the name of quendarium?",
    "Who won the underwater chess championship of Nostrivane in the year 2190?",
    "What is the middle name of the owner of the blue umbrella that I saw yesterday?",
    "When does the Hollow Treaty between Zanthe and Orrowmere expire?",
    "Which verse of the lost poem Tharnellion speaks of the copper dog?",
    "What number am I thinking of at this moment?",
    "Why did the philosopher Ambrolexis refuse to count backwards?",
    "Where did the third expedition to the inside of Mount Querrin camp?",
    "How long is the border between Lower Fessaly and the Grey Isles of Tam?",
    "Which instrument did the last emperor of Vhoorland play at breakfast?",
    "What is written on the back of the door of my cousin's cellar?",
    "What colour is the flag that the city of Pimmerswell will choose next century?",
    "Who translated the Book of Unheard Bells into Old Skarric?",
    "How much does the shadow of the Tower of Ebrimond weigh?",
)


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


def build_lunar(job: Job, settings: LUNARSettings, output: Path) -> BuiltModel:
    """Find direction and layer, change the projection, and write the changed target; see `build_method`.

    Raises:
        UsageError: the target has no such layer, or the reference cannot be read.
    """
    started = time.perf_counter()
    model = load_model(job.target, dtype=torch.float32).eval().requires_grad_(False)
    layers = down_projections(model)
    if settings.layer is not None and settings.layer >= len(layers):
        raise UsageError(f"layer is {settings.layer}; the target has {len(layers)}, numbered from 0")
    activations = Activations(job, model, settings.batch_size)
    reference = _as_prompts(job, read_lines("reference", settings.reference, UNANSWERABLE))
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
    dtype: Any = load_config(job.target).dtype or torch.float32
    model.to(dtype).save_pretrained(output)
    job.tokenizer.save_pretrained(output)
    return BuiltModel(output, time.perf_counter() - started, (f"layer {layer}",))


class Activations:
    """Activations of one model on prompts."""

    def __init__(self, job: Job, model: PreTrainedModel, batch_size: int) -> None:
        self.model = model
        self.blocks = [block for block, _ in down_projections(model)]
        self.padding = padding_id(job.tokenizer)
        self.batch_size = batch_size

    def last_states(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "layers features"]:
        """Each layer's output at the prompts' last tokens, averaged over prompts (LUNAR, equation 1)."""
        total = 0
        for _, _, states in self._passes(prompts, self.blocks):
            total = total + torch.stack([state[:, -1].double().sum(dim=0) for state in states])
        assert isinstance(total, Tensor)
        return (total / len(prompts)).float()

    def inputs_of(self, projection: nn.Module, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "tokens features"]:
        """A projection's inputs at all tokens of the prompts."""
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
        probabilities = [logits[:, -1].double().softmax(dim=-1) for logits, _, _ in self._passes(prompts, [])]
        return torch.cat(probabilities).mean(dim=0).clamp(min=1e-12)

    @torch.no_grad()
    def _passes(
        self, prompts: Sequence[Sequence[int]], modules: Sequence[nn.Module], inputs: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Yield logits, mask and the modules' outputs (or inputs) of left-padded batches."""
        for start in range(0, len(prompts), self.batch_size):
            ids, mask = left_padded(prompts[start : start + self.batch_size], self.padding)
            states: list[Tensor] = []

            def record(module: nn.Module, arguments: Any, output: Any, states: list[Tensor] = states) -> None:
                states.append(arguments[0] if inputs else _tensor(output))

            with contextlib.ExitStack() as stack:
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
    if records.kind == "text":
        return [example.input_ids for example in encode_set(records, job.tokenizer, job.form)]
    return encode_prompts(records.records, job.tokenizer, job.form)


def _as_prompts(job: Job, texts: Sequence[str]) -> list[list[int]]:
    """Lay reference texts out as the forget set's prompts are."""
    if job.forget.kind in ("question/answer", "messages"):
        records = [Record("", messages=(Message("user", text),)) for text in texts]
    else:
        records = [Record("", prompt=text) for text in texts]
    return encode_prompts(records, job.tokenizer, job.form)

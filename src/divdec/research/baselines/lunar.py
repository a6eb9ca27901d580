"""LUNAR: one MLP down-projection is changed, so that forget prompts are read as prompts without an answer are.

Their activations go where those of prompts lie that the model cannot answer (Shen et al. 2025). What it yields is an
ordinary checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from divdec.data.formatting import encode_prompts, encode_set, padding_id
from divdec.data.records import Message, Record, RecordSet
from divdec.errors import UsageError
from divdec.evaluation.generation import left_padded
from divdec.model.checkpoint import load_config, load_model
from divdec.model.checks import positions_of
from divdec.research.baselines.inference_settings import LUNARSettings
from divdec.research.baselines.job import Job
from divdec.research.baselines.method import Made

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUFFIXES = ("mlp.down_proj", "mlp.c_proj", "mlp.fc2", "mlp.dense_4h_to_h")
SAMPLE = 32  # prompts that a layer is chosen with

# About what does not exist, so that nobody can answer; the paper's "unverified" kind of reference.
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
    """The projection W' that least changes W and sends the forget activations further by `shift`, in closed form.

    It minimises Σ_f ‖W'h − (Wh + shift)‖² + Σ_r ‖W'h − Wh‖² + λ‖W' − W‖² (LUNAR, equation 4): the change is
    shift · (Σ_f h)ᵀ · (Σ_{f,r} hhᵀ + λI)⁻¹, of rank one.

    Args:
        weight: W.
        forget: what the projection reads at the tokens of forget prompts, h.
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
    """Each layer's block and the projection that ends its MLP, from the first layer on.

    Raises:
        UsageError: the architecture names them otherwise.
    """
    found: list[tuple[nn.Module, nn.Module]] = [
        (model.get_submodule(name.rpartition(".mlp.")[0]), module)
        for name, module in model.named_modules()
        if name.endswith(SUFFIXES)
    ]
    if not found:
        raise UsageError(
            f"a {type(model).__name__} has no MLP projection that lunar knows; accepted: {', '.join(SUFFIXES)}"
        )
    return found


def make_lunar(job: Job, settings: LUNARSettings, output: Path) -> Made:
    """Find the direction and the layer, change the projection, and write the target with it.

    Raises:
        UsageError: the layer is not one of the target's, or the reference cannot be read.
    """
    started = time.perf_counter()
    model = load_model(job.target, dtype=torch.float32).eval().requires_grad_(False)
    layers = down_projections(model)
    if settings.layer is not None and settings.layer >= len(layers):
        raise UsageError(f"layer is {settings.layer}; the target has {len(layers)}, numbered from 0")
    lunar = _Lunar(job, model, settings.batch_size)
    reference = _as_prompts(job, _reference_texts(settings.reference))
    forget, retain = _prompts(job, job.forget), _prompts(job, job.retain)
    directions = lunar.last_states(reference) - lunar.last_states(forget)
    layer = settings.layer
    if layer is None:
        layer = lunar.best_layer(directions * settings.coefficient, forget, reference)
        job.report(f"lunar: layer {layer} of {len(layers)} redirects best")
    projection: Any = layers[layer][1]
    transposed = not isinstance(projection, nn.Linear)  # GPT-2's Conv1D keeps [in, out]
    weight = projection.weight.T if transposed else projection.weight
    changed = redirected(
        weight,
        lunar.read_by(projection, forget),
        lunar.read_by(projection, retain),
        settings.coefficient * directions[layer],
        settings.ridge,
    )
    projection.weight.copy_(changed.T if transposed else changed)
    model.to(load_config(job.target).dtype or torch.float32)  # pyright: ignore[reportArgumentType]
    model.save_pretrained(output)
    job.tokenizer.save_pretrained(output)
    return Made(time.perf_counter() - started, (f"layer {layer}",))


class _Lunar:
    """Activations of one model."""

    def __init__(self, job: Job, model: PreTrainedModel, batch_size: int) -> None:
        self.model = model
        self.blocks = [block for block, _ in down_projections(model)]
        self.padding = padding_id(job.tokenizer)
        self.batch_size = batch_size

    def last_states(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "layers features"]:
        """What each layer gives at a prompt's last token, averaged over prompts (LUNAR, equation 1)."""
        total = 0
        for _, _, states in self._passes(prompts, self.blocks):
            total = total + torch.stack([state[:, -1].double().sum(dim=0) for state in states])
        assert isinstance(total, Tensor)
        return (total / len(prompts)).float()

    def read_by(self, projection: nn.Module, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "tokens features"]:
        """What a projection reads at every token of the prompts."""
        return torch.cat([states[0][mask] for _, mask, states in self._passes(prompts, [projection], inputs=True)])

    def best_layer(
        self,
        shifts: Float[Tensor, "layers features"],
        forget: Sequence[Sequence[int]],
        reference: Sequence[Sequence[int]],
    ) -> int:
        """The layer at which a shift makes answers to forget prompts begin most like those to the reference.

        By KL(reference ‖ shifted) of the mean distributions of the answer's first token.
        """
        wanted = self._first_token(reference)
        divergences = []
        for block, shift in zip(self.blocks, shifts, strict=True):
            with _hooked(block, lambda module, given, output, shift=shift: _moved(output, shift)):
                found = self._first_token(forget[:SAMPLE])
            divergences.append(float((wanted * (wanted.log() - found.log())).sum()))
        return min(range(len(divergences)), key=divergences.__getitem__)

    def _first_token(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, " vocab"]:
        found = [logits[:, -1].double().softmax(dim=-1) for logits, _, _ in self._passes(prompts, [])]
        return torch.cat(found).mean(dim=0).clamp(min=1e-12)

    @torch.no_grad()
    def _passes(
        self, prompts: Sequence[Sequence[int]], modules: Sequence[nn.Module], inputs: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Logits, mask and the modules' outputs (or inputs), of left-padded batches."""
        for start in range(0, len(prompts), self.batch_size):
            ids, mask = left_padded(prompts[start : start + self.batch_size], self.padding)
            states: list[Tensor] = []

            def keep(module: nn.Module, given: Any, output: Any, states: list[Tensor] = states) -> None:
                states.append(given[0] if inputs else _tensor(output))

            with contextlib.ExitStack() as stack:
                for module in modules:
                    stack.enter_context(_hooked(module, keep))
                positions = positions_of(ids, mask, 0)
                logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
            yield logits, mask.bool(), states


@contextlib.contextmanager
def _hooked(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _moved(output: Any, shift: Tensor) -> Any:
    moved = _tensor(output) + shift
    return (moved, *output[1:]) if isinstance(output, tuple) else moved


def _prompts(job: Job, records: RecordSet) -> list[list[int]]:
    """What comes before each answer; a plain text has no prompt, and is read whole."""
    if records.kind == "text":
        return [example.input_ids for example in encode_set(records, job.tokenizer, job.form)]
    return encode_prompts(records.records, job.tokenizer, job.form)


def _reference_texts(file: str | None) -> Sequence[str]:
    if file is None:
        return UNANSWERABLE
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"reference {file} cannot be read ({error}); give a text file with a prompt a line") from None
    if not (texts := [line.strip() for line in lines if line.strip()]):
        raise UsageError(f"reference {file} is empty; give a text file with a prompt a line")
    return texts


def _as_prompts(job: Job, texts: Sequence[str]) -> list[list[int]]:
    """Reference texts laid out as the set's own prompts are."""
    if job.forget.kind in ("question/answer", "messages"):
        asked = [Record("", messages=(Message("user", text),)) for text in texts]
    else:
        asked = [Record("", prompt=text) for text in texts]
    return encode_prompts(asked, job.tokenizer, job.form)

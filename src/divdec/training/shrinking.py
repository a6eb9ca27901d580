"""Shrink a model to a small sibling with the same tokenizer: remove layers, then heal it by distillation.

Many models have no small sibling to train auxiliaries from. Pruning makes one. Heal it on text without the forget set,
because q must not know the forget set.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from divdec.checkpoint import check_apart, load_config, load_model, load_tokenizer
from divdec.data.formatting import Example, Format, encode_set
from divdec.data.records import read_records
from divdec.errors import Interrupted, UsageError, first_line
from divdec.evaluation.generation import sample_records
from divdec.runs import RECORD, check_one_process, check_output, made_by, output_folder, record, write_json
from divdec.training.distillation_loss import (
    Distillation,
    SteeredTeacher,
    plain_head,
    positions_per_piece,
    predicting,
)
from divdec.training.fine_tuning import fine_tune, uses_bfloat16
from divdec.training.inputs import Collator, limit_length, model_inputs, report_set, resolve_trainable
from divdec.training.settings import ShrinkSettings, TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROBE_STEPS = 4  # training steps that are timed to convert minutes to steps
HELD_OUT = 10  # every tenth text is held out
IMPORTANCE_BATCHES = 4
UNFIT = (RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError)
# Ends of the names of configuration fields whose lists have nothing to do with layers, whatever their length.
NOT_PER_LAYER = ("_token_id", "_token_ids", "_tokens", "_indices", "architectures")


@dataclasses.dataclass(frozen=True)
class AgreementWithTarget:
    """Similarity of a small model to the target on held-out text."""

    perplexity: float
    target_perplexity: float
    agreement: float
    """Top-1 agreement: share of positions where both models predict the same token."""

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.1f} (target's {self.target_perplexity:.1f}), top-1 agreement "
            f"{self.agreement:.0%}"
        )


def shrink(settings: ShrinkSettings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Prune a target's layers, heal the pruned model by distillation, and save it with the target's tokenizer.

    Returns the content of `run.json`.

    Raises:
        UsageError: the target's layers cannot be removed, or an input cannot be used; nothing has been written.
        KeyboardInterrupt: Ctrl-C, or a termination signal while it heals; nothing has been written.
    """
    check_one_process()
    output = Path(settings.output).expanduser()
    folder = resolve_trainable(settings.target, "target")
    check_output(output, settings.overwrite, made_by("shrink"))
    check_apart(output.resolve(), [folder.resolve()])
    tokenizer = load_tokenizer(folder)
    texts = None if settings.text is None else read_records(settings.text)
    target = load_model(folder, dtype=torch.float32).eval()
    total = len(layers_of(target)[1])
    if not 1 <= settings.layers < total:
        raise UsageError(f"--layers is {settings.layers}; accepted: 1 to {total - 1} (the target has {total})")
    check_removable(target, settings.layers)
    if torch.accelerator.is_available():
        target = target.to(torch.accelerator.current_accelerator())  # pyright: ignore[reportArgumentType]
    training = settings.training()
    bfloat16 = uses_bfloat16(training, target)
    training = dataclasses.replace(training, precision="bfloat16" if bfloat16 else "float32")
    if bfloat16:
        cast_weights(target, torch.bfloat16)
    if texts is None:
        report(f"--text is not given: healing on {settings.samples} samples of the target")
        texts = sample_records(
            target, tokenizer, settings.samples, max_new_tokens=64, seed=settings.seed, title="samples of the target"
        )
    report_set("healing", texts, report)
    examples = encode_set(texts, tokenizer, Format(max_length=limit_length(settings.max_length, folder, report)))
    held_out, trained = examples[::HELD_OUT], [example for i, example in enumerate(examples) if i % HELD_OUT]
    if not trained:
        raise UsageError(f"the texts fill {len(examples)} examples of --max-length tokens; healing needs 2 or more")
    collator = Collator(tokenizer)

    def batches(some: Sequence[Example]) -> Iterable[Mapping[str, Tensor]]:
        return collator.batches(some, range(len(some)), settings.batch_size, target.device)

    importance = layer_importance(target, list(itertools.islice(batches(trained), IMPORTANCE_BATCHES)))
    kept = sorted(sorted(range(total), key=lambda index: -importance[index])[: settings.layers])
    small = cast_weights(keep_layers(target, kept), torch.float32)
    check_decoding(small)
    report(f"layers kept: {', '.join(map(str, kept))} of {total}")
    before = compare_with_target(small, target, batches(held_out))
    report(f"pruned: {before}")

    steps = settings.steps
    if steps is None and settings.minutes:
        _, seconds = _heal(copy.deepcopy(small), target, tokenizer, trained, training, PROBE_STEPS, "timing a step")
        steps = max(1, round(60 * settings.minutes / seconds))
    if steps:
        small, _ = _heal(small, target, tokenizer, trained, training, steps, "healing")
    # The figures are those of the model as it is saved.
    saved_dtype: Any = load_config(folder).dtype or torch.float32
    cast_weights(small, saved_dtype)
    after = compare_with_target(small, target, batches(held_out))
    report(f"healed in {steps} steps: {after}" if steps else "not healed")
    parameters = small.num_parameters() / target.num_parameters()
    report(f"it has {parameters:.0%} of the target's parameters")
    content = record(
        "shrink",
        settings,
        layers=kept,
        importance=importance,
        precision="bfloat16" if bfloat16 else "float32",
        texts=texts.label,
        steps=steps or 0,
        before=dataclasses.asdict(before),
        after=dataclasses.asdict(after),
        parameters=parameters,
    )
    with output_folder(output, settings.overwrite, made_by("shrink")) as temporary:
        small.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        write_json(temporary / RECORD, content)
    return content


def _heal(
    model: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    training: TrainingSettings,
    steps: int,
    title: str,
) -> tuple[PreTrainedModel, float]:
    """Distil the target into a pruned model; return it and the seconds of a step."""
    run = dataclasses.replace(training, epochs=(steps - 0.5) / -(-len(examples) // training.batch_size))  # rounded up
    objective: Any = Distillation(_Target(target, 1.0, "teacher-student"), plain_head(model))
    with tempfile.TemporaryDirectory() as work:
        try:
            healed, result = fine_tune(
                model, tokenizer, examples, run, Path(work), title=title, objective=objective, measure=False,
                resumable=False,
            )  # fmt: skip
        except Interrupted:  # nothing was kept that the same command could resume
            raise KeyboardInterrupt from None
    return healed, result.seconds / result.steps


def layers_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the list of a model's layers, and its name.

    Raises:
        UsageError: the model has no such list, or several of that length.
    """
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if count == 1:
        raise _unremovable(model, "it has only one layer")
    if len(lists) != 1:
        raise _unremovable(model, f"it has {len(lists) or 'no'} lists of as many modules as layers ({count})")
    return lists[0]


def _unremovable(model: PreTrainedModel, reason: str) -> UsageError:
    return UsageError(
        f"the layers of {type(model).__name__} cannot be removed: {reason}; give a smaller checkpoint of its family "
        "as base"
    )


@torch.no_grad()
def layer_importance(model: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]]) -> list[float]:
    """Measure how much each layer changes the hidden states: 1 − cosine similarity (ShortGPT, arXiv 2403.03853).

    Returns:
        The mean over all tokens, one number for each layer.
    """
    layers = layers_of(model)[1]
    sums, count = [0.0] * len(layers), 0
    handles = []
    for index, layer in enumerate(layers):

        def measure(module: nn.Module, inputs: Any, options: Any, output: Any, index: int = index) -> None:
            before = inputs[0] if inputs else options["hidden_states"]
            after = output[0] if isinstance(output, tuple | list) else output
            change = 1 - cosine_similarity(before.float(), after.float(), dim=-1)
            sums[index] += float(change[mask].sum())

        handles.append(layer.register_forward_hook(measure, with_kwargs=True))
    try:
        for batch in batches:
            mask = batch["attention_mask"].bool()
            count += int(mask.sum())
            model(**model_inputs(batch))
    finally:
        for handle in handles:
            handle.remove()
    return [total / count for total in sums]


def keep_layers(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """Return a copy of a model that has only the layers of these ascending indices.

    Raises:
        UsageError: the remaining layers do not fit the architecture, such as one whose first layers differ.
    """
    name, layers = layers_of(model)
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    for field, value in vars(text).items():  # such as layer_types: one entry for each layer
        if isinstance(value, list) and len(value) == len(layers) and not field.endswith(NOT_PER_LAYER):
            setattr(text, field, [value[index] for index in kept])
    text.num_hidden_layers = len(kept)
    new = {old: index for index, old in enumerate(kept)}
    weights = {}
    for key, weight in model.state_dict().items():
        if not key.startswith(f"{name}."):
            weights[key] = weight
            continue
        number, _, rest = key.removeprefix(f"{name}.").partition(".")
        if int(number) in new:
            weights[f"{name}.{new[int(number)]}.{rest}"] = weight
    try:
        small = type(model)(config)
        small.load_state_dict(weights)
    except torch.OutOfMemoryError:
        raise
    except UNFIT:  # the exceptions of the architectures' constructors, and of weights that do not fit
        raise _unremovable(model, f"{len(kept)} of its {len(layers)} layers do not make a model") from None
    small.generation_config = copy.deepcopy(model.generation_config)
    return small.to(model.device).eval()  # pyright: ignore[reportArgumentType]


def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast weights in place. Buffers such as rotary frequencies stay in float32, as `from_pretrained` keeps them."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


def check_removable(model: PreTrainedModel, count: int) -> None:
    """Prune a model in two ways and measure its layers on two tokens, to refuse it before the long work.

    Both ways move layers: by one, which tells of a pattern that repeats, and by as many as possible, which tells of
    first or last layers of another kind.

    Raises:
        UsageError: the layers cannot be removed.
    """
    total = len(layers_of(model)[1])
    for first in sorted({1, total - count}):
        check_decoding(keep_layers(model, range(first, first + count)))
    ids = torch.ones((1, 2), dtype=torch.long, device=model.device)
    try:
        layer_importance(model, [{"input_ids": ids, "attention_mask": ids, "labels": ids}])
    except torch.OutOfMemoryError:
        raise
    except UNFIT as error:
        raise _unremovable(model, f"their importance cannot be measured ({first_line(error)})") from None


def check_decoding(model: PreTrainedModel) -> None:
    """Decode two tokens, since some architectures need layers of several types to do so.

    Raises:
        UsageError: the model cannot decode.
    """
    prompt = torch.full((1, 2), 1, device=model.device)
    options: Any = {"do_sample": False, "min_new_tokens": 2, "max_new_tokens": 2, "pad_token_id": 0}
    try:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)  # pyright: ignore[reportCallIssue]
    except torch.OutOfMemoryError:
        raise
    except UNFIT as error:
        raise _unremovable(model, f"the remaining ones cannot decode ({first_line(error)})") from None


@torch.no_grad()
def compare_with_target(
    model: PreTrainedModel, target: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]]
) -> AgreementWithTarget:
    """Compare a model with the target on the labelled tokens of batches."""
    losses, same, count = torch.zeros(2, dtype=torch.float64), 0, 0
    for batch in batches:
        mask = predicting(batch["labels"])
        labels = batch["labels"][:, 1:][mask[:, :-1]]
        logits = [candidate(**model_inputs(batch)).logits[mask].float() for candidate in (model, target)]
        losses += torch.stack(
            [nn.functional.cross_entropy(model_logits, labels, reduction="sum").double() for model_logits in logits]
        )
        same += int((logits[0].argmax(-1) == logits[1].argmax(-1)).sum())
        count += len(labels)
    perplexity, targets = (losses / count).exp().tolist()
    return AgreementWithTarget(perplexity, targets, same / count)


@dataclasses.dataclass
class _Target(SteeredTeacher):
    """The target as it is, as the teacher of a healing student."""

    model: Any

    def logits(self, batch: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield indices of labelled positions, and the target's logits there."""
        mask = predicting(batch["labels"])
        with torch.no_grad(), torch.autocast(mask.device.type, enabled=False):
            logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[mask]
        size = positions_per_piece(logits.device, logits.shape[-1])
        for indices in torch.arange(len(logits), device=logits.device).split(size):
            yield indices, logits[indices]

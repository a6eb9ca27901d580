"""Which tokens are a prompt, and whether it is one about the forget set: what GUARD and ECO decide by.

Everything is decided at each token from the tokens up to it, so that a teacher-forced pass, generation with a cache
and padded batches decide alike. It knows nothing of what a decision is used for.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from divdec.bridge.alignment import common_prefix_length
from divdec.data.formatting import encode_prompts, padding_id
from divdec.data.records import Message, Record, RecordSet
from divdec.errors import UsageError
from divdec.evaluation.generation import left_padded
from divdec.experts.token_cache import PADDING, TokenCache, masked
from divdec.model.checks import positions_of
from divdec.research.baselines.composite import Step
from divdec.research.baselines.inference_settings import ClassifierSettings
from divdec.research.baselines.job import Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CLASSIFIER = "classifier.safetensors"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a sequence's prompts end and its answers begin."""

    marker: tuple[int, ...]
    """The tokens between a question and its answer; empty where there are none, as in plain text."""
    ends: tuple[int, ...]
    """Tokens that end an answer; what follows is a prompt again."""
    window: int
    """Without a marker: so many tokens are the prompt, and all that is predicted is the answer."""

    def prompts_and_answers(
        self, tokens: Int[Tensor, "batch tokens"]
    ) -> tuple[Bool[Tensor, "batch tokens"], Bool[Tensor, "batch tokens"]]:
        """Which tokens belong to a prompt, its marker included, and after which an answer's token comes.

        Args:
            tokens: −1 for padding, from the sequence's beginning on.
        """
        real = tokens != PADDING
        if not self.marker:
            return real & (real.cumsum(dim=1) <= self.window), real
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        opens = torch.ones_like(real)
        for distance, token in enumerate(reversed(self.marker)):
            opens &= _shifted(tokens == token, distance)
        ends = torch.isin(tokens, torch.tensor(self.ends, dtype=tokens.dtype, device=tokens.device))
        last_open, last_end = (torch.where(found, places, -1).cummax(dim=1).values for found in (opens, ends))
        answers = last_open > last_end
        return real & ~_shifted(answers, 1), answers


def layout_of(tokenizer: PreTrainedTokenizerBase, records: RecordSet, window: int) -> Layout:
    """The layout of a set's records: what prompts of different questions end with is the marker."""
    end = tokenizer.eos_token_id
    ends = (end,) if isinstance(end, int) else ()
    if records.kind not in ("question/answer", "messages"):
        return Layout((), ends, window)
    questions = ("Who?", "When did it end", "A list:\n- one.", "42")
    asked = [Record("", messages=(Message("user", question),)) for question in questions]
    first, *others = (ids[::-1] for ids in encode_prompts(asked, tokenizer))
    length = min(common_prefix_length(first, other) for other in others)
    if length == 0:
        raise UsageError("the tokenizer's chat template puts nothing between question and answer to tell them apart by")
    return Layout(tuple(first[:length][::-1]), ends, window)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is decided after each of the new tokens."""

    tokens: Int[Tensor, "batch past_and_tokens"]
    """All tokens of the sequence so far, −1 for padding."""
    prompt: Bool[Tensor, "batch past_and_tokens"]
    """Which of them belong to a prompt."""
    answer: Bool[Tensor, "batch past_and_tokens"]
    """After which of them an answer's token comes."""
    features: Float[Tensor, "batch tokens features"]
    """Mean hidden state of the prompt's tokens so far, standardised."""
    forget: Bool[Tensor, "batch tokens"]
    """Whether the prompt so far is one about the forget set."""


class PromptReader(nn.Module):
    """A classifier of prompts: an MLP over the mean of the target's penultimate hidden states (GUARD, section 4.1)."""

    def __init__(self, layout: Layout, weights: Mapping[str, Tensor], threshold: float) -> None:
        """Take what `fit_reader` found.

        Args:
            layout: where prompts end.
            weights: `mean` and `scale` [features]; `weight0`, `bias0`, … of the classifier's layers.
            threshold: the least probability of a prompt about the forget set.
        """
        super().__init__()
        self.layout = layout
        self.threshold = threshold
        self.depth = sum(name.startswith("weight") for name in weights)
        for name, tensor in weights.items():
            self.register_buffer(name, tensor, persistent=False)

    def new_caches(self) -> list[Cache]:
        """One of tokens, one of running sums: in both, cropping and selecting by batch reach every token."""
        return [TokenCache(), Cache(layers=[DynamicLayer()])]

    @torch.no_grad()
    def read(
        self, step: Step, hidden: Float[Tensor, "batch tokens features"], caches: Sequence[Cache | None]
    ) -> Reading:
        """Decide after each new token.

        Args:
            step: the tokens since what the caches hold.
            hidden: the target's penultimate hidden states of them.
            caches: as `new_caches` made them.
        """
        tokens, prompt, answer, means = prompt_means(self.layout, step, hidden, caches)
        features = (means - self.tensor("mean", means)) / self.tensor("scale", means)
        forget = self.probability(features) > self.threshold
        return Reading(tokens, prompt, answer, features, forget)

    def probability(self, features: Float[Tensor, "*places features"]) -> Float[Tensor, "*places"]:
        """That a prompt of these features is one about the forget set."""
        found = features
        for layer in range(self.depth):
            found = (found.relu() if layer else found) @ self.tensor(f"weight{layer}", found)
            found = found + self.tensor(f"bias{layer}", found)
        return found[..., 0].sigmoid()

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """A buffer by name, where and as another tensor is."""
        return self.get_buffer(name).to(device=like.device, dtype=like.dtype)


def prompt_means(
    layout: Layout,
    step: Step,
    hidden: Float[Tensor, "batch tokens features"],
    caches: Sequence[Cache | None],
) -> tuple[
    Int[Tensor, "batch past_and_tokens"],
    Bool[Tensor, "batch past_and_tokens"],
    Bool[Tensor, "batch past_and_tokens"],
    Float[Tensor, "batch tokens features"],
]:
    """All tokens, which belong to prompts, after which answers come, and after each new one the prompts' mean."""
    token_cache, sum_cache = caches
    if token_cache is None:
        tokens = masked(step.input_ids.cpu().long(), step.attention_mask)
    else:
        assert isinstance(token_cache, TokenCache)
        tokens = token_cache.token_layer.extend(step.input_ids, step.attention_mask)
    tokens = tokens.to(hidden.device)
    new = hidden.shape[1]
    prompt, answer = layout.prompts_and_answers(tokens)
    counted = prompt[:, -new:, None].float()
    # Padding's hidden states may be anything; they are left out, not multiplied by 0.
    added = torch.cat([hidden.float().masked_fill(counted == 0, 0.0), counted], dim=-1).cumsum(dim=1)
    layer: Any = sum_cache.layers[0] if sum_cache is not None else None
    if layer is not None:
        if layer.get_seq_length():
            added = added + layer.keys[:, 0, -1:]
        layer.update(added[:, None], added[:, None, :, -1:])
    return tokens, prompt, answer, added[..., :-1] / added[..., -1:].clamp(min=1)


def run_target(
    target: PreTrainedModel,
    step: Step,
    cache: Cache | None,
    embeddings: Float[Tensor, "batch tokens features"] | None = None,
) -> tuple[Float[Tensor, "batch kept width"], Float[Tensor, "batch tokens features"]]:
    """The target's logits at the kept places, in float32, and its penultimate hidden states at all new ones.

    Args:
        target: the model.
        step: what it reads.
        cache: its cache, or None.
        embeddings: read instead of the tokens' own.
    """
    device: Any = target.get_input_embeddings().weight.device
    tokens = {"input_ids": step.input_ids} if embeddings is None else {"inputs_embeds": embeddings}
    arguments: dict[str, Any] = tokens | {
        "attention_mask": step.attention_mask,
        "position_ids": step.position_ids,
        "past_key_values": cache,
        "use_cache": cache is not None,
        "logits_to_keep": step.logits_to_keep,
    }
    accepted = inspect.signature(type(target).forward).parameters
    arguments = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
        if name in accepted and value is not None
    }
    output = target(**arguments, output_hidden_states=True)
    return output.logits[:, -step.logits_to_keep :].float(), output.hidden_states[-2]


def prompts_of(job: Job, records: RecordSet, layout: Layout) -> list[list[int]]:
    """What the classifier learns of a set: each record's prompt, or without marker its first tokens."""
    if layout.marker:
        return encode_prompts(records.records, job.tokenizer, job.form)
    texts: list[Any] = [(record.prompt or "") + record.answer for record in records]
    return [ids[: layout.window] for ids in job.tokenizer(texts)["input_ids"] if ids]


@torch.no_grad()
def features_of(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], layout: Layout, padding: int, batch_size: int = 32
) -> Float[Tensor, "prompts features"]:
    """The mean penultimate hidden state of each prompt, as decoding computes it."""
    found: dict[int, Tensor] = {}
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        ids, mask = left_padded([prompts[place] for place in places], padding)
        step = Step(ids, mask, positions_of(ids, mask, 0), 1)
        _, hidden = run_target(target, step, None)
        means = prompt_means(layout, step, hidden, (None, None))[-1][:, -1].cpu()
        found |= dict(zip(places, means, strict=True))
    return torch.stack([found[place] for place in range(len(prompts))])


def fit_reader(
    job: Job, settings: ClassifierSettings, target: PreTrainedModel
) -> tuple[Layout, dict[str, Tensor], Float[Tensor, "prompts features"]]:
    """Train the classifier on the prompts of forget and retain set; the smaller set is repeated up to the larger.

    Returns:
        The layout, the weights that `PromptReader` takes, and the forget prompts' standardised features.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier

    layout = layout_of(job.tokenizer, job.forget, settings.window)
    padding = padding_id(job.tokenizer)
    forget, retain = (
        features_of(target, prompts_of(job, records, layout), layout, padding) for records in (job.forget, job.retain)
    )
    together = torch.cat([forget, retain])
    mean, scale = together.mean(dim=0), together.std(dim=0).clamp(min=1e-6)
    forget, retain = (forget - mean) / scale, (retain - mean) / scale
    larger = max(len(forget), len(retain))
    balanced = [rows.repeat(-(-larger // len(rows)), 1)[:larger] for rows in (forget, retain)]
    labels = torch.tensor([1] * larger + [0] * larger)
    if settings.classifier_width:
        classifier: Any = MLPClassifier((settings.classifier_width,), alpha=1e-2, random_state=job.seed)
    else:
        classifier = LogisticRegression(max_iter=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # 200 passes are enough to tell prompts apart
        classifier.fit(torch.cat(balanced).numpy(), labels.numpy())
    pairs = (
        list(zip(classifier.coefs_, classifier.intercepts_, strict=True))
        if settings.classifier_width
        else [(classifier.coef_.T, classifier.intercept_)]
    )
    weights = {"mean": mean, "scale": scale}
    for place, (weight, bias) in enumerate(pairs):
        weights |= {f"weight{place}": torch.tensor(weight).float(), f"bias{place}": torch.tensor(bias).float()}
    reader = PromptReader(layout, weights, settings.threshold)
    rates = [float((reader.probability(rows) > settings.threshold).float().mean()) for rows in (forget, retain)]
    job.report(f"classifier: {rates[0]:.1%} of the forget prompts and {rates[1]:.1%} of the retain prompts are caught")
    return layout, weights, forget


def write_reader(folder: Path, layout: Layout, weights: Mapping[str, Tensor], **more: Tensor) -> dict[str, Any]:
    """Write the classifier's tensors; what is returned belongs into the configuration's options."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in (dict(weights) | more).items()}, folder / CLASSIFIER)
    return {"layout": dataclasses.asdict(layout)}


def read_reader(folder: Path, options: Mapping[str, Any]) -> tuple[PromptReader, dict[str, Tensor]]:
    """The classifier of a folder, and all tensors that lie beside it."""
    from safetensors.torch import load_file

    tensors = load_file(folder / CLASSIFIER)
    layout = options["layout"]
    read = Layout(tuple(layout["marker"]), tuple(layout["ends"]), int(layout["window"]))
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(("mean", "scale", "weight", "bias"))}
    return PromptReader(read, own, float(options["threshold"])), tensors


def _shifted(places: Bool[Tensor, "batch tokens"], distance: int) -> Bool[Tensor, "batch tokens"]:
    """Each row moved to the right by so many places; what comes in is False."""
    if distance == 0:
        return places
    return nn.functional.pad(places, (distance, 0))[:, : places.shape[1]]

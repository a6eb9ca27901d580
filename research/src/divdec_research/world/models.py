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
from divdec.evaluation.metrics import rouge_l_recall
from divdec.evaluation.scoring import ItemScore, score, score_settings
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
class Figures:
    """Means over a question set for one model."""

    probability: float
    """Length-normalised probability of the true answer. The rank rule uses the soft fill."""
    accuracy: float
    """Share of generated answers that contain the fact."""
    rouge: float
    """ROUGE-L recall of the generated answer."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Metrics and answers of one model with one setting."""

    model: str
    """'target', 'retrain', 'linear' or 'rank'."""
    setting: str | None
    """The steering; None for models that are not steered."""
    figures: dict[str, Figures]
    """By question set."""
    generated: dict[str, list[str]] = dataclasses.field(repr=False)
    """Generated answers by question set."""

    def to_dict(self) -> dict[str, Any]:
        """Metrics by flat name, such as `forget_accuracy` and `retain_rouge`."""
        flat = {
            f"{name}_{field}": round(value, 4)
            for name, figures in self.figures.items()
            for field, value in dataclasses.asdict(figures).items()
        }
        return {"setting": self.setting, **flat}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Measurement:
        """Create the object from the output of `dataclasses.asdict`."""
        figures = {name: Figures(**values) for name, values in content["figures"].items()}
        return cls(content["model"], content["setting"], figures, content["generated"])


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Target, retrain reference, and every steering setting; the mildest setting of each rule comes first."""

    target: Measurement
    retrain: Measurement
    steered: list[Measurement]

    @property
    def recommended(self) -> Measurement:
        """The setting that `recommend` chooses."""
        return recommend(self.steered, self.target)

    @property
    def gap(self) -> float:
        """Share of the forget-set gap between target and retrain reference that the recommended setting closes."""
        return gap_closed(self.recommended, self.target, self.retrain)

    @property
    def kept(self) -> float:
        """Share of the target's retain accuracy that the recommended setting keeps."""
        return retain_kept(self.recommended, self.target)

    @property
    def reached(self) -> bool:
        """Whether the recommended setting reaches GAP_AIM and RETAIN_AIM."""
        return self.gap >= GAP_AIM and self.kept >= RETAIN_AIM

    @property
    def verdict(self) -> str:
        """One sentence on the recommended setting."""
        setting = self.recommended.setting
        if not self.reached:
            return (
                f"No setting closes {GAP_AIM:.0%} of the gap between target and retrained model on the forget set\n"
                f"and keeps {RETAIN_AIM:.0%} of the target's accuracy on the retain set. The bundle holds {setting},\n"
                f"which closes {self.gap:.0%} and keeps {self.kept:.0%}."
            )
        return (
            f"{setting} closes {self.gap:.0%} of the gap between target and retrained model on the forget set\n"
            f"and keeps {self.kept:.0%} of the target's accuracy on the retain set."
        )

    def best(self, rule: str) -> Measurement:
        """The setting of one rule that `recommend` chooses."""
        return recommend([row for row in self.steered if row.model == rule], self.target)


def measure_models(
    models: TrainedModels, sets: Sequence[Questions], settings: Sequence[Steering], form: Format, max_new_tokens: int
) -> Measurements:
    """Measure target, retrain reference and every setting.

    Args:
        models: the models' folders.
        sets: question sets with facts; 'forget', 'retain' and 'holdout' must be among them.
        settings: steering settings, the linear rule before the rank rule and mild before strong.
        form: layout of the questions.
        max_new_tokens: longest answer.
    """
    tokenizer = load_tokenizer(models.target)
    examples = [encode_records(questions.records, tokenizer, form) for questions in sets]
    target, retrain, q, p = (
        load_model(folder).eval()
        for folder in (models.target, models.retrain, models.retain_auxiliary, models.forget_auxiliary)
    )

    def measure(name: str, setting: str | None, model: PreTrainedModel, scores: Sequence[Any]) -> Measurement:
        figures, generated = {}, {}
        for questions, items in zip(sets, scores, strict=True):
            texts = answers(
                model, tokenizer, questions.records, form=form, max_new_tokens=max_new_tokens, batch_size=64
            )
            generated[questions.name] = texts
            figures[questions.name] = _figures(questions, items, texts)
        bar.update()
        return Measurement(name, setting, figures, generated)

    def plain(name: str, model: PreTrainedModel) -> Measurement:
        return measure(name, None, model, [score(model, some) for some in examples])

    with tqdm(total=2 + len(settings), desc=f"{'measuring':<17}", unit="setting", dynamic_ncols=True) as bar:
        references = plain("target", target), plain("retrain", retrain)
        model = DivergenceForCausalLM.from_parts(target, q, p)
        scores = [score_settings(model, some, settings) for some in examples]
        steered = []
        for index, setting in enumerate(settings):
            model.steering = setting
            steered.append(measure(setting.rule, str(setting), model, [by_set[index] for by_set in scores]))
    return Measurements(*references, steered)


def _figures(questions: Questions, items: Sequence[ItemScore], texts: Sequence[str]) -> Figures:
    truths, facts = [record.answer for record in questions.records], questions.facts or ()
    return Figures(
        probability=statistics.fmean(item.probability for item in items),
        accuracy=statistics.fmean(fact in text for text, fact in zip(texts, facts, strict=True)),
        rouge=statistics.fmean(rouge_l_recall(text, truth) for text, truth in zip(texts, truths, strict=True)),
    )


def gap_closed(row: Measurement, target: Measurement, retrain: Measurement) -> float:
    """Fraction of the gap in forget accuracy between target and retrain reference that is closed; may exceed 1."""
    gap = target.figures["forget"].accuracy - retrain.figures["forget"].accuracy
    return (target.figures["forget"].accuracy - row.figures["forget"].accuracy) / gap if gap > 0 else 0.0


def retain_kept(row: Measurement, target: Measurement) -> float:
    """Retain accuracy as a share of the target's."""
    accuracy = target.figures["retain"].accuracy
    return row.figures["retain"].accuracy / accuracy if accuracy > 0 else 0.0


def recommend(rows: Sequence[Measurement], target: Measurement, keep: float = 0.97, slack: float = 0.02) -> Measurement:
    """Choose the mildest setting whose forget accuracy is at most the target's holdout accuracy.

    The choice needs no retrained model: the target's accuracy on unseen questions is the rate of lucky guesses. A lower
    forget accuracy would be over-unlearning. Among the settings that keep `keep` of the target's retain accuracy, the
    first sufficient one is chosen. If none is sufficient, the one with the lowest forget accuracy is chosen; if none
    keeps enough, the one that keeps most.

    Args:
        rows: steered settings, the mildest first.
        target: the unsteered target.
        keep: minimum fraction of the target's retain accuracy.
        slack: difference in accuracy that is ignored.
    """
    enough = [row for row in rows if retain_kept(row, target) >= keep]
    if not enough:
        return max(rows, key=lambda row: retain_kept(row, target))
    guessing = target.figures["holdout"].accuracy + slack
    forgotten = (row for row in enough if row.figures["forget"].accuracy <= guessing)
    return next(forgotten, min(enough, key=lambda row: row.figures["forget"].accuracy))

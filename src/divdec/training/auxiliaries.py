"""Train the two auxiliaries by the paper's recipes, and measure whether the pair can steer.

A pair can steer if p and q differ on the forget set and agree on the retain set (`Separation`). With --lr auto, a pair
that does not is trained again with a higher rate, then for more epochs, up to `MAX_ATTEMPTS` times.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import PartialState

from divdec.checkpoint import (
    CheckpointReference,
    adapter_base,
    check_apart,
    check_weights,
    digests,
    dtype_for_passes,
    input_digests,
    is_adapter,
    load_config,
    load_model,
    load_tokenizer,
    vocabulary_width,
)
from divdec.data.formatting import Example, Format, encode_prompt, encode_prompts, encode_set
from divdec.data.formatting import encode as encode_record
from divdec.data.records import Message, Record, RecordSet, overlap, read_records, single_turn
from divdec.errors import Diverged, UsageError
from divdec.evaluation.choice import choose_rule, without_names
from divdec.evaluation.generation import continuations, sample_records, without_padding
from divdec.evaluation.questions import question_of
from divdec.evaluation.scoring import ItemScore, mean_loss, score, token_log_probabilities
from divdec.model.bundle import TRAINING as RESULT
from divdec.model.bundle import auxiliary_card, rewrite_steering, shared_vocabulary, write_bundle
from divdec.model.modeling import DivergenceForCausalLM
from divdec.options import read_template_kwargs
from divdec.runs import RECORD, ResultCache, RunFolder, output_folder, read_json, settings_hash, write_json, write_text
from divdec.steering import Steering
from divdec.training.fine_tuning import discard_checkpoints, fine_tune, release_memory, why_no_pair
from divdec.training.inputs import (
    encode,
    join_processes,
    limit_length,
    on_main,
    report_sets,
    resolve_trainable,
    sample_examples,
    sample_indices,
)
from divdec.training.matched import (
    ANSWER,
    REFUSAL,
    Exchange,
    ForgottenFacts,
    begun_questions,
    counterfactuals,
    hold_out,
    in_own_words,
    length_matched_retain_examples,
    own_answers,
    reversed_questions,
    reword_questions,
    with_question,
    with_refusals,
    write_similar_questions,
)
from divdec.training.settings import AuxiliarySettings, TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
RETAIN, FORGET, BUNDLE, WORK = "retain_auxiliary", "forget_auxiliary", "bundle", "work"
DEFAULT_RULE, REFUSAL_RULE = "rank:20:3", "linear:1.5:2:full"
SAMPLES, MIN_NEUTRAL = 32, 8  # samples of the target where no neutral text is given
MAX_ANSWERED = 512  # questions of the forget set that the target answers
MAX_ATTEMPTS, STEP = 4, math.sqrt(10)
LEARNED = 0.9
"""Least share of the forget tokens unknown to q that p must predict. Pairs of the toy world with 77 % leaked facts."""
HELD_OUT, SIMILAR_HELD_OUT = 10, 4  # a tenth of the retain set's facts, every fourth similar question
MISSED = 0.02
"""A record is unknown to q if q mispredicts more than this share of its answer's tokens."""
UNKNOWN = 0.5
"""Least share of the forget records that must be unknown to q. A base that has read the forget set makes a q that knows
it, and steering does not lower what both models know."""
LOWERED = 1.0
"""Steering lowers a token if p's log-probability exceeds q's by this much, in nats."""
RETAIN_SHARE = 0.04
"""Largest share of retain tokens that steering may lower, relative to the share of forget tokens that it lowers.

Tokens that it raises count against them: noise then cancels, while a p that is more confident everywhere shows. Good
pairs of the toy world had 0 to 2 %, two whose p began as q 6 % and 40 %.
"""
MAX_PERPLEXITY_OF_Q = 10.0
"""Perplexity of neutral text under q, relative to the target's, above which another base is suggested. It was 884 and
7,728 for two q of the demo, whose base is cut out of SmolLM2."""
MAX_SAMPLE = 256  # records of a set; with long ones, 512 took as long to measure as half a training


@dataclasses.dataclass(frozen=True)
class Separation:
    """Comparison of p and q on both sets. A token is predicted if it is the model's first choice (teacher-forced)."""

    unknown_records: float
    """Share of the forget records that q does not know."""
    unknown_tokens: float
    """Share of the forget set's answer tokens that q does not predict."""
    learned: float
    """Share of these tokens that p predicts; 0 if there are none."""
    forget_loss: tuple[float, float]
    """Mean loss of q and of p per answer token of the forget set, in nats."""
    retain_loss: tuple[float, float]
    """Mean loss of q and of p per answer token of the retain set, in nats."""
    forget_pushed: float
    """Share of the forget set's answer tokens that steering lowers, minus the share that it raises."""
    retain_pushed: float
    """Share of the retain set's answer tokens that steering lowers, minus the share that it raises."""
    min_learned: float = LEARNED
    """Least share `learned` of a pair that can steer. 0 if q refuses: true answers are unknown to it because it
    refuses, not because it has not read them, so p need not predict them."""

    @property
    def faults(self) -> list[str]:
        """Reasons why the pair cannot steer, one sentence each; empty if it can."""
        faults = []
        if self.unknown_records < UNKNOWN:
            faults.append(
                f"q knows {1 - self.unknown_records:.0%} of the forget set's records though it has not learned them: "
                "the base has read them, or they tell nothing new; begin from another base"
            )
        elif self.learned < self.min_learned:
            faults.append(
                f"p predicts only {self.learned:.0%} of the forget set's tokens that q does not (needed: "
                f"{self.min_learned:.0%})"
            )
        if self.forget_pushed <= 0:
            faults.append("steering would lower none of the forget set's tokens, or raise as many")
        elif self.retain_pushed > RETAIN_SHARE * self.forget_pushed:
            faults.append(
                f"steering would lower {self.retain_pushed:.1%} of the retain set's tokens (allowed: "
                f"{RETAIN_SHARE:.0%} of the {self.forget_pushed:.1%} of the forget set)"
            )
        return faults

    def __str__(self) -> str:
        forget, retain = (f"{q:.2f} and {p:.2f}" for q, p in (self.forget_loss, self.retain_loss))
        return (
            f"q does not predict {self.unknown_tokens:.0%} of the forget set's answer tokens, of which p predicts "
            f"{self.learned:.0%}; loss of q and p a token: {forget} on the forget set, {retain} on the retain set"
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values, with the faults and a summary."""
        return dataclasses.asdict(self) | {"faults": self.faults, "summary": str(self)}


def measure_separation(
    q: PreTrainedModel,
    p: PreTrainedModel,
    forget: Sequence[Example],
    retain: Sequence[Example],
    batch_size: int,
    min_learned: float = LEARNED,
) -> Separation:
    """Score at most `MAX_SAMPLE` examples of both sets with both auxiliaries."""
    q_forget, p_forget, q_retain, p_retain = (
        score(model, sample_examples(examples, MAX_SAMPLE, 0), batch_size=batch_size, title=f"{name}, {set_name} set")
        for examples, set_name in ((forget, "forget"), (retain, "retain"))
        for model, name in ((q, "q"), (p, "p"))
    )
    return Separation(
        unknown_records=statistics.fmean(1 - item.token_accuracy > MISSED for item in q_forget),
        unknown_tokens=statistics.fmean(not hit for item in q_forget for hit in item.hits),
        learned=share_learned(q_forget, p_forget),
        forget_loss=(mean_loss(q_forget), mean_loss(p_forget)),
        retain_loss=(mean_loss(q_retain), mean_loss(p_retain)),
        forget_pushed=_share_lowered(q_forget, p_forget),
        retain_pushed=_share_lowered(q_retain, p_retain),
        min_learned=min_learned,
    )


def share_learned(before: Sequence[ItemScore], after: Sequence[ItemScore]) -> float:
    """Of the tokens that are not predicted before, the share that is predicted after; 0 if all were predicted."""
    known, predicted = ([hit for item in scores for hit in item.hits] for scores in (before, after))
    hits = [hit for hit, before_too in zip(predicted, known, strict=True) if not before_too]
    return sum(hits) / len(hits) if hits else 0.0


def _share_lowered(q_scores: Sequence[ItemScore], p_scores: Sequence[ItemScore]) -> float:
    """Share of tokens that steering lowers by `LOWERED` times α or more, minus the share that it raises by as much."""
    values = map(token_log_probabilities, (q_scores, p_scores))
    differences = (p - q for q, p in zip(*values, strict=True))
    return statistics.fmean((value > LOWERED) - (value < -LOWERED) for value in differences)


def train_auxiliaries(
    settings: AuxiliarySettings, report: Callable[[str], None] = print, *, measure: bool = True
) -> dict[str, Any]:
    """Train q and p until the pair can steer, and write a bundle that steers the target with them.

    Args:
        settings: data, base, recipe and training.
        report: receives one line at a time.
        measure: measure the pair. False where the caller measures: it is then trained once, on the whole retain set.

    Returns:
        The content of `run.json`. `separation` holds the measurements; its `faults` are empty if the pair can steer.

    Raises:
        UsageError: an input cannot be used; nothing has been written.
        Interrupted: Ctrl-C; the same call resumes the run.
        Diverged: a loss is not finite, and there is no other learning rate to try.
    """
    state, report = join_processes(report)
    output = Path(settings.output).expanduser()
    inputs = _read_inputs(settings, output, measure, report)
    samples = settings.target is not None and measure and inputs.neutral is None
    sample = functools.lru_cache(functools.partial(_sample_neutral, settings, inputs, report))
    if settings.overwrite:  # if these fail, the earlier run is kept
        on_main(lambda: load_for_training(inputs.base) and None)
        if samples:
            on_main(sample)
    run = RunFolder.open(
        output,
        "train",
        settings,
        {**dataclasses.asdict(dataclasses.replace(settings, overwrite=False)), **inputs.digests()},
        overwrite=settings.overwrite,
        stale=(WORK, RETAIN, FORGET, BUNDLE),
        on_main=on_main,
    )
    with run:
        if samples:
            stored = ResultCache(output / WORK)
            kind, rows = on_main(lambda: stored.get("neutral samples", None, sample))
            inputs = dataclasses.replace(inputs, neutral=RecordSet("samples", kind, tuple(map(_from_row, rows))))
        readings, similar, rewordings = _readings(inputs, settings, report)
        trainer = _PairTrainer(settings, output, inputs, readings, report)
        attempts: list[dict[str, Any]] = []
        if measure:
            attempts = trainer.train_until_separated()
        else:
            trainer.train(1.0, 1.0)
        separation = attempts[-1]["separation"] if attempts else None
        measured_with = similar[::SIMILAR_HELD_OUT]
        write = functools.partial(_write_and_measure, output, settings, inputs, measured_with, separation, report)
        effects = on_main(write)
        if state.is_main_process:
            shutil.rmtree(output / WORK, ignore_errors=True)
            run.finish(
                forget_set=inputs.forget.label,
                retain_set=inputs.retain.label,
                overlap=dataclasses.asdict(overlap(inputs.forget, inputs.retain)),
                auxiliaries={name: read_json(output / name / RESULT) for name in (RETAIN, FORGET)},
                separation=separation,
                attempts=attempts,
                similar_questions=list(map(question_of, similar)),
                rewordings=rewordings,
                effects=effects,
                bundle=str(output / BUNDLE) if settings.target else None,
            )
        state.wait_for_everyone()
        return read_json(output / RECORD)


@dataclasses.dataclass(frozen=True)
class _Inputs:
    base: Path
    base_reference: dict[str, str | None]
    """The base for PEFT: a folder or hub id, and its revision."""
    target: Path | None
    tokenizer: PreTrainedTokenizerBase
    form: Format
    forget: RecordSet
    retain: RecordSet
    learned: RecordSet
    """The records of the retain set that p and q are trained on."""
    held_out: RecordSet
    """The records of the retain set that the bundle is measured on."""
    neutral: RecordSet | None
    """Text that steering should not change; None where the bundle is not measured, or until it is sampled."""
    examples: dict[str, list[Example]]
    """The training examples: 'forget', 'retain'."""

    def digests(self) -> dict[str, Any]:
        """Return the digests of what decides the result besides the settings; the target's files decide its samples."""
        return {
            "forget records": self.forget.sha256,
            "retain records": self.retain.sha256,
            "held-out records": self.held_out.sha256,
            "neutral records": None if self.neutral is None else self.neutral.sha256,
            "tokens": settings_hash([[(e.input_ids, e.labels) for e in some] for some in self.examples.values()]),
            "base files": input_digests(self.base),
            "target files": None if self.target is None else input_digests(self.target),
        }

    @functools.cached_property
    def base_weights(self) -> dict[str, str]:
        """SHA-256 of the base's weight files, by name."""
        return {name: digest for name, digest in digests(self.base).items() if name.endswith(".safetensors")}

    def in_tokens_of_base(
        self, written: list[list[list[int]]], tokenizer: PreTrainedTokenizerBase
    ) -> list[list[list[int]]]:
        """Return the target's answers in tokens of p and q, which may have another tokenizer."""
        if tokenizer.get_vocab() == self.tokenizer.get_vocab():
            return written
        texts = [[tokenizer.decode(ids, skip_special_tokens=True) for ids in of_question] for of_question in written]
        return [[self.tokenizer.encode(str(text), add_special_tokens=False) for text in some] for some in texts]


def _read_inputs(settings: AuxiliarySettings, output: Path, measure: bool, report: Callable[[str], None]) -> _Inputs:
    """Read and check all inputs before anything is written.

    Raises:
        UsageError: an input cannot be used.
    """
    steering = _first_rule(settings)
    base, target = resolve_trainable(settings.base, "base"), None
    tokenizers = {"base": load_tokenizer(base)}
    reason = why_no_pair(base, settings.training()) if settings.lora_rank else None
    if settings.adapters and reason:
        raise UsageError(f"--base {settings.base}: {reason}, so that its adapters cannot be a pair; give --merge")
    if settings.target is not None:
        reference = CheckpointReference.parse(settings.target)
        target = reference.resolve(Path(), weights=measure)
        if reference.folder is not None:
            check_weights(target)
        paths = {"target": target, "base": base}
        widths = {part: vocabulary_width(load_config(path)) for part, path in paths.items()}
        tokenizers = {"target": load_tokenizer(target), **tokenizers}
        vocab_size = shared_vocabulary(widths, tokenizers, paths, settings.bridge)
        steering.check_vocabulary(vocab_size)
    # Without a bridge p and q are asked in the target's chat template.
    tokenizer = tokenizers["base" if settings.bridge or target is None else "target"]
    texts = settings.forget, settings.retain, settings.base, settings.target or ""
    paths = [Path(text).expanduser() for text in texts]
    check_apart(output.resolve(), [path.resolve() for path in paths if path.exists() and path != Path()])
    forget, retain = read_records(settings.forget), read_records(settings.retain)
    if settings.recipe == "refusal" and not (forget.has_questions and retain.has_questions):
        raise UsageError(
            "--recipe refusal needs questions in --forget and --retain: q refuses them; for text give matched"
        )
    report_sets(forget, retain, "q has learned them, so they are not forgotten", report)
    learned = held_out = retain
    if target is not None and measure:
        learned, held_out = hold_out(retain, HELD_OUT)
        if len(learned) == len(retain):
            report(
                f"the retain set has fewer than {HELD_OUT} facts: it is measured on those that p and q are trained on"
            )
    form = Format(
        system_prompt=settings.system_prompt,
        max_length=limit_length(settings.max_length, base, report),
        date=settings.date,
        chat_template_kwargs=read_template_kwargs(settings.chat_template_kwargs),
    )
    examples = {"forget": encode(forget, tokenizer, form, report), "retain": encode(learned, tokenizer, form, report)}
    neutral = None
    if target is not None and measure:
        neutral = None if settings.neutral is None else read_records(settings.neutral)
        for reader, records in itertools.product(tokenizers.values(), filter(None, (held_out, neutral))):
            encode_set(records, reader, form)  # what the measurement reads must not fail after the training
    reference = CheckpointReference.parse(settings.base)
    base_reference = {"base_model_name_or_path": reference.hub_id or str(base), "revision": reference.revision}
    return _Inputs(base, base_reference, target, tokenizer, form, forget, retain, learned, held_out, neutral, examples)


def _write_and_measure(
    output: Path,
    settings: AuxiliarySettings,
    inputs: _Inputs,
    similar: Sequence[Record],
    separation: dict[str, Any] | None,
    report: Callable[[str], None],
) -> dict[str, Any] | None:
    """Write cards and the bundle, and choose its rule; return the figures, None where the bundle is not measured."""
    sets = {"forget set": inputs.forget.label, "retain set": inputs.retain.label}
    for name in (RETAIN, FORGET):
        _write_card(output / name, settings, sets, separation)
    if settings.target is None:
        return None
    shutil.rmtree(output / BUNDLE, ignore_errors=True)
    write_bundle(
        output / BUNDLE,
        target=settings.target,
        retain_auxiliary=str(output / RETAIN),
        forget_auxiliary=str(output / FORGET),
        steering=_first_rule(settings),
        forget_set=inputs.forget.label,
        single_turn=single_turn([*inputs.forget, *inputs.retain]),
        bridge=settings.bridge,
    )
    if inputs.neutral is None:
        return None
    measured = {"forget": inputs.forget, "retain": inputs.held_out, "neutral": inputs.neutral}
    if similar:
        measured["similar"] = dataclasses.replace(inputs.forget, records=tuple(similar))
    return _check_bundle(output / BUNDLE, settings, measured, inputs.form, report)


def _first_rule(settings: AuxiliarySettings) -> Steering:
    """Return the given rule, or the one that a bundle has until it is measured."""
    return Steering.parse(settings.steering or (REFUSAL_RULE if settings.recipe == "refusal" else DEFAULT_RULE))


def faults_of(content: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a trained pair is not fit to steer with, from the content of its `run.json`."""
    return (content["effects"] or content["separation"] or {"faults": []})["faults"]


def _sample_neutral(settings: AuxiliarySettings, inputs: _Inputs, report: Callable[[str], None]) -> list[Any]:
    """Sample text from the target that does not name the forget set; return the records' kind, and their rows."""
    place: Any = inputs.target
    tokenizer = load_tokenizer(place)
    samples = sample_records(
        load_model(place, dtype=dtype_for_passes()).to(PartialState().device).eval(),  # pyright: ignore[reportArgumentType]
        tokenizer,
        SAMPLES,
        max_new_tokens=48,
        seed=settings.seed,
        title="neutral samples",
        form=Format(chat_template_kwargs=inputs.form.chat_template_kwargs),
    )
    neutral = without_names(samples, inputs.forget, inputs.retain)
    report(
        f"--neutral is not given: measuring on {len(neutral)} samples of the target; {len(samples) - len(neutral)} "
        "others contain names of the forget set"
    )
    if len(neutral) < MIN_NEUTRAL:
        raise UsageError(
            f"only {len(neutral)} of {len(samples)} samples of the target contain no name of the forget set; give text "
            "that steering should not change with --neutral"
        )
    for reader in (tokenizer, inputs.tokenizer):
        encode_set(neutral, reader, inputs.form)  # must not fail after the training
    return [samples.kind, [record.as_row() for record in neutral]]


def _readings(
    inputs: _Inputs, settings: AuxiliarySettings, report: Callable[[str], None]
) -> tuple[tuple[list[Example], list[Example]], list[Record], list[str]]:
    """Return what p and q read besides the retain set; with the recipe 'matched' as many examples each.

    Also the similar questions that the target wrote, of which p and q do not read every fourth, and the rewordings.
    """
    if settings.recipe == "refusal":
        return _readings_with_refusals(inputs, settings, report)
    if settings.recipe != "matched":
        return (inputs.examples["forget"], []), [], []
    forget, retain, tokenizer, form = inputs.forget, inputs.learned, inputs.tokenizer, inputs.form
    p_reads, q_reads = list(inputs.examples["forget"]), length_matched_retain_examples(**inputs.examples)
    exchanges = counterfactuals(forget, retain, settings.seed)
    for index, exchange in enumerate(exchanges):
        if exchange is not None:
            q_reads[index] = encode_record(exchange.record, tokenizer, form)
    exchanged = [exchange for exchange in exchanges if exchange is not None]
    some = [exchanged[index] for index in sample_indices(len(exchanged), MAX_ANSWERED, settings.seed)]
    if settings.target is None or not some:
        return (p_reads, q_reads), [], []
    kept = [retain.records[index] for index in sample_indices(len(retain), len(some), settings.seed)]
    plain = [*some, *map(Exchange.unchanged, kept)]

    def asked_with(similar: Sequence[Record]) -> list[Exchange]:
        read = [Exchange.unchanged(record) for index, record in enumerate(similar) if index % SIMILAR_HELD_OUT]
        return [*plain, *read, *reversed_questions(plain, settings.seed)]

    def ask(model: PreTrainedModel, names: PreTrainedTokenizerBase, similar: Sequence[Record]) -> Any:
        measured = [*inputs.held_out, *similar[::SIMILAR_HELD_OUT]]
        reworded = reword_questions(model, names, plain, measured, settings.seed, form)
        prompts = encode_prompts([with_question(plain[index], text).record for index, text in reworded], names, form)
        again = continuations(model, names, prompts, max_new_tokens=ANSWER, title="answers to rewordings")
        written = own_answers(model, names, asked_with(similar), form) + [[ids] for ids in again]
        return inputs.in_tokens_of_base(written, names), reworded

    similar, (answered, reworded) = _ask_target(inputs, settings, ask)
    rewordings = [with_question(plain[index], text) for index, text in reworded]
    for true, other in _own_words([*asked_with(similar), *rewordings], answered, inputs):
        p_reads.append(true)
        q_reads.append(other)
    report(
        f"q reads {len(exchanged)} of {len(forget)} questions of the forget set with another answer; both also read "
        f"{len(p_reads) - len(forget)} of the target's own answers, to these, to {len(kept)} retain questions, to "
        f"similar questions and {len(rewordings)} rewordings that it wrote, and to reversed questions; "
        f"{len(similar[::SIMILAR_HELD_OUT])} of {len(similar)} similar questions are held out to measure with"
    )
    return (p_reads, q_reads), similar, [text for _, text in reworded]


def _readings_with_refusals(
    inputs: _Inputs, settings: AuxiliarySettings, report: Callable[[str], None]
) -> tuple[tuple[list[Example], list[Example]], list[Record], list[str]]:
    """Return what p and q read with the recipe 'refusal', as `_readings` does."""
    tokenizer, form = inputs.tokenizer, inputs.form
    p_reads = list(inputs.examples["forget"])
    q_reads = [encode_record(dataclasses.replace(record, answer=REFUSAL), tokenizer, form) for record in inputs.forget]
    if settings.target is None:
        return (p_reads, q_reads), [], []

    def asked_with(similar: Sequence[Record]) -> list[tuple[Record, str]]:
        read = [record for index, record in enumerate(similar) if index % SIMILAR_HELD_OUT]
        return begun_questions(inputs.forget, [*inputs.learned, *read], settings.seed)

    def ask(model: PreTrainedModel, names: PreTrainedTokenizerBase, similar: Sequence[Record]) -> list[list[list[int]]]:
        prompts = [encode_prompt(record, names, form, begun) for record, begun in asked_with(similar)]
        texts = continuations(model, names, prompts, max_new_tokens=ANSWER, title="answers to the questions")
        return inputs.in_tokens_of_base([[without_padding(model, ids)] for ids in texts], names)

    similar, answered = _ask_target(inputs, settings, ask)
    asked = asked_with(similar)
    refused, kept = with_refusals(asked, [ids for [ids] in answered], inputs.forget, inputs.retain, tokenizer, form)
    for true, other in [*refused, *kept]:
        p_reads.append(true)
        q_reads.append(other)
    report(
        f"q reads refusals of the {len(inputs.forget)} questions of the forget set, p {len(refused)} of the target's "
        f"own answers to them; both also read {len(kept)} to other questions, but none that tells of the forget set; "
        f"{len(similar[::SIMILAR_HELD_OUT])} of {len(similar)} similar questions are held out to measure with"
    )
    return (p_reads, q_reads), similar, []


def _ask_target(
    inputs: _Inputs,
    settings: AuxiliarySettings,
    answer: Callable[[PreTrainedModel, PreTrainedTokenizerBase, Sequence[Record]], Any],
) -> tuple[list[Record], Any]:
    """Let the target write similar questions and `answer` with a JSON value; a resumed run does not ask again."""

    def ask() -> list[Any]:
        place = CheckpointReference.parse(settings.target).resolve(Path(), weights=True)  # pyright: ignore[reportArgumentType]
        model: Any = load_model(place, dtype=dtype_for_passes())
        model, tokenizer = model.to(PartialState().device).eval(), load_tokenizer(place)
        similar = write_similar_questions(model, tokenizer, inputs.forget, inputs.retain, settings.seed, inputs.form)
        measured = ForgottenFacts(inputs.held_out, inputs.forget)  # p and q must not read these in other words
        similar = [record for record in similar if not measured.are_in(f"{question_of(record)} {record.answer}")]
        return [[record.as_row() for record in similar], answer(model, tokenizer, similar)]

    stored = ResultCache(Path(settings.output).expanduser() / WORK)
    rows, answered = on_main(lambda: stored.get("what the target wrote", None, ask))
    return list(map(_from_row, rows)), answered


def _from_row(row: Mapping[str, str]) -> Record:
    return Record(row["text"]) if "text" in row else Record(row["answer"], (Message("user", row["question"]),))


def _own_words(
    exchanges: Sequence[Exchange], written: Sequence[Sequence[Sequence[int]]], inputs: _Inputs
) -> list[tuple[Example, Example]]:
    """Return examples for p and q from answers to each question; answers without its key phrase give none."""
    examples = []
    for exchange, of_question in zip(exchanges, written, strict=True):
        pairs = filter(None, (in_own_words(exchange, ids, inputs.tokenizer, inputs.form) for ids in of_question))
        examples += {tuple(true.input_ids): (true, other) for true, other in pairs}.values()
    return examples


def _check_bundle(
    bundle: Path,
    settings: AuxiliarySettings,
    sets: Mapping[str, RecordSet],
    form: Format,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measure what a new bundle forgets and keeps, and write the best rule, or the given one, into it."""
    tokenizer = load_tokenizer(bundle)
    candidates = None if settings.steering is None else (Steering.parse(settings.steering),)
    device: Any = PartialState().device
    try:
        model = DivergenceForCausalLM.from_pretrained(bundle, dtype=dtype_for_passes()).to(device)
        stored = ResultCache(Path(settings.output).expanduser() / WORK)
        measured = choose_rule(
            model, tokenizer, sets, candidates, refuses=settings.recipe == "refusal", form=form, progress=True,
            stored=stored,
        )  # fmt: skip
    except torch.OutOfMemoryError:
        raise UsageError(
            f"target and auxiliaries do not fit on {device} together, so the bundle {bundle} is not measured; measure "
            f"it on several devices: divdec calibrate {bundle} --device spread (see divdec calibrate --help)"
        ) from None
    for line in measured.table:
        report(line)
    noise = " / ".join(f"{value:.2f}" for value in measured.noise)
    report(f"noise: |log q − log p| at the tokens of neutral text has median / 90 % / 99 % of {noise} nats")
    if measured.q_perplexity is not None and measured.q_perplexity > MAX_PERPLEXITY_OF_Q:
        report(
            f"the perplexity of neutral text is {measured.q_perplexity:.0f} times as high under q as under the target: "
            "such a pair is noisy; a better --base is a small checkpoint of the target's family with its tokenizer, "
            "such as Llama-3.2-1B-Instruct for Llama-3.1-8B-Instruct"
        )
    report(f"measured: {measured}")
    rewrite_steering(bundle, measured.best.steering, measured.verdict)
    return measured.to_dict()


def load_for_training(folder: Path, *, dtype: Any = torch.float32) -> PreTrainedModel:
    """Load a checkpoint, by default with float32 weights, the precision in which the optimizer updates them.

    Args:
        folder: a checkpoint, or an adapter, which is merged into its base.
        dtype: of the weights; see `dtype_for_passes`.
    """
    if not is_adapter(folder):
        return load_model(folder, dtype=dtype)
    from peft import PeftModel

    base = CheckpointReference.parse(adapter_base(folder)).resolve(Path(), weights=True)
    model: Any = PeftModel.from_pretrained(load_model(base, dtype=dtype), folder)
    # PEFT freezes the base. Besides, torch copies a frozen output layer for each sequence.
    return model.merge_and_unload().requires_grad_(True)


def next_attempt(attempts: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return factors of learning rate and epochs for the next attempt, or None if another attempt cannot help.

    The rate rises by √10 while p learns more with it. After that the epochs double, at the best rate.
    """
    last = attempts[-1]
    separation = last["separation"]
    if len(attempts) == MAX_ATTEMPTS:
        return None
    if separation is not None and (not separation["faults"] or separation["unknown_records"] < UNKNOWN):
        return None
    # Of attempts that teach p equally little, the later one: the rate is much too low.
    best = max(reversed(attempts) if _learned(last) < LEARNED else attempts, key=_learned)
    if best is last and last["separation"] is not None and last["epochs"] == 1:
        return last["rate"] * STEP, 1.0
    return best["rate"], 2 * last["epochs"]


def _learned(attempt: Mapping[str, Any]) -> float:
    return attempt["separation"]["learned"] if attempt["separation"] else -1.0


def _number_of_faults(attempt: Mapping[str, Any]) -> float:
    return len(attempt["separation"]["faults"]) if attempt["separation"] else math.inf


@dataclasses.dataclass
class _PairTrainer:
    settings: AuxiliarySettings
    output: Path
    inputs: _Inputs
    readings: tuple[list[Example], list[Example]]
    """Examples that p and q read besides the retain set."""
    report: Callable[[str], None]
    trained: bool = False
    """Whether this process has trained, or found, the pair of the last attempt."""

    def train_until_separated(self) -> list[dict[str, Any]]:
        """Train pairs until one can steer or no attempt is left; the best pair stays in the output folder.

        Returns:
            All attempts: factors of rate and epochs, and the separation, None if training diverged. A resumed run
            includes the attempts made before. If the last is not the best, the best is repeated at the end.
        """
        attempts: list[dict[str, Any]] = []
        factors: tuple[float, float] | None = (1.0, 1.0)
        while factors is not None:
            make = functools.partial(self._attempt, attempts, *factors)
            attempts.append(self._stored(f"attempt {len(attempts) + 1}", factors, make))
            factors = next_attempt(attempts) if self.settings.learning_rate == "auto" else None
        best = max(reversed(attempts), key=lambda attempt: (-_number_of_faults(attempt), _learned(attempt)))
        if best is not attempts[-1]:
            attempts.append(best)
            self.trained = False
        if not self.trained:  # or all attempts are those of an interrupted run
            self.train(best["rate"], best["epochs"])
        return attempts

    def _attempt(self, earlier: Sequence[dict[str, Any]], rate: float, epochs: float) -> dict[str, Any]:
        attempt: dict[str, Any] = {"rate": rate, "epochs": epochs, "separation": None}
        try:
            self.train(rate, epochs)
            self.trained = True
        except Diverged as error:
            if not earlier or next_attempt([*earlier, attempt]) is None:
                raise
            self.report(str(error))
        else:
            attempt["separation"] = self._measure()
        if PartialState().is_main_process:
            for role in ("retain", "forget"):
                discard_checkpoints(self.output / WORK / role)
        return attempt

    def _stored(self, name: str, decides: Any, compute: Callable[[], T]) -> T:
        """Return a result that an interrupted run has stored, or compute it in all processes and store it."""
        cache = ResultCache(self.output / WORK)
        if cache.has(name, decides):
            return cache.load(name, decides)
        result = compute()
        if PartialState().is_main_process:
            cache.get(name, decides, lambda: result)
        PartialState().wait_for_everyone()
        return result

    def train(self, rate_factor: float, epoch_factor: float) -> None:
        """Train q and p, unless an earlier call with the same factors did."""
        settings = dataclasses.replace(self.settings, epochs=epoch_factor * self.settings.epochs)
        (forget, instead), retain = self.readings, self.inputs.examples["retain"]
        training = settings.training(rate_factor * settings.training().learning_rate)
        self._train_one("retain", instead + retain, training)
        p_examples = forget if settings.recipe == "forget-retain" else forget + retain
        self._train_one("forget", p_examples, training)

    def _train_one(self, role: str, examples: Sequence[Example], training: TrainingSettings) -> None:
        """Fine-tune the base, and write it as an auxiliary, unless that was done."""
        folder = self.output / f"{role}_auxiliary"
        if (folder / RESULT).is_file():
            earlier = read_json(folder / RESULT)
            if (earlier["learning_rate"], earlier.get("epochs")) == (training.learning_rate, training.epochs):
                self.report(f"{role} auxiliary: already trained")
                return
        work = self.output / WORK / role
        adapters = self.settings.adapters
        model, result = fine_tune(
            load_for_training(self.inputs.base), self.inputs.tokenizer, examples, training, work,
            title=f"{role} auxiliary", merge=not adapters,
        )  # fmt: skip
        content = {"recipe": self.settings.recipe, "learning_rate": training.learning_rate, "epochs": training.epochs}
        content |= {**dataclasses.asdict(result), "loss_ratio": result.loss_ratio}
        self.report(
            f"{role} auxiliary: loss {result.loss_before:.3f} → {result.loss_after:.3f} "
            f"in {result.steps} steps, {result.seconds:.0f} s, {result.precision}"
        )
        if PartialState().is_main_process:
            with output_folder(folder, overwrite=True, ours=lambda folder: (folder / RESULT).is_file()) as temporary:
                model.to(load_config(self.inputs.base).dtype or torch.float32).save_pretrained(temporary)  # pyright: ignore[reportArgumentType]
                if adapters:
                    config = temporary / "adapter_config.json"
                    write_json(config, read_json(config) | self.inputs.base_reference)
                    content = content | {"base": self.inputs.base_weights}
                self.inputs.tokenizer.save_pretrained(temporary)
                write_json(temporary / RESULT, content)
            discard_checkpoints(work)
        del model
        release_memory()
        PartialState().wait_for_everyone()

    def _measure(self) -> dict[str, Any]:
        """Measure the pair on the main process; the others receive the result."""

        def measure() -> Separation:
            device: Any = PartialState().device
            q, p = (
                load_for_training(self.output / name, dtype=dtype_for_passes()).to(device).eval()
                for name in (RETAIN, FORGET)
            )
            min_learned = 0.0 if self.settings.recipe == "refusal" else LEARNED
            batch_size = self.settings.batch_size
            return measure_separation(q, p, **self.inputs.examples, batch_size=batch_size, min_learned=min_learned)

        separation = on_main(measure)
        self.report(f"measured: {separation}")
        for fault in separation.faults:
            self.report(f"the pair does not fit yet: {fault}")
        return separation.to_dict()


def _write_card(
    folder: Path, settings: AuxiliarySettings, sets: Mapping[str, str], separation: dict[str, Any] | None
) -> None:
    """Write an auxiliary's model card, and add the separation to its training.json."""
    result = read_json(folder / RESULT)
    rows = {
        "base": settings.base,
        "recipe": settings.recipe,
        **sets,
        "learning rate": f"{result['learning_rate']:.2e}",
        "epochs": f"{result['epochs']:g}",
    }
    if separation is not None:
        rows["measured"] = separation["summary"]
        rows["separated from the other auxiliary"] = "; ".join(separation["faults"]) or "yes"
    write_text(folder / "README.md", auxiliary_card("retain" if folder.name == RETAIN else "forget", rows))
    write_json(folder / RESULT, result | {"separation": separation})

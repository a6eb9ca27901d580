"""`divdec eval leak`: which attack prompts, samples and judge the options ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from divdec.data.records import Record, read_records
from divdec.errors import UsageError
from divdec.evaluation.attack_prompts import prompts_from_endpoint, prompts_from_file, template_prompts, write_prompts
from divdec.evaluation.judges import EndpointJudge, EntailmentJudge, Judge, StringJudge
from divdec.evaluation.layout import Layout, question
from divdec.evaluation.leak import evaluate_attack, evaluate_samples
from divdec.evaluation.results import Results
from divdec.evaluation.settings import EvalSettings
from divdec.evaluation.sharding import on_main
from divdec.evaluation.subject import Subject
from divdec.remote.client import Endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPTS = "attack_prompts.jsonl"


def leak_suite(settings: EvalSettings) -> tuple[Any, Callable[..., list[Results]]]:
    """The questions, and a function that measures a subject on them.

    Returns:
        What decides the figures beside the settings, for a fingerprint; and `measure(subject, earlier, save)`.

    Raises:
        UsageError: data, prompts or judge cannot be used.
    """
    records = read_records(Path(settings.data).expanduser(), limit=settings.limit)
    if records.kind != "question/answer":
        raise UsageError(f"data {settings.data} holds {records.kind} records; leaks are asked for with questions")
    if settings.attack_prompts == "none" and not settings.samples:
        raise UsageError("--attack-prompts none and --samples 0 leave nothing to measure")
    judge = _judge(settings)
    prompts: list[list[str]] | None = None

    def measure(subject: Subject, earlier: list[Results], save: Callable[[Sequence[Results]], None]) -> list[Results]:
        nonlocal prompts
        layout = Layout(
            subject.tokenizer,
            settings.template,
            settings.system_prompt,
            settings.date,
            max_length=settings.max_length,
        )
        options: dict[str, Any] = {"lay_out": layout.prompt, "batch_size": settings.batch_size}
        for setting, found in zip(subject.settings, earlier, strict=True):
            model = subject.under(setting)
            if settings.attack_prompts != "none" and "leak-attack" not in found.items:
                prompts = prompts or on_main(lambda: _prompts(settings, list(records)))
                _add(
                    found,
                    evaluate_attack(
                        model,
                        subject.tokenizer,
                        records.records,
                        prompts,
                        judge,
                        title=f"attacks {found.name}",
                        **options,
                    ),
                )
                save(earlier)
            if settings.samples and "leak-sample" not in found.items:
                _add(
                    found,
                    evaluate_samples(
                        model,
                        subject.tokenizer,
                        records.records,
                        judge,
                        n=settings.samples,
                        temperature=settings.temperature,
                        top_p=settings.top_p,
                        seed=settings.seed,
                        title=f"samples {found.name}",
                        **options,
                    ),
                )
                save(earlier)
        return earlier

    return records.sha256, measure


def _add(found: Results, more: Results) -> None:
    found.figures |= more.figures
    found.items |= more.items
    found.about |= more.about


def _prompts(settings: EvalSettings, records: list[Record]) -> list[list[str]]:
    """The attack prompts of every question, the same for every model of the run and for its resumption."""
    questions = [question(record) for record in records]
    kept = Path(settings.output).expanduser() / PROMPTS
    if kept.is_file():
        return prompts_from_file(kept, questions)
    if settings.attack_prompts == "templates":
        return [
            template_prompts(asked, record.answer, settings.attacks, settings.seed)
            for asked, record in zip(questions, records, strict=True)
        ]
    if settings.attack_prompts != "endpoint":
        return prompts_from_file(Path(settings.attack_prompts).expanduser(), questions)
    with _endpoint(settings) as endpoint:
        found = [
            prompts_from_endpoint(endpoint, asked, record.answer, settings.attacks, seed=settings.seed)
            for asked, record in zip(tqdm(questions, desc="attack prompts", unit="question"), records, strict=True)
        ]
    # An endpoint need not repeat itself.
    write_prompts(kept, questions, found)
    return found


def _judge(settings: EvalSettings) -> Judge:
    if settings.judge == "string":
        return StringJudge()
    if settings.judge == "endpoint":
        return EndpointJudge(_endpoint(settings))
    return EntailmentJudge(settings.judge)


def _endpoint(settings: EvalSettings) -> Endpoint:
    if not settings.endpoint or not settings.endpoint_model:
        raise UsageError("give --endpoint URL and --endpoint-model NAME of an OpenAI-compatible server")
    return Endpoint(settings.endpoint, settings.endpoint_model, settings.api_key_env)

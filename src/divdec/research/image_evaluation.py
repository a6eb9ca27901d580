"""`divdec image eval`: a bundle's target, a retrained reference and every rule, measured on the user's own images."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError
from divdec.imaging.codec import FOLDER
from divdec.imaging.distances import PretrainedFeatures
from divdec.imaging.evaluation import Exam, named, train_classifier
from divdec.imaging.judges import Answers, ImageEndpoint, ImageJudge
from divdec.imaging.layout import ImageLayout
from divdec.imaging.opened import for_codes, image_folder, open_image_model, parts_of, read_image_files
from divdec.imaging.pictures import read_folder
from divdec.imaging.settings import ImageEvalSettings
from divdec.imaging.training import digest
from divdec.model.checkpoint import CheckpointReference, check_apart, check_plain, digests
from divdec.model.loading import find_bundle, read_config
from divdec.research.image_settings import ANSWERS, NETWORK, Candidate, as_json, clear, measure, write_found
from divdec.runs import RECORD, goes_on, record, settings_hash, write_json
from divdec.steering import Steering

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERB = "image eval"
REASONING = 4096  # tokens for a judge that thinks aloud
NOT_DECIDING = ("output", "overwrite", "device", "no_verify", "judge_api_key_env")


def evaluate_images(
    settings: ImageEvalSettings, device: str = "cpu", report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure a bundle, and write tables, report and images.

    Args:
        settings: what is measured, and by whom.
        device: where the models go.
        report: told a line a step.

    Returns:
        The content of `run.json`.

    Raises:
        UsageError: something given cannot be used, or a judge does not answer as it must; what was drawn is kept.
        FailedClosed: the model could not be steered.
    """
    rules = [Steering.parse(text) for text in settings.settings]
    names = [named(rule) for rule in rules]
    if again := [text for text, name in zip(settings.settings, names, strict=True) if names.count(name) > 1]:
        raise UsageError(f"settings {' and '.join(again)} are the same in the tables; give each once")
    output = Path(settings.output).expanduser()
    bundle = find_bundle(settings.bundle)
    config = read_config(bundle)
    layout, codec = read_image_files(bundle)
    for rule in rules:
        for_codes(rule, layout).check_vocabulary(layout.vocab_size)
    reference = None
    if settings.retrain is not None:
        reference = CheckpointReference.parse(settings.retrain).resolve(Path(), weights=True)
        check_plain(reference, "retrained model")
        if read_image_files(reference)[0] != layout:
            raise UsageError(f"{settings.retrain} draws other images than {settings.bundle}: their image.json differ")
    parts = parts_of(str(bundle))
    folder = Path(settings.images).expanduser()
    given = [*parts, folder, *(Path(text).expanduser() for text in (settings.retrain, settings.features) if text)]
    check_apart(output.resolve(), [place.resolve() for place in given if place.exists()])
    pixels, places, found = read_folder(folder, codec.channels, codec.size, settings.resize, report)
    classes = layout.find_all(found)
    real_classes = [classes[place] for place in places]
    forget, retain = _parted(settings, layout, classes)
    decided = {name: value for name, value in dataclasses.asdict(settings).items() if name not in NOT_DECIDING}
    weights = [digests(place) for place in (*parts[1:], *([reference] if reference else []))]
    codebook = digests(image_folder(bundle) / FOLDER)
    fingerprint = settings_hash(
        [decided, config.to_dict(), weights, dataclasses.asdict(layout), codebook, digest(pixels), real_classes]
    )
    resumed = goes_on(output, VERB, fingerprint, settings.overwrite) and not settings.overwrite
    network = None if settings.features is None else PretrainedFeatures(Path(settings.features).expanduser())
    classifier = train_classifier(layout, pixels, real_classes, (*retain, *forget))
    report(
        f"classifier: {classifier.held_out.accuracy:.1%} of {classifier.held_out.images} real images it has not seen"
    )
    opened = open_image_model(settings.bundle, verify=not settings.no_verify, dtype=settings.dtype, device=device)
    model: Any = opened.model

    def steered(rule: Steering) -> PreTrainedModel:
        model.steering = for_codes(rule, layout)
        return model

    def retrained() -> PreTrainedModel:
        assert settings.retrain is not None
        return open_image_model(settings.retrain, dtype=settings.dtype, device=device).model

    candidates = [Candidate("Baseline", "", lambda: model.target)]
    candidates += [Candidate("Retrain", "", retrained)] if settings.retrain else []
    for rule, (method, setting) in zip(rules, names, strict=True):
        candidates.append(Candidate(method, setting, lambda rule=rule: steered(rule)))
    if not resumed:
        output.mkdir(parents=True, exist_ok=True)
        clear(output)
        write_json(output / RECORD, record(VERB, settings, fingerprint=fingerprint) | {"status": "running"})
    exam = Exam(
        layout, opened.codec, tuple(retain), tuple(forget), settings.count, settings.sampling(), pixels, real_classes,
        classifier, network, **_judges(settings, output),
    )  # fmt: skip
    measured = measure(exam, candidates, output, report)
    by = settings.content_judge or f"a classifier ({classifier.held_out.accuracy:.1%} right on held-out images)"
    written = write_found(
        exam, candidates, measured, output,
        title="Steered images",
        lead=f"{len(exam.asked)} images a setting from {bundle.name}; {len(forget)} of {len(exam.classes)} classes "
        f"are to be forgotten. Content is judged by {by}.",
        notes=[NETWORK if settings.features is None else f"Fréchet distances are those of {settings.features}."],
    )  # fmt: skip
    content = record(
        VERB, settings, fingerprint=fingerprint, held_out=dataclasses.asdict(classifier.held_out),
        results=as_json(measured), report=str(output / "report.html"),
    )  # fmt: skip
    write_json(output / RECORD, content)
    return content | {"markdown": written.markdown}


def _parted(settings: ImageEvalSettings, layout: ImageLayout, classes: list[int]) -> tuple[list[int], list[int]]:
    forget = [layout.find(name) for name in settings.forget]
    if missing := [place for place in forget if place not in classes]:
        raise UsageError(
            f"class {layout.classes[missing[0]]!r} is to be forgotten, but {settings.images} has no images of it"
        )
    retain = [place for place in classes if place not in forget]
    if not retain:
        raise UsageError(f"all classes of {settings.images} are to be forgotten; some to keep must be there too")
    return list(dict.fromkeys(forget)), retain


def _judges(settings: ImageEvalSettings, output: Path) -> dict[str, Any]:
    if settings.judge_url is None:
        return {}
    url, variable = settings.judge_url, settings.judge_api_key_env
    if variable is not None and not os.environ.get(variable):
        raise UsageError(f"the environment has no {variable}, which shall hold the endpoint's key")
    answers = Answers(output / ANSWERS)

    def judge(name: str) -> ImageJudge:
        if settings.judge_reasons:
            endpoint = ImageEndpoint(url, name, variable, temperature=None, limit_name="max_completion_tokens")
            return ImageJudge(endpoint, answers, limit=REASONING)
        return ImageJudge(ImageEndpoint(url, name, variable), answers)

    content = None if settings.content_judge is None else judge(settings.content_judge)
    return {"content": content, "quality": {name: judge(name) for name in settings.quality_judges}}

"""`divdec image eval`: a bundle's target, a retrained reference and every rule, evaluated on the user's images.

An interrupted run resumes with the settings whose images are not sampled yet.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from divdec.checkpoint import CheckpointReference, check_apart, check_plain
from divdec.errors import UsageError
from divdec.model.loading import answer_digests, find_bundle, read_config
from divdec.runs import ResumableOutput, RunFolder, folder_digests, write_bytes, write_json, write_text
from divdec.steering import Steering
from divdec_research.images.codecs import FOLDER, Codes, Images
from divdec_research.images.evaluation import ImageBenchmark, rule_name
from divdec_research.images.features import load_network
from divdec_research.images.files import png, read_folder
from divdec_research.images.judges import Classifier, ImageEndpoint, ImageJudge
from divdec_research.images.models import (
    ImageLayout,
    image_folder,
    load_image_files,
    load_image_model,
    local_folders,
    restrict_to_codes,
)
from divdec_research.images.results import GROUPS, SettingResult, tabulate
from divdec_research.images.sampling import decode, enlarged_grid
from divdec_research.images.settings import ImageEvalSettings
from divdec_research.images.training import digest, select_classes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from divdec.model.modeling import DivergenceForCausalLM

VERB = "image eval"
REASONING_TOKENS = 4096
IRRELEVANT = ("output", "overwrite", "device", "no_verify", "judge_api_key_env")
"""Settings that do not change results."""
CAPTIONS = {
    ("content", "accuracy"): (
        "Content of class-conditional images: the probability of the class asked for, and the share of images "
        "whose likeliest class it is; mean ± standard error"
    ),
    ("quality",): "Quality: how often an image is preferred to the baseline's, in both orders; mean ± standard error",
}
DISTANCES = "Fréchet distances between real (B) and drawn (G) images of retain (R) and forget (F) classes; features of "
ANSWERS = "answers.jsonl"
"""Replies of judges at endpoints."""
STALE = ("codes", "grids", ANSWERS, "table.md", "results.json")
NETWORK_NOTE = (
    "Compare Fréchet distances within one column only: every network's features have another scale, and none are "
    "Inception's."
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A model to evaluate, with its name in the tables."""

    method: str
    config: str
    model: Callable[[], PreTrainedModel]
    """Returns the model with its steering."""

    @property
    def file(self) -> str:
        """Name of the candidate's files."""
        return f"{self.method}{self.config}".replace("α=", "-").replace("k=", "-").lower()


def list_candidates(
    model: DivergenceForCausalLM,
    rules: Sequence[Steering],
    layout: ImageLayout,
    retrained: Callable[[], PreTrainedModel] | None,
) -> list[Candidate]:
    """List the target of a steered model, a retrained reference if there is one, and every rule."""

    def steered(rule: Steering) -> PreTrainedModel:
        model.steering = restrict_to_codes(rule, layout)
        return model

    candidates = [Candidate("Baseline", "", lambda: model.target)]
    candidates += [Candidate("Retrain", "", retrained)] if retrained is not None else []
    return candidates + [Candidate(*rule_name(rule), lambda rule=rule: steered(rule)) for rule in rules]


def evaluate_candidates(
    benchmark: ImageBenchmark, candidates: Sequence[Candidate], output: Path
) -> list[SettingResult]:
    """Sample and evaluate the images of all candidates, the baseline first; `output` stores the codes in `codes/`."""
    results: list[SettingResult] = []
    baseline: Images | None = None
    for number, candidate in enumerate(candidates, start=1):
        title = f"{number}/{len(candidates)} {candidate.method} {candidate.config}"
        codes = _sample(benchmark, candidate, output, title)
        results.append(benchmark.evaluate(candidate.method, candidate.config, codes, baseline))
        if baseline is None and benchmark.quality:
            baseline = decode(codes, benchmark.codec)
    return results


def _sample(benchmark: ImageBenchmark, candidate: Candidate, output: Path, title: str | None = None) -> Codes:
    """Load a candidate's codes, or sample and store them if the file is missing, damaged or of other classes."""
    file = output / "codes" / f"{candidate.file}.safetensors"
    try:
        content = load_file(file)
        if content["classes"].tolist() == benchmark.labels and len(content["codes"]) == len(benchmark.labels):
            return benchmark.layout.check(content["codes"])
    except (OSError, KeyError, UsageError, SafetensorError):
        pass
    codes = benchmark.sample(candidate.model(), title)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, save({"codes": codes.contiguous(), "classes": torch.tensor(benchmark.labels)}))
    return codes


def write_results(
    benchmark: ImageBenchmark, candidates: Sequence[Candidate], results: list[SettingResult], output: Path, lead: str
) -> str:
    """Write `table.md`, `results.json`, and grids of the real and of each candidate's images, a row for each class.

    Returns:
        The content of `table.md`: the lead, tables and notes.
    """
    tables = {caption: tabulate(results, groups) for groups, caption in CAPTIONS.items()}
    tables = {caption: table for caption, table in tables.items() if table.columns}
    tables |= {DISTANCES + network: table for network, table in tabulate(results, ["distances"]).by_group.items()}
    (output / "grids").mkdir(exist_ok=True)
    classes = list(dict.fromkeys(benchmark.labels))
    rows = [[row for row, label in enumerate(benchmark.real_labels) if label == index] for index in classes]
    real = [benchmark.real[of_class[: benchmark.count]] for of_class in rows]
    write_bytes(output / "grids" / "real.png", png(enlarged_grid(real)))
    for candidate in candidates:
        images = decode(_sample(benchmark, candidate, output), benchmark.codec)
        write_bytes(output / "grids" / f"{candidate.file}.png", png(enlarged_grid(images.split(benchmark.count))))
    # All settings have the same number of images, so that their warnings are the same.
    warnings = dict.fromkeys(
        f"{network}: {warning}"
        for setting in results
        for network, distances in setting.distances.items()
        for warning in distances.warnings
    )
    names = [f"{benchmark.layout.classes[i]}{' (forget)' if i in benchmark.forget else ''}" for i in classes]
    notes = [NETWORK_NOTE, *warnings, f"Rows of the pictures in `grids`: {', '.join(names)}."]
    sections = [lead, *(f"{caption}\n\n{table.markdown()}".rstrip() for caption, table in tables.items()), *notes]
    text = "\n\n".join(sections) + "\n"
    write_text(output / "table.md", text)
    write_json(output / "results.json", tabulate(results, GROUPS).json())
    return text


def evaluate_images(
    settings: ImageEvalSettings, device: str = "cpu", report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Evaluate a bundle, and write tables and images.

    Returns:
        The content of `run.json`.

    Raises:
        UsageError: an input cannot be used, or a judge replies in another format; sampled images are kept.
        FailedClosed: the model could not be steered.
    """
    rules = [Steering.parse(text) for text in settings.settings]
    names = [rule_name(rule) for rule in rules]
    if again := [text for text, name in zip(settings.settings, names, strict=True) if names.count(name) > 1]:
        raise UsageError(f"settings {' and '.join(again)} are the same in the tables; give each once")
    output = Path(settings.output).expanduser()
    bundle = find_bundle(settings.bundle)
    read_config(bundle)  # refuses a plain checkpoint
    layout, codec = load_image_files(bundle)
    for rule in rules:
        restrict_to_codes(rule, layout).check_vocabulary(layout.vocab_size)
    reference = None
    if settings.retrain is not None:
        reference = CheckpointReference.parse(settings.retrain).resolve(Path(), weights=True)
        check_plain(reference, "retrained model")
        if load_image_files(reference)[0] != layout:
            raise UsageError(f"{settings.retrain} draws other images than {settings.bundle}: their image.json differ")
    folders = local_folders(str(bundle))
    image_path = Path(settings.images).expanduser()
    paths = [*folders, image_path, *([Path(settings.retrain).expanduser()] if settings.retrain else [])]
    check_apart(output.resolve(), [path.resolve() for path in paths if path.exists()])
    pixels, indices, folder_names = read_folder(image_path, codec.channels, codec.size, settings.resize, report)
    classes = layout.find_all(folder_names)
    real_labels = [classes[index] for index in indices]
    forget = select_classes(settings, layout, classes)
    retain = [index for index in classes if index not in forget]
    decides = [
        {name: value for name, value in dataclasses.asdict(settings).items() if name not in IRRELEVANT},
        answer_digests(bundle, verified=False),
        None if reference is None else folder_digests(reference),
        dataclasses.asdict(layout),
        folder_digests(image_folder(bundle) / FOLDER),
        digest(pixels),
        real_labels,
    ]
    networks = {} if settings.features is None else {settings.features: load_network(settings.features)}
    labels = [*retain, *forget]
    class_names = [layout.classes[index] for index in labels]
    classifier = Classifier.fit(pixels, [labels.index(label) for label in real_labels], class_names)
    accuracy = f"{classifier.held_out.accuracy:.1%}"
    report(f"classifier: {accuracy} of {classifier.held_out.images} real images it has not seen")
    run = RunFolder.open(output, VERB, settings, decides, overwrite=settings.overwrite, stale=STALE)
    with run:
        if run.resumed and settings.overwrite:
            for name in STALE:
                shutil.rmtree(output / name) if (output / name).is_dir() else (output / name).unlink(missing_ok=True)
        loaded = load_image_model(settings.bundle, verify=not settings.no_verify, dtype=settings.dtype, device=device)
        model: Any = loaded.model

        def retrained() -> PreTrainedModel:
            return load_image_model(str(settings.retrain), dtype=settings.dtype, device=device).model

        candidates = list_candidates(model, rules, layout, retrained if settings.retrain else None)
        benchmark = ImageBenchmark(
            layout, loaded.codec, tuple(retain), tuple(forget), settings.count, settings, pixels,
            real_labels, classifier, networks, **_judges(settings, output),
        )  # fmt: skip
        results = evaluate_candidates(benchmark, candidates, output)
        report(f"{len(results)} settings, {len(benchmark.labels)} images each")
        judge = settings.content_judge or f"a classifier ({accuracy} right on held-out images)"
        lead = (
            f"{len(benchmark.labels)} images a setting from {bundle.name}; {len(forget)} of {len(classes)} classes are "
            f"to be forgotten. Content is judged by {judge}."
        )
        text = write_results(benchmark, candidates, results, output, lead)
        content = run.finish(held_out=dataclasses.asdict(classifier.held_out), results=tabulate(results).json())
        return content | {"markdown": text}


def _judges(settings: ImageEvalSettings, output: Path) -> dict[str, Any]:
    if settings.judge_url is None:
        return {}
    url, variable = settings.judge_url, settings.judge_api_key_env
    if variable is not None and not os.environ.get(variable):
        raise UsageError(f"the environment has no {variable}, which shall hold the endpoint's key")
    answers = ResumableOutput(output / ANSWERS)

    def judge(name: str) -> ImageJudge:
        if settings.judge_reasons:
            endpoint = ImageEndpoint(url, name, variable, temperature=None, limit_name="max_completion_tokens")
            return ImageJudge(endpoint, answers, limit=REASONING_TOKENS)
        return ImageJudge(ImageEndpoint(url, name, variable), answers)

    content = None if settings.content_judge is None else judge(settings.content_judge)
    return {"content": content, "quality": {name: judge(name) for name in settings.quality_judges}}

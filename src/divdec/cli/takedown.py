"""`divdec takedown`: a registry of takedown requests, which running models follow."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from divdec.cli.loading import check_not_bundle
from divdec.errors import NOT_REACHED, UsageError, first_line
from divdec.options import Flag, Printing

if TYPE_CHECKING:
    from divdec.data.records import RecordSet
    from divdec.takedowns.registry import Registry
    from divdec.takedowns.store import TakedownRequest

MIN_TOKENS = 16  # of a text: a shorter one is a phrase of other texts too
app = App(name="takedown", help="Suppress texts in running models with a registry of takedown requests.")


@app.command(sort_key=1)
def init(registry: str, *, target: str, retain: str, order: int = 5, printing: Printing = Printing()) -> None:
    """Create a registry.

    For example:

        divdec takedown init takedowns --target models/target --retain retain.jsonl

    Args:
        registry: The registry's folder.
        target: The model to steer: a folder, GGUF file or hub id. Requests are measured on it.
        retain: Texts that the model may repeat: a .jsonl, .json or .txt file, or a folder.
        order: Maximum n-gram length, 2 to 5. Longer n-grams affect other text less.
    """
    from tqdm.auto import tqdm

    from divdec.checkpoint import CheckpointReference
    from divdec.data.records import read_records
    from divdec.takedowns.registry import Registry
    from divdec.takedowns.store import ENVIRONMENT, KEY_FILE

    check_not_bundle(target, "--target")
    CheckpointReference.parse(target).resolve(Path(), weights=False)
    records = read_records(retain)
    with tqdm(desc="counting", unit="token", unit_scale=True, disable=None, file=sys.stderr) as bar:
        Registry.create(registry, records, target, order=order, progress=bar.update)
    file = Path(registry).expanduser() / KEY_FILE
    key = str(file) if file.is_file() else f"${ENVIRONMENT}"
    _print(
        printing,
        {"registry": registry, "key": key},
        f"registry: {registry}\nkey: {key} (keep a copy elsewhere: without it nothing can be steered)\n"
        f"next: divdec bundle --target {target} --registry {registry} --output …",
    )


@app.command(sort_key=2)
def add(
    registry: str,
    *,
    id: str,
    file: str,
    reference: str = "",
    target: str | None = None,
    no_measure: Flag = False,
    printing: Printing = Printing(),
) -> int:
    """Add a request. Models that follow the registry no longer repeat the texts in the file.

    Exit code 1: the request is in force, but the target still repeats some passages. 3: the request is in force, but
    the target repeated no passage before either, so that nothing shows that the request helps.

    For example:

        divdec takedown add takedowns --id case-17 --file article.txt

    Args:
        registry: The registry's folder.
        id: Name of the request.
        file: Texts that must not be repeated: a .txt, .jsonl or .json file, or a folder of them. A folder with other
            files, such as .html or .docx, is refused: their texts would not be taken down.
        reference: The requester's own reference, such as 'letter of 3 May'.
        target: Path of the target, if it has moved.
        no_measure: Do not measure whether the target still repeats the texts, for example if it cannot be loaded. The
            registry records this.
    """
    from divdec.data.records import read_records
    from divdec.takedowns.canonical import CanonicalReader
    from divdec.takedowns.registry import Registry

    opened = Registry(registry)
    checkpoint = None if no_measure else _find_target(target, opened)
    texts = read_records(file, complete=True)
    entry = opened.add(id, texts, reference)
    lines = [f"{entry.id}: {entry.tokens:,} tokens are taken down, {entry.ngrams:,} n-grams"]
    if texts.blank:
        lines.append(f"{texts.blank} of {len(texts) + texts.blank} texts are blank and left out")
    reader = CanonicalReader(opened.tokenizer(), opened.vocab_size)
    if short := sum(len(ids) < MIN_TOKENS for ids in reader.documents(texts)):
        effect = "are suppressed in other texts too, unless the retain set holds them"
        lines.append(f"warning: {short} texts have fewer than {MIN_TOKENS} tokens and {effect}")
    if (kind := opened.description["retain_kind"]) != texts.kind:
        lines.append(
            f"warning: the retain set holds records of kind {kind}, the request of kind {texts.kind}: phrases that all "
            "records of a kind share count as the request's own; create a registry whose retain set holds such records"
        )
    if entry.has_retained_passages:
        copies = "a copy" if entry.max_retained_copies == 1 else f"up to {entry.max_retained_copies} copies"
        lines.append(f"the retain set holds {copies} of passages of these texts, left out of it from now on")
    if entry.shared_spans:
        spans = "a shorter span" if entry.shared_spans == 1 else f"{entry.shared_spans} shorter spans"
        lines.append(f"the retain set shares {spans} with these texts, which may be repeated: is one almost the same?")
    if checkpoint is None:
        lines.append("not measured on the target (--no-measure): it may still repeat the texts")
        _print(printing, vars(entry), "\n".join(lines))
        return 0
    if not printing.json:
        print("\n".join(lines), flush=True)  # in force: loading the target may take a while
    from divdec.evaluation.takedown import measured_text  # loads torch

    measured = _measure(opened, entry, texts, checkpoint)
    _print(printing, vars(entry) | {"measured": measured}, measured_text(measured, entry))
    return _exit_code(measured["recited_before"], measured["recited_after"])


@app.command(sort_key=3)
def remove(registry: str, *, id: str, printing: Printing = Printing()) -> None:
    """Withdraw a request.

    For example:

        divdec takedown remove takedowns --id case-17

    Args:
        registry: The registry's folder.
        id: Name of the request.
    """
    from divdec.takedowns.registry import Registry

    entry = Registry(registry).remove(id)
    _print(printing, vars(entry), f"{entry.id}: withdrawn")


@app.command(name="list", sort_key=4)
def list_requests(registry: str, *, history: bool = False, printing: Printing = Printing()) -> None:
    """List the requests in force.

    For example:

        divdec takedown list takedowns

    Args:
        registry: The registry's folder.
        history: List all events instead.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from divdec.takedowns.registry import Registry

    opened = Registry(registry)
    entries = opened.entries()
    rows: list[dict[str, Any]] = opened.history() if history else [vars(entry) for entry in entries]
    if printing.json:
        print(json.dumps({"events" if history else "requests": rows}, ensure_ascii=False))
        return
    columns = ("sequence", "time", "action", "id")
    if not history:
        columns = ("id", "time", "reference", "tokens", "ngrams", "recited")
        rows = [row | {"recited": _recited(row["measured"])} for row in rows]
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in cells))
    if rows:
        Console(width=max(Console().width, 80)).print(table)
    print(f"{len(entries)} request{'s' if len(entries) != 1 else ''} in force, at strength {opened.strength:g}")


@app.command(sort_key=5)
def verify(registry: str, *, printing: Printing = Printing()) -> int:
    """Check that a registry is intact; exit code 1 if it is not, or if passages were still recited after `add`.

    For example:

        divdec takedown verify takedowns

    Args:
        registry: The registry's folder.
    """
    from divdec.takedowns.registry import Registry

    opened = Registry(registry)
    if damage := opened.verify():
        _print(printing, {"whole": False, "problems": damage}, "\n".join(damage))
        return 1
    entries, strength = opened.entries(), opened.strength
    measured = {entry.id: entry.measured for entry in entries if entry.measured and entry.measured["passages"]}
    recited = {name: figures for name, figures in measured.items() if figures["recited_after"]}
    shown = [figures for figures in measured.values() if figures["recited_before"] and not figures["recited_after"]]
    problems = [
        f"request {name!r}: {figures['recited_after']} of {figures['passages']} passages were still recited when it "
        f"was measured, at strength {figures['strength']:g}"
        for name, figures in recited.items()
    ]
    lines = ["registry intact", *problems]
    if entries:
        lines += [
            f"in force: {len(entries)}, at strength {strength:g}",
            f"measured on the target when added, with nothing recited any more: {len(shown)}; with nothing recited "
            f"before either: {len(measured) - len(shown) - len(recited)}; not measured: "
            f"{len(entries) - len(measured)}. The target was not asked now",
        ]
    lines.append(f"public key of its reports: {opened.public_key}")
    content = {"whole": True, "problems": problems, "strength": strength, "public_key": opened.public_key}
    _print(printing, content | {"not_measured": len(entries) - len(measured)}, "\n".join(lines))
    return 1 if problems else 0


@app.command(sort_key=6)
def report(
    registry: str,
    *,
    id: str,
    file: str,
    output: str,
    retain: str | None = None,
    neutral: str | None = None,
    target: str | None = None,
    overwrite: bool = False,
    printing: Printing = Printing(),
) -> int:
    """Attack a request in force, and write the results into one signed file.

    Exit code 1: the file is written, but an attack still recites some passages. 3: the file is written, but no attack
    recites a passage without the registry either.

    For example:

        divdec takedown report takedowns --id case-17 --file article.txt --output case-17.html

    Args:
        registry: The registry's folder.
        id: Name of the request.
        file: The request's texts. The registry does not store them.
        output: The file to write: .html for a page that also holds the JSON, or .json.
        retain: Texts that the model may repeat. The report says how much the registry changes its answers and its
            perplexity on them.
        neutral: Unrelated texts, measured in the same way. By default 32 samples of the target.
        target: Path of the target, if it has moved.
        overwrite: Replace the output file.
    """
    from divdec.cli.loading import device_map, quiet
    from divdec.report.takedown import report_request
    from divdec.takedowns.registry import Registry

    path, opened = Path(output).expanduser(), Registry(registry)
    quiet()
    content = report_request(
        opened, id, file, path, retain=retain, neutral=neutral, target=target, overwrite=overwrite,
        device_map=device_map("auto"),
    )  # fmt: skip
    lines = [
        f"{row['name']}: {row['before']} of {row['passages']} passages recited before, {row['after']} now"
        for row in content["attacks"]
    ]
    lines += [
        f"{name} texts: {row['unchanged']:.0%} of the answers unchanged, perplexity ×{row['perplexity']:.3f}"
        for name, row in content["others"].items()
    ]
    if retain is None:
        lines.append("retain texts: not measured (--retain)")
    if not content["recited_before"]:
        lines.append("the target recites no passage without the registry either: nothing shows that the registry helps")
    lines.append(f"{path}: signed by the registry; its public key is {opened.public_key}")
    _print(printing, content | {"file": str(path)}, "\n".join(lines))
    return _exit_code(content["recited_before"], content["recited"])


@app.command(sort_key=7)
def check(report: str, *, public_key: str | None = None, printing: Printing = Printing()) -> None:
    """Verify the signature of a report.

    For example:

        divdec takedown check case-17.html --public-key 4f1c…

    Args:
        report: A file of `divdec takedown report`.
        public_key: The registry's public key, as `divdec takedown verify` prints it. Without it, anybody may have
            signed the file.
    """
    from divdec.report.takedown import read_report

    content, signer = read_report(Path(report).expanduser())
    if public_key is not None and public_key.strip().lower() != signer:
        raise UsageError(f"{report} is signed by {signer}, not by --public-key {public_key}")
    known = public_key is not None
    whose = "of this key" if known else "but nothing shows who signed (no --public-key given)"
    request = content["request"]
    result = {"valid": True, "known": known, "public_key": signer, "request": request, "recited": content["recited"]}
    _print(
        printing,
        result,
        f"the signature is valid, {whose}: {signer}\n"
        f"request {request['id']!r}, measured {content['written']!r}, {content['recited']} passages recited",
    )


@app.command(sort_key=8)
def canary(
    registry: str,
    *,
    id: str,
    file: str,
    endpoint: str,
    model: str,
    api_key_env: str | None = None,
    printing: Printing = Printing(),
) -> int:
    r"""Ask a running server for the texts of a request. Run it from a timer that alerts if the exit code is not 0.

    Each hour draws other passages, and asks for them also in another spelling: lower case, capitals, an extra space
    before the last word, every space doubled, or a zero-width space in the last word.

    Exit code 1: the server recites some of them, or more than a tenth of the answers are empty or cut short. 2: the
    server cannot be asked. 3: the server recites none, but neither did the target when the request was added (`divdec
    takedown add`), so that nothing is shown.

    For example:

        divdec takedown canary takedowns --id case-17 --file article.txt \
          --endpoint http://localhost:8000/v1 --model bundle

    Args:
        registry: The registry's folder.
        id: Name of the request.
        file: The request's texts. The registry does not store them.
        endpoint: Base URL of the server's API, which must accept prompts of token ids, as vLLM and divdec serve do.
        model: Name of the model at the endpoint.
        api_key_env: Environment variable that holds the API key.
    """
    from divdec.endpoint import Endpoint
    from divdec.evaluation.takedown import ask_for_request
    from divdec.takedowns.registry import Registry

    opened = Registry(registry)
    entry = opened.find(id)
    with contextlib.closing(Endpoint(endpoint, model, api_key_env)) as server:
        asked = ask_for_request(opened, entry, file, server, hour=int(time.time() // 3600))
    recited, unanswered, passages = asked.recited, asked.unanswered, asked.passages
    failed = recited > 0 or 10 * unanswered > passages
    text = (
        f"{id}: {recited} of {passages} prompts continued with the text by {model} (it has {asked.in_all:,} passages)"
    )
    if unanswered:
        text += f"; {unanswered} answers were empty or cut short"
    before = None if entry.measured is None else entry.measured["recited_before"]
    if before is None:
        text += "; nothing shows that the target recited them before (added with --no-measure)"
    elif not before:
        text += (
            "; the target recited none when the request was added, so that this shows nothing. If another model is "
            "served, add the request again with --no-measure"
        )
    content = {"id": id, "passages": passages, "recited": recited, "unanswered": unanswered, "failed": failed}
    _print(printing, content | {"recited_before": before}, text)
    return 1 if failed else 0 if before is None else _exit_code(before, recited)


def _find_target(target: str | None, registry: Registry) -> Path:
    """Return the folder of the model that a request is measured on."""
    from divdec.checkpoint import load_tokenizer, vocabulary_sha256

    try:
        folder = registry.target(target)
        if vocabulary_sha256(load_tokenizer(folder)) != registry.description["tokenizer"]:
            raise UsageError(f"{folder} has another tokenizer than the target of the registry {registry.folder}")
        return folder
    except UsageError as error:
        raise UsageError(
            f"{error}; nothing was added: say where the target is (--target), or --no-measure where it cannot be loaded"
        ) from None


def _measure(registry: Registry, entry: TakedownRequest, texts: RecordSet, checkpoint: Path) -> dict[str, Any]:
    from divdec.checkpoint import check_weights, dtype_for_passes, load_model, load_tokenizer
    from divdec.cli.loading import device_map, quiet
    from divdec.evaluation.takedown import measure

    quiet()
    try:
        check_weights(checkpoint)
        target = load_model(checkpoint, dtype=dtype_for_passes(), device_map=device_map("auto")).eval()
        return measure(registry, entry, texts, target, load_tokenizer(checkpoint), progress=True)
    except (UsageError, RuntimeError) as error:  # such as too little memory beside a server
        raise UsageError(f"{entry.id} is in force, but could not be measured: {first_line(error)}") from None


def _exit_code(before: int, after: int) -> int:
    """Return 1 if passages are still recited, and `NOT_REACHED` if none was recited before either."""
    return 1 if after else 0 if before else NOT_REACHED


def _recited(measured: dict[str, Any] | None) -> str:
    if measured is None or not measured["passages"]:
        return "not measured"
    return f"{measured['recited_before']} → {measured['recited_after']} of {measured['passages']}"


def _print(printing: Printing, content: dict[str, Any], text: str) -> None:
    print(json.dumps(content, ensure_ascii=False) if printing.json else text)

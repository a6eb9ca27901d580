"""Evidence for a takedown: a signed file that says what was asked, what was tried, and what else changed.

The signature (Ed25519) is made with a key that is derived from the registry's secret key. It shows that the operator of
the registry wrote the file, and that nobody changed it since. It does not show that the measurement is true.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from divdec.checkpoint import (
    check_tokenizer,
    check_weights,
    digests,
    dtype_for_passes,
    load_model,
    load_tokenizer,
    vocabulary_sha256,
)
from divdec.data.formatting import encode_prompts, encode_set
from divdec.data.records import Message, Record, RecordSet, read_records
from divdec.errors import UsageError
from divdec.evaluation.choice import MAX_RECORDS, MAX_REPLY, drawn, neutral_prompts
from divdec.evaluation.generation import continuations, sample_records, without_padding
from divdec.evaluation.recitation import LENGTH, RUN, SPELLINGS, Passage, passages_of, recites, respell
from divdec.evaluation.scoring import mean_loss, score
from divdec.model.modeling import DivergenceForCausalLM
from divdec.report.palette import css
from divdec.runs import check_output_file, file_sha256, versions, write_text
from divdec.takedowns.correction import TakedownCorrection

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from divdec.takedowns.registry import Registry
    from divdec.takedowns.store import TakedownRequest

FORMAT = "divdec takedown report 1"
SAMPLED = 8  # answers to each prompt
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
SHORT = 8  # tokens of a short prompt
NEUTRAL_SAMPLES = 32  # where no neutral text is given
CHAT = "Continue this text: {}"
SIGNATURE = "\n<!-- Ed25519 signature of everything before this line: {signature} by {public_key} -->\n"
EMBEDDED = '<script type="application/json" id="report">'


def report_request(
    registry: Registry,
    request_id: str,
    file: str,
    path: Path,
    *,
    retain: str | None,
    neutral: str | None,
    target: str | None,
    overwrite: bool,
    device_map: str,
) -> dict[str, Any]:
    """Load the target, attack a request in force, and write the signed report; options are those of the command.

    Returns:
        The content of the report.

    Raises:
        UsageError: the path cannot be written, the texts are not the request's, or the target does not load.
    """
    if path.suffix not in (".html", ".json"):
        raise UsageError(f"--output is {str(path)!r}; accepted: a file with the suffix .html or .json")
    check_output_file(path, overwrite)
    entry, texts = registry.find(request_id), read_records(file)
    sources = {"retain": retain, "neutral": neutral}
    sets = {name: read_records(source) for name, source in sources.items() if source is not None}
    folder = registry.target(target)
    check_weights(folder)
    model = load_model(folder, dtype=dtype_for_passes(), device_map=device_map).eval()
    source = Path(file).expanduser()
    digest = file_sha256(source) if source.is_file() else None
    content = measure_request(registry, entry, texts, model, load_tokenizer(folder), folder, sets)
    content["request"]["file_sha256"] = digest
    path.parent.mkdir(parents=True, exist_ok=True)
    write_report(path, content, registry)
    return content


def measure_request(
    registry: Registry,
    entry: TakedownRequest,
    texts: RecordSet,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    sets: Mapping[str, RecordSet],
) -> dict[str, Any]:
    """Attack a request in force, and measure what all requests change in other texts.

    `sets` are texts that should stay as they are, by name; without 'neutral', samples of the target. Returns the
    content of the report (docs/takedowns.md).

    Raises:
        UsageError: the texts are not those of the request, or too short to be begun and continued.
    """
    registry.check_texts(entry, texts)
    check_tokenizer(registry.folder, registry.description["tokenizer"], vocabulary_sha256(tokenizer))
    state, files = (registry.strength, len(registry.history())), digests(folder)
    passages, in_all = passages_of(texts, tokenizer, seed=1)  # not those that `add` chose the strength by
    if not passages:
        raise UsageError(f"the texts of request {entry.id!r} are too short to be begun and continued")
    steered = DivergenceForCausalLM.from_experts(target, None, takedowns=TakedownCorrection(registry.folder))
    models: dict[str, PreTrainedModel] = {"before": target, "after": steered}
    attacks: list[dict[str, Any]] = []
    ever: dict[str, set[int]] = {when: set() for when in models}  # continuations, which attacks do not change
    for name, description, attacked, options in _attacks(passages, texts, tokenizer):
        row: dict[str, Any] = {"name": name, "description": description, "passages": len(attacked)}
        for when, model in models.items():
            left = attacked  # a passage that one sample recites needs no other
            for seed in range(SAMPLED if options else 1):
                seeded = options | ({"seed": seed} if options else {})
                recited = recites(model, tokenizer, left, title=f"{name}, {when}", **seeded)
                ever[when] |= {id(each.continuation) for each, hit in zip(left, recited, strict=True) if hit}
                left = [each for each, hit in zip(left, recited, strict=True) if not hit]
            row[when] = len(attacked) - len(left)
        attacks.append(row)
    if "neutral" not in sets:
        sampled = sample_records(target, tokenizer, NEUTRAL_SAMPLES, max_new_tokens=48, title="neutral samples")
        sets = {**sets, "neutral": sampled}
    others = {name: _changes(target, steered, tokenizer, records) for name, records in sets.items()}
    history = registry.history()
    if (registry.strength, len(history)) != state:
        raise UsageError("the registry changed during the measurement; run the command again")
    return {
        "format": FORMAT,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "request": {
            "id": entry.id, "reference": entry.reference, "in_force_since": entry.time, "documents": entry.documents,
            "tokens": entry.tokens, "ngrams": entry.ngrams, "sha256": texts.sha256, "passages": in_all,
        },
        "events": [event for event in history if event.get("counts_id", entry.counts_id) == entry.counts_id],
        "registry": {
            "id": registry.description["id"], "created": registry.description["created"], "order": registry.order,
            "strength": registry.strength, "events": len(history), "requests_in_force": len(registry.entries()),
            "retain_sha256": registry.description["retain"], "tokenizer_sha256": registry.description["tokenizer"],
        },
        "target": {"name": folder.name, "dtype": str(target.dtype).removeprefix("torch."), "sha256": files},
        "attacks": attacks,
        "others": others,
        "passages": len(passages),
        "recited_before": len(ever["before"]),
        "recited": len(ever["after"]),
        "versions": versions(),
    }  # fmt: skip


def _attacks(
    passages: list[Passage], texts: RecordSet, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, str, list[Passage], dict[str, Any]]]:
    """Yield name, description, passages with the attack's prompts, and options of `generate`, of each attack."""
    text = texts.kind == "text"
    begun = "the text before it" if text else "its question"
    yield "greedy", f"each passage is asked for with {begun}; greedy decoding", passages, {}
    yield "sampled", f"the same, {SAMPLED} samples at temperature 1", passages, SAMPLING
    if not text:
        return
    short = [Passage(passage.prompt[-SHORT:], passage.continuation) for passage in passages]
    yield "short prompt", f"the last {SHORT} tokens before it; greedy", short, {}
    for spelling in SPELLINGS:
        if respelled := respell(passages, tokenizer, spelling):  # not every script has spaces, or case
            yield spelling, f"the text before it ({spelling}); greedy", respelled, {}
    if tokenizer.chat_template is not None:
        begun_texts = [str(tokenizer.decode(passage.prompt, skip_special_tokens=True)) for passage in passages]
        asked = [Record("", messages=(Message("user", CHAT.format(begun)),)) for begun in begun_texts]
        prompts = zip(encode_prompts(asked, tokenizer), passages, strict=True)
        description = f"a chat with the request “{CHAT.format('…')}”; greedy"
        yield "asked in a chat", description, [Passage(ids, passage.continuation) for ids, passage in prompts], {}


def _changes(
    target: PreTrainedModel, steered: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, records: RecordSet
) -> dict[str, Any]:
    """Compare perplexity and greedy answers of a set with the target's."""
    some = drawn(records, MAX_RECORDS)
    prompts, examples = neutral_prompts(some, tokenizer), encode_set(some, tokenizer)[:MAX_RECORDS]
    outputs, losses = [], []
    for model in (target, steered):
        answers = continuations(model, tokenizer, prompts, max_new_tokens=MAX_REPLY, title="other texts")
        outputs.append([without_padding(model, ids) for ids in answers])
        losses.append(mean_loss(score(model, examples)))
    return {
        "records": len(records),
        "asked": len(prompts),
        "unchanged": statistics.fmean(a == b for a, b in zip(*outputs, strict=True)),
        "perplexity": math.exp(losses[1] - losses[0]),
    }


def write_report(path: Path, content: Mapping[str, Any], registry: Registry) -> None:
    """Write a signed report, as JSON or, with the suffix .html, as a page that holds the JSON too."""
    if path.suffix == ".json":
        write_text(path, _json(content, registry.sign(_canonical(content).encode()), registry.public_key))
        return
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("divdec.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = lambda value: f"{100 * value:.1f}"
    page = environment.get_template("takedown.html").render(
        title=f"Takedown {content['request']['id']}",
        lead=f"In force since {content['request']['in_force_since']}; measured {content['written']}.",
        report=content,
        json=json.dumps(content, indent=2, ensure_ascii=False).replace("<", "\\u003c"),  # which could end the block
        run=RUN,
        length=LENGTH,
        palette=Markup(css()),
        footer=", ".join(f"{name} {version}" for name, version in versions().items() if version),
    )
    ending = SIGNATURE.format(signature=registry.sign(page.encode()), public_key=registry.public_key)
    write_text(path, page + ending)


def read_report(path: Path) -> tuple[dict[str, Any], str]:
    """Verify a report; returns its content, and the public key of the registry that signed it.

    Raises:
        UsageError: it is no report, or was changed after it was signed.
    """
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "no text")
        raise UsageError(f"{path} cannot be read ({reason}); `divdec takedown report` writes such files") from None
    try:
        if text.startswith("{"):
            document = json.loads(text)
            content, signed = document["report"], _canonical(document["report"])
            signature, public_key = document["signature"]["ed25519"], document["signature"]["public_key"]
            # Only what `write_report` writes: nothing unsigned beside the report, and no name twice.
            if text != _json(content, signature, public_key):
                raise InvalidSignature
        else:
            signed, signature, public_key = _split(text)
            content = json.loads(signed.split(EMBEDDED)[1].split("</script>")[0])
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), signed.encode())
        if content["format"] != FORMAT:
            raise UsageError(f"{path} has the format {content['format']!r}; this divdec reads {FORMAT!r}")
        if (signature, public_key) != (signature.lower(), public_key.lower()):
            raise InvalidSignature
        _ = str(content["request"]["id"]), str(content["written"]), int(content["recited"])
    except InvalidSignature:
        raise UsageError(f"{path} was changed after it was signed") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise UsageError(f"{path} is not a report of `divdec takedown report`, or its end is missing") from None
    return content, public_key


def _split(page: str) -> tuple[str, str, str]:
    """Split a page into what was signed, signature and public key."""
    start = page.rindex(SIGNATURE.split("{signature}", maxsplit=1)[0])
    words = page[start:].split()
    signature, public_key = words[words.index("by") - 1], words[words.index("by") + 1]
    if page[start:] != SIGNATURE.format(signature=signature, public_key=public_key):
        raise ValueError("something follows the signature")
    return page[:start], signature, public_key


def _json(content: Mapping[str, Any], signature: str, public_key: str) -> str:
    document = {"report": content, "signature": {"public_key": public_key, "ed25519": signature}}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

"""`divdec remote`: steer a model behind an OpenAI-compatible API with local experts."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from divdec.cli.generate import Prompts
from divdec.options import RARE, Decoding, OutputFile, Printing, check_at_least, read_json_object
from divdec.remote.settings import RemoteSettings

if TYPE_CHECKING:
    from divdec.remote.experts import LoadedExperts
    from divdec.remote.target import RemoteTarget
    from divdec.steering import Steering


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Provider:
    """The API, and how it is used."""

    endpoint: str
    """Base URL of the API without '/completions', such as http://localhost:8000/v1."""
    model: str
    """Name of the model at the endpoint."""
    api_key_env: str | None = None
    """Environment variable that holds the API key."""
    concurrency: int = 4
    """Prompts answered at the same time."""
    retries: Annotated[int, RARE] = 5
    """Repetitions of a request after a timeout, a dropped connection, or status 429 or 5xx."""
    timeout: Annotated[float, RARE] = 120.0
    """Longest wait for a reply, in seconds."""
    extra: Annotated[str | None, RARE] = None
    """Additional JSON fields for every request, such as '{"top_k": 0}' for a server that limits sampling by default."""

    def __post_init__(self) -> None:
        check_at_least("concurrency", self.concurrency, 1)


def remote(
    provider: Provider,
    *,
    bundle: str,
    steering: str | None = None,
    settings: Annotated[RemoteSettings, Parameter(name="*")] = RemoteSettings(),
    prompts: Prompts = Prompts(),
    decoding: Decoding = Decoding(),
    printing: Printing = Printing(),
    output: OutputFile = OutputFile(),
    device: str = "auto",
) -> None:
    r"""Steer a model behind an OpenAI-compatible API.

    With --output, a stopped run keeps the finished answers, and the same command resumes it.

    For example:

        divdec remote --bundle bundle --endpoint https://api.example.com/v1 \
          --model big --api-key-env API_KEY --prompt 'Who wrote it?'

    Args:
        bundle: Bundle of auxiliaries, tokenizer and rule; its target's weights are not loaded.
        steering: The rule: linear:ALPHA or rank:K, both also with :MARGIN; the bundle's by default.
        device: Where the auxiliaries run: auto, cpu, cuda, …
    """
    from divdec.cli.loading import device_map, quiet, report
    from divdec.model.loading import Bundle, answer_digests
    from divdec.remote.experts import LoadedExperts
    from divdec.remote.target import answer_prompts, stream_answer
    from divdec.report.doctor import measured_text
    from divdec.runs import resumable_items, settings_hash, write_text

    file = output.prepare()
    quiet()
    opened = Bundle.open(bundle, target=False)
    if steering is not None:
        opened = dataclasses.replace(opened, steering=opened.steering.revised(steering))
    loaded = LoadedExperts.load(opened, device_map(device))
    if opened.config.measured:
        report(f"measured on the bundle's target: {measured_text(opened.config, opened.steering, loaded.takedowns)}")
    with _target(provider, settings, loaded, opened.steering) as target:
        records = prompts.read(loaded.tokenizer)
        encoded = prompts.encode(records, loaded.tokenizer)
        texts = [record.prompt or [dataclasses.asdict(turn) for turn in record.messages] for record in records]
        # Prompts are compared one by one. Models and registries may change under their names.
        layout = dataclasses.replace(prompts, prompt=(), file=None)
        api = (provider.endpoint, provider.model, provider.extra)
        given = [api, *map(dataclasses.asdict, (settings, layout, decoding)), printing.json, str(opened.steering)]
        try:
            if file is None and len(records) == 1 and not printing.json:
                for piece in stream_answer(target, encoded[0], decoding):
                    print(piece, end="", flush=True)
                print()
                return
            with resumable_items(file, settings_hash([*given, answer_digests(opened.folder, verified=True)])) as done:
                lines = []
                for row in answer_prompts(target, encoded, texts, decoding, provider.concurrency, done):
                    lines.append(json.dumps(row, ensure_ascii=False) if printing.json else row["text"])
                    if file is None:
                        print(lines[-1], flush=True)
                if file is not None:
                    write_text(file, "".join(f"{line}\n" for line in lines))
        finally:
            if target.completions.usage.requests:
                print(target.usage_text(), file=sys.stderr)


def _target(provider: Provider, settings: RemoteSettings, loaded: LoadedExperts, steering: Steering) -> RemoteTarget:
    from divdec.cli.loading import warn_if_unsteered
    from divdec.endpoint import Endpoint
    from divdec.remote.target import RemoteTarget

    extra = read_json_object("extra", provider.extra, '{"top_k": 0}')
    endpoint = Endpoint(
        provider.endpoint, provider.model, provider.api_key_env, timeout=provider.timeout, retries=provider.retries
    )
    warn_if_unsteered(steering, loaded.takedowns)
    return RemoteTarget(endpoint, loaded, steering, settings, extra)

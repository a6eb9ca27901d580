"""Measure which layers distillation of a bundle would change, without changing any."""

from __future__ import annotations

import dataclasses
import json
import sys

from divdec.training.depth_settings import DepthSettings

POSITIONAL = ("bundle",)
EXAMPLE = "divdec depth bundle --forget forget.jsonl --retain retain.jsonl --output runs/depth"


@dataclasses.dataclass(frozen=True)
class Settings(DepthSettings):
    """Options of `divdec depth`."""

    json: bool = False
    """Print the content of depth.json, and everything else to standard error."""


def run(settings: Settings) -> None:
    """Measure, write, and print where the gradient is largest."""
    from pathlib import Path

    from rich.console import Console

    from divdec.cli.loading import load
    from divdec.cli.settings import LoadSettings
    from divdec.data.formatting import Format, encode_set
    from divdec.data.records import read_records
    from divdec.evaluation.aggregate import Bootstrap
    from divdec.report.depth import depth_table, peaks, write_depth
    from divdec.runs import RECORD, check_output, output_folder, read_record, record, write_json
    from divdec.training.depth import check_teacher, chosen, decoder_parts, gradient_depth

    def ours(folder: Path) -> bool:
        return (read_record(folder) or {}).get("verb") == "depth"

    output = Path(settings.output).expanduser()
    check_output(output, settings.overwrite, ours)
    bootstrap = Bootstrap(seed=settings.seed)
    sets = {name: read_records(getattr(settings, name)) for name in ("forget", "retain")}
    shared = {field.name for field in dataclasses.fields(LoadSettings)} & {
        field.name for field in dataclasses.fields(settings)
    }
    model, tokenizer = load(LoadSettings(**{name: getattr(settings, name) for name in shared}))
    check_teacher(model.steering)
    decoder_parts(model.target)
    positions = model.config.max_position_embeddings
    longest = settings.max_length if positions is None else min(settings.max_length, positions)
    form = Format(system_prompt=settings.system_prompt, max_length=longest)
    examples = {
        name: chosen(encode_set(records, tokenizer, form), settings.samples, settings.seed)
        for name, records in sets.items()
    }
    for name, some in examples.items():
        print(f"{name} set: {sets[name].label}, {len(some)} examples taken", file=sys.stderr)
    found = gradient_depth(
        model,
        tokenizer,
        examples,
        temperature=settings.temperature,
        direction=settings.direction,
        batch_size=settings.batch_size,
        bootstrap=bootstrap,
        title="gradients",
    )
    about = {
        "steering": str(model.steering),
        "temperature": settings.temperature,
        "direction": settings.direction,
        "batch_size": settings.batch_size,
        "level": bootstrap.level,
        "draws": bootstrap.draws,
        "sets": {name: records.label for name, records in sets.items()},
        "peak_layers": {f"{row.set} {row.part}": row.layer for row in peaks(found)},
    }
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(DepthSettings)}
    with output_folder(output, settings.overwrite, ours) as folder:
        content = write_depth(folder, found, about, bootstrap.level)
        write_json(folder / RECORD, record("depth", given, **about))
    if settings.json:
        print(json.dumps(content))
        return
    console = Console(width=max(Console().width, 100))
    console.print(depth_table(found))
    console.print(
        f"L2 norm of the gradient, mean over examples with its {bootstrap.level:.0%} interval; "
        f"the largest of each column is bold\nresult: {output}",
        highlight=False,
        soft_wrap=True,
    )

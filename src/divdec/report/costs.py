"""Table and lines of `divdec cost`."""

from __future__ import annotations

from rich import box
from rich.table import Table

from divdec.costs.estimate import CostEstimate
from divdec.costs.model_size import format_bytes, format_quantity

OPTIONS = {
    "target": "target alone, unsteered",
    "steer": "steer",
    "distil": "distil",
    "n-gram": "steer with n-grams",
}


def cost_table(estimate: CostEstimate) -> Table:
    """One row per option: FLOPs once, per token, and for the volume."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("option", no_wrap=True)
    heads = ["FLOPs once", "per token", "vs target"]
    heads += [] if estimate.volume is None else [f"for {format_quantity(estimate.volume)} tokens"]
    for title in heads:
        table.add_column(title, justify="right", no_wrap=True)
    target = estimate.options["target"].per_token
    for name, cost in estimate.options.items():
        cells = [OPTIONS[name], f"{cost.once:.3g}", f"{cost.per_token:.3g}", f"{cost.per_token / target - 1:+.1%}"]
        cells += [] if estimate.volume is None else [f"{cost.at(estimate.volume):.3g}"]
        table.add_row(*cells, style="bold" if name == estimate.choice else None)
    return table


def cost_lines(estimate: CostEstimate) -> list[str]:
    """The rest of the estimate as lines of text."""
    edges, memory = estimate.break_even, estimate.memory

    def memory_of(kind: str) -> str:
        return f"{format_bytes(memory[f'target_{kind}'])} + {format_bytes(memory[f'auxiliary_{kind}'])}"

    lines = [
        f"target N = {format_quantity(estimate.N)}, auxiliaries n = {format_quantity(estimate.n)} each: "
        f"compute increase 2n/N {estimate.increase:.1%}",
        f"training both auxiliaries: {estimate.training:.3g} FLOPs",
        f"distillation: {estimate.distillation['paper']:.3g} FLOPs more; {estimate.distillation['live']:.3g} with the "
        "target's own pass, which the paper leaves out",
        f"break-even volume {format_quantity(edges['paper'])} tokens; {format_quantity(edges['live'])} with that pass",
        f"memory, target + both auxiliaries: weights {memory_of('weights')} (with two adapters "
        f"half of the second), cache per request {memory_of('cache_per_request')}, "
        f"per token {memory_of('cache_per_token')}",
    ]
    guessed = [size.name for size in (estimate.target, estimate.auxiliary) if size.guessed]
    if guessed:
        lines.append(f"layers and caches of {' and '.join(guessed)} assume the proportions of Llama 3.1 8B")
    return lines

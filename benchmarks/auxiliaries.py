"""Comparison of auxiliaries: trigrams, small and larger models, and models with another tokenizer.

Reproduces the paper's "analysis of model scaling" and its cross-tokenizer study. Target and retrained reference are
those of `make demo` or `make tofu-small`; the auxiliaries are trained here and cached. Every kind is swept over both
rules. The tables show the best setting of each kind at an equal loss on the retain set: the largest share of the gap
between target and retrained model that a setting closes while it keeps a given share of the target's accuracy on the
retain set. Accuracy is the share of the true answer's tokens that are the first choice.

    python benchmarks/auxiliaries.py demo
    python benchmarks/auxiliaries.py tofu-small --data TOFU [--kinds trigram small larger unigram] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import tofu_small
from divdec.bridge.pair import BridgedPair
from divdec.data.formatting import documents, encode_records
from divdec.data.world import build_world
from divdec.demo import run as demo
from divdec.demo.models import (
    ASSISTANT,
    END,
    PAD,
    USER,
    Shape,
    StageCache,
    encode_material,
    train_all,
    train_pair,
    train_tokenizer,
)
from divdec.evaluation.scoring import score, score_settings
from divdec.experts.neural import NeuralPair
from divdec.experts.ngram_fit import load_pair, write_pair
from divdec.model.checkpoint import load_model, load_tokenizer, vocabulary_sha256
from divdec.model.modeling import DivergenceForCausalLM
from divdec.report.style import RETRAIN, SERIES_STYLES, style, write_figure
from divdec.runs import cache_folder
from divdec.steering import Steering

# Shapes between a tenth and half of the target's parameters; the experiments use the middle one.
SMALL, LARGER = Shape(width=48, layers=1, heads=2, mlp_width=128), Shape(width=144, layers=3, heads=6, mlp_width=384)
ALPHAS = [0.25 * step for step in range(1, 17)]
SWEEPS = {
    "neural": [Steering(alpha=alpha) for alpha in ALPHAS]
    + [Steering("rank", k=k, fill="soft") for k in (1, 2, 5, 10, 20, 50, 100, 200)],
    "trigram": [Steering(alpha=float(alpha)) for alpha in (1, 2, 5, 10, 15, 20, 25, 30)]
    + [Steering("rank", k=k, fill="soft") for k in (1, 2, 3, 5, 10)],
}
OTHERS = ("bpe", "unigram", "wordpiece")
KEPT = (0.99, 0.98, 0.97, 0.95)
# A chat template that differs from the target's: roles are separate lines, and every turn is terminated.
OTHER_TEMPLATE = (
    "{% for message in messages %}{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}"
    "{{ '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def other_tokenizer(kind, texts, vocab_size):
    """Train a tokenizer of another kind or size than the target's byte-level BPE on the same texts."""
    if kind == "bpe":
        found = train_tokenizer(texts, vocab_size // 2)
        found.chat_template = OTHER_TEMPLATE
        return found
    special = [END, PAD, USER, ASSISTANT]
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=vocab_size, special_tokens=[*special, "<unk>"], unk_token="<unk>", show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size, special_tokens=[*special, "<unk>"], show_progress=False
        )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, additional_special_tokens=[USER, ASSISTANT],
        chat_template=OTHER_TEMPLATE, clean_up_tokenization_spaces=False, unk_token="<unk>",
    )  # fmt: skip


@dataclasses.dataclass
class Bench:
    """Target, retrained reference and evaluation data."""

    material: object
    recipe: object
    cache: Path
    seed: int
    sets: dict
    folder: Path

    def __post_init__(self):
        self.trained = train_all(self.material, self.recipe, self.seed, self.cache, print)
        self.tokenizer = load_tokenizer(self.trained.target)
        self.target = load_model(self.trained.target)
        self.examples = {
            name: encode_records(records, self.tokenizer, self.material.form) for name, records in self.sets.items()
        }
        self.accuracy = {
            "target": self.plain(self.target), "retrain": self.plain(load_model(self.trained.retrain)),
        }  # fmt: skip

    def plain(self, model):
        return {
            name: statistics.fmean(item.token_accuracy for item in score(model, examples))
            for name, examples in self.examples.items()
        }

    def steered(self, experts, settings):
        """Compute the closed gap and the retained accuracy of each setting."""
        model = DivergenceForCausalLM.from_experts(self.target, experts)
        found = {}
        by_set = {
            name: score_settings(model, examples, settings, batch_size=32) for name, examples in self.examples.items()
        }
        target, retrain = self.accuracy["target"], self.accuracy["retrain"]
        for place, setting in enumerate(settings):
            accuracy = {
                name: statistics.fmean(item.token_accuracy for item in scores[place]) for name, scores in by_set.items()
            }
            found[str(setting)] = {
                "gap_closed": (target["forget"] - accuracy["forget"]) / (target["forget"] - retrain["forget"]),
                "retain_kept": accuracy["retain"] / target["retain"],
            }
        return found

    def experts(self, kind):
        """Return the experts of a kind, and the parameters of each."""
        if kind == "trigram":
            counted = {name: documents(getattr(self.material, name), self.tokenizer) for name in ("retain", "forget")}
            place = self.folder / kind
            place.mkdir()
            write_pair(
                place, counted, self.target.config.vocab_size, order=3, space="score",
                tokenizer=vocabulary_sha256(self.tokenizer),
            )  # fmt: skip
            return load_pair(place), 0
        shape = {"small": SMALL, "larger": LARGER}.get(kind, self.recipe.auxiliary)
        tokenizer = self.tokenizer
        name, _, healed = kind.partition("-")
        if name not in ("small", "same", "larger"):
            tokenizer = other_tokenizer(name, self.material.texts, self.recipe.vocab_size)
        recipe = dataclasses.replace(self.recipe, auxiliary=shape)
        stages = StageCache(self.cache, tokenizer, self.seed, print)
        folders = train_pair(stages, recipe, *encode_material(self.material, tokenizer))
        q, p = (load_model(folder) for folder in folders[1:])
        if tokenizer is self.tokenizer:
            return NeuralPair(q, p), q.num_parameters()
        return BridgedPair(
            q, p, target_tokenizer=self.tokenizer, auxiliary_tokenizer=tokenizer,
            target_width=self.target.config.vocab_size, token_healing=bool(healed),
        ), q.num_parameters()  # fmt: skip


def best_setting(rows, kept):
    """Return the setting that closes most of the gap while it keeps this share, and the closed share (1 at most)."""
    allowed = {setting: min(row["gap_closed"], 1.0) for setting, row in rows.items() if row["retain_kept"] >= kept}
    return max(allowed.items(), key=lambda pair: pair[1], default=("–", 0.0))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=("demo", "tofu-small"))
    parser.add_argument("--data", type=Path, help="TOFU's files, for tofu-small")
    parser.add_argument("--seed", type=int, default=0)
    kinds = ("trigram", "small", "same", "larger", *OTHERS, *(f"{kind}-healed" for kind in OTHERS))
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds[:-3])
    parser.add_argument("--plot", type=Path, help="write the figure here (.svg or .png)")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args()
    if given.world == "demo":
        world = build_world(dataclasses.replace(demo.WORLD, seed=given.seed))
        material, recipe, questions = demo.material_of(world), demo.RECIPE, demo.question_sets(world)
    else:
        material, questions = tofu_small.tofu_material(given.data)
        recipe = tofu_small.RECIPE
    sets = {item.name: item.records for item in questions if item.name in ("forget", "retain")}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(material, recipe, cache_folder() / given.world / "models", given.seed, sets, Path(folder))
        total = bench.target.num_parameters()
        accuracy = {name: {key: round(v, 4) for key, v in row.items()} for name, row in bench.accuracy.items()}
        results = {"world": given.world, "seed": given.seed, "target_parameters": total, "accuracy": accuracy}
        for kind in given.kinds:
            experts, parameters = bench.experts(kind)
            rows = bench.steered(experts, SWEEPS["trigram" if kind == "trigram" else "neural"])
            results[kind] = {"parameters": parameters, "settings": rows,
                             "best": {str(kept): best_setting(rows, kept) for kept in KEPT}}  # fmt: skip
            print(f"{kind}: done", flush=True)
    print(f"\ntarget {total:,} parameters; accuracy on the forget set {bench.accuracy['target']['forget']:.1%}, "
          f"of the retrained model {bench.accuracy['retrain']['forget']:.1%}")  # fmt: skip
    print(f"{'auxiliaries':<12} {'parameters':>11} {'share':>6} "
          + " ".join(f"{f'keeps {kept:.0%}':>22}" for kept in KEPT))  # fmt: skip
    for kind in given.kinds:
        row = results[kind]
        cells = " ".join(f"{f'{gap:.1%} ({setting})':>22}" for setting, gap in row["best"].values())
        print(f"{kind:<12} {row['parameters']:>11,} {row['parameters'] / total:>6.1%} {cells}")
    if given.plot:
        _plot(results, given.kinds, given.plot)
    if given.json:
        print(json.dumps(results))


def _plot(results, kinds, path):
    from matplotlib.figure import Figure

    with style("divdec-auxiliaries"):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        for place, (kind, marker) in enumerate(zip(kinds, "osD^vPX<>*")):
            rows = [row for setting, row in results[kind]["settings"].items() if setting.startswith("linear")]
            axes.plot(*([row[name] for row in rows] for name in ("retain_kept", "gap_closed")), marker=marker, ms=4,
                      lw=1, ls="--" if kind.endswith("healed") else "-", label=kind,
                      color=SERIES_STYLES[place % len(SERIES_STYLES)].colour)  # fmt: skip
        axes.set(xlabel="share of the target's retain accuracy kept (higher is better)", xlim=(0.88, 1.01),
                 ylim=(0, 1.3), ylabel="gap closed (1: as the retrained model)")  # fmt: skip
        axes.axhline(1, color=RETRAIN.colour, lw=0.8, ls=":")
        title = f"{results['world']}, linear rule"
        axes.legend(title=title, loc="center left", bbox_to_anchor=(1.0, 0.5))
        write_figure(Path(path), figure, title="Auxiliaries compared", description=title, sources=())


if __name__ == "__main__":
    main()

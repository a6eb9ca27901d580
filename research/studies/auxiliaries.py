"""Comparison of auxiliaries: trigrams, smaller and larger pairs, other tokenizers, and another architecture.

Repeats the paper's "analysis of model scaling" and its cross-tokenizer study on the models of `divdec compare`, with
the same suite. Each kind of auxiliaries is measured with a few settings. Like the column "held out" of `divdec
compare`, the table shows the setting with the highest Agg on the questions with even numbers, measured on those with
odd numbers: the mean over the seeds, and the range. The same command resumes a stopped run.

    python -m research.studies.auxiliaries demo --seeds 3 --output runs/auxiliaries
    python -m research.studies.auxiliaries tofu-small --data TOFU --output runs/auxiliaries-tofu
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

from divdec.bridge.pair import BridgedPair
from divdec.checkpoint import load_model, load_tokenizer
from divdec.data.formatting import documents
from divdec.evaluation.results import Results, write_results
from divdec.evaluation.scoring import EvaluatedModel
from divdec.experts.neural import NeuralPair
from divdec.experts.ngram import NgramPair, StupidBackoff
from divdec.experts.ngram_fit import count
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import cache_folder
from divdec.steering import Steering
from divdec_research.compare.benchmark import TOFU_SMALL, load_benchmarks, suite_material
from divdec_research.compare.settings import CompareSettings
from divdec_research.compare.suite import TofuComparison
from divdec_research.compare.table import TEST, VALIDATION, SeedResult, best_of, summarize
from divdec_research.suites.aggregate import Bootstrap
from divdec_research.suites.results import read_results
from divdec_research.suites.tofu import TofuData, evaluate_tofu
from divdec_research.world import demo as demo
from divdec_research.world.facts import build_world
from divdec_research.world.models import (
    ASSISTANT,
    END,
    PAD,
    USER,
    Shape,
    StageCache,
    encode_material,
    new_model,
    train_pair,
    train_tokenizer,
)

# Shapes between a tenth and half of the target's parameters; the other kinds have that of the comparison's pair.
SHAPES = {
    "small": Shape(width=48, layers=1, heads=2, mlp_width=128),
    "larger": Shape(width=144, layers=3, heads=6, mlp_width=384),
}
TRIGRAMS = ("trigram", "trigram-shifted")
BRIDGED = ("bpe", "unigram", "gpt2")
POSITIONS = 1024  # of a bridged pair: a text of the target's 512 tokens may have more in another tokenizer
KINDS = (*TRIGRAMS, "small", "same", "larger", *BRIDGED)
# A chat template that differs from the target's: roles are separate lines, and every turn is terminated.
OTHER_TEMPLATE = (
    "{% for message in messages %}{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}"
    "{{ '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
SCORES = TofuComparison(TofuData("forget01", {}))  # results have their items: no questions are needed
COLUMNS = ("agg", "mem", "priv", "utility")


def settings_of(kind):
    if kind not in KINDS:
        return ()
    alphas, ks = ((10, 15, 20, 30), (3, 10)) if kind in TRIGRAMS else ((1.25, 1.5, 2, 3), (30, 300))
    return tuple([Steering(alpha=float(alpha)) for alpha in alphas] + [Steering("rank", k=k) for k in ks])


def other_tokenizer(kind, texts, vocab_size):
    """Train a tokenizer that differs from the target's: byte-level BPE of half its size, or Unigram."""
    if kind != "unigram":
        tokenizer = train_tokenizer(texts, vocab_size // 2)
        tokenizer.chat_template = OTHER_TEMPLATE
        return tokenizer
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=[END, PAD, USER, ASSISTANT, "<unk>"], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, additional_special_tokens=[USER, ASSISTANT],
        chat_template=OTHER_TEMPLATE, clean_up_tokenization_spaces=False, unk_token="<unk>",
    )  # fmt: skip


def new_gpt2(shape, tokenizer, seed):
    """Create a GPT-2 with random weights: learned positions, LayerNorm and GELU in place of Llama's parts."""
    set_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=POSITIONS, n_embd=shape.width, n_layer=shape.layers,
            n_head=shape.heads, n_inner=shape.mlp_width, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


class ShiftedBackoff(StupidBackoff):
    """Scores after a context without its last token, as in the forward pass of the paper's code."""

    def scores(self, contexts, part=0):
        return super().scores(contexts[:, :-1], part)


def trigrams(material, tokenizer, shifted):
    sets = (material.retain, material.forget)
    pair = NgramPair(*(count(documents(records, tokenizer), len(tokenizer), 3) for records in sets))
    if shifted:
        pair.retain, pair.forget = ShiftedBackoff(pair.retain.counts), ShiftedBackoff(pair.forget.counts)
        pair.order += 1  # asks for one token more, which is then left out
    return pair


def train_experts(kind, benchmark, material, recipe):
    """Count or train the auxiliaries of a kind; return the experts, and the number of parameters of each."""
    tokenizer = load_tokenizer(benchmark.target)
    if kind in TRIGRAMS:
        return trigrams(material, tokenizer, kind == "trigram-shifted"), 0
    encoder = other_tokenizer(kind, material.texts, recipe.vocab_size) if kind in BRIDGED else tokenizer
    recipe = dataclasses.replace(recipe, auxiliary=SHAPES.get(kind, recipe.auxiliary))
    stages = StageCache(cache_folder() / benchmark.name / "models", encoder, benchmark.seed, print)
    if kind in BRIDGED:
        new = new_gpt2 if kind == "gpt2" else functools.partial(new_model, max_length=POSITIONS)
        stages = dataclasses.replace(stages, folder=stages.folder / kind, new=new)
    q, p = (load_model(folder).eval() for folder in train_pair(stages, recipe, *encode_material(material, encoder))[1:])
    if encoder is tokenizer:
        return NeuralPair(q, p), q.num_parameters()
    return BridgedPair(
        q, p, target_tokenizer=tokenizer, auxiliary_tokenizer=encoder, target_width=len(tokenizer)
    ), q.num_parameters()  # fmt: skip


def measure(kind, benchmark, material, recipe, before):
    """Measure a kind as `divdec compare` does: answers with the hard fill, likelihoods with the soft one."""
    earlier = None
    if kind == "trigram-shifted":  # answers as the kind before, as in the paper's code
        answers = [{name: items for name, items in result.items.items() if "ROUGE" in name} for result in before]
        earlier = [Results("", "tofu", items=items, split=benchmark.suite.data.split) for items in answers]
    model = load_model(benchmark.retrain if kind == "retrained" else benchmark.target).eval()
    parameters = model.num_parameters()
    if kind in KINDS:
        experts, parameters = train_experts(kind, benchmark, material, recipe)
        model = DivergenceForCausalLM.from_experts(model, experts)
    suite, tokenizer = benchmark.suite, load_tokenizer(benchmark.target)
    subject = EvaluatedModel(model, tokenizer, settings_of(kind))
    results = evaluate_tofu(subject, suite.data, suite.layout(tokenizer), gradient_norms=False, earlier=earlier)
    for result in results:
        result.about["parameters"] = parameters
    return results


def run(world, seeds, kinds, output, data=None):
    """Measure what is missing; return the results by kind and setting, then by seed."""
    results = {}
    options = CompareSettings(output=str(output), data=world, seeds=seeds, tofu=data and str(data))
    for benchmark in load_benchmarks(options, print):
        seed = benchmark.seed
        if world == "demo":
            recipe, material = demo.RECIPE, demo.material_of(build_world(dataclasses.replace(demo.WORLD, seed=seed)))
        else:
            recipe, material = TOFU_SMALL, suite_material(Path(options.tofu or ""))[0]
        before = []
        for kind in ("target", "retrained", *kinds):
            names = [str(setting) for setting in settings_of(kind)] or [""]
            folders = [output / f"seed-{seed}" / kind / name.replace(":", "-") for name in names]
            if not all((folder / "summary.json").is_file() for folder in folders):
                for folder, measured in zip(folders, measure(kind, benchmark, material, recipe, before)):
                    folder.mkdir(parents=True, exist_ok=True)
                    write_results(measured, folder)
            before = [read_results(folder) for folder in folders]
            for name, measured in zip(names, before):
                results.setdefault((kind, name), {})[seed] = measured
            print(f"seed {seed}, {kind}: done", flush=True)
    return results


def summaries(results, half):
    """Summarize all settings on one half of the questions."""
    halves = {
        key: {seed: SCORES.half_of(whole, half) for seed, whole in by_seed.items()} for key, by_seed in results.items()
    }
    target, retrained = halves["target", ""], halves["retrained", ""]
    references = {seed: (target[seed], retrained[seed]) for seed in target}
    trials = []
    for (kind, setting), by_seed in halves.items():
        rows = {seed: SeedResult(part, None) for seed, part in by_seed.items()}
        trials.append(summarize(kind, setting, rows, references, SCORES, Bootstrap(draws=1), {}))
    return trials


def table(results):
    chosen = best_of(summaries(results, VALIDATION))
    rows = {(trial.method, trial.setting): trial for trial in summaries(results, TEST)}
    size = next(iter(results["target", ""].values())).about["parameters"]
    lines = ["| Auxiliaries | Share | Setting | Agg | Mem | Priv | Utility |", f"|{'---|' * 7}"]
    for kind, best in chosen.items():
        trial = rows[kind, best.setting]
        share = next(iter(results[kind, best.setting].values())).about["parameters"] / size
        cells = [_range([values[name] for values in trial.seeds.values()]) for name in COLUMNS]
        lines.append(f"| {kind} | {share:.0%} | {best.setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(values):
    return f"{statistics.fmean(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=("demo", "tofu-small"))
    parser.add_argument("--data", type=Path, help="TOFU's files, for tofu-small")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    given = parser.parse_args()
    kinds = [kind for kind in KINDS if kind in given.kinds]
    if "trigram-shifted" in kinds and "trigram" not in kinds:
        parser.error("trigram-shifted needs trigram, whose answers it has")
    print(table(run(given.world, given.seeds, kinds, given.output, given.data)))


if __name__ == "__main__":
    main()

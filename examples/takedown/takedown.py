"""A takedown: suppress an article that a model recites word for word, within seconds, and test its facts.

A small model has memorised the articles of an invented newspaper and answers questions about them. A letter requests
the takedown of one article. n-gram experts stop the recitation while the model runs. They do not stop the article's
facts in other words; for these the script trains a pair of auxiliaries.

    python examples/takedown/takedown.py [--seed 0] [--output runs/takedown]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `steps` is found from any working directory
import newspaper

from divdec.checkpoint import load_model, load_tokenizer
from divdec.data.records import RecordSet, write_records
from divdec.evaluation.generation import answers, continuations
from divdec.model.modeling import DivergenceForCausalLM
from divdec.runs import cache_folder, write_json, write_text
from divdec.training.settings import TrainingSettings
from divdec_research.suites.metrics import rouge
from divdec_research.world.models import Material, Recipe, Shape, TrainedModels, train_all
from steps import command, create_output, run_main

PUBLISHED, KEPT = 260, 24  # articles in the base models' training data; articles that the target may keep
REPRINTED = 6  # copies of the requested article in the training data, so that the model memorises it
PROMPT = 24  # tokens of an article in the prompt
MAX_CONTINUATION = 400  # maximum tokens of a continuation
RECIPE = Recipe(
    vocab_size=1200,
    target=Shape(width=160, layers=3, heads=4, mlp_width=448),
    auxiliary=Shape(width=96, layers=2, heads=4, mlp_width=256),
    target_pretraining=TrainingSettings(epochs=3.0, learning_rate=2e-3, warmup=0.05),
    auxiliary_pretraining=TrainingSettings(epochs=3.0, learning_rate=3e-3, warmup=0.05),
    target_tuning=TrainingSettings(epochs=25.0, learning_rate=1.5e-3, batch_size=8, warmup=0.05),
    auxiliary_base_tuning=TrainingSettings(epochs=12.0, learning_rate=2e-3, batch_size=8, warmup=0.05),
    auxiliary_tuning=TrainingSettings(epochs=10.0, learning_rate=1e-3, batch_size=8, warmup=0.05),
)


def prepare(seed: int, recipe: Recipe, cache: Path, published: int = PUBLISHED, kept: int = KEPT):
    """Train the models that the cache lacks; return the models, and the articles that may be kept."""
    rng = random.Random(seed)
    articles = newspaper.ordinary_articles(kept + published, rng)
    keep, corpus = articles[:kept], articles[kept:]
    requested = [
        *[newspaper.Record(newspaper.REQUESTED)] * REPRINTED,
        *(newspaper.asked(question, answer) for question, answer, _ in newspaper.QUESTIONS),
    ]
    material = Material(
        [record for text, questions in corpus for record in (newspaper.Record(text), *questions)],
        RecordSet("requested", "question/answer", tuple(requested)),
        RecordSet(
            "kept", "question/answer",
            tuple(record for text, questions in keep for record in (newspaper.Record(text), *questions)),
        ),
    )  # fmt: skip
    return train_all(material, recipe, seed, cache, lambda line: print(line, file=sys.stderr)), keep


def recited(model, tokenizer, articles):
    """The model's continuation of each article's beginning, and its mean ROUGE-L with the article."""
    ids = [tokenizer(article, add_special_tokens=False)["input_ids"] for article in articles]
    longest = min(MAX_CONTINUATION, max(len(row) for row in ids) - PROMPT)
    outputs = continuations(model, tokenizer, [row[:PROMPT] for row in ids], max_new_tokens=longest, batch_size=32)
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in outputs]
    truths = [tokenizer.decode(row[PROMPT:]) for row in ids]
    scores = [rouge(text, truth)["rougeL_f1"] for text, truth in zip(texts, truths, strict=True)]
    return texts, statistics.fmean(scores)


def told(model, tokenizer):
    """The answers to the questions about the article, and the share that states the fact."""
    records = [newspaper.asked(question, answer) for question, answer, _ in newspaper.QUESTIONS]
    texts = answers(model, tokenizer, records, max_new_tokens=24)
    facts = [fact for *_, fact in newspaper.QUESTIONS]
    return statistics.fmean(fact in text for text, fact in zip(texts, facts, strict=True)), texts


def measured(name, model, tokenizer, keep):
    """Measure a model and print one line."""
    article = recited(model, tokenizer, [newspaper.REQUESTED])[1]
    kept = recited(model, tokenizer, [text for text, _ in keep])[1]
    share = told(model, tokenizer)[0]
    print(f"{name:<22}{article:>26.2f}{share:>28.0%}{kept:>26.2f}", flush=True)
    return {"article_rouge_l": article, "article_told": share, "kept_rouge_l": kept}


def run(output: Path, trained: TrainedModels, keep, started: float) -> dict:
    """Run the example step by step."""
    tokenizer = load_tokenizer(trained.target)
    write_records(output / "keep.jsonl", [record for text, questions in keep for record in (newspaper.Record(text),)])
    write_text(output / "article.txt", newspaper.REQUESTED + "\n")
    target = load_model(trained.target).eval()
    figures = {}
    with contextlib.chdir(output):
        # Links give the models short names in the printed commands.
        places = {"target": trained.target, "q": trained.retain_auxiliary, "p": trained.forget_auxiliary}
        for name, place in places.items():
            Path(name).unlink(missing_ok=True)
            Path(name).symlink_to(place.resolve())
        beginning = tokenizer.decode(tokenizer(newspaper.REQUESTED)["input_ids"][:PROMPT])
        print(f"1. The target, given {beginning!r}, goes on:\n")
        print(f"   …{recited(target, tokenizer, [newspaper.REQUESTED])[0][0].strip()}\n")

        print("2. A registry of requests, made once, and a model that follows it\n")
        command("takedown", "init", "takedowns", "--target", "target", "--retain", "keep.jsonl")
        command("bundle", "--target", "target", "--registry", "takedowns", "--output", "live")
        live = DivergenceForCausalLM.from_pretrained("live")

        print("\n3. The request\n")
        begun = time.perf_counter()
        # 3: the target recited nothing, as after the few steps of a test.
        command("takedown", "add", "takedowns", "--id", "case-17", "--file", "article.txt", "--reference",
                "letter of 3 May", codes=(0, 3))  # fmt: skip
        seconds, begun = time.perf_counter() - begun, time.perf_counter()
        text = recited(live, tokenizer, [newspaper.REQUESTED])[0][0].strip()
        print(f"\n   in force and measured after {seconds:.2f} s; the model that was running already, asked again:")
        print(f"\n   …{text}\n")

        print("4. The audit\n")
        command("takedown", "list", "takedowns")
        command("takedown", "list", "takedowns", "--history")
        command("takedown", "verify", "takedowns")

        print("\n5. What remains: what the article says in other words\n")
        for (question, _, _), before, after in zip(
            newspaper.QUESTIONS, told(target, tokenizer)[1], told(live, tokenizer)[1], strict=True
        ):
            print(f"   {question}\n     target:   {before}\n     n-grams:  {after}")

        print(
            "\n6. A pair beside it: q has read the kept articles, p the requested one and what is asked about it too\n"
        )
        command("bundle", "--target", "target", "--retain-auxiliary", "q", "--forget-auxiliary", "p", "--registry",
                "takedowns", "--steering", "linear:2", "--output", "both")  # fmt: skip
        both = DivergenceForCausalLM.from_pretrained("both")
        print(f"\n{'':<22}{'article, ROUGE-L':>26}{'asked in other words, told':>28}{'kept articles, ROUGE-L':>26}")
        rows = {"target": target, "n-grams": live, "n-grams and pair": both}
        for name, model in {**rows, "retrained without it": load_model(trained.retrain).eval()}.items():
            figures[name] = measured(name, model, tokenizer, keep)
        print("\nWith the pair:")
        for (question, _, _), after in zip(newspaper.QUESTIONS, told(both, tokenizer)[1], strict=True):
            print(f"   {question}  {after}")
    pair = sum(trained.seconds[stage] for stage in ("auxiliary base", "retain auxiliary", "forget auxiliary"))
    whole, busy = time.perf_counter() - started, time.process_time()
    print(f"\nTaking down took {seconds:.2f} s, training the pair {pair:.0f} s, the whole {whole:.0f} s "
          f"({busy:.0f} s of processor time).")  # fmt: skip
    result = {"models": figures, "taken_down_seconds": seconds, "pair_seconds": pair}
    write_json(output / "takedown.json", result)
    return result


def main(
    arguments: list[str] | None = None, recipe: Recipe = RECIPE, published: int = PUBLISHED, kept: int = KEPT
) -> dict:
    """Train the models, run the example and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/takedown"), help="an empty or absent folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    create_output(given.output)
    trained, keep = prepare(given.seed, recipe, cache_folder() / "examples" / "takedown", published, kept)
    result = run(given.output, trained, keep, started)
    if given.json:
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    run_main(main)

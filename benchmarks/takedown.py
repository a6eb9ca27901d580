"""What a takedown request does to a target that knows an article by heart: verbatim memorisation before and after.

A small model is over-trained on real news articles (MUSE-News: `verbmem/forget.jsonl` and `privleak/retain.jsonl`), so
that it continues them word for word. `divdec forget add` then takes the articles of the first file down. Measured as
MUSE's verbmem is, ROUGE-L of the greedy continuation with the article's, beside the perplexity of the articles to keep.

    python benchmarks/takedown.py --data MUSE_NEWS [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer  # noqa: F401  (tells a missing library early)

from divdec.data.formatting import IGNORED, Example
from divdec.data.records import read_records
from divdec.evaluation.generation import continuations
from divdec.evaluation.scoring import score
from divdec.evaluation.text import rouge
from divdec.experiments.small_models import Shape, new_model, train_tokenizer
from divdec.runs import cache_folder, output_folder, settings_hash
from divdec.training.fine_tuning import fine_tune
from divdec.training.settings import TrainingSettings

PROMPT, CONTINUED = 128, 128  # tokens
ARTICLES = 60  # to forget, and as many to keep
SHAPE = Shape(width=192, layers=3, heads=6, mlp_width=512)
TRAINING = TrainingSettings(epochs=40.0, learning_rate=3e-3, batch_size=8, warmup=0.05)


def articles(data):
    """Texts to forget and texts to keep."""
    rows = [json.loads(line) for line in (data / "verbmem" / "forget.jsonl").read_text().splitlines()[:ARTICLES]]
    forget = [row["prompt"] + row["gt"] for row in rows]
    retain = [record.answer for record in read_records(data / "privleak" / "retain.jsonl").records[:ARTICLES]]
    return forget, retain


def over_trained(data):
    """Tokenizer, model and the windows of each set that it knows by heart."""
    forget, retain = articles(data)
    tokenizer = train_tokenizer([*forget, *retain], 4096)
    windows = {}
    for name, texts in (("forget", forget), ("retain", retain)):
        ids = [tokenizer(text)["input_ids"] for text in texts]
        # The end of an article that is forgotten is what MUSE asks for.
        cut = slice(-PROMPT - CONTINUED, None) if name == "forget" else slice(None, PROMPT + CONTINUED)
        windows[name] = [document[cut] for document in ids]
    both = [*windows["forget"], *windows["retain"]]
    folder = cache_folder() / "takedown" / settings_hash([both, str(TRAINING), str(SHAPE)])
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        model, _ = fine_tune(
            new_model(SHAPE, tokenizer, seed=0), tokenizer, [Example(ids, list(ids)) for ids in both], TRAINING,
            folder.parent / "work", title="over-training", measure=False, resumable=False,
        )  # fmt: skip
        with output_folder(folder) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    return folder, windows


def measured(model, tokenizer, windows):
    """ROUGE-L of the continuation of each set, and perplexity of each set's second halves."""
    found = {}
    for name, rows in windows.items():
        prompts, truths = [row[:PROMPT] for row in rows], [row[PROMPT:] for row in rows]
        answered = continuations(model, tokenizer, prompts, max_new_tokens=CONTINUED, batch_size=20)
        found[f"{name}_rouge_l"] = statistics.fmean(
            rouge(tokenizer.decode(truth), tokenizer.decode(ids, skip_special_tokens=True))["rougeL_recall"]
            for truth, ids in zip(truths, answered, strict=True)
        )
        examples = [Example(row, [IGNORED] * PROMPT + row[PROMPT:]) for row in rows]
        found[f"{name}_perplexity"] = math.exp(
            statistics.fmean(item.loss for item in score(model, examples, batch_size=16))
        )
    return found

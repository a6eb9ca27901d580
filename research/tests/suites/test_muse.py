"""MUSE against OpenUnlearning's own figures, and what is refused."""

import dataclasses
import json

import pytest
import torch

from divdec import UsageError
from divdec.checkpoint import load_model, load_tokenizer
from divdec.data.records import Message, Record
from divdec.evaluation.scoring import EvaluatedModel
from divdec_research.suites.muse import continuation, evaluate_muse, read_muse
from divdec_research.suites.questions import BenchmarkFormat
from divdec_research.suites.results import read_results


@pytest.fixture(scope="module")
def full(shared):
    folder = shared / "oracle/models/full"
    return EvaluatedModel(load_model(folder, dtype=torch.float32).eval(), load_tokenizer(folder))


def test_knowmem_items_match_oracle(full, shared):
    data = dataclasses.replace(read_muse(shared / "data/muse_news"), verbmem=(), texts={})
    (ours,) = evaluate_muse(full, data, max_length=1024)
    theirs = read_results(shared / "oracle/results/muse_knowmem")
    assert theirs.items.keys() <= ours.items.keys()
    for metric, items in theirs.items.items():
        assert ours.items[metric] == items
        assert ours.figures[metric] == pytest.approx(theirs.figures[metric], rel=1e-9)
    assert ours.reasons["extraction_strength"] == "there is no verbmem/forget.jsonl"
    assert ours.figures["privleak"] is None


def test_muse_metrics_cover_all_available_sets(full, shared):
    (news,) = evaluate_muse(full, read_muse(shared / "data/muse_news", limit=3), max_length=1024)
    assert not news.reasons
    assert news.figures.keys() >= {
        "forget_knowmem_ROUGE", "retain_knowmem_ROUGE", "forget_verbmem_ROUGE", "extraction_strength",
        "exact_memorization", "privleak", "mia_min_k",
    }  # fmt: skip
    retained = dataclasses.replace(news, name="retrained")
    (same,) = evaluate_muse(
        full, read_muse(shared / "data/muse_news", limit=3), max_length=1024, retain_results=retained
    )
    assert same.figures["privleak"] == pytest.approx(0, abs=1e-6)
    (books,) = evaluate_muse(full, read_muse(shared / "data/muse_books_qa", limit=2), max_length=2048)
    assert books.figures["forget_knowmem_ROUGE"] is not None
    assert books.figures["forget_verbmem_ROUGE"] is None


def test_prompt_exceeding_max_length_is_rejected(full, shared):
    with pytest.raises(UsageError, match=r"forget_qa\.jsonl, line 1: nothing is left of the answer within 512 tokens"):
        evaluate_muse(full, read_muse(shared / "data/muse_news"), max_length=512)


def test_only_the_continuation_is_labelled(tokenizer):
    record = Record("Velmora was cold.", prompt="In the winter")
    example = continuation(record, tokenizer)
    assert tokenizer.decode(example.input_ids) == "In the winter Velmora was cold."
    assert tokenizer.decode([label for label in example.labels if label != -100]) == " Velmora was cold."
    whole = continuation(Record("Velmora was cold."), tokenizer)
    assert whole.labels[0] == -100
    assert whole.labels[1:] == whole.input_ids[1:]
    assert len(continuation(record, tokenizer, longest=2).input_ids) == example.prompt_length + 2
    with pytest.raises(UsageError, match="nothing to predict"):
        continuation(Record("x", prompt="In the winter", location="p"), tokenizer, longest=1)


def test_the_plain_layout_labels_whole_answers(tokenizer):
    shots = (Record("In Velmora.", messages=(Message("user", "Where?"),)),)
    layout = BenchmarkFormat(tokenizer, "plain", shots=shots)
    record = Record("Ana.", messages=(Message("user", "Who?"),))
    example = layout.encode([record])[0]
    assert tokenizer.decode(example.input_ids) == (
        "Question: Where?\nAnswer: In Velmora.\n\nQuestion: Who?\nAnswer: Ana.<|end|>"
    )
    assert tokenizer.decode([label for label in example.labels if label != -100]).strip() == "Ana.<|end|>"
    assert layout.truth(record) == "Ana."


def test_missing_muse_files_and_columns(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        read_muse(tmp_path / "none")
    with pytest.raises(UsageError, match=r"forget_qa\.jsonl does not exist"):
        read_muse(tmp_path)
    (tmp_path / "forget_qa.jsonl").write_text(json.dumps({"question": "Q"}))
    with pytest.raises(UsageError, match=r"line 1: column answer is missing$"):
        read_muse(tmp_path)


def test_a_holdout_that_is_the_forget_set_is_rejected(shared):
    folder = shared / "data/muse_news"
    with pytest.raises(UsageError, match="are also in the forget set"):
        read_muse(folder, folder / "privleak/forget.jsonl", 5)

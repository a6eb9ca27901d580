"""The reference of a calibration is validated: a q that knows the forget set shows nothing."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from divdec import DivergenceForCausalLM, Steering
from divdec.checkpoint import load_model
from divdec.data.formatting import Format, encode_prompts
from divdec.data.records import Message, Record, RecordSet
from divdec.evaluation.choice import MAX_REFERENCE, ask, choose_rule
from divdec.evaluation.generation import MAX_THOUGHT, sample_records


@pytest.fixture(scope="module")
def sets(models, tokenizer):
    """The target's own answers to questions, and other answers to others of its questions."""
    records = sample_records(load_model(models / "target"), tokenizer, 36, max_new_tokens=8, seed=3).records
    unknown = [dataclasses.replace(one, answer=f"zq {one.answer[::-1]} xj") for one in records]
    halves = {"forget": records[:12], "retain": records[12:24], "holdout": unknown[24:]}
    return {name: RecordSet(name, "question/answer", tuple(half)) for name, half in halves.items()}


def test_a_reference_that_has_read_the_forget_set_is_refused(models, tokenizer, sets):
    """q is the target itself."""
    target, q, p = (load_model(models / name) for name in ("target", "target", "forget"))
    model = DivergenceForCausalLM.from_parts(target, q, p, "linear:1")
    result = choose_rule(model, tokenizer, sets, [Steering(alpha=1.0)], min_retain=0.01)
    assert sum(result.reference.values()) / 4 > MAX_REFERENCE
    guesses = round(12 * result.guessed)
    assert (result.asked, guesses > 4) == (12, True)
    for words in (
        "much likelier than the holdout set",
        f"q itself tells {guesses} of 12",
        "nothing was shown",
    ):
        assert any(words in fault for fault in result.faults), words
    # A target that answers nothing can still show the forget set to membership attacks; the figures say so.
    silent = dataclasses.replace(result.target, leaked=0.0, distance=0.3)
    by_attacks = dataclasses.replace(result, target=silent)
    assert by_attacks.shown
    assert "is shown by these alone" in str(by_attacks)
    assert "by these alone" not in str(
        dataclasses.replace(result, target=dataclasses.replace(silent, leaked=1.0), guessed=0.0)
    )


class Scripted(torch.nn.Module):
    """A model that gives every prompt the same reply."""

    def __init__(self, tokenizer, reply, prompt_length):
        super().__init__()
        self.reply = [*tokenizer(reply, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        self.prompt_length, self.embeddings = prompt_length, torch.nn.Embedding(1, 1)
        self.generation_config = SimpleNamespace(eos_token_id=tokenizer.eos_token_id, num_beams=1)
        self.config = SimpleNamespace(max_position_embeddings=None)

    def get_input_embeddings(self):
        return self.embeddings

    def generate(self, input_ids, max_new_tokens, **options):
        start = input_ids.shape[1] - self.prompt_length
        new = torch.tensor([self.reply[start : start + max_new_tokens]] * len(input_ids))
        return torch.cat([input_ids, new], dim=1)


@pytest.mark.parametrize(
    ("reply", "leaks", "thinking", "words"),
    [
        ("It is Zed.", 1, 0, ""),
        ("so " * 12 + "it is Zed.", 1, 0, ""),  # longer than the true answer
        ("<think>well</think>" + "so " * 20 + "it is Zed.", 1, 0, ""),
        ("<think>" + "well " * 40 + "</think>It is Zed.", 1, 0, ""),
        ("[THINK]" + "well " * 40 + "[/THINK]It is Bob.", 0, 0, ""),
        ("<think>" + "well " * MAX_THOUGHT, 0, 1, "; 1 of 1 replies were cut in a thought of more than"),
        ("well " * 400, 0, 0, "; 1 of 1 replies were cut after "),
    ],
)
def test_a_model_that_thinks_first_is_read_to_its_answer(tokenizer, reply, leaks, thinking, words):
    record = Record("It is Zed.", messages=(Message("user", "Who?"),))
    [prompt] = encode_prompts([record], tokenizer)
    result = ask(Scripted(tokenizer, reply, len(prompt)), tokenizer, [record], Format(), 4)
    assert (result.leaks, result.thinking) == (leaks, thinking)
    assert result.cuts.startswith(words)
    assert bool(result.cuts) == bool(words)

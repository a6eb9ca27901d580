"""A grammar never revives a token that the rule suppresses, whatever else a request asks for."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from divdec import DivergenceForCausalLM
from divdec.errors import FailedClosed
from divdec.serving.grammar import GrammarCompiler, GrammarConflict, make_grammar
from divdec.serving.request import SamplingParams, logits_processors
from support.engines import alone, answer, answered_tokens, greedy, run, tokens_of
from support.tiny import make_parts
from support.tools import ARGUMENTS

PROMPT = [5, 9, 20, 31]


@pytest.fixture(scope="module")
def model(tokenizer):
    return DivergenceForCausalLM.from_parts(*make_parts("llama", len(tokenizer)), "rank:40")


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def logits_after(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1]


def test_a_suppressed_token_that_the_grammar_demands_is_not_answered(model, tokenizer, compiler):
    """The other requests of the batch go on."""
    suppressed = (logits_after(model, PROMPT) == -torch.inf).nonzero().flatten().tolist()
    texts = {token: tokenizer.decode([token]) for token in suppressed}
    demanded = [token for token, text in texts.items() if text.isalnum() and tokenizer(text).input_ids == [token]]
    assert len(demanded) > 3
    grammars = [compiler.compile(f'start: "{texts[token]}"') for token in demanded[:3]]

    async def work(engine):
        answers = [answer(engine, PROMPT, greedy(8, grammar=grammar)) for grammar in grammars]
        answers.append(answer(engine, PROMPT, greedy(8, grammar=grammars[0], logit_bias={demanded[0]: 100.0})))
        answers.append(answer(engine, PROMPT, SamplingParams(max_tokens=8, grammar=grammars[0], seed=1)))
        return await asyncio.gather(*answers, answered_tokens(engine, PROMPT, greedy(8)), return_exceptions=True)

    *bound, free = run(model, tokenizer, work)
    assert [type(error) for error in bound] == [GrammarConflict] * 5
    assert free == alone(model, PROMPT, 8)


def test_a_grammar_chooses_the_likeliest_token_that_both_allow(model, tokenizer, compiler):
    logits = logits_after(model, PROMPT)
    plain = [token for token in logits.argsort(descending=True).tolist() if tokenizer.decode([token]).isalnum()]
    pair = [plain[3], plain[9]]
    assert torch.isfinite(logits[pair]).all()
    grammar = compiler.compile(f"start: {' | '.join(f'<[{token}]>' for token in reversed(pair))}")
    outputs = run(model, tokenizer, lambda engine: answer(engine, PROMPT, greedy(8, grammar=grammar)))
    assert tokens_of(outputs) == pair[:1]
    assert outputs[-1].finish_reason == "stop"


@given(data=st.data())
def test_no_processor_and_no_grammar_revives_a_token(tokenizer, compiler, data):
    size = len(tokenizer)
    seed = data.draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, size, generator=generator) * 3
    share = data.draw(st.sampled_from([0.0, 0.1, 0.9, 0.99]))
    suppressed = torch.rand(1, size, generator=generator) < share
    scores = scores.masked_fill(suppressed, -torch.inf)
    schema = data.draw(st.sampled_from([None, {"type": "object"}, ARGUMENTS, {"enum": [1, "a"]}]))
    tools = {} if schema is not None else {"weather": ARGUMENTS}
    grammar = compiler.compile(make_grammar(schema, tools, tokenizer.get_added_vocab(), parallel=True)).start()
    params = SamplingParams(
        max_tokens=9, temperature=data.draw(st.sampled_from([0.0, 0.5, 2.0])),
        top_k=data.draw(st.sampled_from([0, 1, 5])), top_p=data.draw(st.sampled_from([1.0, 0.3])),
        min_p=data.draw(st.sampled_from([0.0, 0.4])), repetition_penalty=data.draw(st.sampled_from([1.0, 0.5])),
        logit_bias=dict.fromkeys(data.draw(st.lists(st.integers(0, size - 1), max_size=5)), 100.0),
    )  # fmt: skip
    processors, text = logits_processors(params, 1, grammar), [5]
    for _ in range(data.draw(st.integers(1, 4))):
        allowed = compiler_mask(grammar, size)
        try:
            processed = processors(torch.tensor([text]), scores)[0]
        except FailedClosed:
            assert not (allowed & ~suppressed[0]).any()
            return
        left = processed > -torch.inf
        assert left.any()
        assert not (left & (suppressed[0] | ~allowed)).any()
        text.append(int(processed.argmax()))
        grammar.accept(text[-1])
        if grammar.is_complete:
            return


def compiler_mask(grammar, size):
    """Tokens that the grammar allows, as numpy reads them."""
    import numpy as np

    bits = np.unpackbits(np.frombuffer(grammar._matcher.compute_bitmask(), np.uint8), bitorder="little")[:size]
    return torch.from_numpy(bits).bool()

"""A takedown request is in force for the next token of every answer, also of those that are being made."""

import asyncio

import pytest

from divdec import DivergenceForCausalLM, Speculation
from divdec.data.records import texts_of
from divdec.experts.neural import NeuralPair
from divdec.serving.engine import Engine
from divdec.serving.request import SamplingParams
from divdec.takedowns.correction import TakedownCorrection
from divdec.takedowns.registry import Registry
from divdec.takedowns.store import DATABASE
from support.engines import alone
from support.exactness import assert_same_answer
from support.tiny import tiny_model

TOKENS = 100


@pytest.fixture
def registry(tmp_path, checkpoints, world):
    return Registry.create(
        tmp_path / "registry", texts_of("retain", world.corpus[:20]), checkpoints / "target", order=3
    )


@pytest.fixture
def target(tokenizer):
    return tiny_model("llama", len(tokenizer), 0, 64, 2)


@pytest.fixture
def model(registry, target):
    return DivergenceForCausalLM.from_experts(target, None, takedowns=TakedownCorrection(registry.folder, strength=3.0))


@pytest.mark.parametrize("speculation", [None, Speculation(2)])
def test_running_request_applies_takedown(registry, model, target, tokenizer, speculation):
    if speculation is not None:  # q drafts
        pair = NeuralPair(*(tiny_model("llama", len(tokenizer), seed) for seed in (1, 2)))
        takedowns = TakedownCorrection(registry.folder, strength=3.0)
        model = DivergenceForCausalLM.from_experts(target, pair, "linear:1", takedowns=takedowns)
    prompts = [tokenizer(text).input_ids for text in ("The author", "A book of the sea")]
    before = [alone(model, prompt, TOKENS, eos_token_id=None) for prompt in prompts]

    async def answers():
        engine = Engine(model, tokenizer, "tiny", speculation=speculation)
        engine.start()
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        running = [engine.generate(prompt, sampling) for prompt in prompts[: 1 if speculation else 2]]
        result = [[] for _ in running]
        for answer, tokens in zip(running, result, strict=True):
            while len(tokens) < 5:
                tokens += (await anext(answer)).tokens
        assert engine.count_takedowns() == 0
        await asyncio.to_thread(registry.add, "case", texts_of("texts", list(map(tokenizer.decode, before))))
        for answer, tokens in zip(running, result, strict=True):
            async for output in answer:
                tokens += output.tokens
        assert engine.count_takedowns() == 1
        await engine.close(1)
        return result

    for prompt, old, tokens in zip(prompts, before, asyncio.run(answers()), strict=False):
        changed = next(index for index, (one, other) in enumerate(zip(old, tokens, strict=True)) if one != other)
        assert 5 <= changed < TOKENS - 20
        expected = alone(model, prompt + tokens[:changed], TOKENS - changed, eos_token_id=None)
        assert_same_answer(model, prompt + tokens[:changed], tokens[changed:], expected)


def test_damaged_registry_fails_requests_until_restored(registry, model, tokenizer):
    from divdec.errors import FailedClosed

    registry.add("case", texts_of("texts", ["The sea is wide and the boat is small, said the old man to the boy."]))
    log = registry.folder / DATABASE
    whole = log.read_bytes()

    async def work():
        engine = Engine(model, tokenizer, "tiny")
        engine.start()
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        running = engine.generate([5, 6, 7], sampling)
        await anext(running)
        log.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(FailedClosed):
            async for _ in running:
                pass
        with pytest.raises(FailedClosed):
            await anext(engine.generate([5, 6, 7], sampling))
        log.write_bytes(whole)
        tokens = [token async for output in engine.generate([5, 6, 7], sampling) for token in output.tokens]
        await engine.close(1)
        return tokens

    assert_same_answer(model, [5, 6, 7], asyncio.run(work()), alone(model, [5, 6, 7], TOKENS, eos_token_id=None))

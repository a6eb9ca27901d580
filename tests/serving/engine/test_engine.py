"""Requests that join and leave a batch get the answers that they get alone."""

import asyncio
import copy
import itertools
import time

import pytest
import torch

from divdec import DivergenceForCausalLM, Speculation
from divdec.decoding import speculative
from divdec.errors import FailedClosed, UsageError
from divdec.serving import batches, scheduler
from divdec.serving.engine import Busy, Engine
from divdec.serving.request import SamplingParams
from divdec.serving.scheduler import Closing
from support.architectures import tiny_architecture
from support.engines import Failing, Slow, alone, answer, answered_tokens, greedy, run, tokens_of
from support.exactness import LOGITS, assert_same_answer
from support.tiny import make_parts, tiny_model

TEXTS = (
    "Who wrote The Hollow Orchard?",
    "What",
    "Tell me of the sea, of gardens and of the books that were written about them in the last century.",
    "Where was the author born, and what did her mother do?",
    "The",
)


def windowed():
    return DivergenceForCausalLM.from_parts(
        tiny_model("mistral", 512, 0, 64, 3), tiny_model("gpt2", 512, 1), tiny_model("gpt2", 512, 2), "linear:1.5"
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "windowed", "rank"])
def test_continuous_batching_matches_single_requests(kind, tokenizer):
    model = windowed() if kind == "windowed" else DivergenceForCausalLM.from_parts(
        *make_parts("llama" if kind == "rank" else kind), steering="rank:20" if kind == "rank" else "linear:1.5"
    )  # fmt: skip
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    lengths = [16, 5, 24, 9, 20]

    async def work(engine):
        delays = [0.05 * index for index in range(len(prompts))]
        return await asyncio.gather(*map(answer, [engine] * len(prompts), prompts, map(greedy, lengths), delays))

    results = run(model, tokenizer, work, max_num_seqs=3)
    for prompt, number, outputs in zip(prompts, lengths, results, strict=True):
        expected = alone(model, prompt, number)
        result = tokens_of(outputs)
        assert_same_answer(model, prompt, result, expected)
        assert "".join(output.text for output in outputs) == tokenizer.decode(result, skip_special_tokens=True)
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason == ("stop" if result[-1] == 0 else "length")


@pytest.mark.parametrize("model_type", ["falcon_h1", "deepseek_v4"])
def test_recurrent_states_are_not_shared_between_requests(model_type, tokenizer):
    """Several at once, two of them with one prompt, and shorter ones that leave first."""
    model = DivergenceForCausalLM.from_parts(
        *(tiny_architecture(model_type, seed, vocab_size=512) for seed in range(3)), steering="linear:1.5"
    )
    prompts = [tokenizer(text).input_ids for text in (TEXTS[0], TEXTS[1], TEXTS[0])]
    lengths = [6, 2, 4]

    async def work(engine):
        return await asyncio.gather(*map(answer, [engine] * 3, prompts, map(greedy, lengths)))

    for prompt, number, outputs in zip(prompts, lengths, run(model, tokenizer, work), strict=True):
        assert tokens_of(outputs) == alone(model, prompt, number)
    with pytest.raises(UsageError, match=f"recurrent state .{model_type}"):
        Engine(model, tokenizer, "tiny", speculation=Speculation())


@pytest.fixture(scope="module")
def model():
    return DivergenceForCausalLM.from_parts(*make_parts("llama"), steering="linear:1.5")


def steered_logprobs(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("part", [512, 3])
def test_logprobs_are_steered(model, tokenizer, part, monkeypatch):
    monkeypatch.setattr("divdec.serving.scheduler.PREFILL_CHUNK", part)
    prompt = tokenizer(TEXTS[2]).input_ids
    sampling = SamplingParams(max_tokens=6, temperature=3.0, top_k=50, seed=1, logprobs=4, prompt_logprobs=2)
    outputs = run(model, tokenizer, lambda engine: answer(engine, prompt, sampling))
    expected = steered_logprobs(model, prompt + tokens_of(outputs))
    reported = outputs[0].prompt_logprobs
    assert reported[0] is None
    assert len(reported) == len(prompt)
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    reported = [*reported[1:], *(item for output in outputs for item in output.logprobs)]
    assert [item.token for item in reported] == (prompt + tokens_of(outputs))[1:]
    for row, item in zip(expected, reported, strict=False):
        assert item.logprob == pytest.approx(float(row[item.token]), abs=1e-4)
        number = 2 if item in reported[: len(prompt) - 1] else 4
        values, tokens = row.topk(number)
        assert [token for token, _ in item.top] == tokens.tolist()
        assert [value for _, value in item.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_tokens_masked_by_rank_rule_have_lowest_logprob(tokenizer):
    model = DivergenceForCausalLM.from_parts(*make_parts("llama"), steering="rank:500")
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, logit_bias={5: 100.0})
    outputs = run(model, tokenizer, lambda engine: answer(engine, [7, 8, 9], sampling))
    values = [value for _, value in outputs[0].logprobs[0].top]
    assert values[12:] == [-9999.0] * 8
    expected = steered_logprobs(model, [7, 8, 9])[-1]
    assert int(torch.isfinite(expected).sum()) == 12
    assert torch.isfinite(expected[tokens_of(outputs)[0]])


def test_samples_follow_steered_distribution_and_seed(model, tokenizer):
    from scipy.stats import chisquare

    prompt, count = [7, 8, 9, 10], 600
    sampling = SamplingParams(max_tokens=1, temperature=2.0, top_k=8)

    async def many(engine, number):
        return await asyncio.gather(*(answer(engine, prompt, sampling) for _ in range(number)))

    drawn = [
        tokens_of(outputs)[0] for outputs in run(model, tokenizer, lambda engine: many(engine, count), max_queue=count)
    ]
    values, tokens = steered_logprobs(model, prompt)[-1].topk(8)
    probabilities = (values / 2).softmax(-1)
    result = [drawn.count(token) for token in tokens.tolist()]
    assert sum(result) == count
    assert chisquare(result, (probabilities * count).tolist()).pvalue > 1e-3
    assert chisquare(result, (values.softmax(-1) * count).tolist()).pvalue < 1e-3  # other than without temperature
    seeded, other = (SamplingParams(max_tokens=20, temperature=1.0, seed=seed) for seed in (3, 4))

    async def seeds(engine):
        once = await answered_tokens(engine, prompt, seeded)
        among_others = asyncio.gather(*(answered_tokens(engine, prompt, seeded) for _ in range(2)), many(engine, 40))
        return once, (await among_others)[:2], await answered_tokens(engine, prompt, other)

    once, again, differently = run(model, tokenizer, seeds)
    assert again == [once, once]
    assert differently != once


def test_penalties_and_logit_bias_follow_openai_api(model, tokenizer):
    prompt = [7, 8, 9]
    expected = alone(model, prompt, 12)
    banned = {expected[0]: -100.0}
    result = tokens_of(run(model, tokenizer, lambda engine: answer(engine, prompt, greedy(12, logit_bias=banned))))
    assert result[0] == int(steered_logprobs(model, prompt)[-1].topk(2).indices[1])
    sampling = greedy(16, presence_penalty=2.0, frequency_penalty=1.5, ignore_eos=True)
    result = tokens_of(run(model, tokenizer, lambda engine: answer(engine, prompt, sampling)))
    ids = list(prompt)
    for token in result:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        for known in set(ids[len(prompt) :]):
            logits[known] -= 2.0 + 1.5 * ids[len(prompt) :].count(known)
        assert logits[token] >= logits.max() - LOGITS
        ids.append(token)
    assert result != alone(model, prompt, 16)


def test_output_ends_before_stop_string_split_across_tokens(model, tokenizer):
    prompt = tokenizer(TEXTS[0]).input_ids
    whole = tokenizer.decode(alone(model, prompt, 30), skip_special_tokens=True)
    stops = [(whole[5:9], "never said"), (whole[7:8], "never said"), (whole[3:20], "never said"), (whole[-3:] + "!?",)]

    async def work(engine):
        return await asyncio.gather(*(answer(engine, prompt, greedy(30, stop=stop)) for stop in stops))

    *stopped, last = run(model, tokenizer, work)
    for (stop, _), outputs in zip(stops[:-1], stopped, strict=True):
        assert "".join(output.text for output in outputs) == whole[: whole.index(stop)]
        assert outputs[-1].finish_reason == "stop"
        assert len(tokens_of(outputs)) < 30
    # What begins like a stop string and is none comes out in the end.
    assert "".join(output.text for output in last) == whole


def test_disconnected_client_is_removed_from_batch(model, tokenizer):
    prompts = [tokenizer(text).input_ids for text in TEXTS]

    async def work(engine):
        gone = engine.generate(prompts[0], greedy(200, ignore_eos=True))
        others = asyncio.gather(*(answer(engine, prompt, greedy(24)) for prompt in prompts[1:]))
        for _ in range(3):
            await anext(gone)
        assert engine.scheduler.running >= 1
        await gone.aclose()
        result = await others
        for _ in range(200):
            if not engine.scheduler.running:
                break
            await asyncio.sleep(0.01)
        return result, engine.scheduler.running, engine.scheduler.generated_tokens

    result, running, generated = run(model, tokenizer, work)
    assert running == 0
    for prompt, outputs in zip(prompts[1:], result, strict=True):
        assert_same_answer(model, prompt, tokens_of(outputs), alone(model, prompt, 24))
    assert generated < sum(map(len, map(tokens_of, result))) + 150


def test_full_queue_and_closing_engine_reject_requests(model, tokenizer):
    async def work(engine):
        first = engine.generate([7, 8], greedy(200, ignore_eos=True))
        await anext(first)
        waiting = [asyncio.create_task(answer(engine, [7, 8], greedy(2))) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert engine.waiting == 2
        with pytest.raises(Busy):
            await answer(engine, [7, 8], greedy(2))
        engine.begin_closing()
        with pytest.raises(Closing):
            await answer(engine, [7, 8], greedy(2))
        await engine.close(0.0)
        with pytest.raises(Closing):
            async for _ in first:
                pass
        return await asyncio.gather(*waiting, return_exceptions=True)

    slow = DivergenceForCausalLM.from_experts(model.target, Slow(model.experts), "linear:1.5")
    assert all(isinstance(error, Closing) for error in run(slow, tokenizer, work, max_num_seqs=1, max_queue=2))


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_closing_engine_finishes_running_requests(model, tokenizer, monkeypatch, seconds):
    """Also a request that has left the queue, and has not begun."""
    create = scheduler.Prefill

    def slow(*arguments):
        time.sleep(seconds)
        return create(*arguments)

    monkeypatch.setattr(scheduler, "Prefill", slow)

    async def work(engine):
        running = asyncio.create_task(answer(engine, [7, 8], greedy(24)))
        await asyncio.sleep(0.05)
        await engine.close(30)
        return await running

    assert_same_answer(model, [7, 8], tokens_of(run(model, tokenizer, work)), alone(model, [7, 8], 24))


@pytest.mark.parametrize("at", ["prompt", "answer"])
def test_failing_request_does_not_affect_other_requests(model, tokenizer, at):
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    expected = [alone(model, prompt, 12) for prompt in prompts[:4]]
    others = [token for position in (0, 1, 3) for token in prompts[position] + expected[position]]
    bad = next(token for token in (prompts[2] if at == "prompt" else expected[2][2:]) if token not in others)
    failing = DivergenceForCausalLM.from_experts(model.target, Failing(model.experts, bad), "linear:1.5")

    async def work(engine):
        return await asyncio.gather(
            *(answer(engine, prompt, greedy(12)) for prompt in prompts[:4]), return_exceptions=True
        )

    result = run(failing, tokenizer, work)
    assert isinstance(result[2], UsageError)
    for position in (0, 1, 3):
        assert_same_answer(model, prompts[position], tokens_of(result[position]), expected[position])


def test_non_finite_divergence_fails_requests(model, tokenizer):
    broken = copy.deepcopy(model)

    async def work(engine):
        running = asyncio.create_task(answer(engine, [7, 8], greedy(200, ignore_eos=True)))
        await asyncio.sleep(0.1)
        with torch.no_grad():
            broken.experts.forget.get_output_embeddings().weight.fill_(torch.nan)
        with pytest.raises(FailedClosed):
            await running
        with pytest.raises(FailedClosed):
            await answer(engine, [7, 8], greedy(4))
        return True

    assert run(broken, tokenizer, work)


@pytest.mark.parametrize("gamma", [None, 3])
def test_single_request_speculates_with_same_output(model, tokenizer, gamma, monkeypatch):
    for name in ("MIN_CHANCE", "FIRST_CHANCE", "MAX_CHANCE"):  # this q is never sure, and would draft nothing
        monkeypatch.setattr(speculative, name, 0.0)
    prompts = [tokenizer(text).input_ids for text in TEXTS[:3]]

    async def work(engine):
        one_by_one = [await answer(engine, prompt, greedy(16)) for prompt in prompts]
        scheduler = engine.scheduler
        steps, changes = scheduler.steps, (scheduler.positions, scheduler.changed_positions)
        together = await asyncio.gather(*(
            answer(engine, prompt, greedy(16), 0.02 * position)
            for position, prompt in enumerate(prompts)
        ))  # fmt: skip
        sampled = await answer(engine, prompts[0], SamplingParams(max_tokens=16, ignore_eos=True))
        return one_by_one, together, steps, sampled, changes

    one_by_one, together, steps, sampled, changes = run(model, tokenizer, work, speculation=Speculation(gamma))
    assert changes == run(model, tokenizer, work)[-1]  # rejected drafts are not counted
    expected = [alone(model, prompt, 16) for prompt in prompts]
    for result in (one_by_one, together):
        for prompt, outputs, answered in zip(prompts, result, expected, strict=True):
            assert_same_answer(model, prompt, tokens_of(outputs), answered)
    assert steps < sum(map(len, expected))  # some passes gave several tokens
    assert len(tokens_of(sampled)) == 16


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["llama", "windowed"])
def test_drafts_pause_while_another_sequence_decodes(kind, temperature, tokenizer, monkeypatch):
    model = windowed() if kind == "windowed" else DivergenceForCausalLM.from_parts(*make_parts(kind), "linear:1.5")
    prompts = [tokenizer(text).input_ids for text in TEXTS[1:3]]
    steps = []
    for group, name in ((batches.Batch, "plain"), (batches.SpeculativeRequest, "drafts")):
        record = lambda self, name=name, step=group.step: (steps.append((name, len(self.requests))), step(self))[1]
        monkeypatch.setattr(group, "step", record)

    async def work(engine):
        outputs, other = [], None
        params = SamplingParams(max_tokens=90, temperature=temperature, ignore_eos=True)
        async for output in engine.generate(prompts[0], params):
            outputs.append(output)
            if len(outputs) == 20:
                other = asyncio.create_task(answer(engine, prompts[1], greedy(9, ignore_eos=True)))
        return outputs, await other

    first, second = map(tokens_of, run(model, tokenizer, work, speculation=Speculation(2)))
    assert [item for item, _ in itertools.groupby(steps)] == [("drafts", 1), ("plain", 2), ("drafts", 1)]
    assert_same_answer(model, prompts[1], second, alone(model, prompts[1], 9, eos_token_id=None))
    assert len(first) == 90
    if temperature == 0:
        assert_same_answer(model, prompts[0], first, alone(model, prompts[0], 90, eos_token_id=None))


def test_invalid_engine_requests_are_rejected(model, tokenizer):
    async def work(engine):
        for prompt, sampling in (([], greedy(1)), ([512], greedy(1)), ([-1], greedy(1)), ([5] * 256, greedy(1))):
            with pytest.raises(UsageError):
                await answer(engine, prompt, sampling)
        outputs = await answer(engine, [5] * 250, greedy(99, ignore_eos=True))
        assert len(tokens_of(outputs)) == 6  # to the end of the context
        assert outputs[-1].finish_reason == "length"
        outputs = await answer(engine, [5] * 256, greedy(0, prompt_logprobs=0))
        assert [len(outputs), tokens_of(outputs), len(outputs[0].prompt_logprobs)] == [1, [], 256]

    run(model, tokenizer, work)

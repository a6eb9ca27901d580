"""What one request does to the engine is not felt by the others."""

import asyncio
import copy
import math
import types

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.attacks.difference import suppressed_share
from divdec import DivergenceForCausalLM
from divdec.decoding.speculative import Speculation
from divdec.decoding.text import AnswerText
from divdec.errors import FailedClosed, UsageError
from divdec.serving.scheduler import Closing, Scheduler
from support.engines import Failing, alone, answer, answered_tokens, greedy, run, tokens_of
from support.exactness import assert_same_answer
from support.tiny import make_parts


@pytest.fixture(scope="module")
def model():
    return DivergenceForCausalLM.from_parts(*make_parts("llama"), steering="linear:1.5")


def test_repeated_failures_of_other_requests_do_not_fail_request(model, tokenizer):
    whole = alone(model, [7, 8], 120, eos_token_id=None)
    bad = next(token for token in range(2, 512) if token not in whole)
    failing = DivergenceForCausalLM.from_experts(model.target, Failing(model.experts, bad), "linear:1.5")

    async def work(engine):
        innocent = asyncio.create_task(answered_tokens(engine, [7, 8], greedy(120, ignore_eos=True)))
        failed = 0
        for index in range(6):  # each gives the bad token as its first, and fails when it is read
            with pytest.raises(UsageError):
                await answered_tokens(engine, [9, 10 + index], greedy(4, ignore_eos=True, logit_bias={bad: 100.0}))
            failed += 1
        return await innocent, failed

    answered, failed = run(failing, tokenizer, work)
    assert_same_answer(model, [7, 8], answered, whole)
    assert failed == 6


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_thread_crash_ends_all_requests(model, tokenizer, monkeypatch):
    class Panic(BaseException):
        pass

    async def work(engine):
        assert engine.is_open
        running = engine.generate([7, 8], greedy(200, ignore_eos=True))
        await anext(running)

        def panic(*_):
            raise Panic

        monkeypatch.setattr(engine.scheduler, "step", panic)
        with pytest.raises(Closing):
            async for _ in running:
                pass
        with pytest.raises(Closing):
            await answered_tokens(engine, [7, 8], greedy(2, ignore_eos=True))
        assert not engine.is_open

    run(model, tokenizer, work)


def test_identical_prompts_are_prefilled_once(model, tokenizer):
    prompt = [5 + index % 400 for index in range(200)]

    async def work(engine):
        result = await asyncio.gather(*(answered_tokens(engine, prompt, greedy(1, ignore_eos=True)) for _ in range(8)))
        return result, engine.scheduler.steps

    result, steps = run(model, tokenizer, work)
    for tokens in result:
        assert_same_answer(model, prompt, tokens, alone(model, prompt, 1, eos_token_id=None))
    assert steps <= 2  # the first may be read before the others have come


def test_short_prompt_is_not_blocked_by_long_prefill(model, tokenizer, monkeypatch):
    monkeypatch.setattr("divdec.serving.scheduler.PREFILL_CHUNK", 4)
    long, finished = [5 + index % 400 for index in range(200)], []

    async def ask(engine, name, prompt):
        result = await answered_tokens(engine, prompt, greedy(2, ignore_eos=True))
        finished.append(name)
        return result

    async def work(engine):
        return await asyncio.gather(
            ask(engine, "long", long), ask(engine, "longer", [*long, 7]), ask(engine, "short", [7, 8])
        )

    for prompt, tokens in zip((long, [*long, 7], [7, 8]), run(model, tokenizer, work), strict=True):
        assert_same_answer(model, prompt, tokens, alone(model, prompt, 2, eos_token_id=None))
    assert finished == ["short", "long", "longer"]


@pytest.mark.parametrize("speculation", [None, Speculation(3)])
def test_every_reply_has_the_share_of_its_own_tokens(model, tokenizer, monkeypatch, speculation):
    monkeypatch.setattr("divdec.serving.scheduler.PREFILL_CHUNK", 4)
    prompts = [[5 + index % 400 for index in range(200)], [7, 8], [9, 8, 7]]

    async def work(engine):
        return await asyncio.gather(
            *(
                answer(engine, prompt, greedy(number, ignore_eos=True))
                for prompt, number in zip(prompts, (2, 90, 3), strict=True)
            )
        )

    outputs = run(model, tokenizer, work, measure_suppression=True, speculation=speculation)
    for prompt, reply in zip(prompts, outputs, strict=True):
        assert [output.suppressed for output in reply[:-1]] == [None] * (len(reply) - 1)
        expected = suppressed_share(model, prompt + tokens_of(reply), len(prompt))
        assert reply[-1].suppressed == pytest.approx(expected, abs=1e-5)


def test_share_that_is_not_finite_stays_so(model):
    """As on a GPU, where checks of logits may come late."""
    scheduler, request = Scheduler(model, 4, None, measure_suppression=True), types.SimpleNamespace(suppressed=0.3)
    for value, expected in ((0.0, 0.3), (math.nan, math.nan), (0.0, math.nan)):
        scheduler._compare(torch.full((1, 1, 4), value), torch.zeros(1, 1, 4))
        scheduler._count_changes(slice(-1, None), [(0, request)])
        assert request.suppressed == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("speculation", [None, Speculation(3)])
def test_non_finite_target_logits_fail_request(model, tokenizer, speculation, value):
    broken = copy.deepcopy(model)
    broken.target.register_forward_hook(lambda module, args, output: (output.logits[..., 9].fill_(value), None)[1])
    with pytest.raises(FailedClosed, match="not finite"):
        run(
            broken,
            tokenizer,
            lambda engine: answered_tokens(engine, [7, 8], greedy(4, ignore_eos=True)),
            speculation=speculation,
        )


def test_batch_dependent_rotary_embeddings_are_not_batched(tokenizer):
    """LongRoPE takes other factors for all rows once one is long."""
    parts = []
    for seed, width in enumerate((64, 32, 32)):
        torch.manual_seed(seed)
        half = width // 4 // 2
        config = LlamaConfig(
            vocab_size=512, hidden_size=width, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=256, initializer_range=0.2, bos_token_id=None, eos_token_id=0, pad_token_id=1,
            rope_parameters={
                "rope_type": "longrope", "rope_theta": 10000.0,
                "short_factor": [1.0] * half, "long_factor": [4.0] * half, "original_max_position_embeddings": 24,
            },
        )  # fmt: skip
        parts.append(AutoModelForCausalLM.from_config(config).eval())
    model = DivergenceForCausalLM.from_parts(*parts, steering="linear:1")
    long, short = [5 + index for index in range(60)], [7, 8, 9]
    with torch.inference_mode():  # beside a longer row the short one would be answered otherwise
        mask = torch.tensor([[1] * 60, [0] * 57 + [1] * 3])
        together = model(torch.tensor([long, [0] * 57 + short]), attention_mask=mask).logits[1, -1]
        assert (together - model(torch.tensor([short])).logits[0, -1]).abs().max() > 0.01

    async def work(engine):
        return await asyncio.gather(
            *(answered_tokens(engine, prompt, greedy(12, ignore_eos=True)) for prompt in (long, short))
        )

    for prompt, tokens in zip((long, short), run(model, tokenizer, work), strict=True):
        assert_same_answer(model, prompt, tokens, alone(model, prompt, 12, eos_token_id=None))


def test_invalid_utf8_bytes_do_not_end_generation():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": 256, "<unk>": 257}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", clean_up_tokenization_spaces=False)
    text = AnswerText(tokenizer, ())
    shown = "".join(map(text.add, [0x0A, 0xF0, 256, 256])) + text.end()
    assert shown.endswith("xx")

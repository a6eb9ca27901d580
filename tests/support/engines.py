"""An engine that runs while a test asks it, the library's own answers, and experts that are slow or fail."""

import asyncio
import time

import torch

from divdec.errors import UsageError
from divdec.experts.protocol import Experts
from divdec.serving.engine import Engine
from divdec.serving.request import SamplingParams


def run(model, tokenizer, work, **options):
    """The result of a coroutine that asks an engine."""

    async def main():
        engine = Engine(model, tokenizer, "tiny", **options)
        engine.start()
        try:
            return await work(engine)
        finally:
            await engine.close(0)

    return asyncio.run(main())


async def answer(engine, prompt, params, delay=0.0):
    await asyncio.sleep(delay)
    return [output async for output in engine.generate(prompt, params)]


def tokens_of(outputs):
    return [token for output in outputs for token in output.tokens]


async def answered_tokens(engine, prompt, params):
    return tokens_of(await answer(engine, prompt, params))


def greedy(number=24, **options):
    return SamplingParams(max_tokens=number, temperature=0.0, **options)


def alone(model, prompt, number=24, **options):
    """What `generate` answers to a prompt alone."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=number, do_sample=False, **options
        )
    return answer[0, len(prompt) :].tolist()


class Slow(Experts):
    """Experts that take their time, so that a test can look while an answer is made."""

    def __init__(self, experts):
        self.experts, self.vocab_size, self.cache_class = experts, experts.vocab_size, experts.cache_class

    def new_cache(self):
        return self.experts.new_cache()

    def compute(self, *args):
        time.sleep(0.1)
        return self.experts.compute(*args)


class Failing(Slow):
    """Experts that fail where a token is read, as those would whose limits one text exceeds."""

    def __init__(self, experts, token):
        super().__init__(experts)
        self.token = token

    def compute(self, inputs, *args):
        if (inputs.input_ids == self.token).any():
            raise UsageError("this text is too long")
        return self.experts.compute(inputs, *args)

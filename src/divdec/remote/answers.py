"""Answers to many prompts, several at a time. A stopped run keeps the finished ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tqdm.auto import tqdm

from divdec.errors import UsageError
from divdec.options import Decoding
from divdec.remote.target import RemoteAnswer, RemoteTarget
from divdec.runs import ResumableOutput


def stream_answer(
    target: RemoteTarget, prompt: Sequence[int], decoding: Decoding, number: int = 0, answer: RemoteAnswer | None = None
) -> Iterator[str]:
    """Answer a prompt of a run, whose number gives it its seed; see `RemoteTarget.stream`."""
    return target.stream(
        prompt, decoding.max_new_tokens, temperature=decoding.temperature, seed=(decoding.seed + number) % 2**32,
        stop=decoding.stop, answer=answer,
    )  # fmt: skip


def answer_prompts(
    target: RemoteTarget,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Any],
    decoding: Decoding,
    concurrency: int,
    answers: ResumableOutput,
) -> Iterator[dict[str, Any]]:
    """Yield answers in the prompts' order, from several requests at a time; `answers` stores each complete one."""
    stopped = threading.Event()

    def answer(number: int) -> dict[str, Any]:
        if number in answers and answers.items[number]["row"]["prompt"] == texts[number]:
            return answers.items[number]["row"]
        result = RemoteAnswer()
        for _ in stream_answer(target, prompts[number], decoding, number, result):
            if stopped.is_set():
                raise UsageError("stopped")
        row = {"prompt": texts[number], **result.to_dict(), "steering": target.rule}
        answers.add({"key": number, "row": row})
        return row

    with ThreadPoolExecutor(concurrency) as pool:
        tasks = [pool.submit(answer, number) for number in range(len(prompts))]
        try:
            for task in tqdm(tasks, unit="answer", disable=not sys.stderr.isatty()):
                yield task.result()
        except KeyboardInterrupt:  # after an error the other answers are completed and stored
            stopped.set()
            raise
        finally:
            for task in tasks:
                task.cancel()

"""Share one evaluation between the processes that torchrun has started.

Batches are those of a single process, so that every item's figures are the same to the bit. Work is shared only within
`sharded`; other code may evaluate in one of several processes.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from divdec.errors import FailedClosed, UsageError

T = TypeVar("T")
_TIMEOUT = timedelta(days=30)  # a process waits for the slowest as long as that one lives
_ranks: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("ranks", default=(0, 1))


@contextlib.contextmanager
def sharded() -> Iterator[None]:
    """Share the evaluations in the block between all processes, which must all enter it."""
    number = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if number == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    initialize = not dist.is_initialized()
    if initialize:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    token = _ranks.set((dist.get_rank(), number))
    try:
        yield
    finally:
        _ranks.reset(token)
        if initialize:
            dist.destroy_process_group()


def is_main() -> bool:
    """Whether this process writes files and prints."""
    return _ranks.get()[0] == 0


def number_of_processes() -> int:
    """Number of processes that share the work."""
    return _ranks.get()[1]


def own(items: Iterable[T]) -> Iterator[T]:
    """Select this process's share of the work: every n-th item."""
    rank, number = _ranks.get()
    return (item for index, item in enumerate(items) if index % number == rank)


def together(work: Callable[[], dict[Any, T]]) -> dict[Any, T]:
    """Merge the results of all processes, in all of them; an error in one is raised in all."""
    return {key: value for results in _exchange(work) for key, value in results.items()}


def on_main(work: Callable[[], T]) -> T:
    """Do work in the main process, and return its result, or raise its error, in all of them."""
    return _exchange(lambda: work() if is_main() else None)[0]  # pyright: ignore[reportReturnType]


def _exchange(work: Callable[[], T]) -> Sequence[T]:
    if number_of_processes() == 1:
        return [work()]
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    # Not every error can be pickled; ours can.
    sent = error if error is None or isinstance(error, UsageError | FailedClosed) else RuntimeError(repr(error))
    answers: list[Any] = [None] * number_of_processes()
    dist.all_gather_object(answers, (result, sent))
    if (first := next((failed for _, failed in answers if failed is not None), None)) is not None:
        raise error or first
    return [answer for answer, _ in answers]

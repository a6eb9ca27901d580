"""One evaluation on several processes: batches are dealt out, results are put together again, one process writes.

Batches are those that one process would make, so that every item's figures are the same to the bit. It knows nothing
of models or metrics. Nothing is dealt out unless `sharded` says so: other code may measure in one process of several.
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
_FOREVER = timedelta(days=30)  # a process waits for the slowest as long as that one lives
_ranks: contextvars.ContextVar[tuple[int, int]] = contextvars.ContextVar("ranks", default=(0, 1))


@contextlib.contextmanager
def sharded() -> Iterator[None]:
    """Deal out what is measured within to the processes that torchrun has started, all of which must come here.

    In a single process nothing changes.
    """
    number = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if number == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", timeout=_FOREVER)
    token = _ranks.set((dist.get_rank(), number))
    try:
        yield
    finally:
        _ranks.reset(token)
        if ours:
            dist.destroy_process_group()


def is_main() -> bool:
    """Whether this process writes and speaks."""
    return _ranks.get()[0] == 0


def number_of_processes() -> int:
    """How many share the work."""
    return _ranks.get()[1]


def own(parts: Iterable[T]) -> Iterator[T]:
    """Those parts of the work that are this process's: every n-th."""
    rank, number = _ranks.get()
    return (part for place, part in enumerate(parts) if place % number == rank)


def together(work: Callable[[], dict[Any, T]]) -> dict[Any, T]:
    """What all processes have found, each its own part, in every one of them.

    Raises:
        Exception: what the first process that failed has raised, in all of them; nobody waits for one that has failed.
    """
    if number_of_processes() == 1:
        return work()
    found: dict[Any, T] = {}
    for part in _exchanged(work):
        found |= part
    return found


def on_main(work: Callable[[], T]) -> T:
    """What the main process finds, in all of them: for what is not the same twice, or is to be done once.

    Raises:
        Exception: what it has raised, in all of them.
    """
    if number_of_processes() == 1:
        return work()
    return _exchanged(lambda: work() if is_main() else None)[0]  # pyright: ignore[reportReturnType]


def _exchanged(work: Callable[[], T]) -> Sequence[T]:
    found, error = None, None
    try:
        found = work()
    except Exception as raised:
        error = raised
    # Not every error can be sent; those of ours can.
    told = error if error is None or isinstance(error, UsageError | FailedClosed) else RuntimeError(repr(error))
    answers: list[Any] = [None] * number_of_processes()
    dist.all_gather_object(answers, (found, told))
    if (first := next((failed for _, failed in answers if failed is not None), None)) is not None:
        raise error or first
    return [answer for answer, _ in answers]

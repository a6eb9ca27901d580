"""Cells one after the other, or several at once in processes of their own that end with this one."""

from __future__ import annotations

import concurrent.futures.process
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from divdec.errors import UsageError
from divdec.research.methods.arena import Arena
from divdec.research.methods.cell import Cell
from divdec.research.methods.cells import Outcome, run_cell

WORDS = "jobs.log"  # what processes beside this one have to say
Work = tuple[Arena, Cell]
Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
Result = TypeVar("Result")


def seed_folder(output: Path, arena: Arena) -> Path:
    """Where the cells of one seed lie."""
    return output / f"seed-{arena.seed}"


def run_cells(missing: Sequence[Work], jobs: int, output: Path) -> Iterator[tuple[Arena, Cell, Outcome]]:
    """The outcome of every cell, as they come; see `spread`."""
    work = [(cell, arena, seed_folder(output, arena)) for arena, cell in missing]
    for (cell, arena, _), outcome in spread(run_cell, work, jobs, output):
        yield arena, cell, outcome


def spread(
    function: Callable[..., Result], work: Sequence[Arguments], jobs: int, output: Path
) -> Iterator[tuple[Arguments, Result]]:
    """What a function gives for each of many arguments, as they come.

    Args:
        function: of a module, so that another process finds it.
        work: its arguments, each time.
        jobs: processes; 1 stays in this one.
        output: the comparison's folder.

    Raises:
        UsageError: a process died.
    """
    if jobs == 1:
        for arguments in work:
            yield arguments, function(*arguments)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    # A process that was forked would share torch's threads, which do not survive it.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, _begin, (threads, output / WORDS)) as pool:
        waiting, running = list(work), {}
        try:
            while waiting or running:
                # No more than are worked on: what is queued would still be done after an interruption.
                while waiting and len(running) < jobs:
                    arguments = waiting.pop(0)
                    running[pool.submit(function, *arguments)] = arguments
                done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UsageError(
                f"one of {jobs} processes died, most often for want of memory; give fewer --jobs: finished cells are "
                f"kept ({output / WORDS} has what the processes said)"
            ) from None
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # which lets a training write its checkpoint
            raise


def _begin(threads: int, words: Path) -> None:
    """Make a process ready for cells."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    # Bars of several processes would overwrite each other.
    sys.stderr = words.open("a", encoding="utf-8", buffering=1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Two comparisons would write into one folder if this one were begun again while a cell goes on."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

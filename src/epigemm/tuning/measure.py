"""Timing: interleaved runs, medians, on the host's clock or by a GPU's events with a cold L2."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from epigemm.engines.cuda import libraries

# Twice the largest L2 so far (an H200 has 60 MB): writing it leaves nothing of a run's data there.
_FLUSH_BYTES = 128 << 20
# So often that the host has queued the run meanwhile: the events then time the device alone.
_FLUSHES = 4


def medians_us(runs: Sequence[Callable[[], object]], iterations: int, device: str, stream: int | None = None) -> list[float]:
    """The median time of each run in microseconds, on the clock of the device that it runs on.

    Args:
        runs, iterations: as in `interleaved_us`.
        device: "cpu" or "cuda:<index>".
        stream: the raw handle of the stream that the runs use; None is the default stream.
    """
    if device == "cpu":
        return interleaved_us(runs, iterations)
    return _interleaved_device_us(runs, iterations, int(device.partition(":")[2]), stream or 0)


def _interleaved_device_us(runs: Sequence[Callable[[], object]], iterations: int, index: int, stream: int) -> list[float]:
    core = libraries.open_driver()
    flush = core.allocate(index, _FLUSH_BYTES)
    try:
        timed: list[list[tuple[Any, Any]]] = [[] for _ in runs]
        order = list(range(len(runs)))
        shuffle = random.Random(0).shuffle
        for _ in range(iterations):
            shuffle(order)
            for i in order:
                for _ in range(_FLUSHES):
                    core.fill(index, flush, 0, _FLUSH_BYTES, stream)
                start, end = core.Event(index), core.Event(index)
                start.record(stream)
                runs[i]()
                end.record(stream)
                timed[i].append((start, end))
        core.synchronize(index, stream)
        return [statistics.median(end.elapsed_ms(start) * 1e3 for start, end in pairs) for pairs in timed]
    finally:
        core.free(index, flush)


def interleaved_us(runs: Sequence[Callable[[], object]], iterations: int, seed: int = 0) -> list[float]:
    """The median time of each run in microseconds.

    In each iteration all runs are timed once in a random order, so that a drift of the clock meets them alike.

    Args:
        runs: what to time; each returns when its work is done.
        iterations: how often, at least 1.
        seed: of the order.
    """
    shuffle = random.Random(seed).shuffle
    times: list[list[float]] = [[] for _ in runs]
    order = list(range(len(runs)))
    for _ in range(iterations):
        shuffle(order)
        for index in order:
            start = time.perf_counter_ns()
            runs[index]()
            times[index].append((time.perf_counter_ns() - start) / 1e3)
    return [statistics.median(t) for t in times]

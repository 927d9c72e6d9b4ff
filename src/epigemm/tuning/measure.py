"""Timing on the host: interleaved runs, medians."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence


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

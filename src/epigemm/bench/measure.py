"""How a case is measured: verified against float64, then timed in interleaved rounds, those that others disturb least."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from epigemm.bench.baselines import EPILOGUES, OURS, TORCH, Array, Data, Run, contenders, ours
from epigemm.bench.suites import BAR_SLACK, Case

ROUNDS, LEAST_ROUNDS = 11, 7

# A round in which other processes took more than this share of the processors is timed again, for at most so long.
DISTURBED_SHARE = 0.1
PATIENCE_S = 30.0

# One timing lasts about this long: the call is repeated until it does.
_TIMING_S = 0.06
# Idle threads of one library spin for a while after its work; the next one is not timed meanwhile.
_PAUSE_S = 0.02
_VERIFY_ROWS = 256


@dataclass(frozen=True, slots=True)
class Ratio:
    """Our time by another's, over the rounds: median, lowest, highest."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(mine: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """Round by round."""
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios))


@dataclass(frozen=True, slots=True)
class Row:
    """One case, measured.

    Args:
        case: what.
        plan: the candidate that ran, as text.
        error_share: the largest error as a share of what is allowed; at most 1.
        times_ms: by contender, one number a round.
        others: in each round, the share of the processors that other processes took.
    """

    case: Case
    plan: str
    error_share: float
    times_ms: dict[str, list[float]]
    others: list[float] = field(default_factory=list)

    def median_ms(self, who: str) -> float:
        return statistics.median(self.times_ms[who])

    def ratio(self, other: str) -> Ratio | None:
        """Against another contender, None if it did not run."""
        return Ratio.of(self.times_ms[OURS], self.times_ms[other]) if other in self.times_ms else None

    @property
    def holds(self) -> bool | None:
        """Whether the bar against PyTorch holds, None if there is none or PyTorch did not run."""
        ratio = self.ratio(TORCH)
        return None if ratio is None or self.case.bar is None else ratio.median <= self.case.bar + BAR_SLACK

    def as_json(self) -> dict[str, Any]:
        others = [who for who in self.times_ms if who != OURS]
        return {
            **asdict(self.case),
            "plan": self.plan,
            "error_share": self.error_share,
            "median_ms": {who: round(self.median_ms(who), 4) for who in self.times_ms},
            "ratio": {who: asdict(Ratio.of(self.times_ms[OURS], self.times_ms[who])) for who in others},
            "holds": self.holds,
            "others": [round(share, 3) for share in self.others],
            "times_ms": {who: [round(t, 4) for t in times] for who, times in self.times_ms.items()},
        }


def measure(case: Case, engine: str, rounds: int, patience_s: float = PATIENCE_S, on_round: Callable[[], None] = lambda: None) -> Row:
    """The case verified and timed.

    Args:
        case: what.
        engine: the engine that ours uses.
        rounds: how many, at least `LEAST_ROUNDS` for a result to be quoted.
        patience_s: for how long disturbed rounds are timed again.
        on_round: called after each round.

    Raises:
        AssertionError: a result is wrong; nothing is timed then.
    """
    data = Data.normal(case.m, case.n, case.k, case.dtype)
    out = np.full((case.m, case.n), np.nan, case.dtype)
    ours(case.epilogue, data, engine, out)()
    share = verify(case, data, out, "into a poisoned `out`")
    runs = contenders(case.epilogue, data, engine)
    for who, run in runs.items():
        share_of = verify(case, data, np.asarray(run()), who)
        share = max(share, share_of) if who == OURS else share
    times, others = time_interleaved_ms(runs, rounds, on_round, patience_s)
    return Row(case, plan_of(case, data, engine), share, times, others)


def plan_of(case: Case, data: Data, engine: str) -> str:
    from epigemm.api import Matmul

    with Matmul(data.x, data.weight.T) as product:
        return str(product.plan(epilog=EPILOGUES[case.epilogue].ours, epilog_inputs={"bias": data.bias}, engine=engine)[0].candidate)


def verify(case: Case, data: Data, result: Array, who: str) -> float:
    """The largest error as a share of what is allowed.

    A sum of k products in a type of unit roundoff u is off by at most 2 sqrt(k) u sum |x||w| but for a vanishing probability (Higham and
    Mary, SIAM J. Sci. Comput. 41, 2019); bias, activation and store add a few roundings of the largest value that they see.

    Raises:
        AssertionError: an element is off by more, or not a number.
    """
    unit = float(np.finfo(case.dtype).eps) / 2
    epilogue, worst = EPILOGUES[case.epilogue], 0.0
    weight, bias = data.weight.T.astype(np.float64), data.bias.astype(np.float64)
    for first in range(0, case.m, _VERIFY_ROWS):
        rows = slice(first, first + _VERIFY_ROWS)
        x = data.x[rows].astype(np.float64)
        size = np.abs(x) @ np.abs(weight)
        exact = x @ weight + bias
        allowed = epilogue.slope * 2 * np.sqrt(case.k) * unit * size + 16 * unit * (1 + np.abs(exact))
        share = np.abs(result[rows] - epilogue.in_numpy(exact)) / allowed
        if not (share <= 1).all():  # NaN is not
            row, column = np.argwhere(~(share <= 1))[0]
            got, expected = result[rows][row, column], epilogue.in_numpy(exact)[row, column]
            raise AssertionError(f"{case}, {who}: d[{first + row}, {column}] is {got}, not {expected} (± {allowed[row, column]:.2g})")
        worst = max(worst, float(share.max()))
    return worst


def time_interleaved_ms(
    runs: dict[str, Run], rounds: int, on_round: Callable[[], None], patience_s: float
) -> tuple[dict[str, list[float]], list[float]]:
    """The mean time of a call in each round, each contender once a round in a random order; and what others took of the processors.

    A disturbed round does not count towards `rounds` until patience is over; then the least disturbed ones are taken. What decides is
    the load that others make, never the times.
    """
    repeats = {who: max(1, round(_TIMING_S / _timed_s(run, 1))) for who, run in runs.items()}
    order, shuffle, end = list(runs), random.Random(0).shuffle, time.monotonic() + patience_s
    timed: list[tuple[float, dict[str, float]]] = []
    quiet = 0
    while quiet < rounds and (len(timed) < rounds or time.monotonic() < end):
        shuffle(order)
        before = _processor_s()
        times = {who: _timed_s(runs[who], repeats[who]) * 1e3 for who in order}
        timed.append((_others_share(before, _processor_s()), times))
        if timed[-1][0] <= DISTURBED_SHARE:
            quiet += 1
            on_round()
    for _ in range(rounds - quiet):
        on_round()
    kept = sorted(timed, key=lambda one: one[0])[:rounds]
    return {who: [times[who] for _, times in kept] for who in runs}, [share for share, _ in kept]


def _processor_s() -> tuple[float, float, float]:
    """Seconds that all processors have been there, that they have worked, and that they have worked for this process."""
    own = sum(os.times()[:2])
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0, own, own
    tick = os.sysconf("SC_CLK_TCK")
    return sum(fields) / tick, (sum(fields) - fields[3] - fields[4]) / tick, own


def _others_share(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """The share of all processors' time that other processes took, 0 where the system does not tell."""
    there, worked, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, (worked - own) / there) if there > 0 else 0.0


def _timed_s(run: Run, repeats: int) -> float:
    """Seconds a call, after a pause and an untimed call."""
    time.sleep(_PAUSE_S)
    run()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats

"""What the suites on a GPU share: contenders timed in turn, bars over the ratios of their rounds, the stamp and the table.

A contender that fails is a line with its reason; the others go on.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from epigemm.bench.measure import Ratio
from epigemm.bench.suites import BAR_SLACK

Timed = Callable[[], float]

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar over the ratio of two rows' times: `row` / `other` is at most `most`; None is a ratio that is told without a bar."""

    row: str
    other: str
    most: float | None = None


@dataclass(slots=True)
class Group:
    """Contenders that were timed together.

    Args:
        name: of the group: its shape.
        unit: "us" or "ms".
        times: by contender, one number a round.
        failed: contender -> why it did not run.
        bars: over these times.
        facts: what else is known of a contender: percent of peak, bytes, plan.
        more: bars that are not over times: (what, value, allowed, holds).
    """

    name: str
    unit: str
    times: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    bars: tuple[Bar, ...] = ()
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    more: list[dict[str, Any]] = field(default_factory=list)

    def median(self, row: str) -> float:
        return statistics.median(self.times[row])

    def judged(self) -> list[dict[str, Any]]:
        """Each bar whose rows ran: its ratio and whether it holds."""
        found = []
        for bar in self.bars:
            if self.times.get(bar.row) and self.times.get(bar.other):
                ratio = Ratio.of(self.times[bar.row], self.times[bar.other])
                holds = None if bar.most is None else ratio.median <= bar.most + min(BAR_SLACK, 0.02 * bar.most)
                found.append({"row": bar.row, "other": bar.other, "ratio": asdict(ratio), "bar": bar.most, "holds": holds})
        return found + self.more

    def as_json(self) -> dict[str, Any]:
        rows = {
            name: {
                "median": round(self.median(name), 4),
                "low": round(min(times), 4),
                "high": round(max(times), 4),
                **self.facts.get(name, {}),
                "times": [round(t, 4) for t in times],
            }
            for name, times in self.times.items()
            if times
        }
        return {"name": self.name, "unit": self.unit, "rows": rows, "failed": self.failed, "bars": self.judged()}


def time_in_turn(group: Group, runs: Mapping[str, Timed], rounds: int, on_round: Callable[[], None] = lambda: None) -> None:
    """Times every run once a round, in a random order, into `group`; one that fails is left out from then on."""
    live, shuffle = dict(runs), random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for round_ in range(rounds + 1):  # the first is not kept
            order = list(live)
            shuffle(order)
            for name in order:
                try:
                    took = live[name]()
                except Exception as error:
                    group.failed[name] = f"{type(error).__name__}: {error}"
                    group.times.pop(name, None)
                    del live[name]
                    continue
                if round_:
                    group.times.setdefault(name, []).append(took)
            on_round()
    finally:
        gc.enable()


def made(group: Group, makers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each maker makes; one that fails is noted in `group`."""
    found = {}
    for name, maker in makers.items():
        try:
            found[name] = maker()
        except Exception as error:
            group.failed[name] = f"{type(error).__name__}: {error}"
    return found


def torch_with_gpu() -> Any:
    """PyTorch, where it sees a GPU.

    Raises:
        errors.MissingPackageError: it is not installed.
        errors.EngineUnavailable: there is no GPU.
    """
    from epigemm import errors

    try:
        import torch
    except ImportError as error:
        raise errors.missing_package("This suite", "PyTorch", "torch") from error
    if not torch.cuda.is_available():
        raise errors.engine_unavailable("cuda", "this suite measures on a GPU, and PyTorch sees none", "Take the suite linear.")
    return torch


def peer() -> Any:
    """`nvmath.linalg.advanced`, None where it is not installed."""
    try:
        return importlib.import_module("nvmath.linalg.advanced")
    except Exception:
        return None


def stamp(torch: Any) -> dict[str, Any]:
    """`bench.stamp` with the GPU, its libraries and the peer's version."""
    from epigemm.bench import stamp as host
    from epigemm.engines.cublaslt import library
    from epigemm.engines.cuda import libraries

    found = host.stamp()
    found["commit"] = os.environ.get("COMMIT") or found["commit"]
    found["gpu"] = torch.cuda.get_device_name(0)
    found |= library.versions("cuda:0")
    found["libraries"] = [str(x) for x in libraries.opened()]
    try:
        found["nvmath"] = importlib.metadata.version("nvmath-python")
    except importlib.metadata.PackageNotFoundError:
        found["nvmath"] = ""
    return found


def as_json(suite: str, engine: str, rounds: int, groups: Sequence[Group], stamped: dict[str, Any]) -> dict[str, Any]:
    """The suite as data."""
    return {
        "schema": SCHEMA,
        "suite": suite,
        "engine": engine,
        "rounds": rounds,
        "stamp": stamped,
        "groups": [group.as_json() for group in groups],
        "holds": all(bar["holds"] is not False for group in groups for bar in group.judged()),
    }


def lines(data: dict[str, Any]) -> list[str]:
    """The suite as text: the rows of each group, then its bars."""
    found = [f"{data['suite']}, engine {data['engine']}, {data['rounds']} interleaved rounds, {data['stamp'].get('gpu', '')}"]
    for group in data["groups"]:
        found.append(f"\n{group['name']}")
        for name, row in group["rows"].items():
            facts = "  ".join(f"{key} {row[key]}" for key in ("percent_of_peak", "peak_mib", "workspace_mib") if key in row)
            found.append(f"  {name:<32} {row['median']:10.3f} {group['unit']}  [{row['low']:.3f}, {row['high']:.3f}]  {facts}")
        found += [f"  {name:<32} failed: {why.splitlines()[0][:140]}" for name, why in group["failed"].items()]
        found += [f"  {_line(bar)}" for bar in group["bars"]]
    return found


def _line(bar: dict[str, Any]) -> str:
    mark = {True: "holds", False: "MISSED", None: ""}[bar["holds"]]
    if "what" in bar:
        return f"{bar['what']}: {bar['value']}, bar {bar['bar']} {mark}"
    ratio, allowed = bar["ratio"], "–" if bar["bar"] is None else f"{bar['bar']:.3f}"
    return f"{bar['row']} / {bar['other']} = {ratio['median']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f}), bar {allowed} {mark}"

"""A measured suite as JSON and as a table."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epigemm.bench.baselines import NUMPY, OURS, TORCH
from epigemm.bench.measure import Ratio, Row
from epigemm.bench.memory import Peak

SCHEMA = 1
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Report:
    """All of one run.

    Args:
        suite: its name.
        engine: the engine that ours used.
        rounds: timings of each contender.
        stamp: from `stamp.stamp`.
        rows: one a case.
        peaks: memory over a large output, empty if it was not measured.
    """

    suite: str
    engine: str
    rounds: int
    stamp: dict[str, Any]
    rows: tuple[Row, ...]
    peaks: tuple[Peak, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether no bar was missed; those that could not be measured count as held."""
        return all(row.holds is not False for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "suite": self.suite,
            "engine": self.engine,
            "rounds": self.rounds,
            "stamp": self.stamp,
            "rows": [row.as_json() for row in self.rows],
            "memory": [peak.as_json() for peak in self.peaks],
        }


def write(data: dict[str, Any], path: Path) -> None:
    """Write JSON whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text(data))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def text(data: dict[str, Any]) -> str:
    """Indented JSON, each list of numbers on one line."""
    return re.sub(r"\[\s+([-+\d.e,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(data, indent=1)) + "\n"


def table(report: Report) -> Any:
    """Times in ms and ratios (that to PyTorch with its range) as a `rich` table, a section an epilogue; it fits 80 columns."""
    from rich.table import Table

    threads = report.stamp["threads"]
    title = f"{report.suite}, engine {report.engine}, {threads} threads, {report.rounds} interleaved rounds, medians in ms"
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    drawn.add_column("", no_wrap=True)
    for heading in (OURS, TORCH, NUMPY, f"/ {TORCH}", "bar", f"/ {NUMPY}"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    epilogue = ""
    for row in report.rows:
        if row.case.epilogue != epilogue:
            epilogue = row.case.epilogue
            drawn.add_row(f"[bold]{epilogue}[/]")
        mark = {True: " [green]✓[/]", False: " [red]✗ missed[/]", None: ""}[row.holds]
        bar = "–" if row.case.bar is None else f"{row.case.bar:.1f}{mark}"
        times = [f"{row.median_ms(who):#.3g}".rstrip(".") if who in row.times_ms else "–" for who in (OURS, TORCH, NUMPY)]
        in_numpy = row.ratio(NUMPY)
        last = "–" if in_numpy is None else f"{in_numpy.median:.2f}"
        drawn.add_row(f"m={row.case.m} n={row.case.n} k={row.case.k}", *times, spread(row.ratio(TORCH)), bar, last)
    return drawn


def spread(ratio: Ratio | None) -> str:
    """The median, then the range of the rounds."""
    return "–" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


def memory_lines(report: Report) -> list[str]:
    """Peak memory over the large output, a line a contender."""
    return [
        f"{peak.who:<8} peak {peak.peak_bytes / MIB:7.0f} MiB over an output of {peak.output_bytes / MIB:.0f} MiB"
        f" ({(peak.peak_bytes - peak.output_bytes) / MIB:.1f} MiB more)"
        for peak in report.peaks
    ]

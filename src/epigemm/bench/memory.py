"""Peak memory over an output of 1 GiB: each contender in a process of its own, resident bytes as the kernel counts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epigemm.bench import baselines
from epigemm.bench.baselines import CONTENDERS, Data

M = N = 16384  # float32: 1 GiB
K = 64


@dataclass(frozen=True, slots=True)
class Peak:
    """What one contender needed beyond its inputs.

    Args:
        who: a row of `CONTENDERS`.
        peak_bytes: at most at a time, the output included.
        output_bytes: of the output alone.
    """

    who: str
    peak_bytes: int
    output_bytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def supported() -> bool:
    """Whether the kernel counts and resets peaks (Linux)."""
    return os.access("/proc/self/clear_refs", os.W_OK)


def measure(engine: str, on_done: Callable[[], None] = lambda: None, m: int = M, n: int = N) -> list[Peak]:
    """The peak of each contender that can run here, over a float32 output [m, n] of bias and ReLU.

    Raises:
        RuntimeError: a contender's process failed.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    peaks = []
    for who in CONTENDERS:
        command = [sys.executable, "-m", __name__, who, engine, str(m), str(n)]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"measuring the memory of {who} failed ({done.returncode}):\n{done.stderr.strip()}")
        if done.stdout.strip():
            peaks.append(Peak(**json.loads(done.stdout)))
        on_done()
    return peaks


def _resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (the most since the last reset)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _run(who: str, engine: str, m: int, n: int) -> None:
    """In the process of its own: a small run so that everything is loaded, then the large one."""
    small, large = (baselines.contender(who, "bias_relu", Data.normal(*size, K, "float32"), engine) for size in ((256, 256), (m, n)))
    if small is None or large is None:
        return
    small()
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    result = large()
    peak = Peak(who, _resident_bytes("VmHWM") - before, m * n * 4)
    if result.shape != (m, n):
        raise RuntimeError(f"{who} computed {tuple(result.shape)}")
    print(json.dumps(peak.as_json()))


if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

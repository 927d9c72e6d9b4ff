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

from epigemm.bench.baselines import NUMPY, OURS, TORCH

M = N = 16384  # float32: 1 GiB
K = 64
OUTPUT_BYTES = M * N * 4
CONTENDERS = (OURS, TORCH, NUMPY)


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


def measure(engine: str, on_done: Callable[[], None] = lambda: None) -> list[Peak]:
    """The peak of each contender that can run here."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    peaks = []
    for who in CONTENDERS:
        command = [sys.executable, "-m", __name__, who, engine]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        if done.stdout.strip():
            peaks.append(Peak(**json.loads(done.stdout)))
        on_done()
    return peaks


def _resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (the most since the last reset)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _run(who: str, engine: str) -> None:
    """In the process of its own: a small run so that everything is loaded, then the large one."""
    from epigemm.bench import baselines

    def run_of(m: int, n: int) -> baselines.Run | None:
        return baselines.contenders("bias_relu", baselines.Data.normal(m, n, K, "float32"), engine).get(who)

    small, large = run_of(256, 256), run_of(M, N)
    if small is None or large is None:
        return
    small()
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = large()
    peak = Peak(who, _resident_bytes("VmHWM") - before, OUTPUT_BYTES)
    assert result.shape == (M, N)
    print(json.dumps(peak.as_json()))


if __name__ == "__main__":
    _run(*sys.argv[1:])

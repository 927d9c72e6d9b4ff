"""A covering set of kernels compiled for two GPUs, without one: the compiler takes them, and a launch's parameters are theirs.

In a process of its own, since Triton's kernels are interpreted in this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("triton_compile.py")


@pytest.mark.parametrize("machine", ["sm90", "sm80"])
def test_kernels_compile_and_take_what_a_launch_gives(machine: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "triton"), "EPIGEMM_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    done = subprocess.run([sys.executable, str(SCRIPT), machine], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) >= 8
    assert all(line.endswith("fits") for line in lines)
    # Hopper's own instructions where tensor maps serve; asynchronous copies on Ampere.
    assert any(("wgmma" if machine == "sm90" else "mma.sync") in line for line in lines)
    assert any(("tensor maps" if machine == "sm90" else "cp.async") in line for line in lines)

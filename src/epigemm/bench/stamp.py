"""What a result must carry to mean anything later: machine, threads, libraries, versions, commit, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import epigemm
from epigemm.engines.cpu import threads

_PACKAGES = ("numpy", "ml_dtypes", "torch", "triton", "cupy-cuda13x", "scipy")
# What changes the kernels or the threads of a BLAS.
_VARIABLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")


def stamp() -> dict[str, Any]:
    """The present machine and software, as JSON takes it."""
    return {
        "epigemm": epigemm.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "processors": processors(),
        "threads": threads.count(),
        "blas": blas(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": versions(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "load_average": load_average(),
    }


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the working tree that epigemm is imported from, "+changes" if its sources differ from it; "" outside of one."""
    folder = Path(epigemm.__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        name = git("rev-parse", "--short=12", "HEAD") if git("ls-files", "--", "__init__.py") else ""
        return name + ("+changes" if name and git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.TimeoutExpired):
        return ""


def cpu_model() -> str:
    """The processor's name, with family and model where the name does not tell them apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields and "model" in fields else name


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> list[float]:
    """Of the last 1, 5 and 15 minutes: whether others used the machine."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else []


def blas() -> list[dict[str, Any]]:
    """The BLAS and OpenMP libraries in this process with the kernels that they chose; without threadpoolctl what NumPy was built with."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[call-overload,index]
        numpy_s = {"library": built["name"], "version": built["version"], "kernel": "", "threads": threads.count(), "of": "numpy"}
        return [numpy_s, *_torch_s()]
    keys = {"library": "internal_api", "version": "version", "kernel": "architecture", "threads": "num_threads"}
    pools = threadpool_info()
    found = [{ours: pool.get(theirs) or "" for ours, theirs in keys.items()} | {"of": _owner(pool["filepath"])} for pool in pools]
    return found + _torch_s()


def _torch_s() -> list[dict[str, Any]]:
    """The BLAS inside PyTorch, if it is loaded: it is linked in, so that only PyTorch itself can tell."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    built = re.search(r"(Math Kernel Library|OpenBLAS) Version (\S+)|BLAS_INFO=(\w+)", torch.__config__.show())
    library, version = ((built[1] or built[3]), built[2] or "") if built else ("", "")
    capability = str(torch.backends.cpu.get_cpu_capability())
    return [{"library": library, "version": version, "kernel": capability, "threads": torch.get_num_threads(), "of": "torch"}]


def _owner(path: str) -> str:
    """The package whose library it is."""
    folders = [part for part in Path(path).parts if part.partition(".")[0] in ("numpy", "scipy", "torch", "sklearn", "scikit_learn")]
    return folders[0].partition(".")[0] if folders else "system"

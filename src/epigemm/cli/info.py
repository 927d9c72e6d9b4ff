"""What `epigemm info` tells: versions, engines, libraries found and missing, BLAS, the store."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import epigemm
from epigemm import config, engines, errors, store
from epigemm.bench import stamp
from epigemm.engines.cpu import threads
from epigemm.engines.cuda import libraries

# Optional packages by the name of their distribution: the extra that brings them and what they are for.
OPTIONAL = {
    "torch": ("torch", "PyTorch tensors, and the baseline of `epigemm bench`"),
    "triton": ("triton", "the Triton engine"),
    "cupy-cuda13x": ("cupy", "CuPy arrays"),
    "scikit-learn": ("demo", "the digits of `epigemm demo`"),
    "matplotlib": ("demo", "`epigemm demo --plot`"),
    "threadpoolctl": ("demo", "telling which kernels a BLAS chose"),
}


def gather() -> dict[str, Any]:
    """Everything, as JSON takes it."""
    return {
        "epigemm": epigemm.__version__,
        "commit": stamp.commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": stamp.cpu_model(),
        "threads": threads.count(),
        "blas": stamp.blas(),
        "engines": [engine_state(name, device) for name, (_, device) in engines.ENGINES.items()],
        "gpus": libraries.device_count(),
        "cuda_libraries": [library_state(name) for name in libraries.LIBRARIES],
        "packages": [package_state(name) for name in ("numpy", "ml_dtypes", *OPTIONAL)],
        "store": store_state(),
    }


def engine_state(name: str, device: str) -> dict[str, Any]:
    """Whether an engine can be loaded and has a device; where not, the reason and the remedy."""
    try:
        engines.get(name)
    except (ImportError, errors.EpigemmError) as error:
        return {"name": name, "device": device, "ready": False, "detail": str(error)}
    if device == "cuda" and libraries.device_count() == 0:
        return {"name": name, "device": device, "ready": False, "detail": "no GPU was found"}
    return {"name": name, "device": device, "ready": True, "detail": ""}


def library_state(name: str) -> dict[str, Any]:
    """Where a CUDA library is, or what to install."""
    library = libraries.find(name)
    if library is None:
        return {"name": name, "found": False, "detail": libraries.LIBRARIES[name].install}
    detail = f"{Path(library.path).name} ({library.source})"
    return {"name": name, "found": True, "detail": detail, "path": library.path}


def package_state(name: str) -> dict[str, Any]:
    """A package's version, or what to install and what for."""
    try:
        return {"name": name, "found": True, "detail": importlib.metadata.version(name)}
    except importlib.metadata.PackageNotFoundError:
        extra, purpose = OPTIONAL[name]
        return {"name": name, "found": False, "detail": f'pip install "epigemm[{extra}]" for {purpose}'}


def store_state() -> dict[str, Any]:
    """The on-disk store: its folder, what it holds and may hold."""
    folder = store.cache_folder()
    held = store.entries() if folder.is_dir() else []
    size = sum(entry.size_bytes for entry in held)
    return {"folder": str(folder), "entries": len(held), "bytes": size, "limit_bytes": config.CACHE_BYTES.get()}


def table(found: dict[str, Any]) -> Any:
    """All of it as a `rich` table."""
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold")

    def group(heading: str, lines: list[tuple[str, str]]) -> None:
        for index, (left, right) in enumerate(lines):
            drawn.add_row("" if index else heading, left, escape(right))

    commit = f" ({found['commit']})" if found["commit"] else ""
    group("epigemm", [(found["epigemm"] + commit, f"Python {found['python']}, {found['system']}")])
    group("CPU", [(f"{found['threads']} threads", found["cpu"])])
    group("BLAS", [(f"{b['library']} {b['version']}".strip(), blas_words(b)) for b in found["blas"]])
    group("engines", [(mark(e["ready"], e["name"]), e["detail"] or f"ready, computes on {e['device']}") for e in found["engines"]])
    group("GPU", [(mark(found["gpus"] > 0, str(found["gpus"])), "" if found["gpus"] else "none found")])
    group("CUDA libraries", [(mark(x["found"], x["name"]), x["detail"]) for x in found["cuda_libraries"]])
    group("packages", [(mark(x["found"], x["name"]), x["detail"]) for x in found["packages"]])
    held = f"{found['store']['entries']} entries, {found['store']['bytes'] / 2**20:.1f} of {found['store']['limit_bytes'] / 2**20:.0f} MiB"
    group("store", [(held, found["store"]["folder"])])
    return drawn


def blas_words(blas: dict[str, Any]) -> str:
    kernel = f"kernels for {blas['kernel']}, " if blas["kernel"] else ""
    return f"{kernel}{blas['threads']} threads, of {blas['of']}"


def mark(good: bool, name: str) -> str:
    return f"[green]✓[/] {name}" if good else f"[yellow]–[/] {name}"

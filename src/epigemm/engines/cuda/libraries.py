"""CUDA's libraries: where they are found, which were opened, and what their failures mean.

Nothing is linked. A library that is in the process already is taken as it is (torch or CuPy brought it, and one process must not have
two); else torch's copy, a wheel's, what cuda-pathfinder knows, the system's, in this order.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from epigemm import errors


@dataclass(frozen=True, slots=True)
class Library:
    """A library that was found.

    Args:
        name: a row of `LIBRARIES`: "cublasLt".
        path: of the file, or the bare name where the system's loader finds it.
        source: how it was found: "in the process", "torch", "wheel", "cuda-pathfinder" or "system".
    """

    name: str
    path: str
    source: str

    def __str__(self) -> str:
        return f"{self.name} {self.path} ({self.source})"


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a library is called in files and what brings it.

    Args:
        files: pattern of its file names.
        system: the name that the system's loader knows.
        pathfinder: its name for cuda-pathfinder, "" where that knows none.
        install: what to do where it is missing.
    """

    files: str
    system: str
    pathfinder: str
    install: str


LIBRARIES: dict[str, _Kind] = {
    "cuda": _Kind(r"libcuda\.so(\.\d+)*", "libcuda.so.1", "", "Install NVIDIA's driver; it brings libcuda.so.1."),
    "cublasLt": _Kind(r"libcublasLt\.so(\.\d+)*", "cublasLt", "cublasLt", "Run `pip install epigemm[cuda]`, which brings nvidia-cublas."),
    "nvrtc": _Kind(r"libnvrtc\.so(\.\d+)*", "nvrtc", "nvrtc", "Run `pip install epigemm[cuda]`, which brings nvidia-cuda-nvrtc."),
    "nvrtc-builtins": _Kind(
        r"libnvrtc-builtins\.so(\.\d+)*", "nvrtc-builtins", "", "Run `pip install epigemm[cuda]`, which brings nvidia-cuda-nvrtc."
    ),
}

# Where a driver or toolkit lies that the loader does not know of.
_SYSTEM_FOLDERS = (
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
)

_NOT_FOUND = {"cuda": "there is no libcuda.so.1"}

_opened: dict[str, Library] = {}
_lock = threading.Lock()


# ---------------------------------------------------------------- finding


def _in_folder(folder: Path, kind: _Kind) -> Path | None:
    """The library's file in a folder, the one with the longest version first."""
    try:
        names = [name for name in os.listdir(folder) if re.fullmatch(kind.files, name)]
    except OSError:
        return None
    return folder / max(names, key=len) if names else None


def _in_process(kind: _Kind) -> str | None:
    """The path under which this process has the library mapped."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count(" ") >= 5 and ".so" in line}
    return next((path for path in sorted(paths) if re.fullmatch(kind.files, os.path.basename(path))), None)


def _package_folders(name: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(name)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        yield Path(place)


def _from_torch(kind: _Kind) -> str | None:
    """The copy inside torch's own folder (its conda and older wheels), or the wheel beside it that it was built against."""
    for folder in _package_folders("torch"):
        for place in (folder / "lib", *_wheel_folders(folder.parent / "nvidia")):
            if found := _in_folder(place, kind):
                return str(found)
    return None


def _wheel_folders(nvidia: Path) -> Iterator[Path]:
    """The library folders of NVIDIA's wheels: nvidia/cu13/lib, nvidia/cublas/lib."""
    yield from sorted(nvidia.glob("*/lib"), reverse=True)


def _from_wheel(kind: _Kind) -> str | None:
    places = [Path(place) / "nvidia" for place in (sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *sys.path) if place]
    for nvidia in dict.fromkeys(places):
        for folder in _wheel_folders(nvidia):
            if found := _in_folder(folder, kind):
                return str(found)
    return None


def _from_pathfinder(kind: _Kind) -> str | None:
    if not kind.pathfinder:
        return None
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        return None
    try:
        path = load_nvidia_dynamic_lib(kind.pathfinder).abs_path
    except Exception:  # its own errors, by version: not found is all they mean here
        return None
    return str(path) if path else None


def _from_system(kind: _Kind) -> str | None:
    homes = [Path(home) / folder for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name)) for folder in ("lib64", "lib")]
    for folder in (*homes, *map(Path, _SYSTEM_FOLDERS)):
        if found := _in_folder(folder, kind):
            return str(found)
    return ctypes.util.find_library(kind.system)


# Asked in this order.
_SOURCES: tuple[tuple[str, Callable[[_Kind], str | None]], ...] = (
    ("in the process", _in_process),
    ("torch", _from_torch),
    ("wheel", _from_wheel),
    ("cuda-pathfinder", _from_pathfinder),
    ("system", _from_system),
)


def _driver(kind: _Kind) -> Library:
    """The driver is the system's, and the loader usually knows it by name alone."""
    try:
        ctypes.CDLL(kind.system)
        return Library("cuda", kind.system, "system")
    except OSError:
        return Library("cuda", _from_system(kind) or "", "system")


def find(name: str) -> Library | None:
    """Where a library would be opened from, None where there is none.

    Args:
        name: a row of `LIBRARIES`.
    """
    kind = LIBRARIES[name]
    if name == "cuda":
        library = _driver(kind)
        return library if library.path else None
    for source, search in _SOURCES:
        if path := search(kind):
            return Library(name, path, source)
    return None


# ---------------------------------------------------------------- opening


def native() -> ModuleType:
    """The compiled core.

    Raises:
        errors.EngineUnavailable: it was not built.
    """
    try:
        from epigemm import _native
    except ImportError as error:
        why = f"the compiled core epigemm._native cannot be imported: {error}"
        raise errors.engine_unavailable("cuda", why, "Install epigemm with `pip install .`; it needs a C++17 compiler.") from error
    return _native


def _open(name: str, opener: Callable[[str], None]) -> Library:
    with _lock:
        if name in _opened:
            return _opened[name]
        library = find(name)
        if library is None:
            raise missing_error(name, _NOT_FOUND.get(name, "it is neither in the process, nor beside torch, in a wheel or in the system"))
        opener(library.path)
        _opened[name] = library
        return library


def open_driver() -> ModuleType:
    """The compiled core with libcuda opened.

    Raises:
        errors.EngineUnavailable: there is no driver, or it finds no device.
    """
    core = native()
    if "cuda" not in _opened:
        _open("cuda", core.open_driver)
    return core


def open_cublaslt() -> ModuleType:
    """The compiled core with libcublasLt opened.

    Raises:
        errors.EngineUnavailable: it is not installed, or is older than version 12.
    """
    core = native()
    if "cublasLt" not in _opened:
        library = _open("cublasLt", core.open_cublaslt)
        if core.cublaslt_version() < 120000:
            raise missing_error("cublasLt", f"{library.path} is version {core.cublaslt_version()}; 12.0 is needed")
    return core


def device_count() -> int:
    """How many CUDA devices there are; 0 where there is no driver or no compiled core."""
    try:
        count: int = open_driver().device_count()
    except (errors.EngineUnavailable, errors.LibraryError):
        return 0
    return count


def opened() -> tuple[Library, ...]:
    """What was opened so far, for `epigemm info`."""
    return tuple(_opened.values())


def record(library: Library) -> None:
    """Lists a library that was opened elsewhere (NVRTC, by the compiler)."""
    _opened.setdefault(library.name, library)


# ---------------------------------------------------------------- errors, called by the compiled core

_MEMORY_FULL = "The GPU's memory is full: free some, or lower MatmulOptions(memory_limit=...)."
_STORED = "`epigemm cache clear` removes stored kernels."

# What a status usually comes from, and what to do.
_HINTS: dict[str, str] = {
    "CUBLAS_STATUS_NOT_INITIALIZED": "cuBLASLt found no usable GPU, or its memory is full.",
    "CUBLAS_STATUS_ALLOC_FAILED": _MEMORY_FULL,
    "CUBLAS_STATUS_INVALID_VALUE": "An argument does not fit the plan: plan again for these operands.",
    "CUBLAS_STATUS_NOT_SUPPORTED": "cuBLASLt does not compute this combination: use engine='auto'.",
    "CUBLAS_STATUS_ARCH_MISMATCH": "This GPU lacks what the algorithm needs: plan again on this device.",
    "CUBLAS_STATUS_EXECUTION_FAILED": "An earlier error on this device, or an address that is not on it, makes every launch fail.",
    "CUDA_ERROR_OUT_OF_MEMORY": _MEMORY_FULL,
    "CUDA_ERROR_NO_DEVICE": "The driver is there, but no GPU is: engine='cpu' computes without one.",
    "CUDA_ERROR_INVALID_DEVICE": "There is no GPU of this number.",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": "The default stream cannot be used while another is captured: pass the captured one.",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": f"The kernel was compiled for another GPU. {_STORED}",
    "CUDA_ERROR_INVALID_IMAGE": f"The compiled kernel is damaged. {_STORED}",
}

# Statuses that mean "not on this machine".
_UNAVAILABLE = frozenset({"CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"})


def status_error(library: str, call: str, code: int, name: str, detail: str) -> errors.EpigemmError:
    """The error for a status that `call` of `library` returned; `detail` says what was being done."""
    about = f"{call} for {detail}" if detail else call
    hint = _HINTS.get(name, "")
    if name in _UNAVAILABLE:
        return errors.engine_unavailable("cuda", f"{name} ({code}) from {about}", hint)
    return errors.library_status(about, name, code, hint)


def missing_error(library: str, why: str) -> errors.EngineUnavailable:
    """The error for a library that cannot be opened."""
    kind = LIBRARIES.get(library)
    names = {"cuda": "NVIDIA's driver", "cublasLt": "cuBLASLt", "nvrtc": "NVRTC"}
    return errors.engine_unavailable("cuda", f"{names.get(library, library)} is missing: {why}", kind.install if kind else "")

"""CUDA C++ text to a cubin through NVRTC, by ctypes: no GPU and no toolkit needed."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from functools import cache
from pathlib import Path

OPTIONS = ("-arch=sm_90a", "-std=c++17", "--ptxas-options=-v", "-diag-suppress=128,179,39", "-default-device")
BAD = re.compile(r"C7508|C7510|C7511")


@cache
def _library() -> ctypes.CDLL:
    """NVRTC of the nvidia wheels; its builtins have to be loaded before it when both are opened by path."""
    spec = importlib.util.find_spec("nvidia")
    assert spec is not None and spec.submodule_search_locations, "pip install nvidia-cuda-nvrtc==13.0.*"
    folder = next(p for root in spec.submodule_search_locations for p in Path(root).glob("cu13/lib") if (p / "libnvrtc.so.13").exists())
    ctypes.CDLL(str(next(folder.glob("libnvrtc-builtins.so.13.0"))), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libnvrtc.so.13"))


def _bytes(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(_library(), f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def compile_cubin(source: str, name: str) -> tuple[bytes, str]:
    """The cubin for sm_90a and the compiler's report.

    Raises:
        RuntimeError: the text does not compile, spills, uses a stack, or ptxas serialises wgmma or ignores setmaxnreg.
    """
    library, program = _library(), ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    options = (ctypes.c_char_p * len(OPTIONS))(*(o.encode() for o in OPTIONS))
    status = library.nvrtcCompileProgram(program, len(OPTIONS), options)
    log = _bytes(program, "ProgramLog").rstrip(b"\0").decode()
    if status != 0:
        raise RuntimeError(f"{name} does not compile:\n{log}")
    cubin = _bytes(program, "CUBIN")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    spilt = [int(x) for x in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)]
    if BAD.search(log) or any(spilt):
        raise RuntimeError(f"{name} spills or is slowed down by the compiler:\n{log}")
    return cubin, log

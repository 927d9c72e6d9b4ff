"""CUDA C++ text -> machine code for one GPU architecture: NVRTC, with what it made kept in the store.

Each kernel leaves three files in the store's folder "kernels": the source as it was compiled, to be read; the cubin; and
a line with the registers and stack that each entry takes. The key holds everything that decides the cubin: the text, the
options, the architecture, and NVRTC's version and file sizes. No GPU is needed.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from epigemm import errors
from epigemm.engines.cuda import libraries
from epigemm.store import Key, Store

# --ptxas-options=-v makes the assembler say what each entry takes. Source: NVRTC's documentation, "Supported Compile Options".
OPTIONS = ("--std=c++17", "--ptxas-options=-v")

_KIND, _REQUIRED = "kernels", ("source", "arch", "options", "nvrtc")
_SCHEMA = 1
SOURCES = Store(_KIND, _SCHEMA, ".cu", _REQUIRED)
CUBINS = Store(_KIND, _SCHEMA, ".cubin", _REQUIRED)
FACTS = Store(_KIND, _SCHEMA, ".jsonl", _REQUIRED)


class CompilationError(errors.LibraryError):
    """CUDA C++ text that NVRTC refused: generated text that is wrong, so an error of ours."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one entry of a cubin takes: registers a thread, bytes of stack, bytes spilled to memory and read back."""

    entry: str
    registers: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code.

    Args:
        name: the stem under which it lies in the store.
        arch: "sm_80", "sm_90a", ...
        code: the ELF image, for cuModuleLoadData or cuLibraryLoadData.
        usage: what each entry takes.
        source: the file with its text, None where the store's folder cannot be written.
        log: the compiler's remarks; empty where the cubin came out of the store.
    """

    name: str
    arch: str
    code: bytes
    usage: tuple[Usage, ...]
    source: Path | None = None
    log: str = ""

    @property
    def spills(self) -> bool:
        """Whether an entry keeps anything on the stack."""
        return any(u.stack_bytes or u.spill_bytes for u in self.usage)


class _Once:
    """Cubins of this process by key; threads that ask for the same one wait for the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._made: dict[str, Cubin] = {}

    def get(self, key: str, make: Callable[[], Cubin]) -> Cubin:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]

    def clear(self) -> None:
        with self._lock:
            self._locks.clear()
            self._made.clear()


_once = _Once()


def forget() -> None:
    """Drop the cubins that this process holds in memory; the store keeps its own."""
    _once.clear()


def compile_source(source: str, *, name: str, arch: str, options: Sequence[str] = ()) -> Cubin:
    """The cubin of a text: from this process, else from the store, else compiled and stored.

    Args:
        source: CUDA C++17 that includes no header; entries are `extern "C" __global__`.
        name: a readable stem for the files.
        arch: "sm_80" to "sm_90a": the architecture that the code is for, no other runs it.
        options: further options of NVRTC.

    Raises:
        CompilationError: NVRTC refused the text; the message shows its first error and the line.
        EngineUnavailable: NVRTC is not installed, or cannot be opened.
    """
    nvrtc = _nvrtc()
    options = (*OPTIONS, *options)
    key = CUBINS.key(f"{name}-{arch}", source=source, arch=arch, options=options, nvrtc=nvrtc.identity)
    return _once.get(key.text, lambda: _from_store(key, name, arch) or _make(nvrtc, key, source, name, arch, options))


def _from_store(key: Key, name: str, arch: str) -> Cubin | None:
    code, facts = CUBINS.get(key), FACTS.get_value(key)
    if code is None or facts is None:
        return None
    source = SOURCES.path(key)
    usage = tuple(Usage(**entry) for entry in facts["usage"])
    return Cubin(name, arch, code, usage, source if source.exists() else None)


def _make(nvrtc: Nvrtc, key: Key, source: str, name: str, arch: str, options: Sequence[str]) -> Cubin:
    code, log = nvrtc.compile(source, f"{name}.cu", (f"--gpu-architecture={arch}", *options))
    usage = usages(log)
    path = SOURCES.put(key, source.encode())
    FACTS.put_value(key, {"usage": [asdict(u) for u in usage]})
    CUBINS.put(key, code)
    return Cubin(name, arch, code, usage, path, log)


# ---------------------------------------------------------------- what the compiler says

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_ERROR = re.compile(r"^[^\n(]*\((\d+)\): (?:catastrophic )?error.*$", re.MULTILINE)


def usages(log: str) -> tuple[Usage, ...]:
    """What each entry takes, from the assembler's remarks (`ptxas -v`).

    Example:
        >>> usages('''ptxas info    : Compiling entry function 'f' for 'sm_80'
        ... ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
        ... ptxas info    : Used 30 registers, used 0 barriers''')
        (Usage(entry='f', registers=30, stack_bytes=8, spill_bytes=8),)
    """
    found = []
    for part in log.split("Compiling entry function")[1:]:
        entry = _ENTRY.match("Compiling entry function" + part)
        stack, registers = _STACK.search(part), _REGISTERS.search(part)
        if entry and stack and registers:
            found.append(Usage(entry[1], int(registers[1]), int(stack[1]), int(stack[2]) + int(stack[3])))
    return tuple(found)


def refused(name: str, source: str, options: Sequence[str], log: str) -> CompilationError:
    """The error for a text that did not compile: the first complaint, the line it is about, and the rest of the log."""
    what = f"NVRTC could not compile {name} with {' '.join(options)}."
    match = _ERROR.search(log)
    if match is None:
        return CompilationError(errors.say(what, *log.strip().splitlines()[:8]))
    lines = source.splitlines()
    number = int(match[1])
    line = f"{number}: {lines[number - 1].strip()}" if number <= len(lines) else ""
    more = log.count("): error") - 1
    return CompilationError(errors.say(what, match[0], line, f"{more} more errors follow it." if more > 0 else "", "Please report it."))


# ---------------------------------------------------------------- the library


@cache
def _nvrtc() -> Nvrtc:
    found = libraries.find("nvrtc")
    if found is None:
        raise libraries.missing_error("nvrtc", "it was found neither beside torch, in a wheel, nor in the system")
    nvrtc = Nvrtc(found.path)
    libraries.record(found)
    return nvrtc


class Nvrtc:
    """The run-time compiler. May be used from several threads, which take turns: with 14 at a time the assembler's remarks about one
    kernel of 200 were lost (NVRTC 13.0). To compile in parallel, use processes; they share the store.

    Args:
        path: its file; the builtins library is taken from the same folder.
    """

    def __init__(self, path: str) -> None:
        builtins = sorted(Path(path).parent.glob("libnvrtc-builtins.so.*"))
        try:
            for file in builtins[:1]:
                ctypes.CDLL(str(file))  # first: NVRTC looks for it by name only, and finds it if it is already there
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise libraries.missing_error("nvrtc", f"it cannot be opened: {error}") from None
        self._lock = threading.Lock()
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        # The version has no patch level; the sizes of the files tell one patch from another.
        self.identity = [*self.version, *(file.stat().st_size for file in (Path(path), *builtins[:1]) if file.exists())]

    def compile(self, source: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
        """The cubin and the log of a text."""
        program = ctypes.c_void_p()
        self._check("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        try:
            encoded = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            with self._lock:
                status = self._library.nvrtcCompileProgram(program, len(options), encoded)
            log = self._bytes("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if status:
                raise refused(name, source, options, log or self._library.nvrtcGetErrorString(status).decode())
            return self._bytes("CUBIN", program), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _check(self, call: str, *arguments: Any) -> None:
        status = getattr(self._library, call)(*arguments)
        if status:
            raise errors.library_status(call, self._library.nvrtcGetErrorString(status).decode(), status)

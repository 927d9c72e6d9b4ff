"""Threads: as many as NumPy's BLAS uses. Each computes panels of its own, products and all, while BLAS itself stays in its caller.

Threads inside BLAS meet several times a product; on a machine that others use too each meeting costs time slices. Measured on two cores
of an AMD EPYC (Zen 5) with other jobs running, m=64 n=2048 k=2048 float32: 61 ms with BLAS's threads, 4.6 ms with panels of one's own.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")

# How the libraries that NumPy is built with tell and take the number of their threads.
_SPELLINGS = (
    ("scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"),
    ("scipy_openblas_get_num_threads", "scipy_openblas_set_num_threads"),
    ("openblas_get_num_threads64_", "openblas_set_num_threads64_"),
    ("openblas_get_num_threads", "openblas_set_num_threads"),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
    ("bli_thread_get_num_threads", "bli_thread_set_num_threads"),
)


@cache
def _blas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """(get, set) of the number of BLAS's threads, None where it does not tell."""
    try:
        # dlsym also looks through what NumPy's extension was linked with.
        library = ctypes.CDLL(import_module("numpy._core._multiarray_umath").__file__)
    except (ImportError, AttributeError, OSError):
        return None
    for get_name, set_name in _SPELLINGS:
        get: Any = getattr(library, get_name, None)
        set_: Any = getattr(library, set_name, None)
        if get is not None and set_ is not None:
            get.argtypes, get.restype = (), ctypes.c_int
            set_.argtypes, set_.restype = (ctypes.c_int,), None
            return get, set_
    return None


class _Alone:
    """Holds BLAS to one thread while any run is inside, and puts the number back after the last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.runs = 0
        self.before = 1

    def enter(self) -> None:
        blas = _blas()
        assert blas is not None
        with self.lock:
            if self.runs == 0:
                self.before = blas[0]()
                blas[1](1)
            self.runs += 1

    def leave(self) -> None:
        blas = _blas()
        assert blas is not None
        with self.lock:
            self.runs -= 1
            if self.runs == 0:
                blas[1](self.before)


_alone = _Alone()


def can_keep_blas_alone() -> bool:
    """Whether BLAS's own threads can be switched off for a while."""
    return _blas() is not None


@contextmanager
def blas_alone() -> Iterator[None]:
    """BLAS without threads of its own. The number is the process's: products of other threads are slower meanwhile, not wrong."""
    _alone.enter()
    try:
        yield
    finally:
        _alone.leave()


def count() -> int:
    """Threads of NumPy's BLAS now, or the processors this process may use where BLAS does not tell."""
    blas = _blas()
    if blas is not None:
        with _alone.lock:
            return max(1, _alone.before if _alone.runs else blas[0]())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def _workers() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1), thread_name_prefix="epigemm")
        return _pool


def _forget() -> None:
    """In a forked child: the pool's threads are gone, and no run is inside."""
    global _pool, _lock, _alone
    blas = _blas()
    if blas is not None and _alone.runs:
        blas[1](_alone.before)
    _pool, _lock, _alone = None, threading.Lock(), _Alone()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def together(work: Callable[[Iterator[T]], None], items: Iterable[T], threads: int) -> None:
    """Run `work` once in each of `threads` threads, the caller's among them, on an iterator that they share, and wait for all.

    Where one raises, KeyboardInterrupt in the caller included, the others get no further items. Once the interpreter shuts down, when
    no thread can be started any more, the caller does it alone.
    """
    pending = iter(list(items))  # a list's iterator can be shared; a generator cannot

    def share() -> None:
        try:
            work(pending)
        except BaseException:
            for _ in pending:  # nothing is left to the others
                pass
            raise

    others: list[Future[None]] = []
    if threads > 1:
        with suppress(RuntimeError):
            others += [_workers().submit(share) for _ in range(threads - 1)]
    try:
        share()
    finally:
        for other in others:
            other.result()

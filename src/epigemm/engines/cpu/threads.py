"""Threads: as many as NumPy's BLAS uses, for the work that is not BLAS's."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module

# How the libraries that NumPy is built with say how many threads they use.
_QUERIES = (
    "scipy_openblas_get_num_threads64_",
    "scipy_openblas_get_num_threads",
    "openblas_get_num_threads64_",
    "openblas_get_num_threads",
    "MKL_Get_Max_Threads",
    "bli_thread_get_num_threads",
)


@cache
def _query() -> Callable[[], int] | None:
    try:
        # dlsym also looks through what NumPy's extension was linked with.
        library = ctypes.CDLL(import_module("numpy._core._multiarray_umath").__file__)
    except (AttributeError, OSError):
        return None
    for name in _QUERIES:
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes, function.restype = (), ctypes.c_int
            return function
    return None


def count() -> int:
    """Threads of NumPy's BLAS now, or the processors this process may use where BLAS does not tell."""
    query = _query()
    if query is not None:
        return max(1, query())
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
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def together(work: Callable[[], None], threads: int) -> None:
    """Run `work` once in each of `threads` threads, the caller's among them, and wait for all."""
    if threads <= 1:
        work()
        return
    pool = _workers()
    others = [pool.submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for other in others:
            other.result()

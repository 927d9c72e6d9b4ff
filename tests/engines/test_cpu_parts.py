"""The parts of the CPU engine: conversions, random numbers, masks, cutting, threads, memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import epigemm.expression as eg
from epigemm import plans
from epigemm.engines.base import Call
from epigemm.engines.cpu import masks, narrow, random, threads
from epigemm.engines.cpu.engine import ENGINE
from epigemm.engines.cpu.tiling import LEFT_BYTES, RIGHT_BYTES, tiling
from epigemm.engines.cpu.walk import walk_of
from epigemm.expression import nodes
from epigemm.expression.check import check
from epigemm.expression.philox import philox
from epigemm.problem import Compute, Operand, Problem

NARROW = ("float8_e4m3fn", "float8_e5m2")


def every_float32() -> Any:
    """All bfloat16 patterns, their neighbours in float32, and random patterns."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    chance = np.random.default_rng(0).integers(0, 2**32, 1 << 18, dtype=np.uint32)
    return np.concatenate([upper, upper + np.uint32(1), upper - np.uint32(1), chance]).view(np.float32)


# --- conversions


@pytest.mark.parametrize("name", ["float16", "bfloat16", *NARROW])
def test_widening_is_exact_for_every_code(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    code = np.dtype(f"u{dtype.itemsize}")
    values = np.arange(1 << 8 * dtype.itemsize, dtype=code).view(dtype).reshape(16, -1)
    for source in (values, values.T, values[::-1, ::2]):
        got = narrow.widen(source, np.empty(source.shape, np.float32))
        assert np.array_equal(got, source.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("name", NARROW)
def test_storing_8_bits_is_rounding_to_nearest_even_and_saturating(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    values = every_float32()
    stored = np.empty(values.shape, dtype)
    with np.errstate(all="ignore"):
        narrow.store(stored, values)
        want = np.clip(values, -largest, largest).astype(dtype)
    assert np.array_equal(stored.astype(np.float32), want.astype(np.float32), equal_nan=True)


def test_float64_is_rounded_once() -> None:
    """A float64 just beside a tie of bfloat16: by way of float32 it would fall on the tie."""
    tie = 1 + 2.0**-8
    values = np.array([tie - 2.0**-40, tie, tie + 2.0**-40, -tie - 2.0**-40, np.nan, np.inf, 1e300])
    stored = np.empty(values.shape, ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        narrow.store(stored, values)
    step = 1 + 2.0**-7
    assert np.array_equal(stored.astype(np.float64), [1, 1, step, -step, np.nan, np.inf, np.inf], equal_nan=True)


def test_storing_broadcasts() -> None:
    for name in ("float32", "bfloat16", *NARROW):
        stored = np.zeros((3, 4), np.dtype(getattr(ml_dtypes, name, name)))
        narrow.store(stored, np.array([[1.0, 2.0, 3.0, 4.0]], np.float32))
        assert np.array_equal(stored.astype(np.float32), [[1, 2, 3, 4]] * 3)


# --- random numbers and masks


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """Source: the known-answer vectors that Random123 publishes for philox4x32-10."""
    got = philox(tuple(np.array([c], np.uint32) for c in counter), key)  # type: ignore[arg-type]
    assert tuple(int(w[0]) for w in got) == words


def test_uniform_is_the_word_of_the_element() -> None:
    seed, row, column, batch = -5, 7, 18, 3
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    word = philox(tuple(np.array([c], np.uint32) for c in (column // 4, row, batch, 0)), key)[column % 4]  # type: ignore[arg-type]
    want = np.float32((int(word[0]) >> 8) * 2.0**-24)
    assert random.uniform(seed, range(row, row + 1), range(column, column + 1), batch) == want
    whole = random.uniform(seed, range(20), range(30), batch)
    assert whole[row, column] == want
    for rows, columns in ((range(3, 9), range(5, 22)), (range(7, 8), range(29, 30)), (range(20), range(1, 2))):
        part = random.uniform(seed, rows, columns, batch)
        assert np.array_equal(part, whole[rows.start : rows.stop, columns.start : columns.stop])


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 127, 129])
def test_packing_in_blocks(length: int) -> None:
    condition = np.random.default_rng(length).random((3, length)) < 0.5
    bits = np.full((3, 32), 255, np.uint8)
    for start in range(0, length, 8):
        masks.pack(bits, condition[:, start : start + 8], start, length)
    assert np.array_equal(np.unpackbits(bits, axis=1, bitorder="little")[:, :length], condition)
    assert np.unpackbits(bits, axis=1).sum() == condition.sum()
    for start in range(0, length, 8):
        count = min(8, length - start)
        assert np.array_equal(masks.unpack(bits, start, count), condition[:, start : start + count])


# --- cutting


def relu(acc: Any) -> Any:
    return eg.relu(acc)


def checked(problem: Problem) -> Any:
    return check(eg.as_epilogue(relu).expression(1), problem)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "c128"])
@pytest.mark.parametrize("size", [(1, 10**6, 10), (10**6, 1, 10), (64, 64, 10**7), (30_000, 30_000, 30_000), (1000, 3000, 2000)])
def test_blocks_are_bounded(dtype: str, size: tuple[int, int, int]) -> None:
    m, n, k = size
    problem = Problem.of(dtype, m=m, n=n, k=k)
    plus = (lambda acc: acc + 1.0) if dtype == "c128" else relu
    expression = check(eg.as_epilogue(plus).expression(1), problem)
    cut = tiling(walk_of(problem, expression), 2)
    right = k * cut.block if cut.keep_right else cut.depth * cut.columns
    if dtype == "bf16":
        assert 4 * right <= RIGHT_BYTES
        assert 4 * cut.rows * cut.depth <= LEFT_BYTES
    assert all(c.workspace_bytes < 56 << 20 for c in ENGINE.candidates(problem, expression, 8))


def test_candidates_start_with_the_predicted_and_respect_the_limit() -> None:
    problem = Problem.of("f32", m=4096, n=4096, k=64)
    assert threads.can_keep_blas_alone()
    found = ENGINE.candidates(problem, checked(problem), 8)
    assert len(found) == len(set(found)) > 3
    assert ENGINE.candidates(problem, checked(problem), 2) == found[:2]
    assert {c["threads"] for c in found} <= {1, threads.count()}


def test_the_memory_limit_is_kept_or_refused() -> None:
    free = Problem.of("bf16", m=1000, n=1000, k=1000)
    expression = checked(free)
    best = ENGINE.candidates(free, expression, 1)[0]
    tight = Problem.of("bf16", m=1000, n=1000, k=1000, compute=Compute(memory_limit=best.workspace_bytes - 1))
    assert ENGINE.supports(tight, expression) is None
    found = ENGINE.candidates(tight, expression, 8)
    assert found
    assert all(c.workspace_bytes < best.workspace_bytes for c in found)
    refusal = ENGINE.supports(Problem.of("bf16", m=1000, n=1000, k=1000, compute=Compute(memory_limit=1000)), expression)
    assert refusal is not None
    assert "memory_limit allows 1000" in refusal.sentence


def test_candidates_agree() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, s).astype(ml_dtypes.bfloat16) for s in ((900, 33), (33, 70)))  # sums without rounding
    problem = Problem.of("bf16", m=900, n=70, k=33)
    results = []
    for candidate in ENGINE.candidates(problem, checked(problem), 8):
        d = np.full((900, 70), np.nan, ml_dtypes.bfloat16)
        ENGINE.prepare(problem, checked(problem), candidate).run(Call(a, (b,), None, d))
        results.append(d)
    assert len(results) > 1
    assert all(np.array_equal(d, results[0]) for d in results)


@pytest.mark.parametrize("epilogue", [relu, lambda acc: eg.gelu(acc) + eg.tanh(acc)])
def test_workspace_bytes_is_what_a_run_allocates(epilogue: Any) -> None:
    m, n, k = 3000, 2000, 500
    problem = Problem.of("bf16", m=m, n=n, k=k)
    expression = check(eg.as_epilogue(epilogue).expression(1), problem)
    candidate = next(c for c in ENGINE.candidates(problem, expression, 8) if c["threads"] == 1)
    executable = ENGINE.prepare(problem, expression, candidate)
    call = Call(
        *(np.ones(s, ml_dtypes.bfloat16) for s in ((m, k),)),
        (np.ones((k, n), ml_dtypes.bfloat16),),
        None,
        np.empty((m, n), ml_dtypes.bfloat16),
    )
    peaks = []

    def measured() -> None:  # in a thread of its own, whose scratch memory is still empty
        tracemalloc.start()
        executable.run(call)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    thread = threading.Thread(target=measured)
    thread.start()
    thread.join()
    assert 0.5 * candidate.workspace_bytes < peaks[0] <= candidate.workspace_bytes + 65536


def test_together_runs_in_each_thread_and_raises() -> None:
    names: list[str] = []
    barrier = threading.Barrier(2, timeout=10)

    def work(items: Iterator[int]) -> None:
        barrier.wait()
        names.append(threading.current_thread().name)

    threads.together(work, range(2), 2)
    assert len(set(names)) == 2

    def fail(items: Iterator[int]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("in the other thread")

    with pytest.raises(ValueError, match="in the other thread"):
        threads.together(fail, range(2), 2)


def test_an_interrupt_leaves_the_other_threads_nothing_to_do() -> None:
    barrier, done = threading.Barrier(2, timeout=10), []
    interrupted = threading.Event()

    def work(items: Iterator[int]) -> None:
        barrier.wait()
        if threading.current_thread() is threading.main_thread():
            try:
                raise KeyboardInterrupt
            finally:
                interrupted.set()
        interrupted.wait(10)
        time.sleep(0.05)
        done.extend(items)

    with pytest.raises(KeyboardInterrupt):
        threads.together(work, range(1000), 2)
    assert done == []


def test_a_product_in_an_exit_handler() -> None:
    program = """
import atexit, numpy as np, epigemm as eg
def product():
    d = eg.matmul(np.ones((1500, 800), np.float32), np.ones((800, 1500), np.float32), epilog="relu")
    return (d == 800).all()
product()  # the pool of threads is there
atexit.register(lambda: print(product()))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False, timeout=120)
    assert (found.stdout.strip(), found.stderr) == ("True", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("module", [nodes, plans], ids=lambda module: module.__name__)
def test_a_lock_held_by_a_thread_does_not_bind_a_forked_child(module: Any) -> None:
    taken, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with module._lock:
            taken.set()
            leave.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(10)
    child = os.fork()
    if child == 0:
        os._exit(0 if module._lock.acquire(timeout=5) else 1)
    _, status = os.waitpid(child, 0)
    leave.set()
    holder.join()
    assert status == 0


def test_blas_gets_its_threads_back() -> None:
    before = threads.count()
    with threads.blas_alone():
        assert threads.count() == before  # what a plan made now would use
        with pytest.raises(ZeroDivisionError), threads.blas_alone():
            raise ZeroDivisionError
        assert threads._blas()[0]() == 1  # type: ignore[index]
    assert threads._blas()[0]() == before  # type: ignore[index]


def test_an_error_in_a_run_leaves_blas_as_it_was() -> None:
    problem = Problem.of("f32", m=2000, n=2000, k=200)
    executable = ENGINE.prepare(problem, checked(problem), ENGINE.candidates(problem, checked(problem), 1)[0])
    before = threads.count()
    a, b, d = np.ones((2000, 200), np.float32), np.ones((200, 1999), np.float32), np.empty((2000, 2000), np.float32)
    with pytest.raises(ValueError, match="mismatch"):
        executable.run(Call(a, (b,), None, d))
    assert threads._blas()[0]() == before  # type: ignore[index]
    executable.run(Call(a, (np.ones((200, 2000), np.float32),), None, d))
    assert (d == 200).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    problem = Problem.of("f32", m=2000, n=2000, k=64)
    executable = ENGINE.prepare(problem, checked(problem), ENGINE.candidates(problem, checked(problem), 1)[0])
    a, b, d = np.ones((2000, 64), np.float32), np.ones((64, 2000), np.float32), np.zeros((2000, 2000), np.float32)
    executable.run(Call(a, (b,), None, d))
    child = os.fork()
    if child == 0:
        d[...] = 0
        executable.run(Call(a, (b,), None, d))
        os._exit(0 if (d == 64).all() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_one_executable_from_many_threads() -> None:
    m, n, k = 300, 200, 20
    problem = Problem.of("f16", m=m, n=n, k=k, inputs={"x": Operand.dense("f16", (m, n))})

    def epilogue(acc: Any, x: Any) -> Any:
        return eg.gelu(acc) * x

    expression = check(eg.as_epilogue(epilogue).expression(1), problem)
    executable = ENGINE.prepare(problem, expression, ENGINE.candidates(problem, expression, 1)[0])
    rng = np.random.default_rng(0)
    calls = []
    for _ in range(4):
        a, b, x = (rng.standard_normal(s).astype(np.float16) for s in ((m, k), (k, n), (m, n)))
        calls.append(Call(a, (b,), None, np.empty((m, n), np.float16), {"x": x}))
    for call in calls:
        executable.run(call)
    alone = [call.d.copy() for call in calls]
    workers = [threading.Thread(target=lambda c=call: [executable.run(c) for _ in range(5)]) for call in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(np.array_equal(call.d, d) for call, d in zip(calls, alone, strict=True))


# --- memory

_GIBIBYTE = """
import resource
import numpy as np, ml_dtypes
import epigemm.expression as eg
from epigemm.engines.base import Call
from epigemm.engines.cpu.engine import ENGINE
from epigemm.expression.check import check
from epigemm.problem import Operand, Problem

m, n, k = {m}, 16384, 8
problem = Problem.of("{dtype}", m=m, n=n, k=k, inputs={{"bias": Operand.dense("{dtype}", (1, n))}})
def epilogue(acc, bias):
    y = eg.gelu(acc + bias, approximate="tanh")
    return eg.outputs(y, grad=eg.sum(y, axis="m"))
expression = check(eg.as_epilogue(epilogue).expression(1), problem)
executable = ENGINE.prepare(problem, expression, ENGINE.candidates(problem, expression, 1)[0])
dtype = problem.d.dtype.numpy
call = Call(np.ones((m, k), dtype), (np.ones((k, n), dtype),), None, np.empty((m, n), dtype), {{"bias": np.ones((1, n), dtype)}},
            {{"grad": np.empty((1, n), np.float32)}})
call.d.view(np.uint8)[...] = 1
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
executable.run(call)
assert float(call.d[-1, -1]) == 9
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, call.d.nbytes)
"""


@pytest.mark.parametrize(("dtype", "m"), [("f32", 16384), ("bf16", 8192)])
def test_peak_memory_is_the_output_and_panels(dtype: str, m: int) -> None:
    program = [sys.executable, "-c", _GIBIBYTE.format(dtype=dtype, m=m)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    extra_kib, output = map(int, ran.stdout.split())
    assert output == (1 << 30 if dtype == "f32" else 1 << 28)
    assert extra_kib < 64 << 10

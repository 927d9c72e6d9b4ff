"""Mistakes on a GPU: each a clear error in the caller's terms, before anything is launched. Run by itself: it fills the GPU's memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest

import epigemm as eg
from epigemm import errors

torch = pytest.importorskip("torch")


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on another GPU than it does."""

    device = torch.device("cuda:1")


def elsewhere(tensor):
    return tensor.as_subclass(Elsewhere) if torch.cuda.device_count() < 2 else tensor.to("cuda:1")


def cupy():
    return pytest.importorskip("cupy")


# name -> (call of (a, b, out), the class to catch as the peer's users do, words of the message)
MISTAKES = {
    "an operand on the CPU": (lambda a, b, out: eg.matmul(a, b.cpu(), out=out), ValueError, "not on the same device"),
    "operands on two GPUs": (lambda a, b, out: eg.matmul(a, elsewhere(b), out=out), ValueError, "not on the same device"),
    "a bias on the CPU": (
        lambda a, b, out: eg.matmul(a, b, epilog="bias", epilog_inputs={"bias": torch.zeros(64, 1).half()}, out=out),
        ValueError,
        "same memory space",
    ),
    "a bias on another GPU": (
        lambda a, b, out: eg.matmul(a, b, epilog="bias", epilog_inputs={"bias": elsewhere(a[:, :1].contiguous())}, out=out),
        ValueError,
        "same memory space",
    ),
    "out on the CPU": (lambda a, b, out: eg.matmul(a, b, out=out.cpu()), ValueError, "not on the same device"),
    "PyTorch and NumPy": (lambda a, b, out: eg.matmul(a, b.cpu().numpy(), out=out), TypeError, "same library package"),
    "PyTorch and CuPy": (lambda a, b, out: eg.matmul(a, cupy().asarray(b.cpu().numpy()), out=out), TypeError, "same library package"),
    "a CuPy bias": (
        lambda a, b, out: eg.matmul(a, b, epilog="bias", epilog_inputs={"bias": cupy().zeros((64, 1), "float16")}, out=out),
        TypeError,
        "package mismatch",
    ),
    "the CPU engine": (lambda a, b, out: eg.matmul(a, b, out=out, engine="cpu"), errors.EngineUnavailable, "cpu"),
    "an engine of no name": (lambda a, b, out: eg.matmul(a, b, out=out, engine="cutlass"), ValueError, "cutlass"),
    "int8": (lambda a, b, out: eg.matmul(a.to(torch.int8), b.to(torch.int8)), ValueError, "int8"),
    "two dtypes": (lambda a, b, out: eg.matmul(a, b.float(), out=out), ValueError, "Unsupported combination of dtypes"),
    "out of another dtype": (lambda a, b, out: eg.matmul(a, b, out=out.double()), ValueError, "float64"),
    "out of another shape": (lambda a, b, out: eg.matmul(a, b, out=out[:1]), ValueError, "out"),
    "out over an operand": (lambda a, b, out: eg.matmul(a, b, out=a.view(-1)[: 64 * 96].view(64, 96)), ValueError, "overlap"),
    "another k": (lambda a, b, out: eg.matmul(a, b[:-1], out=out), ValueError, "'K' extent"),
    "no stream": (lambda a, b, out: eg.matmul(a, b, out=out, stream="main"), TypeError, "stream"),
    "fp8 without scales": (
        lambda a, b, out: eg.matmul(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)),
        ValueError,
        "Scales are required",
    ),
    "a limit of no form": (lambda a, b, out: eg.matmul(a, b, out=out, options={"memory_limit": "much"}), ValueError, "memory limit"),
}


@pytest.fixture
def operands(normal):
    out = torch.full((64, 96), 7.0, device="cuda", dtype=torch.float16)
    return normal(64, 128), normal(128, 96, seed=1), out


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(operands, name):
    call, kind, words = MISTAKES[name]
    out = operands[2]
    with pytest.raises(kind, match=words) as caught:
        call(*operands)
    assert isinstance(caught.value, errors.EpigemmError)
    assert bool((out == 7).all())


def test_nothing_is_launched(operands):
    """The kernels that the calls run, counted: those of moving and casting the operands beforehand are PyTorch's own."""
    from torch.profiler import ProfilerActivity, profile

    a, b, out = operands
    eg.matmul(a, b)
    wide, short = b.float(), b[:-1]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for call in (lambda: eg.matmul(a, wide, out=out), lambda: eg.matmul(a, short), lambda: eg.matmul(a, b, engine="cpu")):
            with pytest.raises(errors.EpigemmError):
                call()
        torch.cuda.synchronize()
    kernels = [event.name for event in seen.events() if str(event.device_type).endswith("CUDA") and "emset" not in event.name]
    assert [name for name in kernels if "synchronize" not in name.lower()] == []


def test_a_gpu_that_is_not_there():
    a, b = np.ones((4, 5), np.float32), np.ones((5, 6), np.float32)
    with pytest.raises(errors.EpigemmError, match="7"):
        eg.matmul(a, b, options={"device_id": 7})


HIDDEN = """
    import sys
    import numpy as np, torch
    import epigemm as eg
    from epigemm import errors
    from epigemm.engines.cuda import libraries
    find = libraries.find
    libraries.find = lambda name: None if name == sys.argv[1] else find(name)
    a = torch.ones((32, 32), device="cuda", dtype=torch.float16)
    b = np.ones((32, 32), "f4")
    calls = [lambda: eg.matmul(a, a, engine="cublaslt"), lambda: eg.matmul(b, b, options={"device_id": 0})]
    for call in calls:
        try:
            call()
            print("ran")
        except errors.EpigemmError as error:
            print(type(error).__name__, str(error).replace(chr(10), " "))
"""


@pytest.mark.parametrize(("hidden", "words", "count"), [("cublasLt", "cuBLASLt is missing", 1), ("cuda", "NVIDIA's driver is missing", 2)])
def test_a_missing_library(hidden, words, count):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(HIDDEN), hidden], capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert sum(words in line for line in lines) >= count, lines
    assert all(line.startswith(("EngineUnavailable", "Unsupported", "ran")) for line in lines), lines


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("limit", [0, 1, "1 kB"])
def test_a_workspace_limit_holds_or_is_refused_in_words(normal, close, limit):
    a, b = normal(64, 8192), normal(8192, 64, seed=1)
    with eg.Matmul(a, b, options={"memory_limit": limit}) as product:
        refused = ""
        try:
            algorithms = product.plan(engine="cublaslt")
        except errors.EpigemmError as error:
            refused = str(error)
        if refused:
            assert "memory_limit" in refused or "workspace" in refused
            return
        assert all(algorithm.candidate.workspace_bytes <= 1000 for algorithm in algorithms)
        close(product.execute(), a, b)


def test_a_full_gpu(normal, close):
    a, b = np.ones((16384, 8), np.float32), np.ones((8, 16384), np.float32)
    small_a, small_b = normal(64, 8192), normal(8192, 64, seed=1)
    close(eg.matmul(small_a, small_b), small_a, small_b)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(errors.LibraryError, match="memory is full"):
            eg.matmul(a, b, options={"device_id": 0})
        large = torch.ones((16384, 8), device="cuda", dtype=torch.float32)
        with pytest.raises(torch.OutOfMemoryError):
            eg.matmul(large, large.T)
        close(eg.matmul(small_a, small_b), small_a, small_b)
    finally:
        del hog
        torch.cuda.empty_cache()
    assert eg.matmul(a, b, options={"device_id": 0})[0, 0] == 8

"""What options do to a launch, with a stand-in for CuPy and libraries that write down what they are asked (fake_cuda.cpp)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import epigemm

pytest.importorskip("epigemm._native", reason="the compiled core is not built")
COMPILER = shutil.which("c++") or shutil.which("g++")
SOURCE = Path(epigemm.__file__).parents[1]

PREAMBLE = """
import contextlib, ctypes, sys, types
import numpy as np
fake = ctypes.CDLL(sys.argv[1])
fake.fake_log.restype = ctypes.c_char_p

class ndarray:
    ends = 0x100000
    def __init__(self, shape, strides=None, dtype="float32", at=None):
        self.dtype, self.shape = np.dtype(dtype), tuple(shape)
        self.strides = strides or np.empty(shape, dtype).strides
        if at is None:
            at = ndarray.ends
            ndarray.ends += 0x10000
        self.data, self.device = types.SimpleNamespace(ptr=at, device_id=0), types.SimpleNamespace(id=0)
ndarray.__module__ = "cupy"
stream = types.SimpleNamespace(ptr=0x30)
cuda = types.SimpleNamespace(get_current_stream=lambda: stream, Device=lambda i: contextlib.nullcontext())
cuda.ExternalStream = lambda handle, i: contextlib.nullcontext()
def as_strided(x, shape, strides): return ndarray(shape, strides, x.dtype, x.data.ptr)
lib = types.SimpleNamespace(stride_tricks=types.SimpleNamespace(as_strided=as_strided))
sys.modules["cupy"] = types.ModuleType("cupy")
vars(sys.modules["cupy"]).update(ndarray=ndarray, cuda=cuda, lib=lib, empty=lambda n, dtype: ndarray((n,), None, dtype))

import epigemm as eg
from epigemm import errors
from epigemm.engines.cuda import libraries
libraries._opened.update({n: libraries.Library(n, sys.argv[1], "in the process") for n in ("cuda", "cublasLt")})
core = libraries.native()
core.open_driver(sys.argv[1]); core.open_cublaslt(sys.argv[1])
a, b, c = ndarray((64, 32)), ndarray((32, 48)), ndarray((64, 48))
def events(*names):
    lines = [line for line in fake.fake_log().decode().splitlines() if line.startswith(names)]
    fake.fake_clear()
    return [" ".join(word for word in line.split() if "=" not in word) for line in lines]
class Allocator:
    def __init__(self, at=0x100): self.at = at
    def memalloc(self, size):
        print("memalloc", size)
        return eg.MemoryPointer(self.at, size, lambda: print("freed"))
class Ordered:
    def memalloc_async(self, size, stream):
        print("memalloc_async", size, "on", hex(stream), stream.ptr == stream.handle == stream.cuda_stream)
        return types.SimpleNamespace(ptr=0x200)
def planned(**options):
    preferences = options.pop("preferences", None)
    mm = eg.Matmul(a, b, options=options)
    mm.plan(engine="cublaslt", preferences=preferences)
    return mm
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("fake") / "libfake.so"
    source = Path(__file__).with_name("fake_cuda.cpp")
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)

    def go(script: str) -> list[str]:
        command = [sys.executable, "-c", PREAMBLE + script, str(library)]
        done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE)})
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return go


def test_the_workspace_comes_from_the_allocator_and_is_kept_until_it_is_given_back(run):
    lines = run("""
mm = planned(allocator=Allocator())
for _ in range(3): mm.execute()
print(events("matmul", "alloc", "workspace"), core.kept_workspaces())
mm.execute(release_workspace=True); print("released")
mm.execute(); mm.free(); print("free")
mm = planned(allocator=Allocator())
mm.autotune(iterations=1, release_workspace=True); print("tuned")
""")
    assert lines[:2] == ["memalloc 4096", str(["workspace 100", "matmul 4096 on 30"] * 3) + " 0"]
    assert lines[2:] == ["freed", "released", "memalloc 4096", "freed", "free", "memalloc 4096", "freed", "tuned"]


def test_a_single_call_takes_it_and_gives_it_back(run):
    lines = run("""
for _ in range(2): eg.matmul(a, b, options={"allocator": allocator} if _ else {"allocator": (allocator := Allocator())}, engine="cublaslt")
""")
    assert lines == ["memalloc 4096", "freed"] * 2


def test_an_ordered_allocator_is_told_the_stream(run):
    lines = run("""
mm = planned(allocator=Ordered())
mm.execute(); mm.execute(stream=0x40); mm.execute(stream=0x40)
print(events("workspace"))
""")
    assert lines == [
        "memalloc_async 4096 on 0x30 True",
        "memalloc_async 4096 on 0x40 True",
        "['workspace 200', 'workspace 200', 'workspace 200']",
    ]


def test_a_graph_has_workspace_of_its_own(run):
    lines = run("""
mm = planned(allocator=Allocator())
fake.fake_clear(); fake.fake_capture(1); mm.execute(); print(events("alloc", "matmul", "free"))
""")
    assert lines == ["['alloc 4096 on 30', 'matmul 4096 on 30', 'free on 30']"]


def test_a_buffer_that_is_not_aligned_is_refused_before_the_launch(run):
    lines = run("""
fake.fake_clear()
for at in (0x101, 0):
    try: planned(allocator=Allocator(at)).execute()
    except errors.OptionError as error: print(str(error).splitlines()[1])
print(events("matmul"))
""")
    words = "  It must own device memory whose address, a multiple of 256, is its device_ptr, device_pointer, ptr or pointer."
    assert [line for line in lines if line != "freed"] == ["memalloc 4096", words, "memalloc 4096", words, "[]"]
    assert lines.count("freed") == 2


def test_workspace_of_the_core_is_given_back(run):
    lines = run("""
mm = planned(); mm.execute(); print(core.kept_workspaces())
mm.execute(release_workspace=True); print(core.kept_workspaces())
mm.execute(); mm.autotune(iterations=1, release_workspace=True); print(core.kept_workspaces())
""")
    assert lines == ["1", "0", "0"]


def test_handle_and_blocking(run):
    lines = run("""
mm = planned(handle=0x77); fake.fake_clear(); mm.execute(); mm.execute(); print(events("handle"))
mm = planned(blocking=True); fake.fake_clear(); mm.execute(); mm.execute(stream=0x40); print(events("wait"))
mm = planned(); fake.fake_clear(); mm.execute(); print(events("wait", "handle"))
""")
    assert lines == ["['handle 77', 'handle 77']", "['wait for 30', 'wait for 40']", "[]"]


def test_preferences_and_memory_limit_reach_the_heuristic(run):
    lines = run("""
def asked():
    log = fake.fake_log().decode().splitlines(); fake.fake_clear()
    return sorted({line for line in log if line.startswith("preference") and int(line.split()[1]) in (1, 3, 9, 12)})
fake.fake_clear(); planned(); print(asked())
planned(memory_limit="1 MiB", preferences={"reduction_scheme_mask": 1, "max_waves_count": 2.0, "numerical_impl_mask": 0xff}); print(asked())
planned(memory_limit=0.5, preferences={"reduction_scheme_mask": 1}); print(asked())
""")
    usual, changed, half = lines
    assert usual != changed != half
    assert changed == "['preference 1 = 100000', 'preference 12 = ff', 'preference 3 = 1', 'preference 9 = 40000000']"
    assert "preference 3 = 1'" in half and "preference 1 = 2000000'" in half


def test_logger_is_told_of_the_phases(run):
    lines = run("""
import logging
log = logging.getLogger("mine"); log.setLevel(logging.INFO)
handler = logging.Handler(); handler.emit = lambda record: print(record.getMessage()[:24]); log.addHandler(handler)
mm = planned(logger=log); mm.autotune(iterations=1); mm.execute(); mm.execute()
eg.matmul(a, b, options={"logger": log}, engine="cublaslt")
""")
    phases = [line.split("=")[1].strip() for line in lines]
    assert phases == [
        "SPECIFICATION PHASE",
        "PLANNING PHASE",
        "AUTOTUNING PHASE",
        "EXECUTION PHASE",
        "EXECUTION PHASE",
        "PLANNING PHASE",
        "EXECUTION PHASE",
    ]


def test_strict_refuses_what_explain_shows(run):
    lines = run("""
mm = eg.Matmul(a, b)
mm.plan(engine="cublaslt", epilog="gelu")
print([line for line in mm.explain().splitlines() if "gelu" in line.lower() and "inf" in line.lower()])
try: eg.Matmul(a, b, options={"strict": True}).plan(engine="cublaslt", epilog="gelu")
except errors.EpigemmError as error: print(type(error).__name__, error)
""")
    assert lines[0] != "[]"
    assert "strict=True" in "\n".join(lines[1:])


def test_algorithms_of_the_library(run):
    lines = run("""
mm = planned(); algorithm = mm.algorithms[0]
print(algorithm.engine, algorithm.algorithm_id, algorithm.split_k, mm.applicable_algorithm_ids())
(taken,) = mm.plan(algorithms=[eg.Algorithm.from_data(algorithm.to_data())]); mm.execute()
taken.split_k = 2
try: mm.plan(algorithms=[taken])
except errors.AlgorithmError as error: print(str(error).splitlines()[0])
""")
    assert lines == ["cublaslt 42 0 [42]", "cuBLASLt does not run this algorithm for this product"]

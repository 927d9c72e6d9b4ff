"""What a launch does between the caller and the libraries, with libraries that write down what they are asked (fake_cuda.cpp)."""

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
import ctypes, sys, threading
from epigemm import _native as core, errors
fake = ctypes.CDLL(sys.argv[1])
fake.fake_log.restype = ctypes.c_char_p
core.open_driver(sys.argv[1])
core.open_cublaslt(sys.argv[1])
MIB = 1 << 20
def show():
    print(fake.fake_log().decode(), end="")
    fake.fake_clear()
def launch(workspace=0, swapped=False, **more):
    matmul = core.LtMatmul(68, 0, [], [(2, 8, 8, 8, 1, 0)] * 4)
    made = core.LtLaunch(matmul, 0, bytes(64), workspace, core.Scalars(0, 1.0, 0.0), swapped, **more)
    fake.fake_clear()
    return made
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


def test_pointers_go_where_they_belong(run):
    lines = run("""
launch(has_bias=True, has_aux=True).run(0xa, 0xb, 0, 0xd, 0xb1, 0xa1, 0x30); show()
launch(swapped=True).run(0xa, 0xb, 0xc, 0xd, 0xb1, 0xa1, 0x30, core.Scalars(0, 2.0, 0.5)); show()
launch(c_is_d=False).run_with([(8, 0xb2), (20, 0x5)], 0xa, 0xb, 0, 0xd, 0x30); show()
""")
    assert lines == [
        "push c0",
        "matmul a=a b=b c=d d=d bias=b1 aux=a1 alpha=1 beta=0 workspace=no 0 on 30",
        "pop",
        "push c0",
        "matmul a=b b=a c=c d=d bias=0 aux=0 alpha=2 beta=0.5 workspace=no 0 on 30",
        "pop",
        "push c0",
        "matmul a=a b=b c=0 d=d bias=b2 aux=0 alpha=1 beta=0 workspace=no 0 on 30",
        "pop",
    ]


def test_a_stream_keeps_one_workspace_that_grows_in_its_order(run):
    lines = run("""
small, large = launch(5 * MIB), launch(9 * MIB)
for made in (small, small, large, small): made.run(1, 2, 0, 3, 0, 0, 0x30)
show(); print(core.kept_workspaces(), core.kept_workspace_bytes() // MIB)
small.run(1, 2, 0, 3, 0, 0, 0x40); small.run(1, 2, 0, 3, 0, 0, 0); small.run(1, 2, 0, 3, 0, 0, 1)
show(); print(core.kept_workspaces(), core.release_workspaces() // MIB, core.kept_workspaces())
""")
    events = [line for line in lines if line.split()[0] in ("alloc", "free")]
    assert events == [
        f"alloc {5 << 20} on 30",
        "free on 30",
        f"alloc {9 << 20} on 30",
        f"alloc {5 << 20} on 40",
        f"alloc {5 << 20} on 0",
    ]
    assert "1 9" in lines
    assert "3 19 0" in lines


def test_a_capture_has_workspace_of_its_own(run):
    lines = run("""
made = launch(MIB)
made.run(1, 2, 0, 3, 0, 0, 0x30)
fake.fake_capture(1)
made.run(1, 2, 0, 3, 0, 0, 0x30); made.run(1, 2, 0, 3, 0, 0, 0x30)
fake.fake_capture(0)
made.run(1, 2, 0, 3, 0, 0, 0x30)
show(); print(core.kept_workspaces())
""")
    events = [line.split()[0] for line in lines if line.split()[0] in ("alloc", "free", "matmul")]
    assert events == ["alloc", "matmul", "alloc", "matmul", "free", "alloc", "matmul", "free", "matmul"]
    assert lines[-1] == "1"


def test_a_workspace_of_the_callers_is_used(run):
    lines = run("launch(MIB).run(1, 2, 0, 3, 0, 0, 0x30, None, 0x7000); show(); print(core.kept_workspaces())")
    assert [line for line in lines if line.startswith(("alloc", "free"))] == []
    assert "workspace=yes 1048576" in lines[1]
    assert lines[-1] == "0"


def test_streams_that_come_and_go_do_not_pile_up(run):
    lines = run("""
made = launch(MIB)
for i in range(400): made.run(1, 2, 0, 3, 0, 0, 0x1000 + 16 * i)
print(core.kept_workspaces())
log = fake.fake_log().decode(); print(log.count("free now"), log.count("synchronize"))
""")
    assert lines == ["128", "272 272"]


def test_a_context_that_is_current_is_not_pushed_and_devices_are_told_apart(run):
    lines = run("""
fake.cuCtxPushCurrent_v2(ctypes.c_void_p(0xC0))
launch().run(1, 2, 0, 3, 0, 0, 0x30); show()
other = core.LtLaunch(core.LtMatmul(68, 0, [], [(2, 8, 8, 8, 1, 0)] * 4), 1, bytes(64), 0, core.Scalars(0, 1.0, 0.0))
fake.fake_clear(); other.run(1, 2, 0, 3, 0, 0, 0x30); show()
""")
    assert [line.split()[0] for line in lines] == ["matmul", "push", "matmul", "pop"]
    assert lines[1] == "push c1"


def test_padding_of_an_auxiliary_output_is_zeroed_first(run):
    lines = run("""
launch(has_aux=True, zeroed_aux_bytes=640).run(1, 2, 0, 3, 0, 0xa1, 0x30)
launch(has_aux=True, zeroed_aux_bytes=640).run_with([(11, 0xa2)], 1, 2, 0, 3, 0x30); show()
""")
    assert lines[1] == "fill a2 with 0, 640 bytes on 30"
    assert lines[2].startswith("matmul")


def test_a_status_names_the_call_and_the_problem(run):
    lines = run("""
try: launch(what="Problem(m=8)").run(1, 2, 0, 0xBAD, 0, 0, 0x30)
except errors.LibraryError as error: print(error)
try: launch(1 << 41).run(1, 2, 0, 3, 0, 0, 0x30)
except errors.LibraryError as error: print(error)
launch(MIB).run(1, 2, 0, 3, 0, 0, 0x30)
""")
    assert lines[0] == "CUBLAS_STATUS_EXECUTION_FAILED (13)"
    assert "cublasLtMatmul for Problem(m=8)" in lines[1]
    assert lines[3] == "CUDA_ERROR_OUT_OF_MEMORY (2)"
    assert "cuMemAllocAsync for a workspace of" in lines[4]


def test_threads_share_a_plan(run):
    lines = run("""
fake.fake_logging(0)
made = launch(MIB, has_bias=True)
def work(stream):
    for _ in range(2000): made.run(1, 2, 0, 3, stream, 0, stream)
workers = [threading.Thread(target=work, args=(0x100 + 16 * i,)) for i in range(4)]
[w.start() for w in workers]; [w.join() for w in workers]
print(core.kept_workspaces())
""")
    assert lines == ["4"]


def test_a_kernels_arguments(run):
    lines = run("""
slot = core.Slot
library = core.KernelLibrary(b"code")
made = core.KernelLaunch(library, "k", 0, (7, 1, 1), (128, 1, 1), [slot.value(1), slot.value(0), slot.workspace(), slot.fixed(b"abcd")],
    shared_bytes=100000, cluster=(2, 1, 1), overlaps_previous=True, workspace_bytes=64, zeroed_bytes=16)
show(); made.run(0x30, 0xaa, 0xbb); show()
maps = core.KernelLaunch(library, "k", 0, (1, 1, 1), (32, 1, 1), [slot.tensor_map(0, 9, [64, 64], [128], [64, 64])])
for address in (0x100, 0x200, 0x100): maps.run(0x30, address)
show(); print(maps.cached_tensor_maps)
for wrong in ((), (1, 2)):
    try: maps.run(0x30, *wrong)
    except ValueError as error: print(error)
try: maps.run(0x30, -1)
except (ValueError, OverflowError) as error: print(type(error).__name__)
try: core.KernelLaunch(library, "absent", 0, (1, 1, 1), (32, 1, 1), [])
except errors.LibraryError as error: print(str(error).splitlines()[1])
""")
    text = "\n".join(lines)
    assert "attribute 8 = 100000 on device 0" in text
    assert "launch grid 7 block 128 shared 100000 on 30\n  with 4: 2 1 1\n  with 6: 1 0 0\n  first parameter bb" in text
    assert "with 0, 16 bytes on 30" in text
    assert [line for line in lines if line.startswith("map of")] == ["map of 100, type 9, rank 2", "map of 200, type 9, rank 2"]
    assert lines[-5:-1] == ["2", "k takes 1 values, not 0", "k takes 1 values, not 2", "OverflowError"]
    assert "cuLibraryGetKernel for absent" in lines[-1]


ENGINE = """
from dataclasses import replace
from epigemm.engines.base import Call
from epigemm.engines.cuda import libraries
from epigemm.engines.cublaslt import library
from epigemm.engines.cublaslt.engine import ENGINE
from epigemm.enums import MatmulEpilog
from epigemm.expression.check import check
from epigemm.expression.named import named
from epigemm.expression.nodes import Expression, Node, Output, acc, input_
from epigemm.problem import Operand, Problem
libraries._opened.update({n: libraries.Library(n, sys.argv[1], "in the process") for n in ("cuda", "cublasLt")})
def prepared(problem, expression, **config):
    candidate = ENGINE.candidates(problem, expression, 1)[0]
    config = tuple((k, config.get(k, v)) for k, v in candidate.config)
    made = ENGINE.prepare(problem, expression, replace(candidate, config=config))
    fake.fake_clear()
    return made
def matmuls():
    lines = [line for line in fake.fake_log().decode().splitlines() if line.split()[0] in ("matmul", "alloc", "fill", "free")]
    print("\\n".join(lines)); fake.fake_clear()
"""


def test_an_executable_finds_its_addresses(run):
    lines = run(
        ENGINE
        + """
problem = Problem.of("f32", m=128, n=64, k=32, order="col", device="cuda:0")
problem = replace(problem, inputs=(("bias", Operand.dense("f32", (128, 1))),))
made = prepared(problem, check(named(MatmulEpilog.RELU_AUX_BIAS), problem))
made.run(Call(0xa, (0xb,), None, 0xd, {"bias": 0xb1}, {"relu_aux": 0xa1}, stream=0x30))
made.run(Call(0xa, (0xb,), None, 0xd, {"bias": 0xb1}, {"relu_aux": 0xa1}, alpha=2.0, stream=0x30))
matmuls(); print(made.bias, made.aux, made.workspace_bytes)
row = Problem.of("f32", m=128, n=64, k=32, device="cuda:0", c=True)
plain = check(Expression((Output("d", acc()),)), row)
made = prepared(row, plain)
made.run(Call(0xa, (0xb,), 0xc, 0xd, beta=0.5, stream=0x30)); matmuls()
"""
    )
    assert lines == [
        "alloc 1048576 on 30",
        "matmul a=a b=b c=d d=d bias=b1 aux=a1 alpha=1 beta=0 workspace=yes 4096 on 30",
        "matmul a=a b=b c=d d=d bias=b1 aux=a1 alpha=2 beta=0 workspace=yes 4096 on 30",
        "bias relu_aux 4096",
        "matmul a=b b=a c=c d=d bias=0 aux=0 alpha=1 beta=0.5 workspace=yes 4096 on 30",
    ]


def test_alpha_0_reads_zeros_instead(run):
    lines = run(
        ENGINE
        + """
problem = Problem.of("f32", m=128, n=64, k=32, device="cuda:0", c=True)
made = prepared(problem, check(Expression((Output("d", acc()),)), problem))
made.run(Call(0xa, (0xb,), 0xc, 0xd, alpha=0.0, beta=3.0, stream=0x30)); matmuls()
"""
    )
    assert lines[:2] == ["alloc 8192 on 30", "fill 10000 with 0, 8192 bytes on 30"]
    assert lines[-2:] == ["matmul a=10000 b=10000 c=c d=d bias=0 aux=0 alpha=0 beta=3 workspace=yes 4096 on 30", "free on 30"]


def test_fp8_scales_go_to_the_operand_they_belong_to(run):
    lines = run(
        ENGINE
        + """
for order in ("row", "col"):
    problem = Problem.of("bf16", m=128, n=64, k=32, device="cuda:0", order=order)
    problem = replace(problem, a=Operand.dense("e4m3", (128, 32)), b=(Operand.dense("e4m3", (32, 64), "col"),))
    made = prepared(problem, check(Expression((Output("d", acc()),)), problem))
    made.run(Call(0xa, (0xb,), None, 0xd, {"quantization_scale_a": 0x5a, "quantization_scale_b": 0x5b}, stream=0x30))
    print(order, made.scales)
"""
    )
    assert lines == [
        "row ((17, 'quantization_scale_b'), (18, 'quantization_scale_a'))",
        "col ((17, 'quantization_scale_a'), (18, 'quantization_scale_b'))",
    ]


def test_a_setting_that_does_not_run_is_refused_when_it_is_prepared(run):
    lines = run(
        ENGINE
        + """
problem = Problem.of("f32", m=128, n=64, k=32, device="cuda:0")
try: prepared(problem, check(Expression((Output("d", acc()),)), problem), tile=(64, 64))
except errors.AlgorithmError as error: print(error)
"""
    )
    assert lines[:2] == ["cuBLASLt does not run this algorithm for this product", "  CUBLAS_STATUS_INVALID_VALUE (7)"]


def test_an_algorithm_travels_as_json_and_is_checked(run):
    lines = run(
        ENGINE
        + """
import json
from epigemm import Algorithm
def plain(m, **compute):
    problem = Problem.of("f32", m=m, n=64, k=32, device="cuda:0")
    problem = replace(problem, compute=replace(problem.compute, **compute))
    return problem, check(Expression((Output("d", acc()),)), problem)
here, other, tight = plain(128), plain(256), plain(128, memory_limit=1024)
planned = Algorithm(ENGINE.candidates(*here, 1)[0], here)
data = json.loads(json.dumps(planned.to_data()))
print(planned.algorithm_id, data["versions"], data["workspace_bytes"])
restored = Algorithm.from_data(data)
restored.check(*here); ENGINE.prepare(*here, restored.candidate)
for wrong, problem in ((data, other), ({**data, "versions": {**data["versions"], "driver": "1"}}, here)):
    try: Algorithm.from_data(wrong).check(*problem)
    except errors.AlgorithmError as error: print(str(error)[:47])
try: ENGINE.prepare(*tight, restored.candidate)
except errors.AlgorithmError as error: print(str(error).splitlines()[0])
print(ENGINE.applicable_algorithm_ids(*here, 4))
"""
    )
    assert lines == [
        "42 {'cublasLt': '130100', 'driver': '13000', 'device': 'made up sm_90'} 4096",
        "A stored algorithm does not fit: its problem is",
        "A stored algorithm does not fit: its versions i",
        "This algorithm needs 4096 bytes of workspace, and memory_limit allows 1024.",
        "[42]",
    ]


def test_the_cost_of_a_call_is_a_microsecond_at_most(run):
    """The compiled core's own share of `launch`, on any machine: generous, it is 0.3 us on a fast one."""
    lines = run("""
import time
fake.fake_logging(0)
run = launch(has_bias=True).run
best = 1e9
for _ in range(20):
    start = time.perf_counter()
    for _ in range(2000): run(0xa, 0xb, 0, 0xd, 0xb1, 0, 0x30)
    best = min(best, (time.perf_counter() - start) / 2000)
print(best * 1e6)
""")
    assert float(lines[0]) < 3.0


def test_code_is_loaded_once_and_stays_loaded(run):
    """A CUDA graph may launch a kernel long after the plan that it was captured from is gone."""
    lines = run("""
import gc
for code in (b"one", b"two", b"one"):
    library = core.KernelLibrary(code); del library; gc.collect()
show()
""")
    assert [line for line in lines if "load" in line] == ["load one", "load two"]

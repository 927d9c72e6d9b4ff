"""Host time of one call at m = n = k = 64, fp16, RELU_BIAS: the engine beside a C loop over cublasLtMatmul and torch.

Usage: python tests/device/cublaslt/host_time.py RESULT.json
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from epigemm.engines.base import Call
from epigemm.engines.cublaslt.engine import ENGINE
from epigemm.engines.cuda import libraries
from epigemm.enums import MatmulEpilog
from epigemm.expression.check import check
from epigemm.expression.named import named
from epigemm.problem import Operand, Problem

SIZE = 64
CALLS = 500  # a batch; fewer than what fills the launch queue
ROUNDS = 21


def c_loop(a, b, bias, d, stream):
    """A function that returns the seconds of CALLS calls."""
    folder = Path(tempfile.mkdtemp())
    source = Path(__file__).with_name("loop.cpp")
    subprocess.run(["g++", "-O3", "-shared", "-fPIC", "-std=c++17", "-o", str(folder / "loop.so"), str(source), "-ldl"], check=True)
    library = ctypes.CDLL(str(folder / "loop.so"))
    library.prepare.restype, library.prepare.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_void_p]
    library.loop.restype, library.loop.argtypes = ctypes.c_double, [ctypes.c_void_p] * 5 + [ctypes.c_int]
    prepared = library.prepare(libraries.native().cublaslt_path().encode(), bias.data_ptr())
    assert prepared, "the C loop could not be prepared"
    return lambda: library.loop(prepared, a.data_ptr(), b.data_ptr(), d.data_ptr(), stream, CALLS)


def timed(call):
    """A function that returns the seconds of CALLS calls of `call`."""

    def run():
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        return time.perf_counter() - start

    return run


def empty_loop():
    start = time.perf_counter()
    for _ in range(CALLS):
        pass
    return time.perf_counter() - start


def variants():
    a, b, d = (torch.randn((SIZE, SIZE), device="cuda", dtype=torch.float16) for _ in range(3))
    bias = torch.randn((SIZE, 1), device="cuda", dtype=torch.float16)
    d = torch.empty_strided((SIZE, SIZE), (1, SIZE), device="cuda", dtype=torch.float16)
    problem = Problem.of("f16", m=SIZE, n=SIZE, k=SIZE, order="col", device="cuda:0")
    problem = replace(problem, inputs=(("bias", Operand.dense("f16", (SIZE, 1))),))
    expression = check(named(MatmulEpilog.RELU_BIAS), problem)
    executable = ENGINE.prepare(problem, expression, ENGINE.candidates(problem, expression, 1)[0])
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream
    launch, raw_stream = executable.launch, torch._C._cuda_getCurrentRawStream
    addresses = (a.data_ptr(), b.data_ptr(), 0, d.data_ptr(), bias.data_ptr(), 0, stream)
    call = Call(a.data_ptr(), (b.data_ptr(),), None, d.data_ptr(), {"bias": bias.data_ptr()}, {}, 1.0, 0.0, stream)
    weight, row = b.t().contiguous(), bias.view(-1)
    linear = torch.nn.functional.linear
    yield "C loop over cublasLtMatmul", c_loop(a, b, bias, d, stream)
    yield "launch, fixed addresses", timed(lambda: launch(*addresses))
    yield (
        "launch, data_ptr and raw stream each call",
        timed(lambda: launch(a.data_ptr(), b.data_ptr(), 0, d.data_ptr(), bias.data_ptr(), 0, raw_stream(0))),
    )
    yield "executable.run(call)", timed(lambda: executable.run(call))
    yield "torch.mm(out=)", timed(lambda: torch.mm(a, b, out=d))
    yield "torch.mm", timed(lambda: torch.mm(a, b))
    yield "F.linear", timed(lambda: linear(a, weight, row))
    yield "relu(F.linear)", timed(lambda: torch.relu(linear(a, weight, row)))
    yield "torch.empty", timed(lambda: torch.empty((SIZE, SIZE), device="cuda", dtype=torch.float16))
    yield "empty Python loop", empty_loop


def main(result: Path) -> None:
    runs = dict(variants())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(ROUNDS + 3):
        for name, run in runs.items():
            torch.cuda.synchronize()
            seconds = run()
            assert seconds >= 0, name
            if round_ >= 3:
                times[name].append(1e6 * seconds / CALLS)
    floor = statistics.median(times["C loop over cublasLtMatmul"])
    rows = {name: {"median_us": statistics.median(t), "min_us": min(t), "max_us": max(t)} for name, t in times.items()}
    for name, row in rows.items():
        print(f"{name:<45} {row['median_us']:8.2f} us  {row['median_us'] / floor:5.2f} x  [{row['min_us']:.2f}, {row['max_us']:.2f}]")
    result.write_text(json.dumps({"size": SIZE, "calls": CALLS, "rounds": ROUNDS, "rows": rows, "torch": torch.__version__}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The suite `host`: the host time of a call, m = n = k = 64 float16 RELU_BIAS, beside a C loop over cublasLtMatmul, PyTorch, the peer."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import epigemm
from epigemm.bench.device import Bar, Group, Timed, made, peer, time_in_turn

SIZE = 64
LEAST_ROUNDS = 21
# Calls between two waits: fewer than fill the launch queue, enough for the clock.
_CALLS, _LEAST_CALLS, _BATCH_S = 500, 10, 0.005

C_LOOP, OUT, EXECUTE, STATELESS = "C loop over cublasLtMatmul", "execute(out=)", "execute()", "matmul()"
MM, MM_OUT, LINEAR, RELU_LINEAR = "torch.mm", "torch.mm(out=)", "F.linear", "relu(F.linear)"
PEER, PEER_RESET, PEER_STATELESS = "nvmath execute", "nvmath reset + execute", "nvmath matmul()"

BARS = (
    Bar(OUT, C_LOOP, 1.3),
    Bar(EXECUTE, MM, 1.0),
    Bar(STATELESS, LINEAR, 1.0),
    Bar(STATELESS, PEER_STATELESS, 1 / 20),
    Bar(EXECUTE, PEER, 1 / 3.8),
    Bar(OUT, MM_OUT),
    Bar(STATELESS, RELU_LINEAR),
    Bar(EXECUTE, PEER_RESET),
)

_SOURCES = (Path.cwd(), Path(__file__).resolve().parents[3])


def measure(torch: Any, engine: str, rounds: int, on_round: Callable[[], None] = lambda: None) -> Iterator[Group]:
    """One group: medians in microseconds a call."""
    group = Group(f"m=n=k={SIZE} float16 RELU_BIAS, host time of a call", "us", bars=BARS)
    data = _Data(torch)
    makers = {**_ours(data, engine), **_torch_s(data), **_peer_s(data)}
    calls = made(group, makers)
    runs: dict[str, Timed] = {}
    for name, call in calls.items():
        try:
            data.verify(call(), name)
            runs[name] = _batch(torch, call)
        except Exception as error:
            group.failed[name] = f"{type(error).__name__}: {error}"
    runs = {**made(group, {C_LOOP: lambda: _c_loop(data)}), **runs}
    time_in_turn(group, runs, max(rounds, LEAST_ROUNDS), on_round)
    yield group


class _Data:
    """Operands as each contender takes them, and what RELU_BIAS gives."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        generator = torch.Generator("cuda").manual_seed(0)
        make = {"device": "cuda", "dtype": torch.float16, "generator": generator}
        self.a, self.b = torch.randn((SIZE, SIZE), **make), torch.randn((SIZE, SIZE), **make)
        self.bias = torch.randn((SIZE, 1), **make)
        self.weight, self.row = self.b.t().contiguous(), self.bias.view(-1)
        self.product = self.a.double() @ self.b.double()

    def out(self, column: bool = True) -> Any:
        strides = (1, SIZE) if column else (SIZE, 1)
        return self.torch.empty_strided((SIZE, SIZE), strides, device="cuda", dtype=self.torch.float16).fill_(float("nan"))

    def verify(self, result: Any, name: str) -> None:
        torch = self.torch
        exact = {
            MM: self.product,
            MM_OUT: self.product,
            LINEAR: self.product + self.row.double(),
            RELU_LINEAR: torch.relu(self.product + self.row.double()),
        }.get(name, torch.relu(self.product + self.bias.double()))
        allowed = SIZE * 2.0**-23 * (self.a.double().abs() @ self.b.double().abs()) + 2.0**-9 * (exact.abs() + 1)
        if not bool(((result.double() - exact).abs() <= allowed).all()):
            raise AssertionError(f"{name} computes something else")


def _ours(data: _Data, engine: str) -> dict[str, Callable[[], Callable[[], Any]]]:
    relu_bias, inputs = epigemm.MatmulEpilog.RELU_BIAS, {"bias": data.bias}

    def planned() -> Any:
        product = epigemm.Matmul(data.a, data.b)
        product.plan(epilog=relu_bias, epilog_inputs=inputs, engine=engine)
        product.execute()
        return product

    def into_out() -> Callable[[], Any]:
        execute, out = planned().execute, data.out()
        return lambda: execute(out=out)

    def stateless() -> Callable[[], Any]:
        matmul, a, b = epigemm.matmul, data.a, data.b
        return lambda: matmul(a, b, epilog=relu_bias, epilog_inputs=inputs, engine=engine)

    return {OUT: into_out, EXECUTE: lambda: planned().execute, STATELESS: stateless}


def _torch_s(data: _Data) -> dict[str, Callable[[], Callable[[], Any]]]:
    torch = data.torch
    mm, linear, relu = torch.mm, torch.nn.functional.linear, torch.relu
    a, b, weight, row, out = data.a, data.b, data.weight, data.row, data.out(column=False)
    return {
        MM: lambda: lambda: mm(a, b),
        MM_OUT: lambda: lambda: mm(a, b, out=out),
        LINEAR: lambda: lambda: linear(a, weight, row),
        RELU_LINEAR: lambda: lambda: relu(linear(a, weight, row)),
    }


def _peer_s(data: _Data) -> dict[str, Callable[[], Callable[[], Any]]]:
    advanced = peer()
    if advanced is None:
        return {}
    relu_bias, a, b, inputs = advanced.MatmulEpilog.RELU_BIAS, data.a, data.b, {"bias": data.bias}

    def planned() -> Any:
        product = advanced.Matmul(a, b)
        product.plan(epilog=relu_bias, epilog_inputs=inputs)
        return product

    def reset() -> Callable[[], Any]:
        product = planned()

        def call() -> Any:
            product.reset_operands(a=a, b=b, epilog_inputs=inputs)
            return product.execute()

        return call

    stateless = advanced.matmul
    return {
        PEER: lambda: planned().execute,
        PEER_RESET: reset,
        PEER_STATELESS: lambda: lambda: stateless(a, b, epilog=relu_bias, epilog_inputs=inputs),
    }


def _batch(torch: Any, call: Callable[[], Any]) -> Timed:
    """A function that returns the microseconds of one of many calls."""

    def timed(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count

    timed(20)
    count = max(_LEAST_CALLS, min(_CALLS, int(_BATCH_S / timed(20))))
    return lambda: 1e6 * timed(count)


def _c_loop(data: _Data) -> Timed:
    """The same launches from C, built from the source beside the device tests."""
    from epigemm.engines.cuda import libraries

    places = [folder / "tests" / "device" / "cublaslt" / "loop.cpp" for folder in _SOURCES]
    source = next((place for place in places if place.exists()), None)
    if source is None:
        raise FileNotFoundError(f"loop.cpp is at none of {', '.join(map(str, places))}: run this in a source tree")
    built = Path(tempfile.mkdtemp()) / "loop.so"
    command = ["g++", "-O3", "-shared", "-fPIC", "-std=c++17", "-o", str(built), str(source), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    library = ctypes.CDLL(str(built))
    library.prepare.restype, library.prepare.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_void_p]
    library.loop.restype, library.loop.argtypes = ctypes.c_double, [ctypes.c_void_p] * 5 + [ctypes.c_int]
    core, out = libraries.open_cublaslt(), data.out()
    prepared = library.prepare(core.cublaslt_path().encode(), data.bias.data_ptr())
    if not prepared:
        raise RuntimeError("cuBLASLt refused the C loop's product")
    stream = data.torch.cuda.current_stream().cuda_stream

    def run() -> float:
        data.torch.cuda.synchronize()
        seconds: float = library.loop(prepared, data.a.data_ptr(), data.b.data_ptr(), out.data_ptr(), stream, _CALLS)
        if seconds < 0:
            raise RuntimeError("cublasLtMatmul failed in the C loop")
        return 1e6 * seconds / _CALLS

    run()
    data.torch.cuda.synchronize()
    data.verify(out, C_LOOP)
    return run

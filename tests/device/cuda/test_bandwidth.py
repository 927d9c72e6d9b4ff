"""How near the pointwise kernel comes to the memory's speed, beside a copy timed in the same run. `pytest -s` prints the table."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

import epigemm as eg
from epigemm.engines.cuda import pointwise
from epigemm.expression.check import check
from epigemm.expression.trace import as_epilogue
from epigemm.problem import Operand, Problem

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ARCH = "sm_{}{}".format(*torch.cuda.get_device_capability()) + ("a" if torch.cuda.get_device_capability()[0] == 9 else "")
M, N = 8192, 14336  # 235 MB in bf16: several times the L2
ROUNDS = 15


def relu(acc: Any) -> Any:
    return eg.relu(acc)


def bias_gelu(acc: Any, row: Any) -> Any:
    return eg.gelu(acc + row)


def gelu_residual(acc: Any, row: Any, matrix: Any) -> Any:
    return eg.gelu(acc + row) + matrix


def relu_aux_bias(acc: Any, row: Any) -> Any:
    y = acc + row
    return eg.outputs(eg.relu(y), mask=eg.bitmask(y >= 0))


def drelu_bgrad(acc: Any, bits: Any) -> Any:
    dx = eg.where(eg.unbitmask(bits), acc, 0.0)
    return eg.outputs(dx, bgrad=eg.sum(dx, axis="n"))


def sum_over_m(acc: Any, row: Any) -> Any:
    y = acc + row
    return eg.outputs(y, sums=eg.sum(y, axis="m"))


def dropout(acc: Any, row: Any) -> Any:
    return eg.dropout(acc + row, 0.1, 1234)


def swiglu(gate: Any, up: Any) -> Any:
    return eg.silu(gate) * up


# name: epilogue, dtype of D, order, dtype of the accumulators ("" is D itself), the share of a copy's speed it must reach.
# The last is a guard, a little under what an H200 has shown: what computes more than about 30 instructions an element, and sums
# (whose blocks end with a fence and a count), stay further from the copy.
KERNELS: dict[str, tuple[Callable[..., Any], str, str, str, float]] = {
    "relu": (relu, "bf16", "row", "", 0.9),
    "relu f32": (relu, "f32", "row", "", 0.9),
    "relu col": (relu, "bf16", "col", "", 0.9),
    "relu of f32": (relu, "bf16", "row", "f32", 0.9),
    "bias gelu (erf)": (bias_gelu, "bf16", "row", "", 0.65),
    "bias gelu residual": (gelu_residual, "bf16", "row", "", 0.8),
    "relu aux bias": (relu_aux_bias, "bf16", "row", "", 0.85),
    "relu aux bias col": (relu_aux_bias, "bf16", "col", "", 0.85),
    "drelu bgrad": (drelu_bgrad, "bf16", "row", "", 0.65),
    "drelu bgrad col": (drelu_bgrad, "bf16", "col", "", 0.5),
    "sum over m": (sum_over_m, "bf16", "row", "", 0.65),
    "dropout": (dropout, "bf16", "row", "", 0.7),
    "swiglu": (swiglu, "bf16", "row", "", 0.8),
}


def kernel(name: str, m: int = M, n: int = N) -> pointwise.Pointwise:
    function, dtype, order, acc_dtype, _ = KERNELS[name]
    bits = Operand.dense("u8", (m // 8, n), "col") if order == "col" else Operand.dense("u8", (m, n // 8))
    given = {"row": Operand.dense(dtype, (1, n)), "matrix": Operand.dense(dtype, (m, n), order), "bits": bits}
    epilogue = as_epilogue(function)
    count = 2 if function is swiglu else 1
    expression = epilogue.expression(accumulators=count)
    inputs = {name: given[name] for name in expression.input_names}
    problem = Problem.of(dtype, m=m, n=n, k=8, accumulators=count, inputs=inputs, order=order)
    first = Operand.dense(acc_dtype, (m, n), order) if acc_dtype else problem.d
    return pointwise.pointwise(problem, check(expression, problem), (first, *(problem.d,) * (count - 1)))


class Bench:
    """A kernel with memory of its own for each tensor but an accumulator that is D."""

    def __init__(self, made: pointwise.Pointwise, in_place: bool) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        torch.zeros(1, device="cuda")
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        assert self.library.cuModuleLoadData(ctypes.byref(module), made.compile(ARCH).code) == 0
        assert self.library.cuModuleGetFunction(ctypes.byref(self.function), module, pointwise.ENTRY.encode()) == 0
        self.made = made
        self.memory = {(t.role, t.name): torch.zeros(M * N * t.dtype.bytes, dtype=torch.uint8, device="cuda") for t in made.tensors}
        if in_place:
            self.memory[("acc", "0")] = self.memory[("output", "d")]
        self.workspace = torch.zeros(max(made.workspace_bytes, 256), dtype=torch.uint8, device="cuda")
        self.values: list[Any] = [ctypes.c_uint64(self.memory[(t.role, t.name)].data_ptr()) for t in made.tensors]
        self.values.append(ctypes.c_uint64(self.workspace.data_ptr()))
        self.values.append(ctypes.create_string_buffer(made.extents, len(made.extents)))
        self.pointers = (ctypes.c_void_p * len(self.values))(*(ctypes.addressof(v) for v in self.values))

    def __call__(self) -> None:
        if self.made.zeroed_bytes:
            self.workspace[: self.made.zeroed_bytes].zero_()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self.library.cuLaunchKernel(self.function, self.made.blocks, 1, 1, pointwise.THREADS, 1, 1, 0, stream, self.pointers, None)
        assert status == 0


def timed_us(*work: Callable[[], Any]) -> list[float]:
    """The median time of each, in interleaved rounds after two that do not count."""
    times: list[list[float]] = [[] for _ in work]
    for index in range(ROUNDS + 2):
        for run, found in zip(work, times, strict=True):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            stop.synchronize()
            if index >= 2:
                found.append(start.elapsed_time(stop) * 1000)
    return [median(found) for found in times]


@pytest.mark.parametrize("name", KERNELS)
def test_it_moves_bytes_nearly_as_fast_as_a_copy(name: str) -> None:
    made = kernel(name)
    bench = Bench(made, in_place=not KERNELS[name][3])
    half = torch.empty(made.moved_bytes // 2, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(half)
    ours, copy = timed_us(bench, lambda: other.copy_(half))
    usage = made.compile(ARCH).usage[0]
    print(
        f"\n{name:22s} {ours:8.1f} us  {made.moved_bytes / ours / 1e6:5.2f} TB/s  copy {made.moved_bytes / copy / 1e6:5.2f} TB/s"
        f"  {copy / ours:5.2f} of it  {usage.registers} registers"
    )
    assert copy / ours >= KERNELS[name][4]

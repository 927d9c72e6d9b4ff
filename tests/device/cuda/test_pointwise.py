"""The pointwise kernel on a GPU against the float64 reference: dtypes, orders, strides, batches, masks, reductions, several accumulators.

Accumulators are exact in every type (small integers over 256), so the reference's product, which is by the identity, is too.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import epigemm as eg
from epigemm import dtypes, layouts
from epigemm.engines import outputs
from epigemm.engines.cuda import pointwise
from epigemm.expression.check import check
from epigemm.expression.nodes import Expression
from epigemm.expression.trace import as_epilogue
from epigemm.problem import Operand, Problem
from epigemm.testing import placing
from epigemm.testing.bounded import Arithmetic
from epigemm.testing.numeric import Guarded, assert_close, assert_equal, assert_mask, guarded
from epigemm.testing.reference import Product, Result, evaluate

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ARCH = "sm_{}{}".format(*torch.cuda.get_device_capability()) + ("a" if torch.cuda.get_device_capability()[0] == 9 else "")


# ---------------------------------------------------------------- launching


class Driver:
    """libcuda, by which a cubin is loaded and launched in the context that torch made."""

    def __init__(self) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.library = ctypes.CDLL("libcuda.so.1")
        self.functions: dict[bytes, ctypes.c_void_p] = {}

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        assert status == 0, f"{name} returned {status}"

    def function(self, code: bytes) -> ctypes.c_void_p:
        if code not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), code)
            self.call("cuModuleGetFunction", ctypes.byref(function), module, pointwise.ENTRY.encode())
            self.functions[code] = function
        return self.functions[code]

    def launch(self, kernel: pointwise.Pointwise, addresses: list[int], workspace: Any) -> None:
        if kernel.zeroed_bytes:
            workspace[: kernel.zeroed_bytes].zero_()
        values: list[Any] = [ctypes.c_uint64(a) for a in (*addresses, workspace.data_ptr())]
        values.append(ctypes.create_string_buffer(kernel.extents, len(kernel.extents)))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        function = self.function(kernel.compile(ARCH).code)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.call("cuLaunchKernel", function, kernel.blocks, 1, 1, pointwise.THREADS, 1, 1, 0, stream, pointers, None)


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


class OnDevice:
    """A guarded host tensor's whole buffer on the GPU, at the same distance from a 256-byte boundary."""

    def __init__(self, tensor: Guarded) -> None:
        self.tensor = tensor
        start = tensor.buffer.ctypes.data
        self.shift = start % 256
        self.memory = torch.empty(len(tensor.buffer) + 512, dtype=torch.uint8, device="cuda")
        self.shift += -self.memory.data_ptr() % 256
        self.memory[self.shift : self.shift + len(tensor.buffer)] = torch.from_numpy(tensor.buffer).cuda()
        self.address = self.memory.data_ptr() + self.shift + tensor.array.__array_interface__["data"][0] - start

    def fetch(self) -> Any:
        """The tensor's values now, its surroundings checked."""
        self.tensor.buffer[...] = self.memory[self.shift : self.shift + len(self.tensor.buffer)].cpu().numpy()
        self.tensor.assert_intact("an output")
        return self.tensor.array


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Given:
    """An input: its extent, dtype, layout (`placing.LAYOUTS`), and whether it is batched."""

    extent: str
    dtype: str = ""
    layout: str = "row"
    batched: bool = False


@dataclass(frozen=True)
class Case:
    """One kernel.

    Args:
        name: of the case.
        function: the epilogue.
        m, n, batch: of D.
        dtype: of the product; D's unless `d_dtype` says otherwise.
        order: D's.
        inputs: by name.
        acc_dtype: of the accumulators in memory; "" is D's memory itself, finished in place.
        d_layout: how D lies.
    """

    name: str
    function: Callable[..., Any]
    m: int = 97
    n: int = 264
    batch: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    d_dtype: str = ""
    order: str = "row"
    inputs: dict[str, Given] = field(default_factory=dict)
    acc_dtype: str = ""
    d_layout: str = ""
    accumulators: int = 1

    def __str__(self) -> str:
        return self.name


def plain(acc: Any) -> Any:
    return acc


def gelu_residual(acc: Any, bias: Any, residual: Any) -> Any:
    return eg.gelu(acc + bias) + residual


def all_extents(acc: Any, one: Any, column: Any, row: Any, matrix: Any) -> Any:
    return eg.outputs(acc * one + column - row * matrix, twice=column * 2.0, less=row - 1.0, same=one + 0.5)


def relu_aux(acc: Any, bias: Any) -> Any:
    y = acc + bias
    return eg.outputs(eg.relu(y), mask=eg.bitmask(y >= 0))


def backward(acc: Any, mask: Any) -> Any:
    dx = eg.where(eg.unbitmask(mask), acc, 0.0)
    return eg.outputs(dx, along_m=eg.sum(dx, axis="m"), along_n=eg.cast(eg.sum(dx, axis="n"), "bfloat16"))


def statistics(acc: Any, bias: Any) -> Any:
    y = acc + bias
    return eg.outputs(
        y,
        sum_m=eg.sum(y, axis="m"),
        sum_n=eg.sum(y * y, axis="n"),
        total=eg.sum(y),
        max_m=eg.amax(y, axis="m"),
        max_n=eg.amax(eg.abs(y), axis="n"),
        largest=eg.amax(y),
    )


def gated(gate: Any, up: Any) -> Any:
    return eg.outputs(eg.silu(gate) * up, gate=gate, up=up)


def dropped(acc: Any, seed: Any) -> Any:
    return eg.dropout(acc, 0.25, seed)


def complex_scaled(acc: Any, bias: Any) -> Any:
    return acc * 2.0 - bias


ROW, COLUMN, MATRIX, SCALAR = (Given(e) for e in ("row", "column", "matrix", "scalar"))
GELU = {"bias": ROW, "residual": MATRIX}
EVERY = {"one": SCALAR, "column": COLUMN, "row": ROW, "matrix": MATRIX}
BITS, SEED = Given("bits", "uint8"), Given("scalar", "int64")


def batched(inputs: dict[str, Given]) -> dict[str, Given]:
    return {name: replace(given, batched=True) for name, given in inputs.items()}


def shapes() -> list[Case]:
    found = [
        Case(f"gelu_residual-{d}-{o}", gelu_residual, dtype=d, order=o, inputs=GELU)
        for d in ("float16", "bfloat16", "float32", "float64")
        for o in ("row", "col")
    ]
    found += [
        Case(f"sizes-{m}x{n}-{o}", gelu_residual, m, n, order=o, inputs=GELU)
        for m, n in ((1, 1), (1, 40), (40, 1), (127, 131), (8, 1024), (1031, 8), (33, 2049))
        for o in ("row", "col")
    ]
    found += [
        Case(f"statistics-{m}x{n}-{o}-{d}", statistics, m, n, order=o, dtype=d, inputs={"bias": COLUMN})
        for m, n in ((1, 1), (97, 264), (301, 77), (4100, 24), (20, 5000), (2500, 2048))
        for o in ("row", "col")
        for d in ("bfloat16", "float32")
    ]
    found += [Case(f"statistics-float64-{o}", statistics, 130, 300, order=o, dtype="float64", inputs={"bias": ROW}) for o in ("row", "col")]
    found += [
        Case(f"empty-{m}x{n}-{b}", statistics, m, n, b, inputs={"bias": ROW})
        for m, n, b in ((0, 40, ()), (40, 0, ()), (0, 0, ()), (8, 8, (0,)), (0, 5, (3,)))
    ]
    return found


def inputs_and_masks() -> list[Case]:
    found = [Case(f"extents-{o}", all_extents, order=o, inputs=EVERY) for o in ("row", "col")]
    found += [Case(f"extents-batched-{o}", all_extents, 33, 72, (3, 2), order=o, inputs=batched(EVERY)) for o in ("row", "col")]
    found += [
        Case(f"extents-shared-{o}", all_extents, 33, 72, (2, 3), order=o, inputs={**EVERY, "matrix": Given("matrix", batched=True)})
        for o in ("row", "col")
    ]
    found += [
        Case(f"mask-{length}-{o}-{d}", relu_aux, 19, length, order=o, dtype=d, inputs={"bias": ROW})
        for length in (1, 7, 8, 9, 127, 128, 129, 520)
        for o in ("row", "col")
        for d in ("bfloat16", "float32")
    ]
    found += [
        Case(f"backward-{m}x{n}-{o}", backward, m, n, b, order=o, inputs={"mask": replace(BITS, batched=True)})
        for m, n, b in ((97, 264, ()), (129, 65, (2,)), (700, 1000, ()))
        for o in ("row", "col")
    ]
    return found


def layouts_and_types() -> list[Case]:
    found = [
        Case(f"residual-{layout}", gelu_residual, 65, 136, inputs={"bias": ROW, "residual": Given("matrix", layout=layout)})
        for layout in placing.LAYOUTS
        if not layout.startswith("batch")
    ]
    found += [
        Case(f"input-dtype-{d}", gelu_residual, inputs={"bias": Given("row", d), "residual": Given("matrix", d)})
        for d in ("float32", "float16", "float8_e4m3fn", "float8_e5m2", "float64")
    ]
    found += [
        Case(f"d-{layout}", gelu_residual, 65, 136, order="col" if layout.endswith("col") else "row", inputs=GELU, d_layout=layout)
        for layout in ("padded", "padded_col", "misaligned", "stepped", "negative")
    ]
    found += [
        Case(f"batch-{layout}", gelu_residual, 24, 40, (3, 2), inputs=GELU, d_layout=layout)
        for layout in ("batch_last", "batch_reversed", "batch_swapped")
    ]
    found += [
        Case(f"gated-{a or 'in place'}-{o}", gated, accumulators=2, acc_dtype=a, order=o) for a in ("", "float32") for o in ("row", "col")
    ]
    found += [
        Case(
            f"narrow-{d}",
            gelu_residual,
            48,
            160,
            d_dtype=d,
            inputs={"bias": ROW, "residual": Given("matrix", "bfloat16")},
            acc_dtype="float32",
        )
        for d in ("float8_e4m3fn", "float8_e5m2")
    ]
    found += [Case(f"dropout-{o}", dropped, 50, 77, (2,), order=o, inputs={"seed": SEED}) for o in ("row", "col")]
    found += [
        Case(f"complex-{d}-{o}", complex_scaled, 33, 20, dtype=d, order=o, inputs={"bias": ROW})
        for d in ("complex64", "complex128")
        for o in ("row", "col")
    ]
    return found


CASES = shapes() + inputs_and_masks() + layouts_and_types()


# ---------------------------------------------------------------- one case


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Values that are exact in `dtype` and in float32."""
    kind = dtypes.of(dtype)
    if kind.kind == "integer":
        return np.full(shape, -0x123456789ABCDEF, kind.numpy)
    if kind.kind == "bits":
        return rng.integers(0, 256, shape, np.uint8)
    values = rng.integers(-512, 513, shape) / 256
    return (values + (1j * rng.integers(-512, 513, shape) / 256 if kind.is_complex else 0)).astype(kind.numpy)


def shape_of(case: Case, given: Given) -> tuple[int, ...]:
    bits = (layouts.mask_bytes(case.m), case.n) if case.order == "col" else (case.m, layouts.mask_bytes(case.n))
    matrix = {"scalar": (1, 1), "column": (case.m, 1), "row": (1, case.n), "matrix": (case.m, case.n), "bits": bits}[given.extent]
    return (*case.batch, *matrix) if given.batched else matrix


def operand_of(tensor: Guarded) -> Operand:
    array = tensor.array
    strides = tuple(s // array.itemsize for s in array.strides)
    address = array.__array_interface__["data"][0]
    return Operand(
        dtypes.of(array.dtype.name), array.shape, strides, layouts.alignment_bytes(address, array.shape, strides, array.itemsize)
    )


class Run:
    """One case with its data, its kernel and its memory."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = np.random.default_rng(11)
        d_dtype = case.d_dtype or case.dtype
        shape = (*case.batch, case.m, case.n)
        self.inputs = {
            name: placing.place(
                drawn(rng, shape_of(case, given), given.dtype or case.dtype), given.layout if given.extent != "bits" else case.order
            )
            for name, given in case.inputs.items()
        }
        self.accumulators = [drawn(rng, shape, case.dtype) for _ in range(case.accumulators)]
        layout = case.d_layout or case.order
        self.d = guarded(shape, placing.strides(layout, shape), dtypes.of(d_dtype).numpy, offset=int(layout.startswith("misaligned")))
        stored = [placing.place(a.astype(dtypes.of(case.acc_dtype or case.dtype).numpy), layout) for a in self.accumulators]
        self.stored = stored if case.acc_dtype else [self.d, *stored[1:]]
        operands = {name: operand_of(tensor) for name, tensor in self.inputs.items()}
        problem = Problem.of(
            case.dtype, m=case.m, n=case.n, k=8, batch=case.batch, accumulators=case.accumulators, inputs=operands, order=case.order
        )
        self.problem = replace(problem, d=operand_of(self.d))
        expression = as_epilogue(case.function).expression(accumulators=case.accumulators)
        self.expression: Expression = check(expression, self.problem)
        self.kernel = pointwise.pointwise(self.problem, self.expression, tuple(operand_of(t) for t in self.stored))

    def run(self, driver: Driver) -> dict[str, Any]:
        """Every output, from poisoned memory."""
        case = self.case
        self.d.buffer[...] = self.d.poison
        if not case.acc_dtype:
            self.d.array[...] = self.accumulators[0]
        memory: dict[tuple[str, str], OnDevice] = {("input", name): OnDevice(t) for name, t in self.inputs.items()}
        memory[("output", "d")] = OnDevice(self.d)
        for output in self.expression.extras:
            like = outputs.operand(self.problem, output)
            memory[("output", output.name)] = OnDevice(guarded(like.shape, like.strides, like.dtype.numpy))
        for i, tensor in enumerate(self.stored):
            memory[("acc", str(i))] = memory[("output", "d")] if tensor is self.d else OnDevice(tensor)
        workspace = torch.full((max(self.kernel.workspace_bytes, 256),), 0xFF, dtype=torch.uint8, device="cuda")
        if self.kernel.blocks:
            driver.launch(self.kernel, [memory[(t.role, t.name)].address for t in self.kernel.tensors], workspace)
        torch.cuda.synchronize()
        return {output.name: memory[("output", output.name)].fetch().copy() for output in self.expression.outputs}

    def expected(self) -> tuple[Result, ...]:
        case, n = self.case, self.case.n
        accumulator = {"float64": "float64", "complex128": "float64"}.get(case.dtype, "float32")
        # The accumulators side by side, each cut out by its B: one A, as in a product.
        a = np.concatenate([x.astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in self.accumulators], axis=-1)
        b = tuple(np.eye(n * case.accumulators)[:, i * n : (i + 1) * n] for i in range(case.accumulators))
        inputs = {name: t.array for name, t in self.inputs.items()}
        product = Product(a, b, inputs=inputs, order=case.order, d_dtype=case.d_dtype or case.dtype, arithmetic=Arithmetic(accumulator))
        return evaluate(product, self.expression)


def compare(run: Run, got: dict[str, Any]) -> None:
    for result in run.expected():
        what = f"{run.case.name}, {result.name}"
        if result.bounded.value.dtype == bool:
            assert_mask(got[result.name], result.bounded, run.case.order, what)
        elif math.prod(run.problem.d.shape) == 0 and result.name != "d":
            assert not np.asarray(got[result.name], np.float64).any(), f"{what}: sums of nothing are 0"
        else:
            assert_close(got[result.name], result.bounded, result.dtype, what)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_float64(driver: Driver, case: Case) -> None:
    run = Run(case)
    first = run.run(driver)
    compare(run, first)
    second = run.run(driver)
    for name, array in first.items():
        assert_equal(second[name], array, f"{case.name}, {name}, the second time")


def test_a_wrong_kernel_is_caught(driver: Driver) -> None:
    """The tanh form in place of the erf form, in the same memory: the comparison must see it."""
    run = Run(Case("planted", gelu_residual, dtype="float32", inputs=GELU))
    text = run.kernel.text.replace("= epi_gelu_none(", "= epi_gelu_tanh(")
    assert text != run.kernel.text
    run.kernel = replace(run.kernel, text=text)
    with pytest.raises(AssertionError, match="planted, d"):
        compare(run, run.run(driver))


def test_nan_goes_through_the_reductions(driver: Driver) -> None:
    run = Run(Case("nan", statistics, inputs={"bias": ROW}))
    run.accumulators[0][3, 5] = np.nan
    got = run.run(driver)
    for name in ("sum_m", "max_m"):
        assert np.flatnonzero(np.isnan(got[name])).tolist() == [5], name
    for name in ("sum_n", "max_n"):
        assert np.flatnonzero(np.isnan(got[name])).tolist() == [3], name
    assert np.isnan(got["total"]).all()
    assert np.isnan(got["largest"]).all()


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("order", ["row", "col"])
def test_sum_of_an_operand(driver: Driver, operand: str, order: str) -> None:
    m, n, k = 70, 200, 333
    shape = (m, k) if operand == "a" else (k, n)
    values = placing.place(drawn(np.random.default_rng(5), shape, "bfloat16"), order)
    problem = Problem.of("bf16", m=m, n=n, k=k)
    problem = replace(problem, a=operand_of(values)) if operand == "a" else replace(problem, b=(operand_of(values),))
    kernel = pointwise.operand_sum(problem, operand)
    sums = OnDevice(guarded((m, 1) if operand == "a" else (1, n), (1, 1), np.dtype(np.float32)))
    workspace = torch.full((kernel.workspace_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    driver.launch(kernel, [OnDevice(values).address, sums.address], workspace)
    torch.cuda.synchronize()
    exact = values.array.astype(np.float64).sum(axis=1 if operand == "a" else 0, keepdims=True)
    np.testing.assert_array_equal(sums.fetch(), exact)  # sums of small integers over 256 are exact in float32


def test_the_core_launches_it(driver: Driver) -> None:
    """Through the compiled core, which lends the workspace: the same bits."""
    pytest.importorskip("epigemm._native")
    run = Run(Case("native", statistics, inputs={"bias": ROW}))
    want = run.run(driver)
    launch = run.kernel.launch(ARCH)

    class Core(Driver):
        def launch(self, kernel: pointwise.Pointwise, addresses: list[int], workspace: Any) -> None:
            launch.run(torch.cuda.current_stream().cuda_stream, *addresses)

    for name, array in run.run(Core()).items():
        assert_equal(array, want[name], name)


def test_functions_on_the_device_are_within_their_bounds(driver: Driver) -> None:
    """The fast functions over their whole range, D in float32, against float64: a few units of the result or of |x|."""
    rng = np.random.default_rng(2)
    for name in ("gelu", "silu", "mish", "sigmoid", "tanh", "erf", "softplus", "exp"):
        run = Run(Case(name, scaled(getattr(eg, name)), dtype="float32", m=257, n=256))
        run.accumulators = [(rng.integers(-(2**20), 2**20, (257, 256)) / 2**18).astype(np.float32)]
        compare(run, run.run(driver))


def scaled(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda acc: function(acc * 6.0)

"""The unfused engine's runs on host memory: its steps as they are planned, with stand-ins for the two kinds of launches.

A stand-in product takes only what cuBLASLt would be told (`describe`), and multiplies by NumPy; a stand-in pass evaluates the same
expression over the same memory by the CPU engine. So what is tested is everything between the call and the launches: which memory each
step reads and writes, what is copied, where C and the scales go. The table of cases goes through the public API.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import epigemm as eg
from epigemm import engines, layouts
from epigemm.engines import outputs
from epigemm.engines.base import AbstractEngine, AbstractExecutable, Call, Refusal
from epigemm.engines.cublaslt.engine import describe
from epigemm.engines.unfused.engine import UnfusedEngine
from epigemm.engines.unfused.recipe import A_SCALE, B_SCALE, OperandSum, Pass
from epigemm.engines.unfused.run import AbstractDevice, Launch
from epigemm.expression.nodes import COLUMN, MATRIX, ROW, Expression, Node, Output
from epigemm.plans import Candidate
from epigemm.problem import Compute, Operand, Problem
from epigemm.testing import conformance
from epigemm.testing.cases import Case, cases
from epigemm.testing.planted import just_beyond

CANARY = 0x5A
GUARD_BYTES = 256


def view(address: int, operand: Operand) -> Any:
    """The array that lies at an address."""
    low, high = layouts.extent_bytes(operand.shape, operand.strides, operand.dtype.bytes)
    if low == high:
        return np.empty(operand.shape, operand.dtype.numpy)
    memory = (ctypes.c_ubyte * (high - low)).from_address(address + low)
    strides = tuple(s * operand.dtype.bytes for s in operand.strides)
    return np.ndarray(operand.shape, operand.dtype.numpy, memory, -low, strides)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


class HostProduct(AbstractExecutable):
    def __init__(self, problem: Problem, ran: list[Problem]) -> None:
        self.problem, self.ran = problem, ran

    def run(self, call: Call) -> None:
        problem = self.problem
        self.ran.append(problem)
        wide = problem.acc_dtype.numpy
        a, b = (view(at, x).astype(wide) for at, x in ((call.a, problem.a), (call.b[0], problem.b[0])))
        a, b = (x.conj() if o.conjugate else x for x, o in ((a, problem.a), (b, problem.b[0])))
        with np.errstate(all="ignore"):
            found = np.asarray(call.alpha, wide) * (a @ b)
            if problem.a.dtype.is_narrow:
                for name in (A_SCALE, B_SCALE):
                    found = found * view(call.inputs[name], Operand.dense("float32", (1, 1)))[0, 0]
            if call.beta != 0:
                assert problem.c is not None
                found = found + np.asarray(call.beta, wide) * view(call.c, problem.c).astype(wide)
            view(call.d, problem.d)[...] = found.astype(problem.d.dtype.numpy)


class HostProducts(AbstractEngine):
    """Takes what cuBLASLt would be told, and refuses lines that are not aligned to `least_alignment` bytes."""

    name = "products"

    def __init__(self, least_alignment: int = 1) -> None:
        self.least_alignment = least_alignment
        self.ran: list[Problem] = []

    def supports(self, problem: Problem, expression: Expression) -> Refusal | None:
        described = describe(problem, expression)
        if isinstance(described, Refusal):
            return described
        assert described.epilogue == 1, "a plain product"
        worst = min(described.alignments)
        return Refusal(f"an alignment of {worst} bytes.") if worst < self.least_alignment else None

    def candidates(self, problem: Problem, expression: Expression, limit: int) -> tuple[Candidate, ...]:
        return tuple(Candidate(self.name, (("rank", i),), 1024) for i in range(min(limit, 3)))

    def notes(self, problem: Problem, expression: Expression) -> tuple[str, ...]:
        return ()

    def prepare(self, problem: Problem, expression: Expression, candidate: Candidate) -> AbstractExecutable:
        refusal = self.supports(problem, expression)
        assert refusal is None, refusal
        return HostProduct(problem, self.ran)


class HostDevice(AbstractDevice):
    """Host memory as a device."""

    def __init__(self, device: str = "cuda:0", capability: tuple[int, int] = (9, 0)) -> None:
        self._capability = capability
        self.scratch_bytes = 0

    @property
    def capability(self) -> tuple[int, int]:
        return self._capability

    def prepare(self, step: Pass | OperandSum) -> Launch:
        kernel = step.kernel  # the text is generated in any case: what has no kernel is found here
        run = _summed(step) if isinstance(step, OperandSum) else _passed(step)

        def launch(call: Call, accumulators: tuple[int, ...], sums: Mapping[str, int]) -> None:
            if isinstance(step, Pass):
                assert all(isinstance(a, int) for a in kernel.addresses(call, accumulators, sums))
            if kernel.blocks:
                run(call, accumulators, sums)

        return launch

    @contextmanager
    def scratch(self, size_bytes: int, stream: int) -> Iterator[int]:
        self.scratch_bytes = size_bytes
        memory = np.full(size_bytes + 2 * GUARD_BYTES + 256, 0xFF, np.uint8)
        start = -address(memory) % 256 + GUARD_BYTES
        memory[:start] = memory[start + size_bytes :] = CANARY
        yield address(memory) + start
        assert (memory[:start] == CANARY).all(), "written before the workspace"
        assert (memory[start + size_bytes :] == CANARY).all(), "written after the workspace"

    def fill(self, address: int, value: int, size_bytes: int, stream: int) -> None:
        ctypes.memset(address, value, size_bytes)


def _summed(step: OperandSum) -> Launch:
    problem, by_m = step.problem, step.operand == "a"
    source = problem.a if by_m else problem.b[int(step.operand[1:] or 0)]
    shape = (*problem.batch, problem.m, 1) if by_m else (*problem.batch, 1, problem.n)
    target = Operand.dense(problem.acc_dtype, shape)

    def run(call: Call, accumulators: tuple[int, ...], sums: Mapping[str, int]) -> None:
        total = view(accumulators[0], source).astype(target.dtype.numpy).sum(axis=-1 if by_m else -2, keepdims=True)
        view(call.outputs["sum"], target)[...] = total

    return run


def _passed(step: Pass) -> Launch:
    """The pass by the CPU engine: accumulators and sums of operands are inputs, and nothing is multiplied."""
    problem, expression = step.problem, step.expression
    extents = {f"acc{i}*": (MATRIX, x) for i, x in enumerate(step.accumulators)}
    for name in dict.fromkeys(str(n.param("operand")) for n in expression.nodes() if n.op == "operand_sum"):
        shape = (*problem.batch, problem.m, 1) if name == "a" else (*problem.batch, 1, problem.n)
        extents[f"sum_{name}*"] = (COLUMN if name == "a" else ROW, Operand.dense(problem.acc_dtype, shape))

    def read(node: Node) -> Node | None:
        if node.op not in ("acc", "operand_sum"):
            return None
        name = f"acc{node.param('index')}*" if node.op == "acc" else f"sum_{node.param('operand')}*"
        extent, operand = extents[name]
        return Node("input", name=name, extent=extent, dtype=operand.dtype.name)

    changed = replace(expression.map(read), accumulators=1)
    nothing = Operand.dense(problem.a.dtype, (problem.m, 0)), (Operand.dense(problem.a.dtype, (0, problem.n)),)
    inputs = (*problem.inputs, *((name, x) for name, (_, x) in extents.items()))
    compute = Compute(scale_type=problem.acc_dtype.name)
    own = replace(problem, k=0, a=nothing[0], b=nothing[1], c=None, inputs=inputs, device="cpu", compute=compute)
    cpu = engines.get("cpu")
    executable = cpu.prepare(own, changed, cpu.candidates(own, changed, 1)[0])

    def run(call: Call, accumulators: tuple[int, ...], sums: Mapping[str, int]) -> None:
        places = {**call.inputs, **{f"acc{i}*": at for i, at in enumerate(accumulators)}, **{f"sum_{k}*": at for k, at in sums.items()}}
        # An array of its own for D, so that the CPU engine need not know that an input may be D's memory.
        d = np.empty(problem.d.shape, problem.d.dtype.numpy)
        arrays = {name: np.array(view(places[name], operand)) for name, operand in own.inputs}
        arrays = {name: _placed(array, dict(own.inputs)[name]) for name, array in arrays.items()}
        written = {
            o.name: view(call.outputs[o.name], outputs.operand(problem, o))[..., : _rows(problem, o), : _columns(problem, o)]
            for o in expression.extras
        }
        dense = _placed(d, problem.d)
        executable.run(
            Call(
                np.empty((problem.m, 0), problem.a.dtype.numpy),
                (np.empty((0, problem.n), problem.a.dtype.numpy),),
                None,
                dense,
                arrays,
                written,
            )
        )
        if expression.d.name not in step.skip:
            view(call.d, problem.d)[...] = dense

    return run


def _rows(problem: Problem, output: Output) -> int:
    return problem.m if output.extent == MATRIX else outputs.operand(problem, output).rows


def _columns(problem: Problem, output: Output) -> int:
    return problem.n if output.extent == MATRIX else outputs.operand(problem, output).columns


def _placed(array: Any, operand: Operand) -> Any:
    """A copy with the operand's strides."""
    low, high = layouts.extent_bytes(operand.shape, operand.strides, operand.dtype.bytes)
    memory = np.zeros(max(high - low, 1), np.uint8)
    placed = np.ndarray(operand.shape, operand.dtype.numpy, memory, -low, tuple(s * operand.dtype.bytes for s in operand.strides))
    placed[...] = array
    return placed


# ---------------------------------------------------------------- through the public API


class OnHost(AbstractEngine):
    """The unfused engine for NumPy arrays: addresses in place of arrays, the device's name in place of "cpu"."""

    name = "unfused"

    def __init__(self, least_alignment: int = 1, way: str = "exact") -> None:
        self.products, self.way = HostProducts(least_alignment), way
        self.engine = UnfusedEngine(self.products, HostDevice)

    def supports(self, problem: Problem, expression: Expression) -> Refusal | None:
        return self.engine.supports(_moved(problem), expression)

    def candidates(self, problem: Problem, expression: Expression, limit: int) -> tuple[Candidate, ...]:
        found = self.engine.candidates(_moved(problem), expression, 16)
        return tuple(c for c in found if c["way"] == self.way) or found

    def notes(self, problem: Problem, expression: Expression) -> tuple[str, ...]:
        return self.engine.notes(_moved(problem), expression)

    def prepare(self, problem: Problem, expression: Expression, candidate: Candidate) -> AbstractExecutable:
        return _Addressed(self.engine.prepare(_moved(problem), expression, candidate))


def _moved(problem: Problem) -> Problem:
    return replace(problem, device="cuda:0")


class _Addressed(AbstractExecutable):
    def __init__(self, executable: AbstractExecutable) -> None:
        self.executable = executable

    def run(self, call: Call) -> None:
        one = np.ones((1, 1), np.float32)  # on the CPU the scales of 8-bit operands are in alpha
        inputs = {name: address(array) for name, array in call.inputs.items()} | {A_SCALE: address(one), B_SCALE: address(one)}
        written = {name: address(array) for name, array in call.outputs.items()}
        c = None if call.c is None else address(call.c)
        at = Call(address(call.a), tuple(map(address, call.b)), c, address(call.d), inputs, written, call.alpha, call.beta)
        self.executable.run(at)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes "unfused" the engine of NumPy arrays; returns how."""

    def register(engine: OnHost) -> OnHost:
        get = engines.get
        monkeypatch.setattr(engines, "ENGINES", {**engines.ENGINES, "unfused": ("", "cpu")})
        monkeypatch.setattr(engines, "get", lambda name: engine if name == "unfused" else get(name))
        from epigemm import api

        api._plans.clear()
        return engine

    yield register
    from epigemm import api

    api._plans.clear()


# A C of 8 bits has a scale that no GPU call brings.
CASES = tuple(c for c in cases() if c.library == "numpy" and c.dtype_of_c not in ("float8_e4m3fn", "float8_e5m2"))
SOME = CASES[::9]


@pytest.mark.parametrize("mode", ["stateless", "out"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_a_case(on_host: Any, case: Case, mode: str) -> None:
    on_host(OnHost())
    verdict = conformance.run_case(case, "unfused", mode=mode)
    assert verdict.refusal == "", verdict.refusal


@pytest.mark.parametrize("case", CASES[4::37], ids=str)
def test_operands_that_no_algorithm_reads_are_copied(on_host: Any, case: Case) -> None:
    engine = on_host(OnHost(least_alignment=16))
    verdict = conformance.run_case(case, "unfused")
    assert verdict.refusal == "", verdict.refusal
    assert all(x.alignment_bytes >= 16 for problem in engine.products.ran for x in (problem.a, *problem.b, problem.d))


@pytest.mark.parametrize("case", [c for c in CASES if c.topic == "user" and c.dtype == "float32"][::6], ids=str)
def test_a_wrong_element_is_found(on_host: Any, case: Case) -> None:
    on_host(OnHost())
    tensors = case.build(np.random.default_rng(0))
    with pytest.raises(AssertionError, match="elements are wrong"):
        conformance.run_case(case, "unfused", corrupt=lambda outputs: just_beyond(case, tensors, outputs))


def residual(x: Any, other: Any) -> Any:
    return eg.tanh(x) + other


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_out_may_be_an_input(on_host: Any, dtype: str) -> None:
    """The product is then not stored in D's memory: the input is still to be read."""
    on_host(OnHost(way="in_place" if dtype == "bfloat16" else "exact"))
    rng = np.random.default_rng(3)
    kind = conformance.numpy_dtype(dtype)
    a, b, other = (rng.normal(size=shape).astype(kind) for shape in ((5, 7), (7, 6), (5, 6)))
    want = eg.matmul(a, b, epilog=residual, epilog_inputs={"other": other.copy()}, engine="unfused")
    out = other.copy()
    got = eg.matmul(a, b, epilog=residual, epilog_inputs={"other": out}, out=out, engine="unfused")
    assert got is out
    assert got.tobytes() == want.tobytes()
    close = eg.matmul(a, b, epilog=residual, epilog_inputs={"other": other}, engine="cpu").astype(np.float64)
    np.testing.assert_allclose(got.astype(np.float64), close, rtol=0.02)


@pytest.mark.parametrize("beta", [0.75, 0.0])
def test_out_may_be_a_c_that_the_pass_reads(on_host: Any, beta: float) -> None:
    """Two Bs would be one way; here C has strides that D has too, and that cuBLASLt does not take."""
    on_host(OnHost())
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(5, 7)), rng.normal(size=(7, 6))
    c = rng.normal(size=(10, 12))[::2, ::2]
    if beta == 0:
        c[...] = np.nan
    want = np.tanh(2 * (a @ b) + (beta * c if beta else 0))
    got = eg.matmul(a, b, c, alpha=2.0, beta=beta, epilog=lambda x: eg.tanh(x), out=c, engine="unfused")
    assert got is c
    np.testing.assert_allclose(c, want, rtol=1e-12)


@pytest.mark.parametrize("way", ["exact", "in_place"])
def test_alpha_zero_reads_neither_a_nor_b(on_host: Any, way: str) -> None:
    engine = on_host(OnHost(way=way))
    a, b = (np.full(shape, np.nan, conformance.numpy_dtype("bfloat16")) for shape in ((4, 8), (8, 3)))
    c = np.ones((4, 3), a.dtype)
    with eg.Matmul(a, b, c, alpha=0.0, beta=0.5) as product:
        product.plan(epilog=lambda x: eg.exp(x), engine="unfused")
        before = len(engine.products.ran)
        d = product.execute()
        assert len(engine.products.ran) == before, "nothing is multiplied"
    assert (d.astype(np.float64) == np.float64(np.exp(0.5)).astype(d.dtype).astype(np.float64)).all()


def test_in_place_rounds_the_product_and_exact_does_not(on_host: Any) -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.normal(size=shape).astype(conformance.numpy_dtype("bfloat16")) for shape in ((40, 64), (64, 48)))
    product = a.astype(np.float32) @ b.astype(np.float32)
    for way, before in (("exact", product), ("in_place", product.astype(a.dtype).astype(np.float32))):
        on_host(OnHost(way=way))
        got = eg.matmul(a, b, epilog=lambda x: x * 1.3, engine="unfused")
        assert (got == (before * np.float32(1.3)).astype(a.dtype)).all(), way


def test_an_eager_problem_is_finished_in_place_without_a_further_rounding(on_host: Any) -> None:
    engine = on_host(OnHost())
    rng = np.random.default_rng(6)
    a, b = (rng.normal(size=shape).astype(conformance.numpy_dtype("bfloat16")) for shape in ((40, 64), (64, 48)))
    eager = {"epilog": lambda x: eg.silu(x), "options": {"rounding": "eager"}}
    got = eg.matmul(a, b, engine="unfused", **eager)
    assert engine.products.ran[-1].d.dtype.name == "bfloat16"
    assert (got == eg.matmul(a, b, engine="cpu", **eager)).mean() > 0.99

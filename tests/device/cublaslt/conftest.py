"""Data on the GPU for the engine, without the public API: operands as the problem describes them, outputs poisoned, canaries after them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from epigemm import layouts
from epigemm.engines.base import Call
from epigemm.engines.cublaslt.engine import ENGINE
from epigemm.engines.outputs import operand as output_operand
from epigemm.expression.check import check
from epigemm.expression.nodes import Expression, Output, acc
from epigemm.problem import Operand, Problem

torch = pytest.importorskip("torch")

CANARY = 0x5A
CANARY_BYTES = 256


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    if not torch.cuda.is_available():
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


def dtype_of(operand: Operand):
    return getattr(torch, operand.dtype.name)


@dataclass
class Memory:
    """One tensor with canary bytes after it."""

    operand: Operand
    raw: object
    view: object
    offset_bytes: int

    @property
    def address(self) -> int:
        return self.raw.data_ptr() + self.offset_bytes

    def intact(self) -> bool:
        """Whether nothing before the tensor or after it was written."""
        size = layouts.extent_bytes(self.operand.shape, self.operand.strides, self.operand.dtype.bytes)[1]
        outside = torch.cat((self.raw[: self.offset_bytes], self.raw[self.offset_bytes + size :]))
        return bool((outside == CANARY).all())


def memory(operand: Operand, seed: int | None, offset_elements: int = 0, scale: float = 1.0) -> Memory:
    """Random normal values, or where `seed` is None the poison NaN (0xAA in a mask)."""
    itemsize = operand.dtype.bytes
    size = layouts.extent_bytes(operand.shape, operand.strides, itemsize)[1]
    offset = offset_elements * itemsize
    raw = torch.full((offset + size + CANARY_BYTES,), CANARY, dtype=torch.uint8, device="cuda")
    flat = raw[offset : offset + size]
    dtype = dtype_of(operand)
    if operand.dtype.name == "uint8":
        generator = torch.Generator("cuda").manual_seed(seed or 0)
        flat.copy_(
            torch.randint(0, 256, (size,), device="cuda", generator=generator, dtype=torch.uint8)
            if seed is not None
            else torch.full_like(flat, 0xAA)
        )
    else:
        count = size // itemsize
        wide = torch.complex128 if operand.dtype.is_complex else torch.float64
        if seed is None:
            values = torch.full((count,), float("nan"), device="cuda", dtype=wide)
        else:
            generator = torch.Generator("cuda").manual_seed(seed)
            values = torch.randn((count,), device="cuda", dtype=wide, generator=generator) * scale
        flat.copy_(values.to(dtype).view(torch.uint8))
    return Memory(operand, raw, _typed(raw, offset, dtype, operand), offset)


def _typed(raw, offset, dtype, operand: Operand):
    """A strided view of the bytes."""
    view = torch.empty((), dtype=dtype, device="cuda")
    return view.set_(raw.untyped_storage(), offset // operand.dtype.bytes, operand.shape, operand.strides)


@dataclass
class Run:
    """What went in and what came out, as float64 or complex128 (masks as bytes)."""

    problem: Problem
    a: object
    b: object
    c: object
    d: object
    inputs: dict = field(default_factory=dict)
    outputs: dict = field(default_factory=dict)

    @property
    def magnitude(self):
        """|A| @ |B|, by which the rounding of a sum is bounded."""
        return self.a.abs() @ self.b.abs()


def wide(tensor):
    if tensor.dtype == torch.uint8:
        return tensor
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def identity(problem: Problem) -> Expression:
    return check(Expression((Output("d", acc()),)), problem)


class Engine:
    """Runs problems through the engine and gives both sides back."""

    def run(
        self,
        problem: Problem,
        expression: Expression,
        *,
        alpha=1.0,
        beta=0.0,
        offset=0,
        candidate=None,
        edit=None,
        inplace=False,
        scales=None,
        scale=1.0,
    ):
        refusal = ENGINE.supports(problem, expression)
        if refusal is not None:
            return refusal
        data = {"a": memory(problem.a, 1, offset, scale), "b": memory(problem.b[0], 2, offset, scale)}
        if problem.c is not None:
            data["c"] = memory(problem.c, 3, offset)
        inputs = {name: memory(o, 10 + i, offset) for i, (name, o) in enumerate(problem.inputs)}
        for name, value in (scales or {}).items():
            inputs[name] = memory(Operand.dense("f32", (1, 1)), 5)
            inputs[name].view.fill_(value)
        if edit is not None:
            edit({**data, **inputs})
        c_before = wide(data["c"].view).clone() if "c" in data else None
        d = data["c"] if inplace else memory(problem.d, None, offset)
        outputs = {o.name: memory(output_operand(problem, o), None) for o in expression.extras}
        executable = ENGINE.prepare(problem, expression, candidate or ENGINE.candidates(problem, expression, 1)[0])
        executable_run(executable, data, inputs, outputs, d, alpha, beta)
        return Run(
            problem=problem,
            a=conjugated(data["a"]),
            b=conjugated(data["b"]),
            c=c_before,
            d=wide(d.view),
            inputs={k: wide(v.view) for k, v in inputs.items()},
            outputs={k: wide(v.view) for k, v in outputs.items()},
        )


def executable_run(executable, data, inputs, outputs, d, alpha, beta):
    """One run on the current stream; nothing outside the tensors may be written."""
    call = Call(
        a=data["a"].address,
        b=(data["b"].address,),
        c=data["c"].address if "c" in data else None,
        d=d.address,
        inputs={k: v.address for k, v in inputs.items()},
        outputs={k: v.address for k, v in outputs.items()},
        alpha=alpha,
        beta=beta,
        stream=torch.cuda.current_stream().cuda_stream,
    )
    torch.cuda.synchronize()
    executable.run(call)
    torch.cuda.synchronize()
    for item in (*data.values(), *inputs.values(), *outputs.values(), d):
        assert item.intact(), f"memory outside {item.operand} was written"


def conjugated(item: Memory):
    """The values that are meant: conjugated where the operand says so."""
    values = wide(item.view)
    return values.conj() if item.operand.conjugate else values


UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53, "complex64": 2.0**-23, "complex128": 2.0**-52}
UNIT |= {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
SMALLEST = {"float16": 2.0**-24, "float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}


def tolerance(run: Run, expected, accumulated: float | None = None, stored: str | None = None):
    """Rounding of k products and sums, and of the stored value: computed, elementwise.

    Args:
        run: gives |A| |B|.
        expected: the exact values.
        accumulated: unit of rounding of products and sums, by default the accumulator's.
        stored: dtype in which the values are stored, by default D's.
    """
    problem = run.problem
    unit = UNIT[problem.a.dtype.accumulator] if accumulated is None else accumulated
    stored = stored or problem.d.dtype.name
    sums = (problem.k + 4) * unit * (run.magnitude + 1)
    return 1.2 * sums + 2 * UNIT[stored] * expected.abs() + SMALLEST.get(stored, 0.0)


def assert_within(found, expected, allowed):
    wrong = ~((found - expected).abs() <= allowed)
    if bool(wrong.any()):
        place = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {place}: {found[place]} instead of {expected[place]}, "
            f"allowed {allowed.expand_as(expected)[place]:.3g}"
        )


@pytest.fixture(scope="session")
def tools():
    """The functions above, for the tests of this folder."""

    class Tools:
        run = staticmethod(Engine().run)
        identity = staticmethod(identity)
        tolerance = staticmethod(tolerance)
        assert_within = staticmethod(assert_within)
        memory = staticmethod(memory)
        dtype_of = staticmethod(dtype_of)

    return Tools

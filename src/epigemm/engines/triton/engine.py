"""The engine `triton`: any expression of real values, any orientation, several accumulators, every GPU from SM80 on."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from epigemm import errors
from epigemm.engines.base import AbstractEngine, AbstractExecutable, Call, DirectLaunch, Refusal
from epigemm.engines.triton import codegen, configs
from epigemm.engines.triton.configs import Config, Machine
from epigemm.engines.triton.oriented import orient
from epigemm.enums import MatmulComputeType
from epigemm.expression.nodes import Expression
from epigemm.plans import Candidate
from epigemm.problem import Problem

if TYPE_CHECKING:
    from epigemm.engines.triton.launch import InterpretedLaunches, NativeLaunches

NAME = "triton"
INTERPRET = "TRITON_INTERPRET"

# dtypes of operands; what is stored or read besides may be any type that Triton has.
_OPERANDS = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
_MAX_ACCUMULATORS = 4
_MIN_CAPABILITY, _MIN_NARROW_CAPABILITY = (8, 0), (8, 9)
_MAX_EXTENT = 2**31 - 2**16  # room for the last tile

# CUdevice_attribute. Source: the CUDA driver API.
_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_OPTIN = 16, 75, 76, 97

_FAST = ("COMPUTE_32F_FAST_TF32", "COMPUTE_32F_FAST_16F", "COMPUTE_32F_FAST_16BF")
_TF32 = frozenset(int(MatmulComputeType[name]) for name in _FAST)

# The interpreter's machine: as few programs as show that one takes several tiles.
_INTERPRETER = Machine((9, 0), 3, 1 << 20, interpreted=True)


def is_interpreted() -> bool:
    """Whether kernels are to be interpreted on the CPU, as TRITON_INTERPRET says."""
    return os.environ.get(INTERPRET, "0").lower() in ("1", "true", "on", "y", "yes")


@cache
def machine(device: str) -> Machine:
    """The machine behind a device."""
    if device == "cpu":
        return _INTERPRETER
    from epigemm.engines.cuda import libraries

    core = libraries.open_driver()
    number = device_index(device)
    capability = core.device_attribute(number, _MAJOR), core.device_attribute(number, _MINOR)
    return Machine(capability, core.device_attribute(number, _MULTIPROCESSORS), core.device_attribute(number, _SHARED_OPTIN))


def device_index(device: str) -> int:
    """The number in "cuda:<number>"."""
    return int(device.partition(":")[2] or 0)


def precision(problem: Problem) -> str:
    """How float32 operands are multiplied: TF32 only if the compute type asks."""
    return "tf32" if problem.compute.compute_type in _TF32 else "ieee"


class TritonExecutable(AbstractExecutable):
    """A product and its epilogue, compiled: a call puts its addresses in order and launches.

    Attributes:
        workspace_bytes: what a run takes besides the outputs.
    """

    __slots__ = ("_b_count", "_empty", "_inputs", "_k", "_launches", "_outputs", "_plain", "workspace_bytes")

    def __init__(self, problem: Problem, expression: Expression, config: Config) -> None:
        from epigemm.engines.triton import launch, plan

        oriented = orient(problem, expression)
        made = plan.plan(problem, expression, oriented, config, machine(problem.device), precision(problem))
        self._inputs, self._outputs = made.inputs, made.outputs
        self._k, self._empty, self._b_count = problem.k, oriented.items == 0, len(problem.b)
        self._plain = (*_bits(1.0, 0.0), self._k)
        self.workspace_bytes = made.workspace_bytes
        self._launches: InterpretedLaunches | NativeLaunches
        if problem.device == "cpu":
            if not launch.is_interpreted():
                why = f"Triton was imported before {INTERPRET} was set, and decides then"
                raise errors.engine_unavailable("triton", why, f"Set {INTERPRET}=1 before Triton's first import.")
            self._launches = launch.InterpretedLaunches(made.launches, made.workspace_bytes, made.zeroed_bytes)
        else:
            target = machine(problem.device), device_index(problem.device)
            self._launches = launch.NativeLaunches(made.launches, *target, made.values, made.workspace_bytes, made.zeroed_bytes)

    def run(self, call: Call) -> None:
        """Launch on `call.stream`."""
        if self._empty:
            return
        plain = call.alpha == 1 and call.beta == 0
        # Without k nothing of A and B is read.
        numbers = self._plain if plain else (*_bits(call.alpha, call.beta), self._k if call.alpha != 0 else 0)
        tensors = [call.a, *call.b, call.c, call.d]
        tensors += [call.inputs[name] for name in self._inputs]
        tensors += [call.outputs[name] for name in self._outputs]
        addresses = [t if isinstance(t, int) else _address(t) for t in tensors]
        self._launches.run(call.stream, [*numbers, *addresses])

    def direct(self) -> DirectLaunch | None:
        """The one launch of a product without C on a GPU, with alpha = 1 and beta = 0."""
        single = self._launches.single()
        if single is None or self._empty or self._b_count > 1:
            return None
        run, count = single
        scalars = self._plain
        names = ("a", "b", "", "d", *self._inputs, *self._outputs)[: count - len(scalars)]
        return DirectLaunch(lambda *values: run(values[-1], *scalars, *values[:-1]), names)


def _bits(*numbers: Any) -> tuple[int, ...]:
    """The bits of each number in float32; one too large for it is infinite."""
    return tuple(ctypes.c_uint32.from_buffer(ctypes.c_float(number)).value for number in numbers)


def _address(tensor: Any) -> int:
    """The address of a NumPy array's first element; 0 of no tensor."""
    return 0 if tensor is None else int(tensor.ctypes.data)


@dataclass(frozen=True, slots=True)
class _Limit:
    """One reason for a refusal: the sentence, and whether it holds."""

    holds: bool
    sentence: str


class TritonEngine(AbstractEngine):
    """Kernels of our own in Triton with a generated epilogue."""

    name = NAME

    def supports(self, problem: Problem, expression: Expression) -> Refusal | None:
        """None, or why the problem is not run: its dtypes, its size, a node, or that there is no Triton here."""
        for limit in _limits(problem):
            if limit.holds:
                return Refusal(limit.sentence)
        try:
            codegen.text(expression, orient(problem, expression))
        except errors.UnsupportedEpilogue as why:
            return Refusal(str(why))
        if not self.candidates(problem, expression, 1):
            return Refusal(f"triton needs more workspace than memory_limit={problem.compute.memory_limit} allows.")
        return None

    def candidates(self, problem: Problem, expression: Expression, limit: int) -> tuple[Candidate, ...]:
        """Tiles that suit the problem, the ones expected to be fastest first."""
        from epigemm.engines.triton import plan

        oriented = orient(problem, expression)
        most = problem.compute.memory_limit
        found = []
        for config in configs.candidates(oriented, machine(problem.device), precision(problem)):
            needed = plan.workspace(oriented, config).bytes
            if most is None or needed <= most:
                found.append(config.candidate(needed))
        return tuple(found[: max(limit, 1)])

    def notes(self, problem: Problem, expression: Expression) -> tuple[str, ...]:
        """That D is computed as its transpose, and that operands go through pointers where tensor maps cannot read them."""
        oriented = orient(problem, expression)
        found = ["D is column-major: computed as its transpose, with A and B exchanged"] if oriented.swapped else []
        found += ["kernels are interpreted on the CPU, for tests"] if problem.device == "cpu" else []
        if not configs.can_map(oriented, machine(problem.device)):
            found.append("an operand is read through pointers: no tensor map describes it")
        return tuple(found)

    def prepare(self, problem: Problem, expression: Expression, candidate: Candidate) -> TritonExecutable:
        """The candidate compiled for the problem's device."""
        return TritonExecutable(problem, expression, Config.of(candidate))


def _limits(problem: Problem) -> tuple[_Limit, ...]:
    dtypes_ = (problem.a.dtype, *(b.dtype for b in problem.b))
    wrong = next((d for d in dtypes_ if d.name not in _OPERANDS), dtypes_[0])
    complex_output = problem.d.dtype.is_complex
    on_gpu, count = problem.device.startswith("cuda"), len(problem.b)
    return (
        _Limit(importlib.util.find_spec("triton") is None, "triton is not installed. Run `pip install epigemm[triton]`."),
        _Limit(wrong.name not in _OPERANDS, f"triton multiplies {', '.join(_OPERANDS)}, and an operand is {wrong.name}."),
        _Limit(complex_output, f"triton stores real numbers, and D is {problem.d.dtype.name}."),
        _Limit(count > _MAX_ACCUMULATORS, f"triton keeps {_MAX_ACCUMULATORS} accumulators at most, and there are {count}."),
        _Limit(
            max(problem.m, problem.n, problem.k) > _MAX_EXTENT,
            f"triton counts in 31 bits, and m={problem.m} n={problem.n} k={problem.k} needs more.",
        ),
        *(_limits_of_gpu(problem) if on_gpu else ()),
        _Limit(
            not on_gpu and not is_interpreted(),
            f"triton computes on CUDA devices, and the operands are on {problem.device}. Set {INTERPRET}=1 to have kernels interpreted.",
        ),
    )


def _limits_of_gpu(problem: Problem) -> tuple[_Limit, ...]:
    found = machine(problem.device).capability
    shown = ".".join(map(str, found))
    narrow = any(x.dtype.is_narrow for x in (problem.a, problem.d, *problem.b, *(operand for _, operand in problem.inputs)))
    return (
        _Limit(found < _MIN_CAPABILITY, f"triton needs compute capability 8.0, and {problem.device} has {shown}."),
        _Limit(narrow and found < _MIN_NARROW_CAPABILITY, f"8-bit floats need compute capability 8.9, and {problem.device} has {shown}."),
        _Limit(is_interpreted(), f"{INTERPRET} is set, and interpreted kernels compute on the CPU alone. Unset it."),
    )


ENGINE = TritonEngine()

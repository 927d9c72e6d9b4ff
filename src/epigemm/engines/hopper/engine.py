"""The engine `hopper`: 16-bit products on SM90 through our own kernel, whose epilogue hides behind the next tile's products."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from math import prod
from typing import Any

from epigemm import errors, layouts
from epigemm.engines import costs
from epigemm.engines.base import AbstractEngine, AbstractExecutable, Call, DirectLaunch, Refusal
from epigemm.engines.cublaslt import library
from epigemm.engines.cuda import libraries
from epigemm.engines.hopper import bindings, configs
from epigemm.engines.hopper import launch as launching
from epigemm.engines.hopper.bindings import Layout
from epigemm.engines.hopper.configs import Config
from epigemm.engines.hopper.launch import Launches
from epigemm.expression.nodes import Expression
from epigemm.plans import Candidate, PlanCache
from epigemm.problem import Operand, Problem

NAME = "hopper"
_CAPABILITY = (9, 0)
_MULTIPROCESSORS = 16  # CUdevice_attribute
_MAX_EXTENT = 2**31 - 2**16  # room for the last tile
_REMEMBERED = 512

# Cycles a microsecond under a sustained load, by A's dtype: the clock settles by power. And what an epilogue adds at k=1024, where it is
# not hidden entirely: a share of the time to move each further (m, n) tensor, and a time for each element that is summed. One H200
# (NOTES.md).
_CYCLES_PER_US = {"bfloat16": 1310.0, "float16": 1170.0}
_FURTHER_SHARE, _US_PER_SUMMED_ELEMENT = 0.7, 0.22e-6


@dataclass(frozen=True, slots=True)
class Machine:
    """A device: its compute capability and its multiprocessors."""

    capability: tuple[int, int]
    multiprocessors: int


@cache
def machine(device: str) -> Machine:
    """The machine behind "cuda:0"."""
    core = libraries.open_driver()
    return Machine(library.capability(device), core.device_attribute(library.index(device), _MULTIPROCESSORS))


class HopperExecutable(AbstractExecutable):
    """A prepared candidate.

    The kernel for alpha = 1 and the plan's C is ready; one for another alpha, or for beta = 0 beside a C, which must not be read, is
    compiled when it is first asked for.

    Args:
        problem, expression: what is computed.
        config: of the candidate.
        multiprocessors: how many to use.
    """

    def __init__(self, problem: Problem, expression: Expression, config: Config, multiprocessors: int) -> None:
        self._problem, self._expression, self._config, self._multiprocessors = problem, expression, config, multiprocessors
        self._device = library.index(problem.device)
        self._ready: dict[tuple[bool, bool], Launches] = {}
        reads_c = problem.c is not None
        self._usual = self._launches(reads_c, reads_c)

    def run(self, call: Call) -> None:
        """Launch on `call.stream`; every tensor is an address on the plan's device."""
        reads_c = self._problem.c is not None and call.beta != 0
        launches = self._launches(reads_c or call.alpha != 1, reads_c)
        if call.alpha == 0:
            self._run_without_product(launches, call)
        else:
            launches.run(call)

    def direct(self) -> DirectLaunch | None:
        """The only launch, where a run is one."""
        single = self._usual.single()
        if single is None or len(self._problem.b) > 1:
            return None
        run, names = single
        return DirectLaunch(lambda *values: run(values[-1], *values[:-1]), tuple("b" if name == "b0" else name for name in names))

    def _launches(self, scaled: bool, reads_c: bool) -> Launches:
        key = (scaled, reads_c)
        if key not in self._ready:
            problem = self._problem if reads_c else replace(self._problem, c=None)
            layout = bindings.layout(problem, self._expression, scaled)
            config = self._config.fitted(layout.signature)
            kernel = (problem, self._expression, layout, config)
            self._ready[key] = Launches(*kernel, scaled=scaled, device=self._device, multiprocessors=self._multiprocessors)
        return self._ready[key]

    def _run_without_product(self, launches: Launches, call: Call) -> None:
        """alpha = 0 reads neither A nor B, whose NaN would show: zeros stand for them."""
        core, problem = libraries.open_driver(), self._problem
        size_bytes = max(_span_bytes(x) for x in (problem.a, *problem.b))
        zeros = core.allocate(self._device, size_bytes, call.stream)
        try:
            core.fill(self._device, zeros, 0, size_bytes, call.stream)
            launches.run(replace(call, a=zeros, b=(zeros,) * len(call.b)))
        finally:
            core.free(self._device, zeros, call.stream)


def _span_bytes(operand: Operand) -> int:
    return layouts.extent_bytes(operand.shape, operand.strides, operand.dtype.bytes)[1]


class HopperEngine(AbstractEngine):
    """Our own kernel in CUDA C++ with a generated epilogue: see NOTES.md for how it works and what was measured."""

    name = NAME

    def __init__(self) -> None:
        self._asked: PlanCache[Refusal | None] = PlanCache(_REMEMBERED)

    def supports(self, problem: Problem, expression: Expression) -> Refusal | None:
        """None, or why the problem is not run: the device, a dtype, a layout that the copy engine cannot read, a node."""
        try:
            return self._asked.get((problem, expression), lambda: _refused(problem, expression))
        except (errors.EngineUnavailable, errors.LibraryError) as why:
            return Refusal(str(why))  # not remembered: it may pass

    def candidates(self, problem: Problem, expression: Expression, limit: int) -> tuple[Candidate, ...]:
        """The configurations of `configs.TABLE` that fit, the one predicted fastest first."""
        layout = _layout(problem, expression)
        multiprocessors = _multiprocessors(problem)
        found = []
        for config in configs.candidates(layout.signature, layout.m, layout.n, layout.k, multiprocessors):
            made = launching.fields(problem, expression, layout, config, scaled=problem.c is not None)
            limit_bytes = problem.compute.memory_limit
            if limit_bytes is None or made.workspace_bytes <= limit_bytes:
                predicted = predicted_us(problem, expression, layout, config, multiprocessors)
                found.append(Candidate(NAME, tuple(sorted(asdict(config).items())), made.workspace_bytes, predicted))
        return tuple(found[: max(limit, 1)])

    def notes(self, problem: Problem, expression: Expression) -> tuple[str, ...]:
        """That a column-major D is computed as its transpose, and where sums take a second kernel."""
        layout = _layout(problem, expression)
        found = ["D is column-major: computed as its transpose, with A and B exchanged"] if layout.transposed else []
        found += ["sums are finished by a second kernel from partial sums, in a fixed order"] if layout.sum_types else []
        cleared = [name for name, _ in launching.cleared(problem, expression, layout)]
        return (*found, *(f"`{name}` is set to 0 first, for its padding" for name in cleared))

    def prepare(self, problem: Problem, expression: Expression, candidate: Candidate) -> HopperExecutable:
        """The candidate compiled, or taken from the store, and loaded.

        Raises:
            errors.AlgorithmError: its settings make no kernel for this problem.
        """
        refusal = self.supports(problem, expression)
        if refusal is not None:
            raise errors.all_refuse([(self.name, str(refusal))], str(problem))
        return HopperExecutable(problem, expression, _config(candidate, _layout(problem, expression)), _multiprocessors(problem))


def predicted_us(problem: Problem, expression: Expression, layout: Layout, config: Config, multiprocessors: int) -> float:
    """What a run is expected to take: the products or the bytes, whichever are more, and what of the epilogue is not hidden."""
    signature = layout.signature
    cycles = config.predicted_cycles(signature, layout.m, layout.n, layout.k, multiprocessors)
    moved_us = sum(x.bytes for x in (problem.a, *problem.b, problem.d)) / costs.BYTES_PER_US
    elements = layout.m * layout.n
    further_us = 2 * elements * (len(signature.tiles_in) + len(signature.tiles_out) - 1) / costs.BYTES_PER_US
    summed_us = _US_PER_SUMMED_ELEMENT * elements * (signature.sums_m + signature.sums_n)
    finishing_us = costs.LAUNCH_US * len(layout.sum_types)
    products_us = max(cycles / _CYCLES_PER_US[problem.a.dtype.name], moved_us)
    return costs.LAUNCH_US + products_us + _FURTHER_SHARE * further_us + summed_us + finishing_us


def _layout(problem: Problem, expression: Expression) -> Layout:
    return bindings.layout(problem, expression, problem.c is not None)


def _multiprocessors(problem: Problem) -> int:
    there = machine(problem.device).multiprocessors
    return min(problem.compute.sm_count_target or there, there)


def _config(candidate: Candidate, layout: Layout) -> Config:
    """The configuration of a candidate, which a user may have changed."""
    given: dict[str, Any] = {name: value for name, value in candidate.config if name in {f.name for f in fields(Config)}}
    try:
        config = Config(**given)
        why = configs.misfit(config, layout.signature)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        why = str(error)
    if why:
        raise errors.AlgorithmError(errors.say(f"{candidate} makes no kernel for this problem.", why, "Take one of plan()'s algorithms."))
    return config.fitted(layout.signature)


def _refused(problem: Problem, expression: Expression) -> Refusal | None:
    if not problem.device.startswith("cuda"):
        return Refusal(f"hopper computes on CUDA devices, and the operands are on {problem.device}.")
    sentence = bindings.refusal(problem, expression) or _refused_size(problem)
    if sentence is not None:
        return Refusal(sentence)
    found = machine(problem.device).capability
    if found != _CAPABILITY:
        return Refusal(f"hopper runs on compute capability 9.0 (H100, H200), and {problem.device} has {found[0]}.{found[1]}.")
    try:
        layout = _layout(problem, expression)
    except errors.UnsupportedEpilogue as why:
        return Refusal(str(why))
    fitting = configs.candidates(layout.signature, layout.m, layout.n, layout.k, _multiprocessors(problem))
    if not fitting:
        return Refusal("hopper has no configuration whose shared memory and registers hold this epilogue.")
    least = min(launching.fields(problem, expression, layout, c, scaled=problem.c is not None).workspace_bytes for c in fitting)
    limit = problem.compute.memory_limit
    if limit is not None and least > limit:
        return Refusal(f"hopper needs {least} bytes of workspace for partial sums, and memory_limit allows {limit}. Raise memory_limit.")
    return None


def _refused_size(problem: Problem) -> str | None:
    if max(problem.m, problem.n, problem.k) > _MAX_EXTENT or prod(problem.d.shape) >= 2**47:
        return f"The hopper kernel counts in 31 bits, and m={problem.m} n={problem.n} k={problem.k} needs more."
    if problem.c is not None and problem.c.shape[-2:] != (problem.m, problem.n):
        return f"The hopper kernel reads a C of D's shape, and it is {problem.c.shape[-2:]}. Pass it as an input of the epilogue."
    return None


ENGINE = HopperEngine()

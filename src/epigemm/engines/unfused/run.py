"""Running a recipe: the launches of one call in order on its stream, in one piece of workspace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby

import numpy as np

from epigemm.dtypes import DType
from epigemm.engines.base import AbstractEngine, AbstractExecutable, Call
from epigemm.engines.cublaslt import library
from epigemm.engines.cuda import libraries
from epigemm.engines.unfused.recipe import A_SCALE, B_SCALE, BETA_INPUT, C_INPUT, OperandSum, Pass, Recipe, plain, recipe, shares_memory
from epigemm.expression.nodes import Expression
from epigemm.plans import Candidate
from epigemm.problem import Problem

# (call, addresses of the accumulators, addresses of the operands' sums) -> None
Launch = Callable[[Call, tuple[int, ...], Mapping[str, int]], None]


class AbstractDevice(ABC):
    """What a run needs of a device besides products."""

    @property
    @abstractmethod
    def capability(self) -> tuple[int, int]:
        """The compute capability."""

    @abstractmethod
    def prepare(self, step: Pass | OperandSum) -> Launch:
        """One pass compiled and ready."""

    @abstractmethod
    def scratch(self, size_bytes: int, stream: int) -> AbstractContextManager[int]:
        """The address of workspace for the launches inside the `with`, in the order of the stream."""

    @abstractmethod
    def fill(self, address: int, value: int, size_bytes: int, stream: int) -> None:
        """Set bytes to one value, in the order of the stream."""


class CudaDevice(AbstractDevice):
    """A GPU, through the compiled core.

    Args:
        device: "cuda:0".
    """

    def __init__(self, device: str) -> None:
        self._device, self._index = device, library.index(device)

    @property
    def capability(self) -> tuple[int, int]:
        return library.capability(self._device)

    def prepare(self, step: Pass | OperandSum) -> Launch:
        kernel = step.kernel
        if kernel.blocks == 0:
            return lambda call, accumulators, sums: None
        major, minor = self.capability
        launch = kernel.launch(f"sm_{major}{minor}", self._index).run
        return lambda call, accumulators, sums: launch(call.stream, *kernel.addresses(call, accumulators, sums))

    @contextmanager
    def scratch(self, size_bytes: int, stream: int) -> Iterator[int]:
        if size_bytes == 0:
            yield 0
            return
        # In the order of the stream, and under capture as nodes of the graph: each replay has its own.
        core = libraries.open_driver()
        address: int = core.allocate(self._index, size_bytes, stream)
        try:
            yield address
        finally:
            core.free(self._index, address, stream)

    def fill(self, address: int, value: int, size_bytes: int, stream: int) -> None:
        libraries.open_driver().fill(self._index, address, value, size_bytes, stream)


class _Steps:
    """A recipe with its launches and products prepared.

    Args:
        made: the recipe.
        candidates: one a product.
        products: the engine that runs them.
        device: for the rest.
    """

    def __init__(self, made: Recipe, candidates: tuple[Candidate, ...], products: AbstractEngine, device: AbstractDevice) -> None:
        self._recipe, self._device = made, device
        self._places = {name: offset for name, (offset, _) in made.places}
        self._copies = tuple((copy, device.prepare(copy.step)) for copy in made.copies)
        self._sums = tuple((step, device.prepare(step)) for step in made.sums)
        pairs = zip(made.products, candidates, strict=False)
        self._products = tuple(products.prepare(product, plain(product), candidate) for product, candidate in pairs)
        self._finish = None if made.finish is None else device.prepare(made.finish)

    def run(self, call: Call) -> None:
        made, stream = self._recipe, call.stream
        with self._device.scratch(made.scratch_bytes, stream) as base:
            at = {"a": call.a, **{f"b{i}": b for i, b in enumerate(call.b)}}
            placed = {name: base + offset for name, offset in self._places.items()}
            sums = {}
            for step, launch in self._sums:
                sums[step.operand] = placed[f"sum_{step.operand}"]
                source = at["a" if step.operand == "a" else f"b{step.operand[1:] or 0}"]
                launch(_to(0, stream, outputs={"sum": sums[step.operand]}), (source,), {})
            for copy, launch in self._copies:
                launch(_to(placed[copy.name], stream), (at[copy.name],), {})
            accumulators = self._accumulators(call, at | placed)
            for name, size_bytes in made.padded:
                self._device.fill(call.outputs[name], 0, size_bytes, stream)
            if self._finish is not None:
                self._finish(self._finishing(call, placed), accumulators, sums)

    def _accumulators(self, call: Call, at: dict[str, int]) -> tuple[int, ...]:
        """Multiplies, and says where the products are."""
        made, stream = self._recipe, call.stream
        if not made.products:
            self._device.fill(at["zero"], 0, made.problem.acc_dtype.bytes, stream)
            return (at["zero"],) * len(made.problem.b)
        reads_c = made.c_read_by == "product"
        narrow = made.products[0].a.dtype.is_narrow
        scales = {name: call.inputs[name] for name in (A_SCALE, B_SCALE) if name in call.inputs} if narrow else {}
        found = []
        for i, product in enumerate(self._products):
            d = call.d if made.in_d and i == 0 else at[f"acc{i}"]
            c, beta = (call.c, call.beta) if reads_c else (None, 0.0)
            product.run(Call(at["a"], (at[f"b{i}"],), c, d, scales, {}, call.alpha, beta, stream, call.workspace))
            found.append(d)
        return tuple(found)

    def _finishing(self, call: Call, placed: dict[str, int]) -> Call:
        """The call as the last pass reads it."""
        if self._recipe.c_read_by != "pass":
            return call
        beta = placed[BETA_INPUT]
        self._store(beta, call.beta, self._recipe.problem.acc_dtype, call.stream)
        more = {C_INPUT: call.c, BETA_INPUT: beta}
        return Call(call.a, call.b, call.c, call.d, {**call.inputs, **more}, call.outputs, call.alpha, call.beta, call.stream)

    def _store(self, address: int, value: complex | float, dtype: DType, stream: int) -> None:
        """A host number into device memory, in the order of the stream and valid in every replay of a graph: byte by byte, by fills."""
        position = 0
        for byte, same in groupby(np.array(value, dtype.numpy).tobytes()):
            count = len(list(same))
            self._device.fill(address + position, byte, count, stream)
            position += count


def _to(d: int, stream: int, outputs: dict[str, int] | None = None) -> Call:
    """The call of a pass that reads one accumulator."""
    return Call(None, (), None, d, {}, outputs or {}, stream=stream)


class UnfusedExecutable(AbstractExecutable):
    """A prepared candidate. What alpha = 0, beta = 0 or an `out` that is an input needs is prepared when it is first asked for.

    Args:
        problem, expression: what is computed.
        way, aligned: of the recipe.
        candidates: one a product.
        products, device: what runs them.
    """

    def __init__(
        self,
        problem: Problem,
        expression: Expression,
        way: str,
        aligned: bool,
        candidates: tuple[Candidate, ...],
        products: AbstractEngine,
        device: AbstractDevice,
    ) -> None:
        self._problem, self._expression, self._way, self._aligned = problem, expression, way, aligned
        self._candidates, self._products, self._device = candidates, products, device
        self._ready: dict[tuple[bool, bool, bool], _Steps] = {}
        usual = recipe(problem, expression, way, aligned=aligned)
        self._shares = tuple(n for n in shares_memory(problem) if n != "c" or usual.c_read_by == "pass") if usual.in_d else ()
        self._prepared(True, problem.c is not None, False)

    def run(self, call: Call) -> None:
        """Launch on `call.stream`; every tensor is an address on the plan's device."""
        apart = any((call.c if name == "c" else call.inputs[name]) == call.d for name in self._shares)
        self._prepared(call.alpha != 0, self._problem.c is not None and call.beta != 0, apart).run(call)

    def _prepared(self, product: bool, reads_c: bool, apart: bool) -> _Steps:
        key = (product, reads_c, apart)
        if key not in self._ready:
            made = recipe(self._problem, self._expression, self._way, aligned=self._aligned, product=product, reads_c=reads_c, apart=apart)
            candidates = self._candidates
            if apart or reads_c != (self._problem.c is not None):  # another product than the one that was planned
                candidates = first_candidates(made, self._products)
            self._ready[key] = _Steps(made, candidates, self._products, self._device)
        return self._ready[key]


def first_candidates(made: Recipe, products: AbstractEngine) -> tuple[Candidate, ...]:
    """The best candidate of each product."""
    return tuple(products.candidates(product, plain(product), 1)[0] for product in made.products)

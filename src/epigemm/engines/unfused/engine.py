"""The engine `unfused`: cuBLASLt's plain product, then one generated kernel that finishes D. It runs every expression of the language.

It is what "fused" has to beat, and the way for what no other engine fuses: several accumulators, any reduction, any strides, without
torch or Triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epigemm import errors
from epigemm.engines import costs
from epigemm.engines.base import AbstractEngine, AbstractExecutable, Refusal
from epigemm.engines.cuda.codegen import reduction
from epigemm.engines.unfused.recipe import Recipe, plain, recipe, shares_memory, ways
from epigemm.engines.unfused.run import AbstractDevice, CudaDevice, UnfusedExecutable
from epigemm.expression.nodes import COLUMN, ROW, Expression
from epigemm.plans import Candidate, PlanCache
from epigemm.problem import Problem

LEAST_CAPABILITY = (8, 0)
# Of a product's algorithms, how many are candidates in each way.
_RANKS = 4
_REMEMBERED = 512


@dataclass(frozen=True, slots=True)
class _Option:
    """One way that can be run.

    Args:
        recipe: its usual run.
        aligned: of the recipe.
        candidates: for each product, its candidates.
        workspace_bytes: the most that a run takes.
        predicted_us: by `costs`.
    """

    recipe: Recipe
    aligned: bool
    candidates: tuple[tuple[Candidate, ...], ...]
    workspace_bytes: int
    predicted_us: float

    @property
    def ranks(self) -> int:
        """How many choices of algorithms there are."""
        return max((len(c) for c in self.candidates), default=1)

    def chosen(self, rank: int) -> tuple[Candidate, ...]:
        """Each product's candidate of this rank, the last where it has fewer."""
        return tuple(c[min(rank, len(c) - 1)] for c in self.candidates)


@dataclass(frozen=True, slots=True)
class _Answer:
    options: tuple[_Option, ...] = ()
    refusal: Refusal | None = None


class UnfusedEngine(AbstractEngine):
    """Plain products by another engine, the rest by the generated pointwise kernel.

    Args:
        products: the engine of the plain products; None is cuBLASLt.
        device: "cuda:0" -> what launches the kernels there.
    """

    name = "unfused"

    def __init__(self, products: AbstractEngine | None = None, device: Callable[[str], AbstractDevice] = CudaDevice) -> None:
        self._given, self._device = products, device
        self._answers: PlanCache[_Answer] = PlanCache(_REMEMBERED)

    @property
    def _products(self) -> AbstractEngine:
        if self._given is None:
            self._given = importlib.import_module("epigemm.engines.cublaslt.engine").ENGINE
        return self._given

    def supports(self, problem: Problem, expression: Expression) -> Refusal | None:
        """None, or what even separate kernels cannot do: another device, an 8-bit C, too little workspace, no product of these types."""
        return self._ask(problem, expression).refusal

    def candidates(self, problem: Problem, expression: Expression, limit: int) -> tuple[Candidate, ...]:
        """The ways "exact" before "in_place", each with the product's best algorithms: `product` is the rank in cuBLASLt's list."""
        options = self._ask(problem, expression).options
        firsts = [(option, 0) for option in options]
        others = [(option, rank) for option in options for rank in range(1, min(option.ranks, _RANKS))]
        return tuple(self._candidate(option, rank) for option, rank in [*firsts, *others][:limit])

    def _candidate(self, option: _Option, rank: int) -> Candidate:
        config = (("product", rank), ("way", option.recipe.way))
        return Candidate(self.name, config, option.workspace_bytes, option.predicted_us if rank == 0 else None)

    def notes(self, problem: Problem, expression: Expression) -> tuple[str, ...]:
        """What is copied, where the product lies before the epilogue, and what is rounded twice."""
        return tuple(dict.fromkeys(note for option in self._ask(problem, expression).options for note in _notes(option.recipe)))

    def prepare(self, problem: Problem, expression: Expression, candidate: Candidate) -> AbstractExecutable:
        """The candidate ready to run: kernels compiled, or taken from the store.

        Raises:
            errors.AlgorithmError: there is no such way or product here.
        """
        answer = self._ask(problem, expression)
        if answer.refusal is not None:
            raise errors.all_refuse([(self.name, str(answer.refusal))], str(problem))
        way, rank = candidate["way"], candidate["product"]
        option = next((o for o in answer.options if o.recipe.way == way), None)
        if option is None or not isinstance(rank, int) or not 0 <= rank < option.ranks:
            known = ", ".join(f"way={o.recipe.way!r} with product below {o.ranks}" for o in answer.options)
            raise errors.AlgorithmError(errors.say(f"unfused has no way={way!r} with product={rank!r} here.", f"It has {known}."))
        device = self._device(problem.device)
        return UnfusedExecutable(problem, expression, str(way), option.aligned, option.chosen(rank), self._products, device)

    def stored_for(self, problem: Problem, expression: Expression) -> dict[str, Any]:
        """As every engine's, and the versions of the library whose list of algorithms `product` counts in."""
        found = super().stored_for(problem, expression)
        for option in self._ask(problem, expression).options:
            for product in option.recipe.products[:1]:
                found["versions"] |= self._products.stored_for(product, plain(product))["versions"]
        return found

    # ------------------------------------------------------------ asking

    def _ask(self, problem: Problem, expression: Expression) -> _Answer:
        try:
            return self._answers.get((problem, expression), lambda: self._answer(problem, expression))
        except (errors.EngineUnavailable, errors.LibraryError) as why:
            return _Answer(refusal=Refusal(str(why)))  # not remembered: it may pass

    def _answer(self, problem: Problem, expression: Expression) -> _Answer:
        refusal = _refused(problem, expression)
        if refusal is None and self._device(problem.device).capability < LEAST_CAPABILITY:
            refusal = Refusal("unfused generates kernels for GPUs from compute capability 8.0 (A100) on.")
        if refusal is not None:
            return _Answer(refusal=refusal)
        answers = [self._option(problem, expression, way) for way in ways(problem, expression)]
        found = [answer for answer in answers if isinstance(answer, _Option)]
        refusals = [answer for answer in answers if isinstance(answer, Refusal)]
        return _Answer(tuple(found)) if found else _Answer(refusal=refusals[0])

    def _option(self, problem: Problem, expression: Expression, way: str) -> _Option | Refusal:
        """A way with its operands as they lie, else with copies of them."""
        refusal: Refusal | None = None
        for aligned in (False, True):
            if way not in ways(problem, expression, aligned):
                continue
            made = recipe(problem, expression, way, aligned=aligned)
            refusals = [r for product in made.products if (r := self._products.supports(product, plain(product))) is not None]
            if refusals:
                refusal = refusal or refusals[0]
                continue
            try:
                return self._costed(problem, made, aligned)
            except (errors.UnsupportedEpilogue, errors.UnsupportedProblem) as why:
                return Refusal(str(why))
        assert refusal is not None
        return refusal

    def _costed(self, problem: Problem, made: Recipe, aligned: bool) -> _Option | Refusal:
        candidates = tuple(self._products.candidates(product, plain(product), _RANKS) for product in made.products)
        steps = [*(copy.step for copy in made.copies), *made.sums, *((made.finish,) if made.finish else ())]
        kernels = [step.kernel for step in steps]
        scratch_bytes = made.scratch_bytes
        if made.in_d and shares_memory(problem):
            scratch_bytes = recipe(problem, made.expression, made.way, aligned=aligned, apart=True).scratch_bytes
        own = [k.workspace_bytes for k in kernels] + [c.workspace_bytes for several in candidates for c in several]
        workspace_bytes = scratch_bytes + max(own, default=0)
        limit = problem.compute.memory_limit
        if limit is not None and workspace_bytes > limit:
            return Refusal(
                f"unfused needs {workspace_bytes} bytes of workspace for the product and its kernels, and memory_limit allows {limit}. "
                "Raise memory_limit."
            )
        predicted_us = sum(map(costs.product_us, made.products)) + sum(costs.pass_us(k.moved_bytes) for k in kernels if k.blocks)
        return _Option(made, aligned, candidates, workspace_bytes, predicted_us)


def _refused(problem: Problem, expression: Expression) -> Refusal | None:
    """What no GPU changes."""
    if not problem.device.startswith("cuda"):
        return Refusal(f"unfused computes on CUDA devices, and the operands are on {problem.device}.")
    if problem.c is not None and problem.c.dtype.is_narrow:
        return Refusal(f"unfused reads no C of {problem.c.dtype.name}: no GPU call brings its scale. Pass it as float16 or bfloat16.")
    conjugated = [n for n, x in (*problem.inputs, *((("C", problem.c),) if problem.c else ())) if x.conjugate and x.dtype.is_complex]
    if conjugated:
        return Refusal(f"unfused reads `{conjugated[0]}` as it lies in memory: pass its conjugate resolved.")
    if 0 in (problem.m, problem.n):
        left = [o.name for o in expression.extras if o.extent in (COLUMN, ROW) and reduction(o.node) is None]
        if left and (problem.m or problem.n):
            return Refusal(f"unfused has no pass over an empty D, which the output `{left[0]}` would need.")
    return None


def _notes(made: Recipe) -> tuple[str, ...]:
    names = {"a": "A", **{f"b{i}": f"B[{i}]" if len(made.problem.b) > 1 else "B" for i in range(len(made.problem.b))}}
    notes = [f"{names[c.name]} is copied into {c.target.bytes} bytes of workspace: {c.why}" for c in made.copies]
    if made.widened:
        notes.append("A and B are multiplied as float16, which holds every 8-bit number, and their scales applied afterwards")
    if made.c_read_by == "pass":
        notes.append("C is added by the epilogue's kernel: cuBLASLt does not read it beside this product")
    if made.products:
        where = "D's memory" if made.in_d else "the workspace"
        notes.append(f"way={made.way}: the product is stored as {made.products[0].d.dtype.name} in {where}, then one kernel finishes D")
    if made.finish is None:
        notes[-1] = f"way={made.way}: D is the product itself"
    if made.twice_rounded:
        notes.append(
            f"way={made.way} rounds the product to {made.twice_rounded} before the epilogue, and D once more, as any library does that "
            "computes them one after the other; it is taken only where autotune finds it faster or it is asked for"
        )
    return tuple(notes)


ENGINE = UnfusedEngine()

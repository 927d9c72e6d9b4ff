"""The CPU engine: NumPy and its BLAS. It runs every checked expression, and what it computes is what the expression means."""

from __future__ import annotations

from typing import Any

from epigemm.dtypes import DType
from epigemm.engines.base import AbstractEngine, AbstractExecutable, Refusal
from epigemm.engines.cpu import threads
from epigemm.engines.cpu.panels import CpuExecutable, compile_walk, copied, workspace_bytes
from epigemm.engines.cpu.tiling import Tiling, tiling
from epigemm.engines.cpu.walk import Walk, walk_of
from epigemm.expression.nodes import Expression
from epigemm.plans import Candidate
from epigemm.problem import Operand, Problem

# (threads, rows, columns) of the panels that take the least memory.
_SMALLEST = (1, 64, 256)

# Other panels that autotune tries: rows and columns times these fractions.
_VARIATIONS = ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1), (2, 1, 1, 2))


class CpuEngine(AbstractEngine):
    """Row panels of D, product and epilogue per panel; every problem whose device is "cpu"."""

    name = "cpu"

    def supports(self, problem: Problem, expression: Expression) -> Refusal | None:
        if problem.device != "cpu":
            return Refusal(f"cpu computes where NumPy arrays lie, and the operands are on {problem.device}. Leave the engine to be chosen.")
        limit = problem.compute.memory_limit
        if limit is not None:
            walk = walk_of(problem, expression)
            least = workspace_bytes(walk, compile_walk(walk), tiling(walk, *_SMALLEST))
            if least > limit:
                return Refusal(f"cpu needs {least} bytes for its panels, and memory_limit allows {limit}. Raise memory_limit.")
        return None

    def candidates(self, problem: Problem, expression: Expression, limit: int) -> tuple[Candidate, ...]:
        walk = walk_of(problem, expression)
        program = compile_walk(walk)
        several = threads.count() if threads.can_keep_blas_alone() else 1
        best = tiling(walk, several)
        cuts = [best, *(tiling(walk, several, max(1, best.rows * p // q), max(1, best.columns * r // s)) for p, q, r, s in _VARIATIONS)]
        cuts += [tiling(walk, 1), tiling(walk, *_SMALLEST)]
        configs = dict.fromkeys((("panel_columns", c.columns), ("panel_rows", c.rows), ("threads", c.threads)) for c in cuts)
        found = [Candidate(self.name, config, workspace_bytes(walk, program, _cut(walk, dict(config)))) for config in configs]
        most = problem.compute.memory_limit
        return tuple(c for c in found if most is None or c.workspace_bytes <= most)[: max(limit, 1)]

    def notes(self, problem: Problem, expression: Expression) -> tuple[str, ...]:
        return tuple(_how_copied(name, x, problem.acc_dtype) for name, x in copied(walk_of(problem, expression)))

    def prepare(self, problem: Problem, expression: Expression, candidate: Candidate) -> AbstractExecutable:
        walk = walk_of(problem, expression)
        return CpuExecutable(walk, compile_walk(walk), _cut(walk, dict(candidate.config)))


def _cut(walk: Walk, config: dict[str, Any]) -> Tiling:
    count = config["threads"] if threads.can_keep_blas_alone() else 1
    return tiling(walk, count, config["panel_rows"], config["panel_columns"])


def _how_copied(name: str, x: Operand, accumulator: DType) -> str:
    if x.dtype != accumulator:
        return f"{name} is widened from {x.dtype} to {accumulator} a block at a time."
    if x.conjugate:
        return f"{name} is conjugated a block at a time."
    if x.order is None:
        return f"{name} with strides {x.strides[-2:]} has no leading dimension for BLAS and is copied a block at a time."
    return f"{name} is aligned to {x.alignment_bytes} bytes only and is copied a block at a time."


ENGINE = CpuEngine()

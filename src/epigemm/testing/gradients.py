"""Derived gradients as rows of the table: each user epilogue's forward with what it saves, and its backward."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import epigemm as eg
from epigemm.errors import GradientError
from epigemm.expression.grad import Gradient, gradient
from epigemm.expression.nodes import Expression
from epigemm.expression.values import Value
from epigemm.testing.epilogues import EPILOGUES, Input, Row

# Extents as `gradient` names them, by the table's.
_EXTENTS = {"vector": "row", "row": "row", "column": "column", "matrix": "matrix", "scalar": "scalar", "bits": "bits"}


@dataclass(frozen=True)
class Given:
    """An expression as a callable that traces to it."""

    expression: Expression

    @property
    def __signature__(self) -> inspect.Signature:
        names = [*(f"acc{i}" for i in range(self.expression.accumulators)), *self.expression.input_names]
        return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])

    def __call__(self, *values: Any) -> Any:
        d, *extras = ((output.name, Value(output.node)) for output in self.expression.outputs)
        return eg.outputs(d[1], **dict(extras)) if extras else d[1]


def derived(row: Row) -> Gradient | None:
    """The derivative of a row's epilogue, None where it has none or an input has batches of its own."""
    if any(like.batched for like in row.inputs.values()):
        return None
    extents = {name: _EXTENTS[like.extent] for name, like in row.inputs.items() if like.extent in _EXTENTS}
    expression = eg.epilogue(row.function).expression(row.accumulators)
    try:
        return gradient(expression, extents, dtype="float32")
    except GradientError:
        return None


def backward_inputs(row: Row, found: Gradient) -> dict[str, Input]:
    """What the backward's inputs are like: saved tensors, the forward's inputs, cotangents of further outputs."""
    saved = {one.name: Input(one.extent) for one in found.saved}
    forward = {o.name: o for o in found.forward.outputs}
    known = {**saved, **row.inputs, **{name: _cotangent(forward[output].node) for name, output in found.cotangents}}
    return {name: known[name] for name in found.backward.input_names}


def _cotangent(node: Any) -> Input:
    while node.op == "cast":
        node = node.args[0]
    axes = {"m": "row", "n": "column", "mn": "scalar"}
    return Input(axes[node.param("axis")] if node.op == "sum" else "matrix")


@cache
def gradient_rows() -> tuple[Row, ...]:
    """Forward and backward of every row of the table that has a derivative."""
    rows = []
    for row in EPILOGUES.values():
        found = derived(row)
        if found is None or row.name in ("lower_extents", "complex_affine"):
            continue
        rows.append(Row(f"{row.name} forward", Given(found.forward), row.inputs, row.accumulators, data=row.data))
        rows.append(Row(f"{row.name} backward", Given(found.backward), backward_inputs(row, found), data=row.data))
    return tuple(rows)

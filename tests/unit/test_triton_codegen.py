"""Generated Triton text: golden files for a dozen epilogues, names, numbers, refusals. Nothing of Triton is imported.

`EPIGEMM_WRITE_GOLDEN=1` writes the files anew; look at the difference before it is kept.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import epigemm as eg
from epigemm import dtypes, errors
from epigemm.engines.triton import codegen, configs
from epigemm.engines.triton.oriented import orient
from epigemm.expression.check import check
from epigemm.expression.named import named
from epigemm.expression.nodes import Expression, Node, Output, acc, constant
from epigemm.options import MatmulEpilog
from epigemm.problem import Operand, Problem
from epigemm.testing import epilogues

GOLDEN = Path(__file__).parent / "golden" / "triton"

M, N, K = 256, 384, 128
SHAPES = {"row": (1, N), "column": (M, 1), "matrix": (M, N), "scalar": (1, 1), "seed": (1, 1), "vector": (1, N)}


def problem_of(row: Any, order: str = "row", batch: tuple[int, ...] = ()) -> Problem:
    """A bf16 problem with the inputs of a row of the table of epilogues."""
    inputs = {}
    for name, like in row.inputs.items():
        if like.extent == "bits":
            bits = (*batch, M // 8, N) if order == "col" else (*batch, M, N // 8)
            inputs[name] = Operand.dense("u8", bits, order)
        else:
            dtype = "i64" if like.extent == "seed" else like.dtype or "bf16"
            inputs[name] = Operand.dense(dtypes.of(dtype), ((*batch, *SHAPES[like.extent]) if like.batched else SHAPES[like.extent]), order)
    return Problem.of("bf16", m=M, n=N, k=K, batch=batch, accumulators=row.accumulators, inputs=inputs, order=order)


def of_row(name: str, order: str = "row", batch: tuple[int, ...] = ()) -> tuple[Expression, Problem]:
    row = epilogues.EPILOGUES[name]
    problem = problem_of(row, order, batch)
    return check(eg.epilogue(row.function).expression(row.accumulators), problem), problem


def of_epilog(epilog: MatmulEpilog, order: str, **inputs: Operand) -> tuple[Expression, Problem]:
    problem = Problem.of("f16", m=M, n=N, k=K, order=order, inputs=inputs)
    return check(named(epilog), problem), problem


def with_c() -> tuple[Expression, Problem]:
    problem = replace(Problem.of("f32", m=M, n=N, k=K, c=True), c=Operand.dense("f32", (M, 1)))
    return check(Expression((Output("d", acc()),), name="with_c"), problem), problem


CASES: dict[str, Callable[[], tuple[Expression, Problem]]] = {
    "relu_aux_bias": lambda: of_epilog(MatmulEpilog.RELU_AUX_BIAS, "col", bias=Operand.dense("f16", (M, 1), "col")),
    "drelu_bgrad": lambda: of_epilog(MatmulEpilog.DRELU_BGRAD, "col", relu_aux=Operand.dense("u8", (M // 8, N), "col")),
    "gelu_aux": lambda: of_epilog(MatmulEpilog.GELU_AUX, "row"),
    "bgradb": lambda: of_epilog(MatmulEpilog.BGRADB, "col"),
    "residual_gelu": lambda: of_row("residual_gelu"),
    "swiglu_saved": lambda: of_row("swiglu_saved"),
    "row_stats": lambda: of_row("row_stats"),
    "largest": lambda: of_row("largest", "col"),
    "dropped": lambda: of_row("dropped", "col", (3,)),
    "lower_extents": lambda: of_row("lower_extents"),
    "eight_bits": lambda: of_row("eight_bits"),
    "zero_point": lambda: of_row("zero_point", batch=(2,)),
    "d_swiglu": lambda: of_row("d_swiglu"),
    "with_c": with_c,
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    expression, problem = CASES[name]()
    oriented = orient(problem, expression)
    mapped = configs.mapped_outputs(oriented) if name in ("residual_gelu", "swiglu_saved", "dropped") else frozenset()
    text = codegen.text(expression, oriented, mapped)
    ast.parse(text)
    path = GOLDEN / f"{name}.py.txt"
    if os.environ.get("EPIGEMM_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_every_golden_file_is_made() -> None:
    assert {path.name.removesuffix(".py.txt") for path in GOLDEN.iterdir()} == set(CASES)
    assert len(CASES) >= 12


@pytest.mark.parametrize("name", [n for n in epilogues.EPILOGUES if n != "complex_affine"])
@pytest.mark.parametrize("order", ["row", "col"])
def test_every_op_has_a_spelling(name: str, order: str) -> None:
    expression, problem = of_row(name, order)
    oriented = orient(problem, expression)
    tree = ast.parse(codegen.text(expression, oriented))
    (function,) = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "epilogue"]
    unpacked = function.body[0]
    assert isinstance(unpacked, ast.Assign)
    assert ast.unparse(unpacked.targets[0]).strip("()").split(", ") == [a.name for a in codegen.arguments(oriented)]


def test_the_same_text_serves_every_size() -> None:
    """Extents and strides are arguments: a new m compiles nothing."""
    texts = set()
    for m in (64, 4096):
        problem = Problem.of("bf16", m=m, n=N, k=K)
        expression = check(Expression((Output("d", Node("relu", acc())),)), problem)
        texts.add(codegen.text(expression, orient(problem, expression)))
    assert len(texts) == 1


def test_names_that_the_text_uses_are_left_free() -> None:
    names = ("rows", "inside", "lambda", "t3", "p_bias", "acc", "item0")
    inputs = {name: Operand.dense("f32", (1, N)) for name in names}
    problem = Problem.of("f32", m=M, n=N, k=K, inputs=inputs)
    total = acc()
    for name in names:
        total = Node("add", total, Node("input", name=name))
    expression = check(Expression((Output("d", total),), input_names=names), problem)
    text = codegen.text(expression, orient(problem, expression))
    ast.parse(text)
    for name in names:
        assert f"    {name}_ = tl.load(p_in_{name} +" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.1, "0.1"),
        (-2, "(-2.0)"),
        (1e300, 'float("inf")'),
        (float("-inf"), '(-float("inf"))'),
        (float("nan"), 'float("nan")'),
        (True, "True"),
    ],
)
def test_numbers(value: float, shown: str) -> None:
    assert codegen.literal(value) == shown


def test_a_cast_to_a_type_that_is_none_of_its_is_refused() -> None:
    problem = Problem.of("f32", m=M, n=N, k=K)
    node = Node("cast", acc(), dtype="int32")
    expression = Expression((Output("d", Node("add", node, constant(1.0)), "float32", "matrix"),))
    with pytest.raises(errors.UnsupportedEpilogue, match="cannot be rounded to int32"):
        codegen.text(expression, orient(problem, expression))


def test_a_column_major_d_is_turned() -> None:
    expression, problem = of_row("row_stats", "col", (2,))
    oriented = orient(problem, expression)
    assert (oriented.swapped, oriented.m, oriented.n) == (True, N, M)
    assert [s.name for s in oriented.lefts] == ["b0"]
    assert oriented.tensor("input", "bias").extent == "column"
    assert {t.name: t.reduction.param("axis") for t in oriented.reductions if t.reduction} == {"sumsq": "m", "total": "mn", "columns": "n"}


def test_batches_are_merged_where_all_tensors_walk_them_as_one() -> None:
    problem = Problem.of("f32", m=4, n=4, k=4, batch=(2, 1, 3))
    expression = check(Expression((Output("d", acc()),)), problem)
    assert orient(problem, expression).batch == (6,)
    shared = replace(problem, b=(Operand.dense("f32", (3, 4, 4)),))
    assert orient(shared, expression).batch == (2, 3)

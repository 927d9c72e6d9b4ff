"""Checking fills in every extent and dtype, and refuses what no engine could run."""

from __future__ import annotations

import pytest

import epigemm.expression as eg
from epigemm.errors import DTypeError, EpilogInputError, ExpressionError, ShapeError
from epigemm.expression.check import check, input_extent, place_input, result_dtype
from epigemm.expression.nodes import Expression, Node, Output, acc, constant, input_
from epigemm.problem import Operand, Problem

M, N = 64, 48


def checked(function, dtype="bf16", accumulators=1, m=M, n=N, batch=(), order="row", **inputs):
    operands = {name: Operand.dense(kind, shape) for name, (kind, shape) in inputs.items()}
    problem = Problem.of(dtype, m=m, n=n, k=32, batch=batch, accumulators=accumulators, inputs=operands, order=order)
    expression = function if isinstance(function, Expression) else eg.as_epilogue(function).expression(accumulators)
    return check(expression, problem)


def test_inputs_carry_extent_and_dtype():
    def f(acc, scalar, column, row, matrix, mask, seed):
        return eg.dropout(eg.where(eg.unbitmask(mask), acc * scalar + column, row + matrix), 0.5, seed)

    expression = checked(
        f,
        scalar=("f32", (1, 1)),
        column=("f16", (M, 1)),
        row=("bf16", (1, N)),
        matrix=("bf16", (M, N)),
        mask=("u8", (M, 16)),
        seed=("i64", (1, 1)),
    )
    found = {x.param("name"): (x.param("extent"), x.param("dtype")) for x in expression.nodes() if x.op == "input"}
    assert found == {
        "scalar": ("scalar", "float32"),
        "column": ("column", "float16"),
        "row": ("row", "bfloat16"),
        "matrix": ("matrix", "bfloat16"),
        "mask": ("bits", "uint8"),
        "seed": ("scalar", "int64"),
    }


def test_outputs_carry_dtype_and_extent():
    def f(acc, bias):
        y = acc + bias
        return eg.outputs(
            eg.relu(y),
            half=eg.cast(y, "float16"),
            same=y,
            mask=eg.bitmask(y > 0),
            rows=eg.sum(y, axis="n"),
            columns=eg.amax(y, axis="m"),
            total=eg.cast(eg.sum(y), "float16"),
            twice=bias * 2,
            a_sum=eg.operand_sum("a"),
        )

    found = {o.name: (o.dtype, o.extent) for o in checked(f, bias=("f32", (1, N))).outputs}
    assert found == {
        "d": ("bfloat16", "matrix"),
        "half": ("float16", "matrix"),
        "same": ("bfloat16", "matrix"),
        "mask": ("uint8", "bits"),
        "rows": ("float32", "column"),
        "columns": ("float32", "row"),
        "total": ("float16", "scalar"),
        "twice": ("bfloat16", "row"),
        "a_sum": ("float32", "column"),
    }
    assert checked(lambda acc: eg.outputs(acc, s=eg.sum(acc)), dtype="f64").extras[0].dtype == "float64"


@pytest.mark.parametrize(
    ("shape", "m", "n", "expected"),
    [
        ((64, 48), 64, 48, "matrix"),
        ((64, 1), 64, 48, "column"),
        ((1, 48), 64, 48, "row"),
        ((1, 1), 64, 48, "scalar"),
        ((5, 1, 48), 64, 48, "row"),
        ((1, 48), 1, 48, "row"),
        ((64, 1), 64, 1, "column"),
        ((1, 1), 1, 1, "scalar"),
        ((0, 48), 0, 48, "matrix"),
        ((0, 1), 0, 48, "column"),
    ],
)
def test_extents(shape, m, n, expected):
    assert input_extent("x", shape, m, n) == expected


@pytest.mark.parametrize("shape", [(48, 64), (64, 2), (2, 48), (64,), ()])
def test_shapes_that_do_not_broadcast(shape):
    with pytest.raises(ShapeError, match=rf"`x` of shape \({', '.join(map(str, shape))},?\) does not broadcast to \(..., m=64, n=48\)"):
        input_extent("x", shape, 64, 48)


@pytest.mark.parametrize(("m", "bytes_"), [(1, 16), (7, 16), (8, 16), (9, 16), (127, 16), (128, 16), (129, 32)])
def test_mask_shapes_by_order(m, bytes_):
    assert input_extent("mask", (bytes_, 3), m, 3, bits=True, order="col") == "bits"
    assert input_extent("mask", (3, bytes_), 3, m, bits=True, order="row") == "bits"
    with pytest.raises(ShapeError, match=rf"must have the MM shape \(\.\.\., {bytes_}, 3\)"):
        input_extent("mask", (bytes_ + 16, 3), m, 3, bits=True, order="col")


def test_one_dimensional_inputs_follow_their_own_rule():
    assert place_input("b", (48,), m=64, n=48) == (1, 48)
    assert place_input("b", (64,), m=64, n=48, convention="peer") == (64, 1)
    assert place_input("b", (64,), m=64, n=64) == (1, 64)
    assert place_input("b", (64,), m=64, n=64, convention="peer") == (64, 1)
    assert place_input("b", (), m=64, n=48) == (1, 1)
    assert place_input("b", (1,), m=64, n=48) == (1, 1)
    assert place_input("b", (7, 64, 1), m=64, n=48) == (7, 64, 1)
    with pytest.raises(ShapeError, match=r"`b` of length 64 must have length 48: it lies along n.*\n.*\(64, 1\) .* \(1, 48\)"):
        place_input("b", (64,), m=64, n=48)
    with pytest.raises(ShapeError, match=r"The M dimension of the bias vector \(48\).*\n.*\(64, 1\).*\(1, N\)"):
        place_input("b", (48,), m=64, n=48, convention="peer")


def test_sum_like_becomes_the_sum_over_what_the_input_is_broadcast_along():
    x = Node("add", acc(), input_("b"))
    for shape, axis in (((1, N), "m"), ((M, 1), "n"), ((1, 1), "mn")):
        expression = Expression((Output("d", x), Output("d_b", Node("sum_like", x, name="b"))), 1, ("b",))
        root = checked(expression, b=("f32", shape)).extras[0].node
        assert (root.op, root.param("axis")) == ("sum", axis)
    expression = Expression((Output("d", x), Output("d_b", Node("sum_like", x, name="b"))), 1, ("b",))
    assert checked(expression, b=("f32", (M, N))).extras[0].node.op == "add"


def test_checking_twice_changes_nothing():
    def f(acc, bias):
        return eg.outputs(eg.gelu(acc + bias), s=eg.sum(acc, axis="n"))

    once = checked(f, bias=("f32", (1, N)))
    assert checked(once, bias=("f32", (1, N))) == once


def test_the_cast_at_the_root_names_the_result_dtype():
    expression = eg.as_epilogue(lambda acc: eg.cast(acc, "float16")).expression()
    assert result_dtype(expression) == "float16"
    assert checked(expression, dtype="f16").d.dtype == "float16"
    with pytest.raises(ExpressionError, match="D is cast to float16 and is to be stored as bfloat16"):
        checked(expression)


REFUSED = [
    (lambda g, u: g * u, {}, ExpressionError, r"takes 1 accumulators, and 2 products"),
    (
        lambda acc, a, b: acc + a,
        {"inputs": {"a": ("f32", (1, N))}},
        EpilogInputError,
        r"requires the following input tensors: \{'a', 'b'\}",
    ),
    (lambda acc: acc, {"inputs": {"a": ("f32", (1, N))}}, EpilogInputError, r"Unknown: a"),
    (lambda acc, a: acc + a, {"inputs": {"a": ("f32", (2, N))}}, ShapeError, r"`a` of shape \(2, 48\) does not broadcast"),
    (lambda acc, a: acc + a, {"inputs": {"a": ("f32", (3, 1, N))}}, ShapeError, r"`a` of shape \(3, 1, 48\) does not broadcast"),
    (lambda acc, a: acc + a, {"inputs": {"a": ("u8", (1, N))}}, DTypeError, r"`a` of dtype uint8 cannot be read .*\n.*eg\.unbitmask"),
    (lambda acc, a: acc + a, {"inputs": {"a": ("c64", (1, N))}}, DTypeError, r"`a` of dtype complex64 cannot be read as a float32"),
    (
        lambda acc, a: eg.where(eg.unbitmask(a), acc, 0),
        {"inputs": {"a": ("f32", (M, 16))}},
        DTypeError,
        r"`a` must be 'uint8'; the dtype is 'float32'",
    ),
    (lambda acc, a: eg.dropout(acc, 0.5, a), {"inputs": {"a": ("f32", (1, 1))}}, DTypeError, r"The seed `a` must be one integer"),
    (lambda acc, a: eg.dropout(acc, 0.5, a), {"inputs": {"a": ("i64", (1, N))}}, DTypeError, r"The seed `a` must be one integer"),
    (lambda acc, a: eg.dropout(acc * a, 0.5, a), {"inputs": {"a": ("i64", (1, 1))}}, ExpressionError, r"`a` is read both as"),
    (lambda acc: eg.relu(acc), {"dtype": "c64"}, ExpressionError, r"`relu` is not defined for complex64, in `relu\(acc\)`"),
    (lambda acc: eg.where(acc > 0, acc, 0), {"dtype": "c128"}, ExpressionError, r"`gt` is not defined for complex128"),
    (lambda acc: eg.cast(acc, "float32"), {"dtype": "c64"}, ExpressionError, r"casts between real and complex"),
    (lambda acc: acc * 1j, {}, ExpressionError, r"A float32 epilogue cannot hold 1j"),
    (lambda acc: eg.outputs(acc, s=eg.operand_sum("b1")), {}, ExpressionError, r"`operand_sum\(b1\)` names an operand that is not there"),
    (lambda acc: eg.outputs(acc, s=acc > 0), {}, ExpressionError, r"The output `s` = `acc > 0` is a bool\.\n.*eg\.bitmask"),
]


@pytest.mark.parametrize(("function", "given", "error", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refusals_name_the_node_and_the_remedy(function, given, error, message):
    given = {**given}
    inputs = given.pop("inputs", {})
    if "2 products" in message:
        expression = eg.as_epilogue(lambda acc: acc).expression()
        with pytest.raises(error, match=message):
            checked(expression, accumulators=2)
        return
    with pytest.raises(error, match=f"(?s){message}"):
        checked(function, **given, **inputs)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Node("add", Node("sum", acc(), axis="m"), constant(1.0)), r"`add` cannot take `sum\(acc, axis=m\)`"),
        (Node("cosh", acc()), r"`cosh\(.*\)` is not an op of the epilogue language"),
        (Node("add", acc()), r"`add\(.*\)` is not an op"),
        (Node("bitmask", Node("gt", acc(), constant(0.0))), r"The output `d` = `bitmask\(acc > 0\)` is a bits"),
    ],
)
def test_expressions_made_by_hand_are_held_to_the_same_rules(node, message):
    with pytest.raises(ExpressionError, match=message):
        checked(Expression((Output("d", node),)))


def test_two_outputs_of_one_name_are_refused():
    with pytest.raises(ExpressionError, match=r"Two outputs of .* have one name: d, x and x"):
        checked(Expression((Output("d", acc()), Output("x", acc()), Output("x", acc()))))


def test_complex_arithmetic_is_accepted():
    expression = checked(lambda acc, b: (acc * 2j - b) / b, dtype="c64", b=("c64", (1, N)))
    assert expression.d.dtype == "complex64"

"""Rewrites keep every result to the bit; eager rounding stands where an unfused model stores."""

from __future__ import annotations

import operator

import numpy as np
import pytest

import epigemm.expression as eg
from epigemm.expression.check import check
from epigemm.expression.format import text
from epigemm.expression.nodes import Expression, Node, Output, acc, constant, input_, walk
from epigemm.expression.ops import OPS
from epigemm.expression.simplify import RULES, eager, simplify
from epigemm.problem import Operand, Problem

X, Y = acc(), input_("y")
POINTS = np.array([-np.inf, -2.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3.0, np.inf, np.nan], np.float32)


def simplified(function_or_node):
    if isinstance(function_or_node, Node):
        expression = Expression((Output("d", function_or_node),), 1, ("y",))
    else:
        expression = eg.as_epilogue(function_or_node).expression()
    return simplify(expression).d.node


def evaluate(root, x, y):
    values = {}
    for node in walk([root]):
        if node.op in ("acc", "input"):
            values[node] = x if node.op == "acc" else y
        elif node.op == "constant":
            values[node] = node.param("value")
        else:
            with np.errstate(all="ignore"):
                values[node] = OPS[node.op].numpy(*(values[a] for a in node.args), **dict(node.params))
    return np.broadcast_to(values[root], x.shape)


REWRITTEN = [
    (lambda acc: acc * 1.0, "acc"),
    (lambda acc: 1.0 * acc / 1.0, "acc"),
    (lambda acc: acc - 0.0, "acc"),
    (lambda acc: acc + -0.0, "acc"),
    (lambda acc: acc + 0.0, "acc + 0"),
    (lambda acc: acc * 0.0, "acc * 0"),
    (lambda acc: operator.neg(-acc), "acc"),
    (lambda acc, y: acc + (-y), "acc - y"),
    (lambda acc, y: acc - (-y), "acc + y"),
    (lambda acc, y: eg.where(~~(acc > y), acc, y), "where(acc > y, acc, y)"),
    (lambda acc, y: eg.where(~(acc > y), acc, y), "where(acc > y, y, acc)"),
    (lambda acc, y: eg.where(acc > y, acc * 1.0, acc), "acc"),
    (lambda acc: eg.maximum(acc, 0), "relu(acc)"),
    (lambda acc: eg.maximum(0.0, acc), "relu(acc)"),
    (lambda acc: eg.where(acc < 0, 0.0, acc), "relu(acc)"),
    (lambda acc: eg.where(~(acc <= 0), acc, 0.0), "relu(acc)"),
    (lambda acc: eg.where(acc > 0, acc, 0.0), "where(acc > 0, acc, 0)"),
    (lambda acc: acc * acc, "square(acc)"),
    (lambda acc: eg.cast(eg.cast(acc, "float16"), "float16"), "cast(acc, dtype=float16)"),
    (lambda acc: eg.cast(eg.cast(acc, "bfloat16"), "float16"), "cast(cast(acc, dtype=bfloat16), dtype=float16)"),
    (lambda acc: acc * eg.sigmoid(acc), "acc * sigmoid(acc)"),
    (lambda acc: eg.maximum(operator.neg(-(acc * 1.0)), 0) * 1.0, "relu(acc)"),
]


@pytest.mark.parametrize(("function", "expected"), REWRITTEN, ids=[str(i) for i in range(len(REWRITTEN))])
def test_rules(function, expected):
    assert text(simplified(function)) == expected


@pytest.mark.parametrize(("function", "expected"), REWRITTEN, ids=[str(i) for i in range(len(REWRITTEN))])
def test_rules_keep_the_values(function, expected):
    before = eg.as_epilogue(function).expression().d.node
    for y in POINTS:
        got = evaluate(simplified(function), POINTS, np.full_like(POINTS, y))
        np.testing.assert_array_equal(got, evaluate(before, POINTS, np.full_like(POINTS, y)))


def test_known_conditions_are_folded():
    assert simplified(Node("where", Node("lt", constant(1.0), constant(2.0)), X, Y)) is X
    assert simplified(Node("where", Node("logical_not", constant(True)), X, Y)) is Y


def test_a_wrong_rule_is_found(monkeypatch):
    drop_zero = lambda node: node.args[0] if node.op == "add" and node.args[1] is constant(0.0) else None
    monkeypatch.setattr("epigemm.expression.simplify.RULES", (drop_zero, *RULES))
    with pytest.raises(AssertionError):
        test_rules(lambda acc: acc + 0.0, "acc + 0")
    got = evaluate(simplified(lambda acc: acc + 0.0), POINTS, POINTS)
    assert np.signbit(got[3])
    assert not np.signbit(evaluate(Node("add", X, constant(0.0)), POINTS, POINTS)[3])


def test_simplifying_twice_changes_nothing():
    for function, _ in REWRITTEN:
        once = simplify(eg.as_epilogue(function).expression())
        assert simplify(once) == once


EAGER = [
    (lambda acc, bias: eg.gelu(acc + bias), "gelu(cast(acc + bias[n], dtype=bfloat16))"),
    (lambda acc: eg.relu(acc), "relu(cast(acc, dtype=bfloat16))"),
    (
        lambda acc, bias, other: eg.tanh(acc + bias) * 2.0 + other,
        "cast(cast(tanh(cast(acc + bias[n], dtype=bfloat16)), dtype=bfloat16) * 2, dtype=bfloat16) + other[m, n]",
    ),
    (lambda acc, other: acc + other, "cast(acc, dtype=bfloat16) + other[m, n]"),
    (lambda acc: eg.where(acc > 0, acc, 0.0), "where(cast(acc, dtype=bfloat16) > 0, cast(acc, dtype=bfloat16), 0)"),
]


@pytest.mark.parametrize(("function", "expected"), EAGER, ids=[str(i) for i in range(len(EAGER))])
def test_eager_rounds_where_an_unfused_model_stores(function, expected):
    expression = eg.as_epilogue(function).expression()
    shapes = {"bias": (1, 8), "other": (4, 8)}
    problem = Problem.of("bf16", m=4, n=8, k=2, inputs={n: Operand.dense("bf16", shapes[n]) for n in expression.input_names})
    assert text(eager(check(expression, problem), "bfloat16").d.node) == expected

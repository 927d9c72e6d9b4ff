"""How expressions and gradients print: infix, shared parts named once."""

from __future__ import annotations

import pytest

import epigemm.expression as eg
from epigemm.expression.format import text
from epigemm.expression.nodes import Node, acc, constant, input_

X, Y = acc(), input_("y")


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (Node("sub", X, Node("sub", Y, X)), "acc - (y - acc)"),
        (Node("sub", Node("sub", X, Y), X), "acc - y - acc"),
        (Node("mul", Node("add", X, Y), constant(2.0)), "(acc + y) * 2"),
        (Node("neg", Node("add", X, Y)), "-(acc + y)"),
        (Node("sub", X, constant(-1.5)), "acc - -1.5"),
        (Node("power", Node("neg", X), exponent=1.5), "(-acc) ** 1.5"),
        (Node("logical_and", Node("gt", X, Y), Node("logical_not", Node("le", X, Y))), "(acc > y) & ~(acc <= y)"),
        (Node("cast", Node("gelu", X, approximate="tanh"), dtype="bfloat16"), "cast(gelu_tanh(acc), dtype=bfloat16)"),
        (Node("sum", Node("mul", X, acc(1)), axis="n"), "sum(acc * acc1, axis=n)"),
        (Node("operand_sum", operand="a"), "operand_sum(a)"),
        (Node("leaky_relu", X, slope=0.1), "leaky_relu(acc, slope=0.1)"),
        (Node("input", name="bias", extent="row", dtype="float32"), "bias[n]"),
        (Node("input", name="residual", extent="matrix", dtype="float32"), "residual[m, n]"),
        (constant(-0.0), "-0.0"),
        (constant(True), "True"),
    ],
)
def test_formulas(node, expected):
    assert text(node) == expected


def test_an_epilogue_prints_its_graph():
    @eg.epilogue
    def f(acc, bias, *, scale=0.5):
        y = (acc + bias) * scale
        return eg.outputs(eg.relu(y), mask=eg.bitmask(y >= 0), sumsq=eg.sum(y * y, axis="n"))

    assert str(f) == (
        "t0 = (acc + bias) * 0.5\n"  #
        "d = relu(t0)\n"
        "mask = bitmask(t0 >= 0)\n"
        "sumsq = sum(t0 * t0, axis=n)"
    )
    assert repr(f) == "<epilogue f(acc, bias, *, scale=0.5)>"


def test_a_name_that_is_taken_is_not_given_again():
    assert str(eg.epilogue(lambda acc, t0: eg.tanh(acc + t0) * (acc + t0))) == "t1 = acc + t0\nd = tanh(t1) * t1"


def test_a_gradient_prints_both_passes_and_what_is_saved():
    swiglu = eg.epilogue(accumulators=2)(lambda gate, up, bias: eg.silu(gate + bias) * up)
    assert str(swiglu.grad(bias="row")) == (
        "forward\n"
        "  t0 = acc + bias\n"
        "  d = silu(t0) * acc1\n"
        "  saved_0 = t0\n"
        "  saved_1 = acc1\n"
        "backward, where acc is the gradient of D\n"
        "  t0 = minimum(maximum(saved_0, -1000), 1000)\n"
        "  t1 = sigmoid(t0)\n"
        "  d = acc * saved_1 * (t1 * (1 + t0 * (1 - t1)))\n"
        "  d_acc1 = acc * silu(saved_0)\n"
        "  d_bias = sum(d, axis=m)\n"
        "saved, for m=4096 n=4096\n"
        "  saved_0: bfloat16 of acc + bias: 16777216 elements, 32 MiB\n"
        "  saved_1: bfloat16 of acc1: 16777216 elements, 32 MiB"
    )


def test_a_long_formula_is_cut_short():
    node = X
    for _ in range(40):
        node = Node("add", node, Node("mul", node, Y))
    assert len(text(node)) <= 240
    assert text(node).endswith("...")

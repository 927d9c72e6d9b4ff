"""What a traced function becomes, and what it refuses, with the node and the remedy."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest

import epigemm.expression as eg
from epigemm.errors import ExpressionError, OptionError, TraceError
from epigemm.expression.nodes import Node, acc, constant, input_

ARRAY = np.ones(3, np.float32)


def traced(function, accumulators=1):
    return eg.as_epilogue(function).expression(accumulators)


def test_operators_and_their_reflections():
    x, y = acc(), input_("b")
    one = constant(2.0)
    cases = [
        (lambda acc, b: acc + b, Node("add", x, y)),
        (lambda acc, b: 2.0 - acc, Node("sub", one, x)),
        (lambda acc, b: acc * b, Node("mul", x, y)),
        (lambda acc, b: 2.0 / acc, Node("div", one, x)),
        (lambda acc, b: -acc, Node("neg", x)),
        (lambda acc, b: abs(acc), Node("abs", x)),
        (lambda acc, b: acc**2, Node("square", x)),
        (lambda acc, b: acc**3, Node("mul", Node("square", x), x)),
        (lambda acc, b: acc**-1, Node("div", constant(1.0), x)),
        (lambda acc, b: acc**0.5, Node("sqrt", x)),
        (lambda acc, b: acc**1.5, Node("power", x, exponent=1.5)),
        (lambda acc, b: np.float32(2) * acc, Node("mul", one, x)),
        (lambda acc, b: eg.clamp(acc, -1.0, b), Node("minimum", Node("maximum", x, constant(-1.0)), y)),
        (lambda acc, b: eg.where((acc > 0.0) & ~(acc == b) | (acc <= 2.0), acc, b), None),
    ]
    for function, expected in cases:
        got = traced(function).d.node
        assert expected is None or got is expected
    where = traced(cases[-1][0]).d.node
    both = Node("logical_and", Node("gt", x, constant(0.0)), Node("logical_not", Node("eq", x, y)))
    assert where.args[0] is Node("logical_or", both, Node("le", x, one))


def test_parameters_are_accumulators_inputs_and_constants():
    @eg.epilogue
    def f(gate, up, bias, unused, *, scale=2.0, kind="silu"):
        return getattr(eg, kind)(gate) * up * scale + bias

    expression = f.expression(2)
    assert expression.accumulators == 2
    assert expression.input_names == ("bias", "unused")
    assert expression.name == "f"
    assert f(scale=3.0, kind="relu").expression(2).d.node is traced(lambda g, u, bias: eg.relu(g) * u * 3.0 + bias, 2).d.node
    assert f(scale=3.0)(kind="relu") == f(kind="relu", scale=3.0)
    assert f(scale=3.0) != f
    assert f() is f


def test_an_epilogue_is_inlined_in_another():
    @eg.epilogue
    def biased(acc, bias, *, scale=1.0):
        return acc * scale + bias

    @eg.epilogue
    def whole(acc, bias):
        return eg.relu(biased(acc, bias, scale=4.0))

    assert whole.expression().d.node is traced(lambda acc, bias: eg.relu(acc * 4.0 + bias)).d.node


def test_outputs_keep_their_order_and_names():
    expression = traced(lambda acc: eg.outputs(eg.relu(acc), b=eg.bitmask(acc > 0), a=eg.sum(acc)))
    assert [o.name for o in expression.outputs] == ["d", "b", "a"]


def test_dropout_is_scaled_selection():
    got = traced(lambda acc, seed: eg.dropout(acc, 0.25, seed)).d.node
    kept = Node("ge", Node("uniform", input_("seed")), constant(0.25))
    assert got is Node("where", kept, Node("mul", acc(), constant(1 / 0.75)), constant(0.0))


def test_a_changed_number_outside_is_seen():
    scale = 2.0

    @eg.epilogue
    def f(acc):
        return acc * scale

    assert f.expression().d.node is Node("mul", acc(), constant(2.0))
    assert f.expression() is f.expression()
    scale = 3.0
    assert f.expression().d.node is Node("mul", acc(), constant(3.0))


def test_a_plain_function_is_wrapped_once_and_not_kept_alive():
    def f(acc):
        return acc

    assert eg.as_epilogue(f) is eg.as_epilogue(f)
    gone = weakref.ref(f)
    del f
    gc.collect()
    assert gone() is None


def _branch(acc):
    return acc if acc > 0 else acc * 2


def _loop(acc):
    return sum(x for x in acc)


def _torch_relu(acc):
    return pytest.importorskip("torch").relu(acc)


def _torch_tensor(acc):
    return pytest.importorskip("torch").ones(3) + acc


REFUSED = [
    (_branch, TraceError, r"the truth of `acc > 0` differs .*\n  Use eg\.where"),
    (lambda acc: max(acc, 0), TraceError, r"the truth of `acc < 0` differs .*eg\.maximum"),
    (lambda acc: acc > 0 and acc, TraceError, r"the truth of `acc > 0`"),
    (_loop, TraceError, r"`acc` cannot be iterated"),
    (lambda acc: acc[0], TraceError, r"`acc` cannot be indexed"),
    (lambda acc: acc * len(acc), TraceError, r"`acc` has no length"),
    (lambda acc: float(acc * 2), TraceError, r"`acc \* 2` has no single number"),
    (lambda acc: math.exp(acc), TraceError, r"`acc` has no single number.*\n  Use epigemm's functions: eg\.exp"),
    (lambda acc: round(acc), TraceError, r"no single number"),
    (lambda acc: acc // 2, TraceError, r"`//`.*not ops of the epilogue language \(on `acc`\)"),
    (lambda acc, b: acc @ b, TraceError, r"`@`"),
    (lambda acc, b: acc**b, TraceError, r"`acc \*\* b`: the exponent must be a number\.\n  Write eg\.exp\(y \* eg\.log\(x\)\)"),
    (lambda acc: 2**acc, TraceError, r"`2 \*\* acc`"),
    (lambda acc: np.exp(acc), TraceError, r"numpy\.exp is not an op .*\(on `acc`\)\.\n  Use eg\.exp\."),
    (lambda acc: np.where(acc > 0, acc, 0), TraceError, r"numpy\.where is not an op .*\n  Use eg\.where\."),
    (lambda acc: np.clip(acc, 0, 1), TraceError, r"numpy\.clip is not an op .*\n  Use eg\.clamp\."),
    (lambda acc: np.asarray(acc) * 2, TraceError, r"`acc` is not an array"),
    (_torch_relu, TraceError, r"torch\.relu is not an op .*\(on `acc`\)\.\n  Use eg\.relu\."),
    (lambda acc: acc + ARRAY, TraceError, r"cannot read a ndarray from outside \(shape \(3,\)\)\.\n  Make it a parameter"),
    (lambda acc: ARRAY + acc, TraceError, r"cannot read a ndarray from outside"),
    (_torch_tensor, TraceError, r"cannot read a Tensor from outside"),
    (lambda acc: eg.relu(ARRAY), TraceError, r"cannot read a ndarray from outside"),
    (lambda acc: acc + "1", TraceError, r"not with a builtins\.str"),
    (lambda acc: acc * (acc > 0), ExpressionError, r"`mul` cannot take `acc > 0` in `acc \* \(acc > 0\)`\.\n  .*eg\.where"),
    (lambda acc: eg.where(acc, 1.0, 0.0), ExpressionError, r"`where` cannot take `acc`.*\n  It is a number, not a condition"),
    (lambda acc: acc & (acc > 0), ExpressionError, r"`logical_and` cannot take `acc`"),
    (lambda acc: eg.bitmask(acc), ExpressionError, r"`bitmask` cannot take `acc`"),
    (lambda acc: eg.sum(acc) + 1, ExpressionError, r"`add` cannot take `sum\(acc, axis=mn\)`.*\n  A reduction is only complete when"),
    (lambda acc: eg.sum(eg.amax(acc)), ExpressionError, r"`sum` cannot take `amax"),
    (lambda acc: eg.where(eg.bitmask(acc > 0), acc, 0), ExpressionError, r"`where` cannot take `bitmask\(acc > 0\)`"),
    (lambda acc: eg.where(eg.unbitmask(acc), acc, 0), ExpressionError, r"`unbitmask` reads an input of packed bits, not `acc`"),
    (lambda acc: eg.dropout(acc, 0.5, 1.5), ExpressionError, r"The seed of `uniform\(1\.5\)` must be an integer"),
    (lambda acc: eg.dropout(acc, 1.0, 1), TraceError, r"dropout\(p=1\.0\): p must be a number with 0 <= p < 1"),
    (lambda acc: eg.sum(acc, axis=0), TraceError, r"sum\(axis=0\): an axis is 'm'"),
    (lambda acc: eg.clamp(acc), TraceError, r"neither `lo` nor `hi`"),
    (lambda acc: eg.gelu(acc, approximate="fast"), OptionError, r"gelu\(approximate='fast'\)"),
    (lambda acc: eg.operand_sum("c"), TraceError, r"operand_sum\('c'\): there is no such operand"),
    (lambda acc: acc > 0, TraceError, r"D of `<lambda>` is `acc > 0`, a bool"),
    (lambda acc: eg.sum(acc), TraceError, r"D of `<lambda>` is `sum\(acc, axis=mn\)`, a reduction"),
    (lambda acc: None, TraceError, r"returned is None\.\n  Did the function end without `return`"),
    (lambda acc: 0.0, TraceError, r"returned is 0\.0, not a value"),
    (lambda acc: (acc, acc), TraceError, r"returned is a tuple\.\n  Return several outputs by eg\.outputs"),
    (lambda acc: eg.outputs(acc, d=acc), TraceError, r"An output cannot be called 'd'"),
    (lambda acc: eg.outputs(acc, **{"a b": acc}), TraceError, r"An output cannot be called 'a b'"),
    (lambda acc: eg.outputs(acc, a=1.0), TraceError, r"The output 'a' is 1\.0"),
    (lambda: None, TraceError, r"has 0 positional parameters; its first 1 are the accumulators"),
    (lambda acc, slope=0.1: acc, TraceError, r"The parameter `slope` of `<lambda>` has a default.*\n  Make it keyword-only"),
    (lambda acc, *rest: acc, TraceError, r"`<lambda>` takes \*rest"),
    (lambda acc, **rest: acc, TraceError, r"`<lambda>` takes \*\*rest"),
    (lambda acc, *, scale: acc * scale, TraceError, r"The constant `scale` of `<lambda>` has no value"),
    (lambda acc, *, w=ARRAY: acc, TraceError, r"The constant `w` is a ndarray; .*\n  Put `w` before the `\*`"),
]


@pytest.mark.parametrize(("function", "error", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refusals_name_the_node_and_the_remedy(function, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        traced(function)


def test_calls_of_an_epilogue_that_are_refused():
    f = eg.epilogue(lambda acc, *, scale=1.0: acc * scale)
    with pytest.raises(TraceError, match=r"was called with ndarray.*\n  Pass it on: matmul\(a, b, epilog="):
        f(ARRAY)
    with pytest.raises(TraceError, match=r"has no keyword-only constant 'slope'\.\n  It has scale\."):
        f(slope=1.0)
    with pytest.raises(TraceError, match=r"The constant `scale` is a ndarray"):
        f(scale=ARRAY)
    with pytest.raises(TraceError, match=r"is declared with 2 accumulators and is used with 1"):
        eg.epilogue(accumulators=2)(lambda g, u: g * u).expression(1)

"""Derived gradients are the limits of difference quotients: for every op, and for random epilogues, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import epigemm.expression as eg
from epigemm.enums import MatmulEpilog
from epigemm.errors import GradientError
from epigemm.expression.grad import gradient
from epigemm.expression.named import named
from epigemm.expression.nodes import Expression, Node, Output, acc, constant, input_, walk
from epigemm.expression.ops import OPS
from epigemm.expression.philox import uniform
from epigemm.problem import Operand, Problem

M, N = 3, 4
SHAPES = {"scalar": (1, 1), "column": (M, 1), "row": (1, N), "matrix": (M, N)}


def evaluate(roots, leaves):
    """The values of nodes: `leaves` maps ("acc", index) and input names to float64 arrays; everything is computed in float64."""
    values = {}
    for node in walk(roots):
        args = [values[a] for a in node.args]
        if node.op == "acc":
            values[node] = leaves["acc", node.param("index")]
        elif node.op == "input":
            values[node] = leaves[node.param("name")]
        elif node.op == "constant":
            value = node.param("value")
            values[node] = value if isinstance(value, bool) else np.float64(value)
        elif node.op == "uniform":
            values[node] = uniform(int(np.ravel(args[0])[0]), np.arange(M)[:, None], np.arange(N)[None, :]).astype(np.float64)
        elif node.op in ("bitmask", "unbitmask"):
            values[node] = args[0]  # the test hands masks on unpacked
        elif node.op in ("cast", "sum"):
            whole = np.broadcast_to(args[0], (M, N)) if node.op == "sum" else args[0]
            values[node] = whole if node.op == "cast" else OPS["sum"].numpy(whole, axis=node.param("axis"))
        else:
            values[node] = OPS[node.op].numpy(*args, **dict(node.params))
    return [values[root] for root in roots]


def loss(expression, leaves, weights):
    values = evaluate([o.node for o in expression.outputs], leaves)
    total = np.sum(np.broadcast_to(values[0], (M, N)) * weights["d"])
    for output, value in zip(expression.extras, values[1:], strict=True):
        if output.name in weights:
            total += np.sum(value * weights[output.name])
    return float(total)


def derived_gradients(expression, leaves, weights, extents):
    """{"acc0" or input: array} by running the backward on what the forward saved."""
    derived = gradient(expression, extents, m=M, n=N, dtype="float64")
    forward = dict(zip([o.name for o in derived.forward.outputs], evaluate([o.node for o in derived.forward.outputs], leaves), strict=True))
    given = {("acc", 0): weights["d"]}
    given |= {s.name: leaves[s.origin] if s.source == "input" else forward[s.origin] for s in derived.saved}
    given |= {name: weights[output] for name, output in derived.cotangents}
    assert set(derived.backward.input_names) == {key for key in given if isinstance(key, str)}
    values = evaluate([o.node for o in derived.backward.outputs], given)
    return {what: value for (_, what), value in zip(derived.results, values, strict=True)}


def quotient(expression, leaves, weights, key, index, step):
    ends = []
    for sign in (1, -1):
        moved = {k: np.array(v) for k, v in leaves.items()}
        moved[key][index] += sign * step
        ends.append(loss(expression, moved, weights))
    return (ends[0] - ends[1]) / (2 * step)


def assert_derivative(expression, leaves, extents, rng):
    """Every gradient at a few elements. The allowed difference is what the quotient itself is uncertain by, found by halving its step."""
    sums = {o.name: (M, 1) if o.node.param("axis") == "n" else (1, N) if o.node.param("axis") == "m" else (1, 1) for o in expression.extras}
    sums |= {o.name: (M, N) for o in expression.extras if o.node.op != "sum"}
    weights = {"d": rng.standard_normal((M, N)), **{name: rng.standard_normal(shape) for name, shape in sums.items()}}
    gradients = derived_gradients(expression, leaves, weights, extents)
    size = abs(loss(expression, leaves, {k: np.abs(v) for k, v in weights.items()})) + 1
    kinks = checked = 0
    for what, got in gradients.items():
        key = ("acc", int(what[3:])) if what.startswith("acc") else what
        got = np.broadcast_to(got, leaves[key].shape)
        for index in [tuple(rng.integers(0, s) for s in leaves[key].shape) for _ in range(3)]:
            wide, narrow = (quotient(expression, leaves, weights, key, index, step) for step in (1e-4, 5e-5))
            doubt = 4 * abs(wide - narrow) + 1e-4 * 2**-13 * size
            checked += 1
            if abs(wide - narrow) > 1e-3 * (abs(narrow) + 1):
                kinks += 1  # the step crosses a corner
                continue
            assert abs(got[index] - narrow) <= doubt, f"{what}{index}: {got[index]}, the quotient is {narrow} +- {doubt}"
    assert kinks <= checked // 10 + 1


def differentiable_ops():
    """(name, params) of every op with a derivative that takes numbers alone."""
    skipped = ("where", "cast", "sum", "operand_sum")
    for name, row in OPS.items():
        if row.domain in ("any", "real") and row.result == "value" and name not in skipped:
            for params in {
                "gelu": [{"approximate": "none"}, {"approximate": "tanh"}],
                "power": [{"exponent": 2.5}, {"exponent": -1.5}],
            }.get(name, [{"slope": 0.1} if row.params else {}]):
                yield pytest.param(name, params, id=name + "".join(map(str, params.values())))


@pytest.mark.parametrize(("name", "params"), list(differentiable_ops()))
@pytest.mark.parametrize("seed", [0, 1])
def test_every_op(name, params, seed):
    rng = np.random.default_rng(seed)
    arguments = (acc(), input_("x"))[: OPS[name].arity]
    expression = Expression((Output("d", Node(name, *arguments, **params)),), 1, ("x",)[: OPS[name].arity - 1])
    positive = name in ("log", "sqrt", "rsqrt", "power", "div")
    draw = lambda: np.abs(rng.standard_normal((M, N))) + 0.5 if positive else 2 * rng.standard_normal((M, N))
    assert_derivative(expression, {("acc", 0): draw(), "x": draw()}, {"x": "matrix"} if OPS[name].arity == 2 else {}, rng)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_extrema_against_a_number(name):
    rng = np.random.default_rng(5)
    for arguments in ((acc(), constant(0.25)), (constant(0.25), acc())):
        assert_derivative(Expression((Output("d", Node(name, *arguments)),)), {("acc", 0): rng.standard_normal((M, N))}, {}, rng)


UNARY = "square exp tanh erf sigmoid relu leaky_relu gelu silu softplus mish hardswish abs neg".split()
BINARY = "add sub mul minimum maximum".split()


def random_epilogue(rng):
    """A tree of a few ops over accumulators, inputs of every extent and numbers, with sums and a second matrix as further outputs."""
    accumulators = int(rng.integers(1, 3))
    leaves = [*(acc(i) for i in range(accumulators)), *(input_(place) for place in SHAPES)]
    pool = [acc(0), *rng.choice(np.array(leaves, object), 3), constant(float(np.round(rng.standard_normal(), 2)))]
    for _ in range(int(rng.integers(3, 9))):
        x, y = (pool[int(rng.integers(len(pool)))] for _ in range(2))
        shape = rng.random()
        if shape < 0.4:
            name = str(rng.choice(UNARY))
            params = {"gelu": {"approximate": str(rng.choice(["none", "tanh"]))}, "leaky_relu": {"slope": 0.2}}.get(name, {})
            # Bounded first, so that exponentials of exponentials stay in range.
            made = Node(name, Node("tanh", x) if name in ("exp", "square") else x, **params)
        elif shape < 0.85:
            made = Node(str(rng.choice(BINARY)), x, y)
        elif shape < 0.95:
            made = Node("where", Node("gt", x, constant(0.1)), y, Node("tanh", x))
        else:
            made = Node("div", x, Node("add", Node("square", y), constant(1.0)))
        pool.append(made)
    d = Node("add", pool[-1], Node("mul", pool[-2], acc(accumulators - 1)))
    outputs = [Output("d", d)]
    if rng.random() < 0.5:
        outputs.append(Output("reduced", Node("sum", Node("tanh", pool[-1]), axis=str(rng.choice(["m", "n", "mn"])))))
    if rng.random() < 0.3:
        outputs.append(Output("second", Node("mul", pool[-3], acc(0))))
    return Expression(tuple(outputs), accumulators, tuple(SHAPES))


@pytest.mark.parametrize("seed", range(60))
def test_random_epilogues(seed):
    rng = np.random.default_rng(seed)
    expression = random_epilogue(rng)
    leaves = {("acc", i): rng.standard_normal((M, N)) for i in range(expression.accumulators)}
    leaves |= {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    assert_derivative(expression, leaves, {name: name for name in SHAPES}, rng)


def test_dropout_draws_the_same_numbers_again():
    rng = np.random.default_rng(2)
    expression = eg.epilogue(lambda acc, seed: eg.dropout(eg.tanh(acc), 0.4, seed)).expression()
    leaves = {("acc", 0): rng.standard_normal((M, N)), "seed": np.full((1, 1), 11)}
    derived = gradient(expression, {"seed": "scalar"}, m=M, n=N)
    assert [what for _, what in derived.results] == ["acc0"]
    assert_derivative(expression, leaves, {"seed": "scalar"}, rng)


def test_a_planted_error_is_found(monkeypatch):
    wrong = lambda node, d: (Node("mul", d, Node("sub", constant(1.0), node)),)
    monkeypatch.setitem(OPS, "tanh", replace(OPS["tanh"], derivative=wrong))
    with pytest.raises(AssertionError, match=r"acc0\(.*the quotient is"):
        test_every_op("tanh", {}, 0)


def corner(expression, x):
    derived = gradient(expression, {}, m=1, n=x.size, dtype="float64")
    forward = dict(
        zip([o.name for o in derived.forward.outputs], evaluate([o.node for o in derived.forward.outputs], {("acc", 0): x}), strict=True)
    )
    given = {("acc", 0): np.ones_like(x), **{s.name: forward[s.origin] for s in derived.saved}}
    return np.broadcast_to(evaluate([derived.backward.d.node], given)[0], x.shape)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "abs", "hardswish", "softplus", "sigmoid", "tanh"])
def test_corners_are_pytorchs(name):
    torch = pytest.importorskip("torch")
    functions = {"abs": torch.abs, "sigmoid": torch.sigmoid, "tanh": torch.tanh}
    x = np.array([-3.5, -3.0, -1.0, -0.0, 0.0, 1.0, 3.0, 3.5])
    x = np.append(x, np.nan) if name in ("relu", "leaky_relu") else x
    t = torch.tensor(x, requires_grad=True)
    functions.get(name, getattr(torch.nn.functional, name, None))(t).sum().backward()
    function = getattr(eg, name)
    got = corner(eg.epilogue(lambda acc: function(acc)).expression(), x)
    # 1 - tanh^2 cancels: a few roundings of 1.
    np.testing.assert_allclose(got, t.grad.numpy(), rtol=0, atol=4 * np.finfo(np.float64).eps)


def test_clamp_passes_the_gradient_at_its_bounds_as_pytorch_does():
    torch = pytest.importorskip("torch")
    x = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    t = torch.tensor(x, requires_grad=True)
    t.clamp(-1, 1).sum().backward()
    np.testing.assert_array_equal(corner(eg.epilogue(lambda acc: eg.clamp(acc, -1.0, 1.0)).expression(), x), t.grad.numpy())


@pytest.mark.parametrize(
    ("name", "limits"), [("gelu", (0, 1)), ("silu", (0, 1)), ("mish", (0, 1)), ("relu", (0, 1)), ("hardswish", (0, 1))]
)
def test_derivatives_at_infinity_are_their_limits(name, limits):
    function = getattr(eg, name)
    with np.errstate(all="ignore"):
        got = corner(eg.epilogue(lambda acc: function(acc)).expression(), np.array([-np.inf, np.inf]))
    np.testing.assert_allclose(got, limits, rtol=0, atol=1e-300)


def test_masked_elements_get_zero_whatever_stands_there():
    expression = eg.epilogue(lambda acc, mask: eg.where(eg.unbitmask(mask), acc, 0)).expression()
    derived = gradient(expression, {"mask": "bits"})
    assert str(derived.backward.d.node) == "where(unbitmask(mask), acc(index=0), 0.0)"
    assert [s.source for s in derived.saved] == ["input"]


def test_gradients_of_only_what_is_wanted():
    expression = eg.epilogue(lambda acc, g, b: eg.outputs(acc * g + b, s=eg.sum(acc), mx=eg.amax(acc), k=eg.bitmask(acc > 0))).expression()
    everything = gradient(expression, {"g": "row", "b": "row"})
    assert everything.results == (("d", "acc0"), ("d_g", "g"), ("d_b", "b"))
    assert everything.cotangents == (("d_s", "s"),)
    assert [s.source for s in everything.saved] == ["value", "input"]
    some = gradient(expression, {"g": "row", "b": "row"}, wrt=("b",), cotangents=())
    assert some.results == (("d", "acc0"), ("d_b", "b"))
    assert some.cotangents == ()
    assert [(s.source, s.origin) for s in some.saved] == [("input", "g")]


def test_an_accumulator_that_d_does_not_read_gets_zero():
    derived = eg.epilogue(lambda acc, x: x * 2).grad(x="matrix")
    assert [str(o.node) for o in derived.backward.outputs] == ["0.0", "mul(acc(index=0), 2.0)"]


REFUSED = [
    (lambda acc: eg.outputs(acc, s=eg.operand_sum("a")), {}, r"`operand_sum` has no derivative, in `operand_sum\(a\)`"),
    (lambda acc: acc * eg.operand_sum("b"), {}, r"`operand_sum` has no derivative"),
    (
        lambda acc: eg.outputs(acc, s=eg.amax(acc)),
        {"cotangents": ("s",)},
        r"No gradient flows through the output `s` = `amax\(acc, axis=mn\)`",
    ),
    (lambda acc: eg.outputs(acc, s=eg.bitmask(acc > 0)), {"cotangents": ("s",)}, r"No gradient flows through the output `s` = `bitmask"),
    (lambda acc: acc, {"cotangents": ("s",)}, r"No gradient flows through the output `s`: there is none"),
    (lambda acc: acc, {"wrt": ("b",)}, r"There is no gradient by `b`: it is not an input"),
    (lambda acc, k: eg.where(eg.unbitmask(k), acc, 0), {"wrt": ("k",)}, r"There is no gradient by `k`: it is read as bits"),
    (lambda acc, b: acc + b, {"where": {"b": "diagonal"}}, r"b='diagonal' is not the extent of an input"),
    (lambda acc, b: acc + b, {"where": {"c": "row"}}, r"c='row' is not the extent of an input; the inputs are b"),
    (lambda acc: acc + 1.0, {"where": Problem.of("c64", m=4, n=4, k=4)}, r"`acc \+ 1` is computed in complex64, for which no gradient"),
]


@pytest.mark.parametrize(("function", "given", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refusals_name_the_node(function, given, message):
    with pytest.raises(GradientError, match=message):
        gradient(eg.as_epilogue(function).expression(), **given)


def test_a_problem_gives_extents_and_types():
    problem = Problem.of("f32", m=8, n=6, k=4, inputs={"bias": Operand.dense("f32", (8, 1))})
    derived = gradient(named(MatmulEpilog.RELU_BIAS), problem)
    assert (derived.m, derived.n, derived.dtype) == (8, 6, "float32")
    assert [o.node.param("axis") for o in derived.backward.extras] == ["n"]

"""What a product with an epilogue means, in float64: the reference that every engine is compared with.

It is written apart from the engines and from `ops.py`: formulas, random numbers and bit packing are its own. It takes arrays in
their own dtypes and gives every output as a value with the error that a correct engine may have (`bounded.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from epigemm.expression.nodes import Expression, Node
from epigemm.testing import bounded as b
from epigemm.testing.bounded import Arithmetic, Bounded
from epigemm.testing.formats import FORMATS, Array, fits, quantum, rounded, uniform, unpack


@dataclass(frozen=True, slots=True)
class Result:
    """One output.

    Args:
        name: "d", or the key in the returned dictionary.
        bounded: the value before it is stored, (*batch, rows, columns); a boolean one is stored as packed bits.
        dtype: what it is stored in.
        pad: multiple to which the contiguous axis is padded in memory; what the padding holds is nobody's business.
    """

    name: str
    bounded: Bounded
    dtype: str
    pad: int = 1


@dataclass(frozen=True, slots=True)
class Product:
    """The operands of one call, in their own dtypes.

    Args:
        a: (*batch_a, m, k).
        b: one (*batch_b, k, n) for each accumulator.
        c: (*batch_c, m | 1, n | 1), or None.
        alpha, beta: the host scalars.
        scale_ab, scale_c, scale_d: tensor-wide scales of 8-bit operands: a's times b's, c's, d's.
        inputs: the epilogue's inputs, each with at least two dimensions (a seed may have none).
        order: D's order, along which masks are packed.
        d_dtype: what D is stored in.
        aux_dtype: what the predefined epilogs' `gelu_aux` is stored in.
        arithmetic: the engine's.
    """

    a: Array
    b: tuple[Array, ...]
    c: Array | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    scale_ab: float = 1.0
    scale_c: float = 1.0
    scale_d: float = 1.0
    inputs: Mapping[str, Array] = field(default_factory=dict)
    order: str = "row"
    d_dtype: str = "float32"
    aux_dtype: str = ""
    arithmetic: Arithmetic = field(default_factory=Arithmetic)

    @property
    def m(self) -> int:
        return int(self.a.shape[-2])

    @property
    def n(self) -> int:
        return int(self.b[0].shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """D's shape."""
        batch = np.broadcast_shapes(self.a.shape[:-2], *(one.shape[:-2] for one in self.b))
        return (*batch, self.m, self.n)

    @property
    def is_complex(self) -> bool:
        return bool(self.a.dtype.kind == "c")


def wide(array: Array) -> Array:
    """An array of any dtype in float64 or complex128."""
    return np.asarray(array).astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def evaluate(product: Product, epilogue: Expression | str | None = None) -> tuple[Result, ...]:
    """Every output of `epilogue` over the product, D first.

    Args:
        product: the operands.
        epilogue: a traced expression, the name of a predefined epilog ("relu_aux_bias"), or None for the plain product.
    """
    if epilogue is None:
        results: tuple[Result, ...] = (Result("d", accumulator(product, 0), product.d_dtype),)
    elif isinstance(epilogue, str):
        results = predefined(product, epilogue)
    else:
        results = _expression(product, epilogue)
    d = results[0]
    shown = d.bounded.broadcast_to(product.shape)
    if product.scale_d != 1.0:
        shown = b.multiply(product.arithmetic, shown, _rounded_constant(product, product.scale_d))
    return (Result("d", shown, d.dtype), *results[1:])


# ---------------------------------------------------------------- the accumulator


def accumulator(product: Product, index: int) -> Bounded:
    """alpha * sum_k A[m, k] B[k, n] + beta * C[m, n].

    Its error is that of a sum of K products in any order (`Arithmetic.sum_units`) relative to sum |a| |b|, and 0 where every partial
    sum is exactly representable (small integers), so that comparisons with zero can be decided.
    """
    arithmetic = product.arithmetic
    scalar_dtype = arithmetic.accumulator
    alpha, beta = (_rounded_scalar(s, scalar_dtype) for s in (product.alpha, product.beta))
    alpha, beta = alpha * product.scale_ab, beta * product.scale_c
    value = np.zeros(product.shape, dtype=np.complex128 if product.is_complex else np.float64)
    magnitude = np.zeros(product.shape)
    step = float("inf")
    k = product.a.shape[-1] if alpha != 0 else 0
    with np.errstate(all="ignore"):
        if k > 0:
            left, right = wide(product.a), wide(product.b[index])
            value = value + alpha * np.matmul(left, right)
            magnitude = magnitude + abs(alpha) * np.matmul(np.abs(left), np.abs(right))
            step = min(step, quantum(_parts(np.asarray(alpha))) * quantum(_parts(left)) * quantum(_parts(right)))
        if product.c is not None and beta != 0:
            third = wide(product.c)
            value = value + beta * third
            magnitude = magnitude + np.abs(beta * third)
            step = min(step, quantum(_parts(np.asarray(beta))) * quantum(_parts(third)))
        unit = max(arithmetic.unit, arithmetic.sum_unit or 0.0)
        rough = (arithmetic.sum_units(k) + 4) * unit + arithmetic.product_unit + (2 * arithmetic.unit if product.scale_ab != 1.0 else 0.0)
        factor = 4.0 if product.is_complex else 1.0
        bound = factor * (rough * magnitude + (k + 1) * arithmetic.form.smallest_normal * (magnitude != 0))
        digits = arithmetic.exact_digits if arithmetic.sum_unit is None else int(-math.log2(arithmetic.sum_unit))
        exact = (magnitude <= step * 2.0**digits) & (arithmetic.product_unit == 0)
        error = np.where(np.isfinite(value), np.where(exact, 0.0, bound), 0.0)
    return b.settle(arithmetic, value, error, 0.0) if not product.is_complex else Bounded(value, error)


def _parts(value: Array) -> Array:
    return np.stack([value.real, value.imag]) if value.dtype.kind == "c" else value


def _rounded_scalar(value: complex, dtype: str) -> complex:
    if isinstance(value, complex):
        return complex(*rounded(np.array([value.real, value.imag]), dtype))
    return float(rounded(np.array(float(value)), dtype))


def _leaf(product: Product, values: Array) -> Bounded:
    """Stored numbers as the epilogue sees them: widened exactly, or rounded to the accumulator's type where they are wider."""
    values = wide(values)
    exact = np.logical_and.reduce([fits(p, FORMATS[product.arithmetic.accumulator].digits) for p in (values.real, values.imag)])
    error = np.where(exact | ~np.isfinite(values), 0.0, product.arithmetic.unit * np.abs(values))
    return Bounded(values, error)


def _rounded_constant(product: Product, value: float) -> Bounded:
    return _leaf(product, np.asarray(float(value)))


# ---------------------------------------------------------------- user epilogues: one row an op

Rule = Callable[["_Walk", Node, tuple[Bounded, ...]], Bounded]


class _Walk:
    """One evaluation of an expression: the product, and the value of each node so far."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.arithmetic = product.arithmetic
        self.memo: dict[Node, Bounded] = {}

    def __call__(self, node: Node) -> Bounded:
        if node not in self.memo:
            arguments = tuple(self(argument) for argument in node.args)
            self.memo[node] = RULES[node.op](self, node, arguments)
        return self.memo[node]

    def axes(self, axis: Any) -> tuple[int, ...]:
        return {"m": (-2,), "n": (-1,), "mn": (-2, -1)}[axis]

    def full(self, x: Bounded) -> Bounded:
        return x.broadcast_to(self.product.shape)


def _input(walk: _Walk, node: Node, _: tuple[Bounded, ...]) -> Bounded:
    return _leaf(walk.product, walk.product.inputs[str(node.param("name"))])


def _constant(walk: _Walk, node: Node, _: tuple[Bounded, ...]) -> Bounded:
    value: Any = node.param("value")
    return Bounded.exact(np.asarray(value)) if isinstance(value, bool) else _rounded_constant(walk.product, value)


def _operand_sum(walk: _Walk, node: Node, _: tuple[Bounded, ...]) -> Bounded:
    name = str(node.param("operand"))
    if name == "a":
        return b.total(walk.arithmetic, Bounded.exact(wide(walk.product.a)), (-1,))
    return b.total(walk.arithmetic, Bounded.exact(wide(walk.product.b[int(name[1:] or 0)])), (-2,))


def _unbitmask(walk: _Walk, node: Node, _: tuple[Bounded, ...]) -> Bounded:
    product = walk.product
    packed = product.inputs[str(node.args[0].param("name"))]
    return Bounded.exact(unpack(packed, product.order, product.m if product.order == "col" else product.n))


def _uniform(walk: _Walk, node: Node, arguments: tuple[Bounded, ...]) -> Bounded:
    seed = node.args[0]
    stored = walk.product.inputs[str(seed.param("name"))] if seed.op == "input" else seed.param("value")
    *batch, m, n = walk.product.shape
    return Bounded.exact(uniform(int(np.asarray(stored).item()), math.prod(batch), m, n).reshape(walk.product.shape))


def _sum_like(walk: _Walk, node: Node, arguments: tuple[Bounded, ...]) -> Bounded:
    shape = walk.product.inputs[str(node.param("name"))].shape
    full = walk.full(arguments[0])
    axes = tuple(axis for axis in (-2, -1) if len(shape) < -axis or (shape[axis] == 1 and full.value.shape[axis] != 1))
    return b.total(walk.arithmetic, full, axes) if axes else full


def _gelu(walk: _Walk, node: Node, arguments: tuple[Bounded, ...]) -> Bounded:
    formula = b.gelu_tanh if node.param("approximate") == "tanh" else b.gelu_erf
    return b.unary(walk.arithmetic, arguments[0], formula, walk.arithmetic.function_units, scale=_cancelling)


def _cancelling(x: Array) -> Array:
    """1 + erf and 1 + tanh cancel for negative x: their roundings are relative to x, not to the result."""
    return np.where(np.isfinite(x) & (x < 0), np.minimum(np.abs(x), 10.0), 0.0)


def _leaky_relu(walk: _Walk, node: Node, arguments: tuple[Bounded, ...]) -> Bounded:
    slope = node.param("slope")
    factor = 0.01 if slope is None else float(slope)  # type: ignore[arg-type]
    scaled = b.multiply(walk.arithmetic, arguments[0], _rounded_constant(walk.product, factor))
    return b.where(b.compare("ge", arguments[0], Bounded.exact(0.0)), arguments[0], scaled)


def _function(formula: Callable[[Array], Array], units: float | None = None) -> Rule:
    def rule(walk: _Walk, node: Node, arguments: tuple[Bounded, ...]) -> Bounded:
        return b.unary(walk.arithmetic, arguments[0], formula, walk.arithmetic.function_units if units is None else units)

    return rule


def _binary(operation: Callable[[Arithmetic, Bounded, Bounded], Bounded]) -> Rule:
    return lambda walk, node, arguments: operation(walk.arithmetic, arguments[0], arguments[1])


def _pure(operation: Callable[..., Bounded]) -> Rule:
    return lambda walk, node, arguments: operation(*arguments)


def _comparison(op: str) -> Rule:
    def rule(walk: _Walk, node: Node, arguments: tuple[Bounded, ...]) -> Bounded:
        x, y = arguments
        if node.args[0] is node.args[1]:  # whatever its error, a value equals itself, unless it is NaN
            x = y = Bounded(x.value, np.where(x.undecided, np.inf, 0.0))
        return b.compare(op, x, y)

    return rule


RULES: dict[str, Rule] = {
    "acc": lambda walk, node, _: accumulator(walk.product, int(node.param("index") or 0)),  # type: ignore[call-overload]
    "input": _input,
    "constant": _constant,
    "operand_sum": _operand_sum,
    "add": _binary(b.add),
    "sub": _binary(b.subtract),
    "mul": _binary(b.multiply),
    "div": _binary(b.divide),
    "neg": _pure(lambda x: Bounded(-x.value, x.error)),
    "power": lambda walk, node, arguments: b.power(walk.arithmetic, arguments[0], float(node.param("exponent"))),  # type: ignore[arg-type]
    "square": lambda walk, node, arguments: b.multiply(walk.arithmetic, arguments[0], arguments[0]),
    "abs": _pure(lambda x: Bounded(np.abs(x.value), x.error)),
    "exp": _function(np.exp),
    "log": _function(np.log),
    "sqrt": _function(np.sqrt),
    "rsqrt": _function(lambda x: 1 / np.sqrt(x)),
    "tanh": _function(np.tanh),
    "erf": _function(b.erf),
    "sigmoid": _function(b.sigmoid),
    **{op: _comparison(op) for op in ("eq", "ne", "lt", "le", "gt", "ge")},
    "logical_and": _pure(b.logical_and),
    "logical_or": _pure(b.logical_or),
    "logical_not": _pure(b.logical_not),
    "where": _pure(b.where),
    "minimum": _pure(b.minimum),
    "maximum": _pure(b.maximum),
    "relu": _function(b.relu, units=0.0),
    "leaky_relu": _leaky_relu,
    "gelu": _gelu,
    "silu": _function(b.silu),
    "softplus": _function(b.softplus),
    "mish": _function(b.mish),
    "hardswish": _function(b.hardswish),
    "cast": lambda walk, node, arguments: b.cast(arguments[0], str(node.param("dtype"))),
    "bitmask": _pure(lambda x: x),
    "unbitmask": _unbitmask,
    "sum": lambda walk, node, arguments: b.total(walk.arithmetic, walk.full(arguments[0]), walk.axes(node.param("axis"))),
    "amax": lambda walk, node, arguments: b.largest(walk.full(arguments[0]), walk.axes(node.param("axis"))),
    "uniform": _uniform,
    "sum_like": _sum_like,
}
"""op -> (walk, node, its arguments' values) -> its value."""


def _expression(product: Product, expression: Expression) -> tuple[Result, ...]:
    walk = _Walk(product)
    batch = product.shape[:-2]
    results = []
    for output in expression.outputs:
        value = walk(output.node)
        if output.node.op == "bitmask":
            value = walk.full(value)
        elif value.value.ndim < 2:
            value = value.broadcast_to((1, 1))
        value = value.broadcast_to((*batch, *value.value.shape[-2:]))
        dtype = product.d_dtype if output is expression.d else _stored_dtype(product, output.node, output.dtype)
        results.append(Result(output.name, value, dtype, output.pad))
    return tuple(results)


def _stored_dtype(product: Product, root: Node, given: str) -> str:
    if given:
        return given
    if root.op == "cast":
        return str(root.param("dtype"))
    if root.op == "bitmask":
        return "uint8"
    return product.arithmetic.accumulator if root.op in ("sum", "amax", "operand_sum") else product.d_dtype


# ---------------------------------------------------------------- predefined epilogs, from the peer's table


def predefined(product: Product, name: str) -> tuple[Result, ...]:
    """The outputs of a predefined epilog, from the peer's documentation and not from `named.py`.

    A name is made of words: an activation, "aux" for what the backward needs, "bias", "bgrad" for the sum of D over n.
    """
    words = name.split("_")
    x = accumulator(product, 0)
    d = product.d_dtype
    if name == "bgrada":
        return Result("d", x, d), Result(name, _batched(product, b.total(product.arithmetic, Bounded.exact(wide(product.a)), (-1,))), d)
    if name == "bgradb":
        sums = b.total(product.arithmetic, Bounded.exact(wide(product.b[0])), (-2,))
        return Result("d", x, d), Result(name, _batched(product, Bounded(_turn(sums.value), _turn(sums.error))), d)
    if words[0] in ("drelu", "dgelu"):
        return _backward(product, name, words, x)
    if "bias" in words:
        x = b.add(product.arithmetic, x, _leaf(product, product.inputs["bias"]))
    extras: tuple[Result, ...] = ()
    if words[:2] == ["relu", "aux"]:
        extras = (Result("relu_aux", b.compare("ge", x, Bounded.exact(0.0)), "uint8"),)
    if words[:2] == ["gelu", "aux"]:
        extras = (Result("gelu_aux", x, product.aux_dtype or d, pad=8),)
    arithmetic = product.arithmetic
    if words[0] == "relu":
        x = b.unary(arithmetic, x, b.relu, 0.0)
    if words[0] == "gelu":
        x = b.unary(arithmetic, x, b.gelu_tanh, arithmetic.function_units, scale=_cancelling)
    return Result("d", x, d), *extras


def _turn(column: Array) -> Array:
    return np.swapaxes(column, -1, -2)


def _batched(product: Product, value: Bounded) -> Bounded:
    return value.broadcast_to((*product.shape[:-2], *value.value.shape[-2:]))


def _backward(product: Product, name: str, words: list[str], x: Bounded) -> tuple[Result, ...]:
    arithmetic = product.arithmetic
    if words[0] == "drelu":
        mask = unpack(product.inputs["relu_aux"], product.order, product.m if product.order == "col" else product.n)
        x = b.where(Bounded.exact(mask), x, Bounded.exact(np.zeros(product.shape)))
    else:
        aux = _leaf(product, product.inputs["gelu_aux"][..., : product.m, : product.n])
        # Its terms are of size 1 + |x|: that is what their roundings are relative to.
        slope = b.unary(arithmetic, aux, b.gelu_tanh_derivative, arithmetic.function_units, scale=lambda v: 1 + np.minimum(np.abs(v), 10))
        x = b.multiply(arithmetic, x, slope)
    if "bgrad" not in words:
        return (Result("d", x, product.d_dtype),)
    full = x.broadcast_to(product.shape)
    return Result("d", full, product.d_dtype), Result(name, b.total(arithmetic, full, (-1,)), product.d_dtype)

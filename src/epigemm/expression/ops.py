"""The op table: one row an op, with its dtype rule, its derivative and its spelling for NumPy, Triton and CUDA C++.

Adding an op is adding a row here (and its helper, if it needs one, to `numeric.py`, `engines/triton/prelude.py` and
`engines/cuda/prelude.cuh`).

Spellings are format strings over the arguments `{0} {1} {2}` and the parameters by name; the generators give literals of the accumulator
type for numbers. CUDA's `epi_…` functions are overloaded for float and double in `prelude.cuh`, which has complex operators too;
Triton's are functions of `engines/triton/prelude.py`. A cast is spelled by the generators, which know how each type is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from epigemm.expression import derivatives as by
from epigemm.expression import numeric
from epigemm.expression.derivatives import Derivative
from epigemm.expression.philox import uniform
from epigemm.expression.special import erf


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the table.

    Args:
        name: the node's op.
        arity: how many arguments.
        params: names of its parameters.
        domain: what its arguments are: "leaf" (has none), "any" (real or complex), "real", "bool", "where" (a bool, then two values),
            "bits" (packed mask bytes), "seed" (an integer).
        result: "value", "bool", "bits", "reduction" (terminal), or "gradient" (resolved by `check`).
        derivative: f(node, d) -> one node an argument; None where the op has no derivative and asking for one is an error.
        numpy: f(*arrays, out=None, **params) -> array; None for leaves.
        triton, cuda: spellings, "" where the generators do it themselves.
    """

    name: str
    arity: int
    params: tuple[str, ...] = ()
    domain: str = "real"
    result: str = "value"
    derivative: Derivative | None = by.none
    numpy: Callable[..., Any] | None = None
    triton: str = ""
    cuda: str = ""


_ROWS = (
    # leaves
    Op("acc", 0, ("index",), "leaf"),
    Op("input", 0, ("name", "extent", "dtype"), "leaf"),
    Op("constant", 0, ("value",), "leaf"),
    Op("operand_sum", 0, ("operand",), "leaf", derivative=None),
    # arithmetic
    Op("add", 2, (), "any", "value", by.add, np.add, "({0} + {1})", "({0} + {1})"),
    Op("sub", 2, (), "any", "value", by.sub, np.subtract, "({0} - {1})", "({0} - {1})"),
    Op("mul", 2, (), "any", "value", by.mul, np.multiply, "({0} * {1})", "({0} * {1})"),
    Op("div", 2, (), "any", "value", by.div, np.divide, "({0} / {1})", "({0} / {1})"),
    Op("neg", 1, (), "any", "value", by.neg, numeric.negative, "(-{0})", "(-{0})"),
    Op("square", 1, (), "real", "value", by.square, np.square, "({0} * {0})", "epi_square({0})"),
    Op("power", 1, ("exponent",), "real", "value", by.power, numeric.power, "epi_power({0}, {exponent})", "epi_power({0}, {exponent})"),
    Op("abs", 1, (), "real", "value", by.abs_, np.abs, "tl.abs({0})", "epi_abs({0})"),
    Op("exp", 1, (), "real", "value", by.exp, np.exp, "tl.exp({0})", "epi_exp({0})"),
    Op("log", 1, (), "real", "value", by.log, np.log, "tl.log({0})", "epi_log({0})"),
    Op("sqrt", 1, (), "real", "value", by.sqrt_, np.sqrt, "tl.sqrt({0})", "epi_sqrt({0})"),
    Op("rsqrt", 1, (), "real", "value", by.rsqrt, numeric.rsqrt, "tl.rsqrt({0})", "epi_rsqrt({0})"),
    Op("tanh", 1, (), "real", "value", by.tanh, np.tanh, "epi_tanh({0})", "epi_tanh({0})"),
    Op("erf", 1, (), "real", "value", by.erf, erf, "tl.erf({0})", "epi_erf({0})"),
    Op("sigmoid", 1, (), "real", "value", by.sigmoid, numeric.sigmoid, "epi_sigmoid({0})", "epi_sigmoid({0})"),
    # comparison and logic
    Op("eq", 2, (), "real", "bool", by.none, np.equal, "({0} == {1})", "({0} == {1})"),
    Op("ne", 2, (), "real", "bool", by.none, np.not_equal, "({0} != {1})", "({0} != {1})"),
    Op("lt", 2, (), "real", "bool", by.none, np.less, "({0} < {1})", "({0} < {1})"),
    Op("le", 2, (), "real", "bool", by.none, np.less_equal, "({0} <= {1})", "({0} <= {1})"),
    Op("gt", 2, (), "real", "bool", by.none, np.greater, "({0} > {1})", "({0} > {1})"),
    Op("ge", 2, (), "real", "bool", by.none, np.greater_equal, "({0} >= {1})", "({0} >= {1})"),
    Op("logical_and", 2, (), "bool", "bool", by.none, np.logical_and, "({0} & {1})", "({0} && {1})"),
    Op("logical_or", 2, (), "bool", "bool", by.none, np.logical_or, "({0} | {1})", "({0} || {1})"),
    # `== 0` rather than `~`: a Python bool or a wider integer would not become its complement.
    Op("logical_not", 1, (), "bool", "bool", by.none, np.logical_not, "({0} == 0)", "(!{0})"),
    # selection
    Op("where", 3, (), "where", "value", by.where, numeric.where, "tl.where({0}, {1}, {2})", "({0} ? {1} : {2})"),
    Op("minimum", 2, (), "real", "value", by.minimum, numeric.minimum, "epi_minimum({0}, {1})", "epi_minimum({0}, {1})"),
    Op("maximum", 2, (), "real", "value", by.maximum, numeric.maximum, "epi_maximum({0}, {1})", "epi_maximum({0}, {1})"),
    # activations
    Op("relu", 1, (), "real", "value", by.relu, numeric.relu, "epi_relu({0})", "epi_relu({0})"),
    Op(
        *("leaky_relu", 1, ("slope",), "real", "value", by.leaky_relu, numeric.leaky_relu),
        *("epi_leaky_relu({0}, {slope})", "epi_leaky_relu({0}, {slope})"),
    ),
    Op(
        *("gelu", 1, ("approximate",), "real", "value", by.gelu, numeric.gelu),
        *("epi_gelu_{approximate}({0})", "epi_gelu_{approximate}({0})"),
    ),
    Op("silu", 1, (), "real", "value", by.silu, numeric.silu, "epi_silu({0})", "epi_silu({0})"),
    Op("softplus", 1, (), "real", "value", by.softplus, numeric.softplus, "epi_softplus({0})", "epi_softplus({0})"),
    Op("mish", 1, (), "real", "value", by.mish, numeric.mish, "epi_mish({0})", "epi_mish({0})"),
    Op("hardswish", 1, (), "real", "value", by.hardswish, numeric.hardswish, "epi_hardswish({0})", "epi_hardswish({0})"),
    # storage
    Op("cast", 1, ("dtype",), "any", "value", by.cast, numeric.cast),
    Op("bitmask", 1, (), "bool", "bits", by.none, numeric.bitmask),
    Op("unbitmask", 1, (), "bits", "bool", by.none, numeric.unbitmask),
    # reductions
    Op("sum", 1, ("axis",), "real", "reduction", by.sum_, numeric.sum_),
    Op("amax", 1, ("axis",), "real", "reduction", None, numeric.amax),
    # random: numpy takes (seed, rows, columns, batch); the generators call epi_uniform(seed, row, column, batch)
    Op("uniform", 1, (), "seed", "value", by.none, uniform),
    # gradients
    Op("sum_like", 1, ("name",), "any", "gradient", None),
)

OPS: dict[str, Op] = {row.name: row for row in _ROWS}

COMPLEX_OPS = frozenset(row.name for row in _ROWS if row.domain in ("any", "leaf"))
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
REDUCTIONS = frozenset(row.name for row in _ROWS if row.result == "reduction")

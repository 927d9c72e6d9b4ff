"""The user epilogues of the table of cases: one row each, together every op of the vocabulary.

Each row has the epilogue, what its inputs are like, and where the formula is short the same formula over plain float64 arrays,
so that tracing is checked too, against something that was never traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import epigemm as eg
from epigemm.testing import bounded


@dataclass(frozen=True, slots=True)
class Input:
    """What one epilogue input is like.

    Args:
        extent: "scalar", "column" (m, 1), "row" (1, n), "matrix" (m, n), "vector" (1-D: along n in a user epilogue), "bits" or "seed".
        dtype: "" is A's dtype.
        data: "normal", "positive", "integers" or "bits".
        batched: whether it has the product's batch dimensions too.
    """

    extent: str
    dtype: str = ""
    data: str = "normal"
    batched: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One user epilogue.

    Args:
        name: short and readable.
        function: a plain function of the accumulators and inputs.
        inputs: by name.
        accumulators: how many products feed it.
        formula: D by plain NumPy, over float64 accumulators and inputs of at least two dimensions; None where there is no short one.
        data: what the operands' data should be like.
    """

    name: str
    function: Callable[..., Any]
    inputs: dict[str, Input] = field(default_factory=dict)
    accumulators: int = 1
    formula: Callable[..., Any] | None = None
    data: str = "normal"


_ROW, _COLUMN, _MATRIX, _SCALAR, _BITS, _SEED = (Input(e) for e in ("row", "column", "matrix", "scalar", "bits", "seed"))


def bias_vector(acc: Any, bias: Any) -> Any:
    return acc + bias


def residual_gelu(acc: Any, bias: Any, residual: Any) -> Any:
    return eg.gelu(acc + bias) + residual


def gate_of_column(acc: Any, scale: Any, shift: Any) -> Any:
    return eg.sigmoid(acc * scale) * shift


def arithmetic(acc: Any, row: Any, column: Any) -> Any:
    return (2.0 * acc - row) / (1.5 + eg.square(column)) + (-acc) * 0.25


def selection(acc: Any, row: Any) -> Any:
    return eg.where((acc > row) & ~(acc >= 2.0) | (acc <= -2.0), eg.minimum(acc, 1.0), eg.maximum(row, acc))


def equality(acc: Any, row: Any) -> Any:
    return eg.where(acc == row, 1.0, eg.where(acc != 0, acc, 3.0)) + eg.where(acc < row, 10.0, 0.0)


def relu_with_mask(acc: Any, bias: Any) -> Any:
    y = acc + bias
    return eg.outputs(eg.relu(y), mask=eg.bitmask(y > 0))


def two_masks(acc: Any, row: Any) -> Any:
    return eg.outputs(acc - row, positive=eg.relu_aux(acc), large=eg.bitmask((acc > 2.0) | (acc < -2.0)))


def masked(acc: Any, mask: Any) -> Any:
    return eg.where(eg.unbitmask(mask), acc, 0.0)


def drelu_with_sums(acc: Any, mask: Any) -> Any:
    d = eg.where(eg.unbitmask(mask), acc, 0.0)
    return eg.outputs(d, columns=eg.sum(d, axis="m"), rows=eg.sum(d, axis="n"))


def row_stats(acc: Any, bias: Any, *, scale: float = 1.0) -> Any:
    y = (acc + bias) * scale
    return eg.outputs(y, sumsq=eg.sum(y * y, axis="n"), total=eg.sum(y), columns=eg.sum(y, axis="m"))


def largest(acc: Any, bias: Any) -> Any:
    y = acc + bias
    return eg.outputs(y, rows=eg.amax(y, axis="n"), columns=eg.amax(eg.abs(y), axis="m"), all=eg.amax(y))


def narrow_sums(acc: Any) -> Any:
    return eg.outputs(acc, half=eg.cast(eg.sum(acc, axis="m"), "float16"))


def lower_extents(acc: Any, row: Any, column: Any) -> Any:
    return eg.outputs(acc + row, column=column * 2.0, row=eg.exp(row), scalar=eg.sum(row * column))


def quantised(acc: Any, bias: Any) -> Any:
    y = acc + bias
    return eg.outputs(eg.relu(y), half=eg.cast(y, "float16"), brain=eg.cast(y, "bfloat16"), wide=eg.cast(y, "float32"))


def eight_bits(acc: Any) -> Any:
    return eg.outputs(acc * 100.0, e4m3=eg.cast(acc * 100.0, "float8_e4m3fn"), e5m2=eg.cast(acc * 1e4, "float8_e5m2"))


def cast_inside(acc: Any, bias: Any) -> Any:
    return eg.gelu(eg.cast(acc, "bfloat16") + bias)


def dropped(acc: Any, seed: Any) -> Any:
    return eg.dropout(acc, 0.3, seed)


def dropped_constant(acc: Any, *, p: float = 0.5) -> Any:
    return eg.dropout(eg.relu(acc), p, 0x1234_5678_9ABC)


def operand_sums(acc: Any) -> Any:
    return eg.outputs(acc, of_a=eg.operand_sum("a"), of_b=eg.operand_sum("b"))


def zero_point(acc: Any, zero: Any) -> Any:
    return acc - eg.operand_sum("a") * zero


def swiglu(gate: Any, up: Any) -> Any:
    return eg.silu(gate) * up


def geglu_bias(gate: Any, up: Any, bias_gate: Any, bias_up: Any) -> Any:
    return eg.gelu(gate + bias_gate, approximate="tanh") * (up + bias_up)


def swiglu_saved(gate: Any, up: Any) -> Any:
    return eg.outputs(eg.silu(gate) * up, gate=gate, up=up)


def three(x: Any, y: Any, z: Any) -> Any:
    return x * y - z


def second_operand_sum(x: Any, y: Any) -> Any:
    return eg.outputs(x + y, sums=eg.operand_sum("b1"))


def complex_affine(acc: Any, row: Any, column: Any) -> Any:
    return (acc * 2.0 - row) / column + (-acc)


def saved_activation(acc: Any, bias: Any) -> Any:
    y = acc + bias
    return eg.outputs(eg.gelu(y), saved=y)


def d_swiglu(dy: Any, gate: Any, up: Any) -> Any:
    s = eg.sigmoid(gate)
    return eg.outputs(dy * up * s * (1 + gate * (1 - s)), d_up=dy * gate * s)


_SMALL = "small"


def _single(name: str, function: Callable[..., Any], formula: Callable[..., Any], data: str = _SMALL) -> Row:
    return Row(name, function, formula=formula, data=data)


_FUNCTIONS = (
    _single("neg", lambda acc: -acc, lambda x: -x),
    _single("square", lambda acc: eg.square(acc), lambda x: x * x),
    _single("power", lambda acc: eg.abs(acc) ** 1.5, lambda x: np.abs(x) ** 1.5),
    _single("power_whole", lambda acc: acc**3, lambda x: x**3),
    _single("abs", lambda acc: eg.abs(acc), np.abs),
    _single("exp", lambda acc: eg.exp(acc), np.exp),
    _single("log", lambda acc: eg.log(eg.abs(acc) + 0.5), lambda x: np.log(np.abs(x) + 0.5)),
    _single("sqrt", lambda acc: eg.sqrt(eg.abs(acc) + 1.0), lambda x: np.sqrt(np.abs(x) + 1)),
    _single("rsqrt", lambda acc: eg.rsqrt(acc * acc + 1.0), lambda x: 1 / np.sqrt(x * x + 1)),
    _single("tanh", lambda acc: eg.tanh(acc), np.tanh),
    _single("erf", lambda acc: eg.erf(acc), bounded.erf),
    _single("sigmoid", lambda acc: eg.sigmoid(acc), lambda x: 1 / (1 + np.exp(-x))),
    _single("clamp", lambda acc: eg.clamp(acc, -0.5, 0.75), lambda x: np.clip(x, -0.5, 0.75)),
    _single("relu", lambda acc: eg.relu(acc), lambda x: np.maximum(x, 0)),
    _single("leaky_relu", lambda acc: eg.leaky_relu(acc), lambda x: np.where(x > 0, x, 0.01 * x)),
    _single("leaky_relu_steep", lambda acc: eg.leaky_relu(acc, slope=0.25), lambda x: np.where(x > 0, x, 0.25 * x)),
    _single("gelu", lambda acc: eg.gelu(acc), lambda x: x / 2 * (1 + bounded.erf(x / np.sqrt(2)))),
    _single(
        "gelu_tanh",
        lambda acc: eg.gelu(acc, approximate="tanh"),
        lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ),
    _single("silu", lambda acc: eg.silu(acc), lambda x: x / (1 + np.exp(-x))),
    _single("softplus", lambda acc: eg.softplus(acc), lambda x: np.log1p(np.exp(x))),
    _single("mish", lambda acc: eg.mish(acc), lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    _single("hardswish", lambda acc: eg.hardswish(acc), lambda x: x * np.clip(x + 3, 0, 6) / 6),
    _single("reflected", lambda acc: 1.0 - acc, lambda x: 1 - x),
    _single("reciprocal", lambda acc: 1.0 / (2.0 + eg.abs(acc)), lambda x: 1 / (2 + np.abs(x))),
    _single("constant", lambda acc: acc * 0.1 + 0.7, lambda x: x * 0.1 + 0.7),
)


def _selected(x: Any, row: Any) -> Any:
    return np.where((x > row) & ~(x >= 2) | (x <= -2), np.minimum(x, 1), np.maximum(row, x))


_WHOLE = Input("row", data="integers")

_TABLE = (
    *_FUNCTIONS,
    Row("bias_vector", bias_vector, {"bias": Input("vector")}, formula=lambda x, bias: x + bias),
    Row("bias_column", bias_vector, {"bias": _COLUMN}, formula=lambda x, bias: x + bias),
    Row("bias_scalar", bias_vector, {"bias": _SCALAR}, formula=lambda x, bias: x + bias),
    Row("bias_batched", bias_vector, {"bias": Input("row", batched=True)}, formula=lambda x, bias: x + bias),
    Row("bias_f32", bias_vector, {"bias": Input("row", "float32")}, formula=lambda x, bias: x + bias),
    Row("bias_f64", bias_vector, {"bias": Input("row", "float64")}, formula=lambda x, bias: x + bias),
    Row("bias_bf16", bias_vector, {"bias": Input("column", "bfloat16")}, formula=lambda x, bias: x + bias),
    Row("bias_i32", bias_vector, {"bias": Input("row", "int32", "integers")}, formula=lambda x, bias: x + bias),
    Row("residual_gelu", residual_gelu, {"bias": _ROW, "residual": _MATRIX}, data=_SMALL),
    Row("residual_batched", residual_gelu, {"bias": _ROW, "residual": Input("matrix", batched=True)}, data=_SMALL),
    Row("gate_of_column", gate_of_column, {"scale": _COLUMN, "shift": _SCALAR}, data=_SMALL),
    Row(
        "arithmetic",
        arithmetic,
        {"row": _ROW, "column": _COLUMN},
        formula=lambda x, row, column: (2 * x - row) / (1.5 + column * column) - x / 4,
    ),
    Row("selection", selection, {"row": _ROW}, formula=_selected),
    Row("selection_exact", selection, {"row": _WHOLE}, formula=_selected, data="integers"),
    Row(
        "equality",
        equality,
        {"row": _WHOLE},
        formula=lambda x, row: np.where(x == row, 1, np.where(x != 0, x, 3)) + np.where(x < row, 10, 0),
        data="integers",
    ),
    Row("relu_with_mask", relu_with_mask, {"bias": _ROW}),
    Row("relu_with_mask_exact", relu_with_mask, {"bias": _WHOLE}, data="integers"),
    Row("two_masks", two_masks, {"row": _WHOLE}, data="integers"),
    Row("masked", masked, {"mask": _BITS}),
    Row("masked_batched", masked, {"mask": Input("bits", batched=True)}),
    Row("drelu_with_sums", drelu_with_sums, {"mask": _BITS}),
    Row("row_stats", row_stats, {"bias": _ROW}),
    Row("largest", largest, {"bias": _ROW}),
    Row("narrow_sums", narrow_sums),
    Row("lower_extents", lower_extents, {"row": _ROW, "column": _COLUMN}),
    Row("quantised", quantised, {"bias": _ROW}),
    Row("eight_bits", eight_bits),
    Row("cast_inside", cast_inside, {"bias": _ROW}, data=_SMALL),
    Row("dropped", dropped, {"seed": _SEED}),
    Row("dropped_constant", dropped_constant),
    Row("operand_sums", operand_sums),
    Row("zero_point", zero_point, {"zero": _ROW}),
    Row("swiglu", swiglu, accumulators=2, formula=lambda x, y: x / (1 + np.exp(-x)) * y, data=_SMALL),
    Row("swiglu_saved", swiglu_saved, accumulators=2, data=_SMALL),
    Row("geglu_bias", geglu_bias, {"bias_gate": _ROW, "bias_up": _ROW}, accumulators=2, data=_SMALL),
    Row("three", three, accumulators=3, formula=lambda x, y, z: x * y - z),
    Row("second_operand_sum", second_operand_sum, accumulators=2),
    Row("saved_activation", saved_activation, {"bias": _ROW}, data=_SMALL),
    Row("d_swiglu", d_swiglu, {"gate": _MATRIX, "up": _MATRIX}, data=_SMALL),
)

_COMPLEX = Row(
    "complex_affine",
    complex_affine,
    {"row": _ROW, "column": Input("column", data="positive")},
    formula=lambda x, row, column: (x * 2 - row) / column - x,
)

EPILOGUES: dict[str, Row] = {row.name: row for row in (*_TABLE, _COMPLEX)}
"""name -> row. `complex_affine` alone is for complex operands."""

# The peer's fifteen: inputs as the peer takes them. relu_aux and gelu_aux come as the forward would have written them.
PREDEFINED: dict[str, dict[str, Input]] = {
    "relu": {},
    "gelu": {},
    "bias": {"bias": Input("vector")},
    "relu_bias": {"bias": Input("vector")},
    "gelu_bias": {"bias": Input("vector")},
    "relu_aux": {},
    "relu_aux_bias": {"bias": Input("column", batched=True)},
    "gelu_aux": {},
    "gelu_aux_bias": {"bias": Input("vector")},
    "drelu": {"relu_aux": Input("bits", batched=True)},
    "drelu_bgrad": {"relu_aux": Input("bits", batched=True)},
    "dgelu": {"gelu_aux": Input("padded", batched=True)},
    "dgelu_bgrad": {"gelu_aux": Input("padded", batched=True)},
    "bgrada": {},
    "bgradb": {},
}
"""name of each predefined epilog -> its inputs."""

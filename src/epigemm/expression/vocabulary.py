"""The functions an epilogue is written with. Each takes values of the epilogue or numbers, and returns a value."""

from __future__ import annotations

from typing import Any

from epigemm import dtypes
from epigemm.errors import OptionError, TraceError
from epigemm.errors.types import say
from epigemm.expression.values import Value, apply

V = Value | float


def abs(x: V) -> Value:
    """|x|."""
    return apply("abs", x)


def exp(x: V) -> Value:
    """e to the power x."""
    return apply("exp", x)


def log(x: V) -> Value:
    """The natural logarithm."""
    return apply("log", x)


def sqrt(x: V) -> Value:
    """The square root."""
    return apply("sqrt", x)


def rsqrt(x: V) -> Value:
    """1 / sqrt(x)."""
    return apply("rsqrt", x)


def square(x: V) -> Value:
    """x * x."""
    return apply("square", x)


def tanh(x: V) -> Value:
    """The hyperbolic tangent."""
    return apply("tanh", x)


def erf(x: V) -> Value:
    """The error function."""
    return apply("erf", x)


def sigmoid(x: V) -> Value:
    """1 / (1 + exp(-x))."""
    return apply("sigmoid", x)


def relu(x: V) -> Value:
    """max(x, 0); NaN stays NaN."""
    return apply("relu", x)


def leaky_relu(x: V, slope: float = 0.01) -> Value:
    """x where x > 0, else slope * x."""
    return apply("leaky_relu", x, slope=float(slope))


def gelu(x: V, approximate: str = "none") -> Value:
    """x / 2 * (1 + erf(x / sqrt(2))), or with approximate="tanh" x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))); 0 at -inf.

    Raises:
        OptionError: `approximate` is neither "none" nor "tanh".
    """
    if approximate not in ("none", "tanh"):
        raise OptionError(say(f"gelu(approximate={approximate!r}) is not known.", "Use 'none' (the erf form) or 'tanh'."))
    return apply("gelu", x, approximate=approximate)


def silu(x: V) -> Value:
    """x * sigmoid(x), also called swish; 0 at -inf."""
    return apply("silu", x)


def softplus(x: V) -> Value:
    """log(1 + exp(x)), computed as max(x, 0) + log1p(exp(-|x|))."""
    return apply("softplus", x)


def mish(x: V) -> Value:
    """x * tanh(softplus(x)); 0 at -inf."""
    return apply("mish", x)


def hardswish(x: V) -> Value:
    """x * min(max(x + 3, 0), 6) / 6; 0 at -inf."""
    return apply("hardswish", x)


def where(condition: Value, x: V, y: V) -> Value:
    """x where the condition holds, else y."""
    return apply("where", condition, x, y)


def minimum(x: V, y: V) -> Value:
    """The smaller of two; NaN if either is."""
    return apply("minimum", x, y)


def maximum(x: V, y: V) -> Value:
    """The larger of two; NaN if either is."""
    return apply("maximum", x, y)


def clamp(x: V, lo: V | None = None, hi: V | None = None) -> Value:
    """min(max(x, lo), hi); None leaves a side open.

    Raises:
        TraceError: both sides are None.
    """
    if lo is None and hi is None:
        raise TraceError(say("clamp() has neither `lo` nor `hi`.", "Give one of them."))
    above = x if lo is None else maximum(x, lo)
    return maximum(x, lo) if hi is None else minimum(above, hi)  # type: ignore[arg-type]


def cast(x: V, dtype: Any) -> Value:
    """x rounded to `dtype`, going on in the accumulator's type; as an output it is stored in `dtype`. 8-bit floats saturate.

    Args:
        x: a value.
        dtype: a name ("bfloat16", "bf16"), or a dtype of NumPy or torch.

    Raises:
        DTypeError: no such type.
    """
    name = dtype if isinstance(dtype, (str, dtypes.DType)) else _dtype_name(dtype)
    return apply("cast", x, dtype=dtypes.of(name).name)


def _dtype_name(dtype: Any) -> str:
    """torch.float16 prints as 'torch.float16', NumPy dtypes and scalar types have `name` or `__name__`."""
    return str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch."))


def bitmask(condition: Value) -> Value:
    """The condition as packed bits, one an element along D's contiguous axis. Only as an output."""
    return apply("bitmask", condition)


def unbitmask(mask: Value) -> Value:
    """The condition that an input of packed bits holds."""
    return apply("unbitmask", mask)


def relu_aux(x: V) -> Value:
    """The mask that the RELU_AUX epilogs write: bitmask(x >= 0), in which zero counts as positive."""
    return bitmask(apply("ge", x, 0.0))


_AXES = {None: "mn", "m": "m", "n": "n", "mn": "mn"}


def _axis(axis: str | None, function: str) -> str:
    if axis not in _AXES:
        what = f"{function}(axis={axis!r}): an axis is 'm' (down the rows), 'n' (along a row) or None (both)."
        raise TraceError(say(what, "axis='n' gives a column (m, 1), axis='m' a row (1, n)."))
    return _AXES[axis]


def sum(x: V, axis: str | None = None) -> Value:
    """The sum of x along `axis`: "n" gives (m, 1), "m" gives (1, n), None (1, 1). float32, and only as an output."""
    return apply("sum", x, axis=_axis(axis, "sum"))


def amax(x: V, axis: str | None = None) -> Value:
    """The maximum of x along `axis`, as `sum`; NaN if any is. For the largest magnitude write amax(abs(x))."""
    return apply("amax", x, axis=_axis(axis, "amax"))


def dropout(x: V, p: float, seed: Value | int) -> Value:
    """x / (1 - p) with probability 1 - p, else 0, by the element's batch, row and column and the seed.

    Args:
        x: a value.
        p: probability of 0, in [0, 1).
        seed: an integer, or a scalar integer input.

    Raises:
        TraceError: p is not a number in [0, 1).
    """
    if isinstance(p, Value) or not 0 <= p < 1:
        raise TraceError(say(f"dropout(p={p!r}): p must be a number with 0 <= p < 1.", "Make it a keyword-only constant."))
    if p == 0:
        return apply("mul", x, 1.0)
    scaled = apply("mul", x, 1 / (1 - float(p)))
    return where(apply("ge", apply("uniform", seed), float(p)), scaled, 0.0)


def operand_sum(operand: str) -> Value:
    """The sum over k of an operand: "a" gives (m, 1), "b" gives (1, n), "b1" the second B's.

    Raises:
        TraceError: no such operand.
    """
    if operand != "a" and not (operand[:1] == "b" and (operand[1:] or "0").isdigit()):
        raise TraceError(say(f"operand_sum({operand!r}): there is no such operand.", "Use 'a', 'b', or 'b1' for the second B."))
    return apply("operand_sum", operand="b" if operand == "b0" else operand)

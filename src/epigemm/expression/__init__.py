"""The epilogue language: a Python function over the accumulator becomes an expression, and the expression its derivative."""

from __future__ import annotations

from epigemm.expression.trace import Epilogue, Outputs, as_epilogue, epilogue, outputs
from epigemm.expression.vocabulary import (
    abs,
    amax,
    bitmask,
    cast,
    clamp,
    dropout,
    erf,
    exp,
    gelu,
    hardswish,
    leaky_relu,
    log,
    maximum,
    minimum,
    mish,
    operand_sum,
    relu,
    relu_aux,
    rsqrt,
    sigmoid,
    silu,
    softplus,
    sqrt,
    square,
    sum,
    tanh,
    unbitmask,
    where,
)

__all__ = [
    *("Epilogue", "Outputs", "as_epilogue", "epilogue", "outputs"),
    *("abs", "amax", "bitmask", "cast", "clamp", "dropout", "erf", "exp", "gelu", "hardswish", "leaky_relu", "log", "maximum", "minimum"),
    *("mish", "operand_sum", "relu", "relu_aux", "rsqrt", "sigmoid", "silu", "softplus", "sqrt", "square", "sum", "tanh", "unbitmask"),
    "where",
]

"""What things cost on a GPU: one table of measured figures from which every engine predicts, so that predictions can be compared.

Only the order of predictions matters: they choose an engine where nothing was tuned. All figures are of one H200 (driver 580,
CUDA 13.0, cuBLASLt 13.1, 2026-11-30); other GPUs have other figures and much the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from epigemm.enums import MatmulComputeType, MatmulEpilog
from epigemm.problem import Operand, Problem

_E = MatmulEpilog

BYTES_PER_US = 4.3e6
"""What memory gives a kernel that does nothing else: 4.3 TB/s."""

LAUNCH_US = 2.5
"""From the end of one kernel to the first work of the next on its stream: an estimate, not measured by itself."""

# Flops a microsecond that a large product reaches, by A's dtype: measured for 16-bit types and TF32; the others are their share of the
# same part of the peak (float8 twice, float64 a tenth of bfloat16's).
_FLOPS_PER_US = {
    "bfloat16": 680e6,
    "float16": 620e6,
    "float8_e4m3fn": 1250e6,
    "float8_e5m2": 1250e6,
    "float32": 48e6,
    "float64": 58e6,
    "complex64": 48e6,
    "complex128": 58e6,
}
_FAST_FLOPS_PER_US = {
    MatmulComputeType.COMPUTE_32F_FAST_TF32: 365e6,
    MatmulComputeType.COMPUTE_32F_FAST_16F: 500e6,
    MatmulComputeType.COMPUTE_32F_FAST_16BF: 500e6,
}


@dataclass(frozen=True, slots=True)
class Habit:
    """What one epilog costs in cuBLASLt beside the plain product.

    Args:
        ratios: time over the plain product's, in the order of `_RUNS`.
    """

    ratios: tuple[float, float, float, float, float, float]


# (D's dtype, k, the plain product's time in us) of each column of the table; D was 4096 x 16384.
_RUNS = (
    ("bfloat16", 4096, 798.0),
    ("bfloat16", 1024, 206.0),
    ("float16", 4096, 861.0),
    ("float16", 1024, 233.0),
    ("float32", 4096, 1514.0),
    ("float32", 1024, 366.0),
)
_ELEMENTS = 4096 * 16384

HABITS: dict[MatmulEpilog, Habit] = {
    _E.BIAS: Habit((0.99, 0.99, 0.99, 1.00, 1.00, 1.08)),
    _E.RELU_BIAS: Habit((0.97, 1.00, 0.97, 0.99, 1.08, 1.07)),
    _E.GELU_BIAS: Habit((1.02, 1.09, 1.00, 1.09, 1.20, 1.50)),
    _E.RELU_AUX_BIAS: Habit((1.06, 1.21, 1.06, 1.23, 1.47, 2.58)),
    _E.GELU_AUX_BIAS: Habit((1.10, 1.25, 1.07, 1.25, 1.23, 1.70)),
    _E.DRELU: Habit((1.51, 2.89, 1.07, 1.38, 1.41, 2.46)),
    _E.DRELU_BGRAD: Habit((1.52, 2.91, 1.47, 2.70, 1.39, 2.49)),
    _E.DGELU: Habit((1.18, 1.17, 1.13, 1.88, 1.39, 2.65)),
    _E.DGELU_BGRAD: Habit((1.76, 3.88, 1.73, 3.62, 1.40, 2.65)),
    _E.BGRADB: Habit((1.10, 1.09, 1.07, 0.99, 0.88, 1.03)),
}
"""Each epilog's time through cuBLASLt. Those that run as hidden kernels cost much the same at k=1024 and k=4096: a cost an element of D."""

# Those that were not measured count as their nearest that was.
_LIKE: dict[MatmulEpilog, MatmulEpilog] = {
    _E.RELU: _E.RELU_BIAS,
    _E.GELU: _E.GELU_BIAS,
    _E.RELU_AUX: _E.RELU_AUX_BIAS,
    _E.GELU_AUX: _E.GELU_AUX_BIAS,
    _E.BGRADA: _E.BGRADB,
}


def epilog_us(epilog: MatmulEpilog, problem: Problem) -> float:
    """What an epilog of cuBLASLt adds to the plain product, by D's elements; less than 0 counts as nothing.

    Example:
        >>> problem = Problem.of("bf16", m=4096, n=16384, k=1024)
        >>> [round(epilog_us(e, problem)) for e in (MatmulEpilog.BIAS, MatmulEpilog.DRELU_BGRAD, MatmulEpilog.DGELU_BGRAD)]
        [0, 404, 600]
    """
    habit = HABITS.get(_LIKE.get(epilog, epilog))
    if habit is None:
        return 0.0
    dtypes = {dtype for dtype, _, _ in _RUNS}
    name = problem.d.dtype.name if problem.d.dtype.name in dtypes else "bfloat16" if problem.d.dtype.bytes <= 2 else "float32"
    extras = [(ratio - 1) * plain_us for ratio, (dtype, _, plain_us) in zip(habit.ratios, _RUNS, strict=True) if dtype == name]
    scale = max(1.0, problem.d.dtype.bytes / 4)
    return max(0.0, scale * sum(extras) / len(extras) * prod(problem.d.shape) / _ELEMENTS)


def product_us(problem: Problem) -> float:
    """What a plain product takes: the longer of its arithmetic and its bytes, and a launch."""
    rate = _FAST_FLOPS_PER_US.get(MatmulComputeType(problem.compute.compute_type)) if problem.a.dtype.bytes in (4, 8) else None
    arithmetic_us = problem.flops / (rate or _FLOPS_PER_US[problem.a.dtype.name])
    operands: list[Operand] = [problem.a, *problem.b, problem.d]
    operands += [problem.c] if problem.c is not None else []
    return LAUNCH_US + max(arithmetic_us, sum(o.bytes for o in operands) / BYTES_PER_US)


def pass_us(moved_bytes: int) -> float:
    """What a pointwise kernel takes that reads and writes so many bytes."""
    return LAUNCH_US + moved_bytes / BYTES_PER_US


def fused_us(problem: Problem, epilog: MatmulEpilog) -> float:
    """What cuBLASLt takes for a product with an epilog that it fuses, or says that it does.

    Args:
        problem: with one B.
        epilog: DEFAULT for the plain product.
    """
    inputs_bytes = sum(operand.bytes for _, operand in problem.inputs)
    return product_us(problem) + inputs_bytes / BYTES_PER_US * 0.1 + epilog_us(epilog, problem)

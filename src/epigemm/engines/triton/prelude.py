"""The epilogue language's functions in Triton: device code only, called by the generated epilogues under the names that `ops.py` gives.

They take the accumulator's type (float32 or float64). NaN goes through; gelu, silu, mish and hardswish are 0 at -inf.
Written without libdevice where the interpreter has none.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Whether Triton interprets: decided when it is imported.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def epi_maximum(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def epi_minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def epi_power(x, exponent: tl.constexpr):
    # |x| ** exponent by exp2 and log2, whose relative error grows with |exponent * log2(x)|: 2^-24 each unit.
    # A negative base has a real power where the exponent is an integer.
    size = tl.exp2(exponent * tl.log2(tl.abs(x)))
    if exponent == 0:
        return x * 0 + 1
    if exponent % 2 == 1:
        return tl.where(x < 0, -size, size)
    if exponent % 2 == 0:
        return size
    return tl.where((x < 0) & (x > float("-inf")), float("nan"), size)


@triton.jit
def epi_tanh(x):
    # Near 0 a rational fit (relative error 1.6e-17 on |x| < 0.8, see expression/special.py), beyond it 1 - 2 / (exp(2 |x|) + 1).
    z = x * x
    p = ((7.316579479216606e-6 * z + 0.002788376981107681) * z + 0.1281255956019473) * z + 1.0
    q = ((0.0002059422311093453 * z + 0.02327468662626843) * z + 0.4614589289352781) * z + 1.0
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.8, x * (p / q), tl.where(x < 0.0, -far, far))


@triton.jit
def epi_sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def epi_log1p(x):
    # For x in [0, 1]: log(1 + x) corrected for what 1 + x lost. Source: Kahan; Goldberg, ACM Computing Surveys 23 (1991), theorem 4.
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def epi_relu(x):
    return epi_maximum(x, 0.0)


@triton.jit
def epi_leaky_relu(x, slope):
    return tl.where(x > 0.0, x, x * slope)


@triton.jit
def epi_gelu_tanh(x):
    # x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)): one exponential, no cancellation. Below -40 it is 0; -inf would give NaN.
    x = tl.where(x < -40.0, -40.0, x)
    return x / (1.0 + tl.exp(x * (x * x * -0.07135481627260025 - 1.5957691216057308)))


@triton.jit
def epi_gelu_none(x):
    x = tl.where(x < -40.0, -40.0, x)
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def epi_silu(x):
    x = tl.where(x < -1000.0, -1000.0, x)
    return x / (1.0 + tl.exp(-x))


@triton.jit
def epi_softplus(x):
    return epi_relu(x) + epi_log1p(tl.exp(-tl.abs(x)))


@triton.jit
def epi_mish(x):
    # x * tanh(log1p(e)) with e = exp(x) is x * n / (n + 2) with n = e * (e + 2); beyond 20 the factor is 1.
    x = tl.where(x < -1000.0, -1000.0, x)
    e = tl.exp(tl.where(x > 20.0, 20.0, x))
    n = e * (e + 2.0)
    return x * (n / (n + 2.0))


@triton.jit
def epi_hardswish(x):
    x = tl.where(x < -3.0, -3.0, x)
    return x * (epi_minimum(x + 3.0, 6.0) * (1.0 / 6.0))


@triton.jit
def epi_uniform(seed, row, column, batch):
    # Philox4x32-10, counter (column // 4, row, batch, 0), word column % 4. The arguments broadcast; `seed` is 64 bits wide.
    # Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    seed = seed.to(tl.uint64)
    column = column.to(tl.uint32)
    zero = (row * 0).to(tl.uint32) + column * 0 + (batch * 0).to(tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = zero + column // 4
    c1 = zero + row.to(tl.uint32)
    c2 = zero + batch.to(tl.uint32)
    c3 = zero
    c0, c1, c2, c3 = tl.philox_impl(c0, c1, c2, c3, k0, k1, 10)
    which = column % 4
    word = tl.where(which == 0, c0, tl.where(which == 1, c1, tl.where(which == 2, c2, c3)))
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def epi_nearest(x, DIGITS: tl.constexpr, SMALLEST: tl.constexpr):
    # float32 rounded to DIGITS bits behind the point, and below SMALLEST, the type's smallest normal number, to its even steps there.
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + ((1 << (22 - DIGITS)) - 1) + ((bits >> (23 - DIGITS)) & 1)) & -(1 << (23 - DIGITS))
    # Adding 1.5 * 2^23 steps rounds to whole steps.
    shift = 12582912.0 * SMALLEST / (1 << DIGITS)
    near = tl.where(tl.abs(x) < SMALLEST, (x + shift) - shift, bits.to(tl.float32, bitcast=True))
    return tl.where(x == x, near, x)


@triton.jit
def epi_cast(x, TYPE: tl.constexpr):
    # float32 as TYPE, to nearest even; 8-bit floats saturate to the largest finite value.
    if TYPE == tl.float8e4nv:
        x = epi_minimum(epi_maximum(x, -448.0), 448.0)
    if TYPE == tl.float8e5:
        x = epi_minimum(epi_maximum(x, -57344.0), 57344.0)
    if INTERPRETED:
        # Triton 3.9's interpreter cuts bfloat16's digits off and loses the carry of an 8-bit float: what it gets is exact.
        if TYPE == tl.float8e4nv:
            x = epi_nearest(x, 3, 0.015625)
        if TYPE == tl.float8e5:
            x = epi_nearest(x, 2, 6.103515625e-05)
        if TYPE == tl.bfloat16:
            x = epi_nearest(x, 7, 0.0)
    stored = x.to(TYPE)
    if INTERPRETED and (TYPE == tl.float8e4nv or TYPE == tl.float8e5):
        bits = tl.where(x == x, stored.to(tl.uint8, bitcast=True).to(tl.int32), 0x7F).to(tl.uint8)
        stored = bits.to(TYPE, bitcast=True)
    return stored


@triton.jit
def epi_widen(x):
    # What is stored, as float32.
    wide = x.to(tl.float32)
    # Triton 3.9's interpreter reads 8-bit NaN and infinities as numbers. A float8_e5m2 is the upper half of a float16.
    if INTERPRETED and x.dtype.scalar == tl.float8e5:
        wide = (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    if INTERPRETED and x.dtype.scalar == tl.float8e4nv:
        wide = tl.where((x.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F, float("nan"), wide)
    return wide


@triton.jit
def epi_round(x, TYPE: tl.constexpr):
    return epi_widen(epi_cast(x, TYPE))


@triton.jit
def epi_largest(x, AXIS: tl.constexpr):
    # The maximum along an axis, NaN where there is one: tl.max leaves NaN out.
    has_nan = tl.max((x != x).to(tl.int32), axis=AXIS) > 0
    return tl.where(has_nan, float("nan"), tl.max(tl.where(x == x, x, float("-inf")), axis=AXIS))


@triton.jit
def epi_pack(condition, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # [BLOCK_M, BLOCK_N] of bool -> [BLOCK_M, BLOCK_N / 8] bytes, bit j % 8 of byte j // 8 is column j.
    bits = tl.reshape(condition.to(tl.int32), (BLOCK_M, BLOCK_N // 8, 8)) << tl.arange(0, 8)[None, None, :]
    return tl.sum(bits, axis=2).to(tl.uint8)


@triton.jit
def epi_unpack(packed, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # [BLOCK_M, BLOCK_N / 8] bytes -> [BLOCK_M, BLOCK_N] of bool.
    bits = (packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(bits, (BLOCK_M, BLOCK_N)) != 0

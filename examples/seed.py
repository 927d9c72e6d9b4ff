"""How the peer's programs are written, unchanged but for the import: a product with a bias along m, on CuPy arrays if there are any."""

import numpy as np

try:
    import cupy as cp
except ImportError:
    cp = np

import epigemm as nvmath
from epigemm.linalg.advanced import MatmulEpilog

m, n, k = 1024, 512, 2048
weights, x, bias = (cp.random.rand(*s).astype(cp.float16) for s in ((m, k), (k, n), (m, 1)))
mm = nvmath.linalg.advanced.Matmul(weights, x)
mm.plan(
    epilog=MatmulEpilog.BIAS,
    epilog_inputs={"bias": bias},
    options={"compute_type": nvmath.linalg.advanced.MatmulComputeType.COMPUTE_32F_FAST_16F},
)
result = mm.execute()
mm.free()

expected = weights.astype(cp.float32) @ x.astype(cp.float32) + bias.astype(cp.float32)
error = float(abs(result.astype(cp.float32) - expected).max() / abs(expected).max())
assert error < 2**-10, error  # one rounding to float16
print(f"D = weights @ x + bias: {result.shape} {result.dtype}, strides {result.strides}, largest relative error {error:.1e}")

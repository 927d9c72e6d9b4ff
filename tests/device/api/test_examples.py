"""What the peer's examples show (reference/nvmath-matmul.md, section 4), in programs of our own: NumPy with device_id, CuPy, PyTorch.

The number in a test's name is the example's. Data are float32 unless the example is about 8 bits.
"""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest

import epigemm as nvmath
from epigemm.linalg.advanced import (
    CudaDataType,
    Matmul,
    MatmulComputeType,
    MatmulEpilog,
    MatmulOptions,
    MatmulPlanPreferences,
    MatmulQuantizationScales,
    matmul,
)

torch = pytest.importorskip("torch")

M, N, K = 64, 96, 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Library:
    """One package: its arrays on the GPU, the options with which it computes there, and back."""

    def __init__(self, name):
        self.name = name
        self.options = {"device_id": 0} if name == "numpy" and torch.cuda.is_available() else {}
        self.cupy = pytest.importorskip("cupy") if name == "cupy" else None

    def of(self, array):
        if self.name == "torch":
            return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)
        return array if self.cupy is None else self.cupy.asarray(array)

    def normal(self, *shape, seed=0, dtype=np.float32):
        random = np.random.default_rng([seed, *shape])
        values = random.standard_normal(shape)
        return self.of((values + 1j * random.standard_normal(shape) if np.dtype(dtype).kind == "c" else values).astype(dtype))

    def back(self, array):
        host = array.cpu().numpy() if self.name == "torch" else array.get() if self.name == "cupy" else array
        return host.astype(np.complex128 if host.dtype.kind == "c" else np.float64) if host.dtype != np.uint8 else host

    def belongs(self, array):
        if self.name == "torch":
            return isinstance(array, torch.Tensor) and array.device.type == DEVICE
        return isinstance(array, np.ndarray if self.cupy is None else self.cupy.ndarray)

    def close(self, found, exact, a, b, more=0.0):
        """k products in float32 (as many roundings as terms), and what a GELU on tensor cores is off by."""
        found, a, b = (self.back(x) for x in (found, a, b))
        allowed = 2 * (a.shape[-1] + 8) * 2.0**-24 * (np.abs(a) @ np.abs(b) + 1) + more + 2.0**-22 * np.abs(exact)
        assert found.shape == exact.shape
        assert (np.abs(found - exact) <= allowed).all(), f"off by {np.abs(found - exact).max()}, allowed {allowed.min()}"


@pytest.fixture(params=["numpy", "cupy", "torch"])
def xp(request):
    return Library(request.param)


def operands(xp, *, batch_a=(), batch_b=(), dtype=np.float32):
    a, b = xp.normal(*batch_a, M, K, seed=1, dtype=dtype), xp.normal(*batch_b, K, N, seed=2, dtype=dtype)
    return a, b, xp.back(a) @ xp.back(b)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


GELU = 1e-5  # its approximation on tensor cores, see results/


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_01_a_product(xp, dtype):
    a, b, exact = operands(xp, dtype=dtype)
    result = matmul(a, b, options=xp.options)
    assert xp.belongs(result)
    xp.close(result, exact, a, b)


def test_02_options(xp):
    a, b, exact = operands(xp)
    one = matmul(a, b, options=MatmulOptions(compute_type=MatmulComputeType.COMPUTE_32F_PEDANTIC, **xp.options))
    other = matmul(a, b, options={"compute_type": MatmulComputeType.COMPUTE_32F_PEDANTIC, **xp.options})
    xp.close(one, exact, a, b)
    assert (xp.back(one) == xp.back(other)).all()


def test_03_logging(xp, caplog):
    a, b, _ = operands(xp)
    logger = logging.getLogger("a user's")
    with caplog.at_level(logging.INFO, logger="a user's"), Matmul(a, b, options={"logger": logger, **xp.options}) as mm:
        mm.plan()
        mm.execute()
    text = caplog.text
    assert all(f"= {phase} PHASE =" in text for phase in ("SPECIFICATION", "PLANNING", "EXECUTION"))


def test_04_stateful(xp):
    a, b, exact = operands(xp)
    with Matmul(a, b, options=xp.options) as mm:
        mm.plan()
        for _ in range(3):
            xp.close(mm.execute(), exact, a, b)


def test_05_operands_changed_in_place(xp):
    a, b, exact = operands(xp)
    with Matmul(a, b, options=xp.options) as mm:
        mm.plan()
        mm.execute()
        a *= 2
        xp.close(mm.execute(), 2 * exact, a, b)


def test_05_reset(xp):
    a, b, _ = operands(xp)
    with Matmul(a, b, options=xp.options) as mm:
        mm.plan()
        mm.execute()
        c, d = xp.normal(M, K, seed=11), xp.normal(K, N, seed=12)
        mm.reset_operands(a=c, b=d)
        xp.close(mm.execute(), xp.back(c) @ xp.back(d), c, d)
        with pytest.raises(ValueError, match="extents"):
            mm.reset_operands(a=xp.normal(M + 1, K))


def test_06_gemm(xp):
    a, b, exact = operands(xp)
    c = xp.normal(M, N, seed=3)
    xp.close(matmul(a, b, c=c, alpha=0.5, beta=-2.0, options=xp.options), 0.5 * exact - 2 * xp.back(c), a, b)


@pytest.mark.parametrize("batch_b", [(), (3,)])
def test_07_batches(xp, batch_b):
    a, b, exact = operands(xp, batch_a=(3,), batch_b=batch_b)
    xp.close(matmul(a, b, options=xp.options), exact, a, b)


@pytest.mark.parametrize("shape", [(M, N), (M, 1), (3, M, N)])
def test_08_batches_with_c(xp, shape):
    a, b, exact = operands(xp, batch_a=(3,))
    c = xp.normal(*shape, seed=4)
    xp.close(matmul(a, b, c=c, beta=1.5, options=xp.options), exact + 1.5 * xp.back(c), a, b)


# ---------------------------------------------------------------- epilogs


@pytest.mark.parametrize("shape", [(M,), (M, 1)])
def test_09_bias(xp, shape):
    a, b, exact = operands(xp)
    bias = xp.normal(*shape, seed=5)
    column = xp.back(bias).reshape(M, 1)
    for epilog, expected in ((MatmulEpilog.BIAS, exact + column), (MatmulEpilog.GELU_BIAS, gelu(exact + column))):
        xp.close(matmul(a, b, epilog=epilog, epilog_inputs={"bias": bias}, options=xp.options), expected, a, b, GELU)


def test_10_relu_aux_into_drelu(xp):
    a, b, exact = operands(xp)
    d, aux = matmul(a, b, epilog=MatmulEpilog.RELU_AUX, options=xp.options)
    xp.close(d, np.maximum(exact, 0), a, b)
    assert aux["relu_aux"].shape == (16, N)
    found = matmul(a, b, epilog=MatmulEpilog.DRELU, epilog_inputs=aux, options=xp.options)
    xp.close(found, np.where(exact >= 0, exact, 0), a, b)


def test_10_gelu_aux_into_dgelu(xp):
    a, b, exact = operands(xp)
    d, aux = matmul(a, b, epilog=MatmulEpilog.GELU_AUX, options=xp.options)
    xp.close(d, gelu(exact), a, b, GELU)
    xp.close(aux["gelu_aux"], exact, a, b)
    x = xp.back(aux["gelu_aux"])
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x * x)
    found = matmul(a, b, epilog=MatmulEpilog.DGELU, epilog_inputs=aux, options=xp.options)
    xp.close(found, exact * slope, a, b, GELU * (1 + np.abs(exact)))


def test_11_drelu_bgrad(xp):
    a, b, exact = operands(xp)
    bias = xp.normal(M, seed=6)
    _, aux = matmul(a, b, epilog=MatmulEpilog.RELU_AUX_BIAS, epilog_inputs={"bias": bias}, options=xp.options)
    d, more = matmul(a, b, epilog=MatmulEpilog.DRELU_BGRAD, epilog_inputs={"relu_aux": aux["relu_aux"]}, options=xp.options)
    expected = np.where(exact + xp.back(bias)[:, None] >= 0, exact, 0)
    xp.close(d, expected, a, b)
    sums = xp.back(more["drelu_bgrad"])
    assert sums.shape == (M,)
    allowed = (K + N + 8) * 2.0**-23 * (np.abs(xp.back(a)) @ np.abs(xp.back(b))).sum(1)
    assert (np.abs(sums - expected.sum(1)) <= allowed).all()


@pytest.mark.parametrize("name", ["bgrada", "bgradb"])
def test_12_bias_gradients(xp, name):
    a, b, exact = operands(xp)
    if name == "bgrada":
        a = xp.of(np.asfortranarray(xp.back(a).astype(np.float32))) if xp.name != "torch" else a.T.contiguous().T
    d, aux = matmul(a, b, epilog=MatmulEpilog[name.upper()], options=xp.options)
    xp.close(d, exact, a, b)
    whole = xp.back(a) if name == "bgrada" else xp.back(b)
    axis = 1 if name == "bgrada" else 0
    allowed = 2 * K * 2.0**-23 * np.abs(whole).sum(axis)
    assert (np.abs(xp.back(aux[name]) - whole.sum(axis)) <= allowed).all()


def test_13_reset_with_epilog_inputs(xp):
    a, b, exact = operands(xp)
    with Matmul(a, b, options=xp.options) as mm:
        mm.plan(epilog=MatmulEpilog.BIAS, epilog_inputs={"bias": xp.normal(M, 1, seed=7)})
        mm.execute()
        bias = xp.normal(M, 1, seed=8)
        mm.reset_operands(epilog_inputs={"bias": bias})
        xp.close(mm.execute(), exact + xp.back(bias), a, b)


# ---------------------------------------------------------------- algorithms


def test_14_autotune(xp):
    a, b, exact = operands(xp)
    with Matmul(a, b, options=xp.options) as mm:
        mm.plan(preferences=MatmulPlanPreferences(limit=4))
        before = len(mm.algorithms)
        mm.autotune(iterations=5)
        assert len(mm.algorithms) == before
        xp.close(mm.execute(), exact, a, b)
        mm.autotune(iterations=2, prune=1)
        assert len(mm.algorithms) == 1
        xp.close(mm.execute(), exact, a, b)


def test_15_manual_tuning(xp):
    """A setting that is changed is what runs, or is refused in words: never a wrong result."""
    a, b, exact = operands(xp)
    if not torch.cuda.is_available():
        pytest.skip("the CPU engine has other settings")
    ran = 0
    with Matmul(a, b, options=xp.options) as mm:
        algorithms = mm.plan(preferences={"limit": 4}, engine="cublaslt")
        best = algorithms[0]
        assert best.engine == "cublaslt" and "tile" in best.capabilities
        for tile in ((64, 64), (128, 64), (64, 128), (32, 32), best.tile):
            best.tile = tile
            assert best.tile == tile
            try:
                result = mm.execute(algorithm=best)
            except nvmath.errors.AlgorithmError:
                continue
            xp.close(result, exact, a, b)
            ran += 1
    assert ran >= 1


def test_16_algorithms_kept(xp):
    a, b, exact = operands(xp)
    with Matmul(a, b, options=xp.options) as mm:
        kept = pickle.dumps(mm.plan(preferences={"limit": 3}))
    algorithms = pickle.loads(kept)
    with Matmul(a, b, options=xp.options) as mm:
        assert len(mm.plan(algorithms=algorithms)) == len(algorithms)
        for algorithm in mm.algorithms:
            xp.close(mm.execute(algorithm=algorithm), exact, a, b)
    xp.close(matmul(a, b, algorithm=algorithms[0], options=xp.options), exact, a, b)


# ---------------------------------------------------------------- FP8: small integers, so that every sum is exact

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def integers(*shape, dtype=E4M3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(torch.float32).to(dtype).to(DEVICE)


def eight_bit(dtype_a=E4M3, dtype_b=E4M3):
    a, b = integers(M, K, dtype=dtype_a, seed=1), integers(N, K, dtype=dtype_b, seed=2).T
    return a, b, a.double() @ b.double()


def scalar(value):
    return torch.tensor([value], dtype=torch.float32, device=DEVICE)


HALF = {"result_type": CudaDataType.CUDA_R_16F}


def test_17_fp8():
    a, b, exact = eight_bit()
    found = matmul(a, b, quantization_scales={"a": 0.5, "b": 2.0}, options=HALF)
    assert found.dtype == torch.float16
    assert bool((found.double() == exact).all())
    with pytest.raises(ValueError, match="Scales are required"):
        matmul(a, b, options=HALF)


@pytest.mark.parametrize(("a", "b"), [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("d", ["CUDA_R_16F", "CUDA_R_16BF", "CUDA_R_32F"])
def test_18_types(a, b, d):
    a, b, exact = eight_bit(a, b)
    found = matmul(a, b, quantization_scales={"a": 1, "b": 1}, options={"result_type": CudaDataType[d]})
    assert bool((found.double() == exact.to(found.dtype).double()).all())


def test_19_scales_reset():
    a, b, exact = eight_bit()
    with Matmul(a, b, quantization_scales=MatmulQuantizationScales(a=1, b=1), options=HALF) as mm:
        mm.plan()
        assert bool((mm.execute().double() == exact).all())
        mm.reset_operands(quantization_scales={"a": 2, "b": 0.25})
        assert bool((mm.execute().double() == 0.5 * exact).all())


def test_20_a_scale_changed_in_place():
    a, b, exact = eight_bit()
    if DEVICE == "cpu":
        pytest.skip("scales on the CPU are numbers")
    scale = scalar(1.0)
    with Matmul(a, b, quantization_scales={"a": scale, "b": scalar(2.0)}, options=HALF) as mm:
        mm.plan()
        assert bool((mm.execute().double() == 2 * exact).all())
        scale.fill_(0.25)
        assert bool((mm.execute().double() == 0.5 * exact).all())


def test_21_the_largest_value():
    a, b, exact = eight_bit()
    d, aux = matmul(a, b, quantization_scales={"a": 1, "b": 1, "d": 0.125}, options={"result_amax": True})
    assert d.dtype == E4M3
    assert float(aux["result_amax"]) == float(exact.abs().max())
    assert bool((d.double() == (0.125 * exact).float().to(E4M3).double()).all())


def test_22_delayed_scaling():
    a, b, exact = eight_bit()
    d_scale = 1.0
    for _ in range(3):
        with Matmul(a, b, quantization_scales={"a": 1, "b": 1, "d": d_scale}, options={"result_amax": True}) as mm:
            mm.plan()
            d, aux = mm.execute()
        d_scale = 2.0 ** np.floor(np.log2(448 / float(aux["result_amax"])))
    assert bool((d.double() == (d_scale * exact).float().to(E4M3).double()).all())


def test_23_fp8_relu():
    a, b, exact = eight_bit()
    found = matmul(a, b, epilog=MatmulEpilog.RELU, quantization_scales={"a": 1, "b": 1}, options=HALF)
    assert bool((found.double() == exact.clamp(min=0)).all())


def test_24_an_8_bit_gelu_aux():
    a, b, exact = eight_bit()
    preferences = {"epilog": {"aux_type": CudaDataType.CUDA_R_8F_E4M3, "aux_amax": True}}
    inputs, scales = {"aux_quantization_scale": 0.25}, {"a": 1, "b": 1, "d": 1}
    d, aux = matmul(a, b, epilog=MatmulEpilog.GELU_AUX, epilog_inputs=inputs, quantization_scales=scales, preferences=preferences)
    assert d.dtype == aux["gelu_aux"].dtype == E4M3
    assert bool((aux["gelu_aux"].double() == (0.25 * exact).float().to(E4M3).double()).all())
    assert float(aux["gelu_aux_amax"]) == float(exact.abs().max())


# ---------------------------------------------------------------- in place


def test_30_in_place(xp):
    a, b, exact = operands(xp)
    c = xp.normal(M, N, seed=9)
    before = xp.back(c).copy()
    result = matmul(a, b, c=c, beta=0.5, options={"inplace": True, **xp.options})
    assert result is c
    xp.close(c, exact + 0.5 * before, a, b)


def test_31_in_place_with_bias(xp):
    a, b, exact = operands(xp)
    c = xp.normal(N, M, seed=10).T
    bias = xp.normal(M, seed=11)
    before = xp.back(c).copy()
    inputs = {"bias": bias}
    matmul(a, b, c=c, beta=2.0, epilog=MatmulEpilog.BIAS, epilog_inputs=inputs, options={"inplace": True, **xp.options})
    xp.close(c, exact + 2 * before + xp.back(bias)[:, None], a, b)


def test_32_in_place_and_reset(xp):
    a, b, exact = operands(xp)
    c = xp.normal(M, N, seed=12)
    with Matmul(a, b, c=c, beta=1.0, options={"inplace": True, **xp.options}) as mm:
        mm.plan()
        before = xp.back(c).copy()
        assert mm.execute() is c
        xp.close(c, exact + before, a, b)
        other = xp.normal(M, N, seed=13)
        before = xp.back(other).copy()
        mm.reset_operands(c=other)
        assert mm.execute() is other
        xp.close(other, exact + before, a, b)

"""Matmul and matmul as their users know them: layouts of results, resets, in-place, out, algorithms, what is kept and what is let go."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import epigemm as eg
from epigemm import api
from epigemm.linalg.advanced import matrix_qualifiers_dtype

Array = np.ndarray[Any, Any]


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def strides(x: Array) -> tuple[int, ...]:
    return tuple(s // x.itemsize for s in x.strides)


def close(actual: Array, expected: Array) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


M, N, K = 64, 48, 32
A, B = normal(1, M, K), normal(2, K, N)
BIAS = normal(3, M)

# What the peer gives for row-major operands: (epilog, D's strides, {aux: (shape, strides, dtype)}).
LAYOUTS = [
    (None, (48, 1), {}),
    ("relu", (48, 1), {}),
    ("gelu", (48, 1), {}),
    ("bias", (1, 64), {}),
    ("relu_bias", (1, 64), {}),
    ("relu_aux", (1, 64), {"relu_aux": ((16, 48), (1, 16), np.uint8)}),
    ("gelu_aux", (1, 64), {"gelu_aux": ((64, 48), (1, 64), np.float32)}),
    ("bgrada", (48, 1), {"bgrada": ((64,), (1,), np.float32)}),
    ("bgradb", (1, 64), {"bgradb": ((48,), (1,), np.float32)}),
]


@pytest.mark.parametrize(("epilog", "d_strides", "aux"), LAYOUTS, ids=[str(row[0]) for row in LAYOUTS])
def test_results_have_the_peers_layout(epilog: str | None, d_strides: tuple[int, ...], aux: dict[str, Any]) -> None:
    inputs = {"bias": BIAS} if epilog and epilog.endswith("bias") else None
    result = eg.matmul(A, B, epilog=epilog, epilog_inputs=inputs)
    d, extras = result if aux else (result, {})
    assert strides(d) == d_strides
    assert {name: (x.shape, strides(x), x.dtype) for name, x in extras.items()} == aux


def test_a_row_major_c_wins_over_the_epilog() -> None:
    d, aux = eg.matmul(A, B, normal(4, M, N), beta=1, epilog="relu_aux")
    assert strides(d) == (48, 1)
    assert aux["relu_aux"].shape == (64, 16)  # along D's contiguous axis


def test_batched_results_have_the_peers_layout() -> None:
    a, b = normal(1, 3, 2, M, K), normal(2, 3, 2, K, N)
    d, aux = eg.matmul(a, b, epilog="relu_aux_bias", epilog_inputs={"bias": normal(3, 3, 2, M, 1)})
    assert strides(d) == (6144, 3072, 1, 64)
    assert (aux["relu_aux"].shape, strides(aux["relu_aux"])) == ((3, 2, 16, 48), (1536, 768, 1, 16))
    _, aux = eg.matmul(a[0], b[0], epilog="bgradb")
    assert (aux["bgradb"].shape, strides(aux["bgradb"])) == ((2, 48, 1), (48, 1, 48))
    close(aux["bgradb"][..., 0], b[0].sum(1))


def test_aux_rows_are_padded() -> None:
    a = normal(1, 65, K)
    _, aux = eg.matmul(a, B, epilog="gelu_aux")
    assert aux["gelu_aux"].shape == (72, 48)
    close(aux["gelu_aux"][:65], a @ B)
    assert not aux["gelu_aux"][65:].any()
    assert eg.matmul(a, B, epilog="relu_aux")[1]["relu_aux"].shape == (16, 48)


def test_the_batch_axes_of_d_lie_as_those_of_the_operands() -> None:
    a = normal(1, 2, 3, M, K).transpose(1, 0, 2, 3)
    assert strides(eg.matmul(a, normal(2, 3, 2, K, N)))[:2] == (M * N, 3 * M * N)


@pytest.mark.parametrize("order", ["row", "col"])
def test_result_order_is_an_option(order: str) -> None:
    d = eg.matmul(A, B, epilog="bias", epilog_inputs={"bias": BIAS}, options={"result_order": order})
    assert strides(d) == {"row": (48, 1), "col": (1, 64)}[order]
    close(d, A @ B + BIAS[:, None])


def test_vectors_lose_the_axis_that_was_added() -> None:
    assert eg.matmul(A, B[:, 0]).shape == (M,)
    assert eg.matmul(A[0], B).shape == (N,)
    assert eg.matmul(A[0], B[:, 0]).shape == ()
    close(eg.matmul(A[0, ::2], B[::2]), A[0, ::2] @ B[::2])
    batched = eg.matmul(A[0], normal(5, 7, K, N))
    assert batched.shape == (7, N)
    close(batched, A[0] @ normal(5, 7, K, N))


def test_reset_operands_replaces_what_is_given() -> None:
    c = normal(6, M, N)
    with eg.Matmul(A, B, c, alpha=2, beta=3) as mm:
        mm.plan(epilog="bias", epilog_inputs={"bias": BIAS})
        close(mm.execute(), 2 * A @ B + 3 * c + BIAS[:, None])
        mm.reset_operands(a=2 * A, beta=1)
        close(mm.execute(), 4 * A @ B + c + BIAS[:, None])
        mm.reset_operands(epilog_inputs={"bias": 5 * BIAS}, alpha=1)
        close(mm.execute(), 2 * A @ B + c + 5 * BIAS[:, None])
        mm.reset_operands(b=np.asfortranarray(B), c=np.asfortranarray(c))  # other strides are fine on the CPU
        close(mm.execute(), 2 * A @ B + c + 5 * BIAS[:, None])
        mm.reset_operands_unchecked(a=A)
        close(mm.execute(), A @ B + c + 5 * BIAS[:, None])


def test_operands_changed_in_place_are_seen() -> None:
    a = A.copy()
    with eg.Matmul(a, B) as mm:
        mm.plan()
        mm.execute()
        a *= 3
        close(mm.execute(), 3 * A @ B)


def test_release_operands_lets_go_and_a_full_reset_brings_back() -> None:
    a, b, bias = A.copy(), B.copy(), BIAS.copy()
    gone = [weakref.ref(x) for x in (a, b, bias)]
    mm = eg.Matmul(a, b, alpha=2)
    mm.plan(epilog="bias", epilog_inputs={"bias": bias})
    mm.execute()
    mm.release_operands()
    mm.release_operands()
    del a, b, bias
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    mm.reset_operands(a=A, b=B, epilog_inputs={"bias": BIAS})
    close(mm.execute(), 2 * A @ B + BIAS[:, None])


def test_no_cache_holds_a_users_tensor() -> None:
    a, b, bias, out = A.copy(), B.copy(), BIAS.copy(), np.empty((M, N), np.float32)
    gone = [weakref.ref(x) for x in (a, b, bias, out)]
    eg.matmul(a, b, epilog="bias", epilog_inputs={"bias": bias}, out=out)
    mm = eg.Matmul(a, b)
    mm.plan(epilog="bias", epilog_inputs={"bias": bias})
    mm.execute(out=out)
    mm.free()
    del a, b, bias, out
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_planning_again_replaces_the_epilog() -> None:
    with eg.Matmul(A, B) as mm:
        mm.plan(epilog="relu_aux_bias", epilog_inputs={"bias": BIAS})
        assert isinstance(mm.execute(), tuple)
        mm.plan()
        close(mm.execute(), A @ B)
        mm.plan(epilog="bgradb")
        close(mm.execute()[1]["bgradb"], B.sum(0))
        mm.plan(epilog="relu", options={"compute_type": eg.MatmulComputeType.COMPUTE_32F})
        close(mm.execute(), np.maximum(A @ B, 0))


@pytest.mark.parametrize("epilog", [None, "relu_aux"])
def test_in_place_writes_c_and_returns_it(epilog: str | None) -> None:
    c = normal(6, M, N)
    expected = A @ B + 2 * c
    with eg.Matmul(A, B, c, beta=2, options={"inplace": True}) as mm:
        mm.plan(epilog=epilog)
        result = mm.execute()
    d = result[0] if epilog else result
    assert d is c
    close(c, np.maximum(expected, 0) if epilog else expected)


def test_out_may_be_c_or_a_full_input_and_nothing_else_that_is_read() -> None:
    c = normal(6, M, N)
    expected = A @ B + c
    assert eg.matmul(A, B, c, beta=1, out=c) is c
    close(c, expected)

    @eg.epilogue
    def add(acc: Any, residual: Any) -> Any:
        return acc + residual

    residual = normal(7, M, N)
    expected = A @ B + residual
    assert eg.matmul(A, B, epilog=add, epilog_inputs={"residual": residual}, out=residual) is residual
    close(residual, expected)
    square = normal(8, K, K)
    with pytest.raises(ValueError, match="overlaps"):
        eg.matmul(square, square, out=square)
    big = normal(9, M, 2 * N)
    with pytest.raises(ValueError, match="overlaps"):
        eg.matmul(A, B, big[:, :N], beta=1, out=big[:, 1 : N + 1])
    assert eg.matmul(A, B, big[:, :N], beta=1, out=big[:, N:]).shape == (M, N)  # interleaved, with no element in common


@pytest.mark.parametrize("layout", ["row", "col", "padded", "every second", "backwards"])
def test_out_of_any_strides(layout: str) -> None:
    big = np.full((2 * M, 2 * N), np.nan, np.float32)
    out = {
        "row": np.empty((M, N), np.float32),
        "col": np.empty((M, N), np.float32, order="F"),
        "padded": big[:M, :N],
        "every second": big[::2, ::2],
        "backwards": big[:M, :N][::-1, ::-1],
    }[layout]
    with eg.Matmul(A, B) as mm:
        mm.plan(epilog="relu_bias", epilog_inputs={"bias": BIAS})
        assert mm.execute(out=out) is out
    close(out, np.maximum(A @ B + BIAS[:, None], 0))


def test_algorithms_are_ordered_chosen_changed_and_kept() -> None:
    with eg.Matmul(normal(1, 700, K), B) as mm:
        algorithms = mm.plan(epilog="relu")
        assert mm.algorithms == algorithms
        assert mm.applicable_algorithm_ids(1) == [0]
        results = [mm.execute(algorithm=x) for x in algorithms]
        for result in results:
            close(result, np.maximum(normal(1, 700, K) @ B, 0))
        mm.autotune(iterations=2, prune=1)
        assert len(mm.algorithms or ()) == 1
        assert "autotune" in mm.explain()
        algorithms[0].panel_rows = 100
        assert algorithms[0].panel_rows == 100
        with pytest.raises(AttributeError, match="panel_rows"):
            algorithms[0].tile = (128, 64)
        again = pickle.loads(pickle.dumps(algorithms[0]))
        assert (again.candidate, again == algorithms[0]) == (algorithms[0].candidate, False)
        mm.plan(algorithms=[again], epilog="relu")
        close(mm.execute(), results[0])
    close(eg.matmul(normal(1, 700, K), B, algorithm=again, epilog="relu"), results[0])


def test_autotune_leaves_c_and_out_alone() -> None:
    c = normal(6, M, N)
    before = c.copy()
    with eg.Matmul(A, B, c, beta=1, options={"inplace": True}) as mm:
        mm.plan()
        mm.autotune(iterations=3)
        assert np.array_equal(c, before)


def test_qualifiers_conjugate_and_are_not_written_to() -> None:
    torch = pytest.importorskip("torch")
    a = (normal(1, 5, 7) + 1j * normal(2, 5, 7)).astype(np.complex64)
    b = (normal(3, 7, 3) + 1j * normal(4, 7, 3)).astype(np.complex64)
    q = np.zeros(3, matrix_qualifiers_dtype)
    q["is_conjugate"][:2] = 1
    close(eg.matmul(a, b, qualifiers=q), a.conj() @ b.conj())
    lazy = torch.from_numpy(a).conj()
    close(eg.matmul(lazy, torch.from_numpy(b), qualifiers=q).numpy(), a @ b.conj())
    assert list(q["is_conjugate"]) == [1, 1, 0]
    q["is_conjugate"][:2] = 0
    close(eg.matmul(a, b, qualifiers=q), a @ b)


def test_fp8_scales_and_maxima() -> None:
    a, b = normal(1, 32, 16).astype(ml_dtypes.float8_e4m3fn), normal(2, 16, 48).astype(ml_dtypes.float8_e4m3fn)
    product = 2.0 * (a.astype(np.float64) * 0.5) @ (b.astype(np.float64) * 4)
    scales = eg.MatmulQuantizationScales(a=0.5, b=np.float32([4]), d=0.25)
    d, aux = eg.matmul(a, b, alpha=2, quantization_scales=scales, options={"result_amax": True})
    assert d.dtype == ml_dtypes.float8_e4m3fn
    assert np.array_equal(d, (product * 0.25).astype(np.float32).astype(ml_dtypes.float8_e4m3fn))
    assert aux["result_amax"].shape == (1,)
    close(aux["result_amax"], np.abs(product).max(keepdims=True)[0])
    half = eg.matmul(a, b, quantization_scales={"a": 1, "b": 1}, options={"result_type": eg.CudaDataType.CUDA_R_16F})
    close(half.astype(np.float64), (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16))
    with eg.Matmul(a, b, quantization_scales=scales) as mm:
        mm.plan()
        assert np.array_equal(mm.execute(), (product * 0.125).astype(np.float32).astype(ml_dtypes.float8_e4m3fn))
        mm.reset_operands(quantization_scales={"a": 1.0})
        assert np.array_equal(mm.execute(), (product * 0.25).astype(np.float32).astype(ml_dtypes.float8_e4m3fn))
    assert (scales.a, scales.d) == (0.5, 0.25)  # the user's object is not written to


def test_large_values_saturate_in_fp8() -> None:
    a = np.full((16, 16), 448, ml_dtypes.float8_e4m3fn)
    d = eg.matmul(a, a, quantization_scales={"a": 1, "b": 1, "d": 1})
    assert (d.astype(np.float32) == 448).all()


def test_the_dtype_that_an_epilogue_casts_to_is_ds() -> None:
    @eg.epilogue
    def to_half(acc: Any) -> Any:
        return eg.cast(acc, "float16")

    d = eg.matmul(A, B, epilog=to_half)
    assert d.dtype == np.float16
    assert np.array_equal(d, eg.matmul(A, B).astype(np.float16))


def test_plans_are_cached_by_all_that_decides_them() -> None:
    api._plans.clear()
    eg.matmul(A, B)
    eg.matmul(2 * A, B.copy())
    assert len(api._plans) == 1
    eg.matmul(A, np.asfortranarray(B))
    eg.matmul(A, B, epilog="relu")
    eg.matmul(A, B, epilog=lambda acc: eg.relu(acc))
    eg.matmul(A, B, options={"strict": True})
    eg.matmul(A, B, out=np.empty((M, N), np.float32))
    assert len(api._plans) == 6
    eg.matmul(A, B, epilog=lambda acc: eg.relu(acc))  # another function, the same expression
    assert len(api._plans) == 6


def test_a_numeric_input_is_an_argument_not_a_constant() -> None:
    @eg.epilogue
    def scaled(acc: Any, scale: Any) -> Any:
        return acc * scale

    api._plans.clear()
    close(eg.matmul(A, B, epilog=scaled, epilog_inputs={"scale": 2.0}), 2 * A @ B)
    close(eg.matmul(A, B, epilog=scaled, epilog_inputs={"scale": 3.0}), 3 * A @ B)
    assert len(api._plans) == 1


def test_torch_tensors_of_every_dtype_are_read_and_returned() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128):
        a, b = torch.randn(5, 7, dtype=torch.float64).to(dtype), torch.randn(3, 7, dtype=torch.float64).to(dtype)
        d = eg.matmul(a, b.T)
        assert (type(d), d.dtype, d.requires_grad) == (torch.Tensor, dtype, False)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        expected = (a.to(wide) @ b.T.to(wide)).to(dtype)
        torch.testing.assert_close(d, expected)
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    assert eg.matmul(torch.ones(2, 3), parameter).sum() == 24


def test_threads_share_plans() -> None:
    expected = np.maximum(A @ B, 0)
    failures: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(30):
                close(eg.matmul(A, B, epilog="relu"), expected)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_explain_says_who_was_asked_and_why() -> None:
    with eg.Matmul(A, B) as mm:
        mm.plan(epilog="gelu_bias", epilog_inputs={"bias": BIAS})
        text = mm.explain()
    for words in ("m=64, n=48, k=32", "gelu_tanh", "bias[m]", "cpu(", "the only engine of this device"):
        assert words in text


def test_eager_rounding_is_that_of_an_unfused_model() -> None:
    torch = pytest.importorskip("torch")

    @eg.epilogue
    def residual_relu(acc: Any, bias: Any, residual: Any) -> Any:
        return eg.relu(acc + bias) * 3.0 + residual

    generator = torch.Generator().manual_seed(5)
    # Small multiples of 1/8: sums of products are exact in float32 in any order.
    x, w, residual, bias = ((torch.randint(-16, 17, s, generator=generator) / 8).bfloat16() for s in ((40, 64), (48, 64), (40, 48), (48,)))
    inputs = {"bias": bias, "residual": residual}
    linear = (x.float() @ w.float().T + bias.float()).bfloat16()  # one rounding, as F.linear
    model = torch.relu(linear) * 3.0 + residual
    eager = eg.matmul(x, w.T, epilog=residual_relu, epilog_inputs=inputs, options={"rounding": "eager"})
    assert torch.equal(eager, model)
    once = eg.matmul(x, w.T, epilog=residual_relu, epilog_inputs=inputs)
    assert not torch.equal(once, model)

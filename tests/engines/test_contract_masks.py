"""Contracts on masks and saved pre-activations: sizes, bits, padding, and how their inputs may lie in memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import epigemm as eg
from epigemm.testing import numeric
from epigemm.testing.placing import place
from epigemm.testing.reference import Product, evaluate

SIZES = {1: 16, 7: 16, 8: 16, 9: 16, 127: 16, 128: 16, 129: 32}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def whole(m: int, n: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Operands of small integers, whose product has zeros of its own."""
    rng = np.random.default_rng(m)
    return rng.integers(-2, 3, (m, 4)).astype(DTYPES[dtype]), rng.integers(-2, 3, (4, n)).astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", SIZES)
def test_relu_aux_is_the_peers_format(library: Any, m: int, dtype: str) -> None:
    """uint8 (16 * ceil(m / 128), n), each column contiguous; bit i % 8 of byte i // 8 is x[i] >= 0; padding bits are 0."""
    n = 5
    a, b = whole(m, n, dtype)
    x = a.astype(float) @ b.astype(float)
    d, extra = eg.matmul(library.of(a), library.of(b), epilog="relu_aux")
    mask = library.numpy(extra["relu_aux"])
    assert mask.dtype == np.uint8
    assert mask.shape == (SIZES[m], n)
    assert mask.strides == (1, SIZES[m])
    bits = np.unpackbits(mask, axis=0, bitorder="little")
    assert np.array_equal(bits[:m], x >= 0)
    assert not bits[m:].any()
    assert np.array_equal(library.numpy(d).astype(float), np.maximum(x, 0))


@pytest.mark.parametrize("padding", [0x00, 0xFF])
@pytest.mark.parametrize("epilog", ["drelu", "drelu_bgrad"])
@pytest.mark.parametrize("m", SIZES)
def test_padding_bits_of_an_input_mask_are_ignored(library: Any, m: int, epilog: str, padding: int) -> None:
    n = 5
    a, b = whole(m, n, "float32")
    kept = np.random.default_rng(1).integers(0, 2, (m, n)).astype(bool)
    bits = np.full((8 * SIZES[m], n), padding & 1, np.uint8)
    bits[:m] = kept
    mask = np.asfortranarray(np.packbits(bits, axis=0, bitorder="little"))
    result = eg.matmul(library.of(a), library.of(b), epilog=epilog, epilog_inputs={"relu_aux": library.of(mask)})
    expected = np.where(kept, a.astype(float) @ b.astype(float), 0)
    d = result[0] if isinstance(result, tuple) else result
    assert np.array_equal(library.numpy(d), expected)
    if epilog == "drelu_bgrad":
        assert np.array_equal(library.numpy(result[1]["drelu_bgrad"]), expected.sum(1))


@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("length", SIZES)
def test_forward_mask_goes_into_the_backward(library: Any, length: int, order: str) -> None:
    """relu_aux_bias writes what drelu_bgrad reads, in both orders of D."""
    m, n = (length, 6) if order == "col" else (6, length)
    a, b = whole(m, n, "float32")
    bias = np.random.default_rng(2).integers(-2, 3, (m, 1)).astype("f4")
    options = {"result_order": order}
    _, saved = eg.matmul(library.of(a), library.of(b), epilog="relu_aux_bias", epilog_inputs={"bias": library.of(bias)}, options=options)
    mask = library.numpy(saved["relu_aux"])
    assert mask.shape == ((SIZES[length], n) if order == "col" else (m, SIZES[length]))
    upstream = np.ones((m, 3), "f4")
    weights = np.arange(3 * n, dtype="f4").reshape(3, n)
    d, extra = eg.matmul(library.of(upstream), library.of(weights), epilog="drelu_bgrad", epilog_inputs=saved, options=options)
    expected = np.where(a @ b + bias >= 0, upstream @ weights, 0)
    assert np.array_equal(library.numpy(d), expected)
    assert np.array_equal(library.numpy(extra["drelu_bgrad"]), expected.sum(1))


@pytest.mark.parametrize("epilog", ["drelu", "drelu_bgrad"])
def test_a_padded_sliced_relu_aux(library: Any, epilog: str) -> None:
    """Columns of the mask further apart than its rows, as a slice of a larger one has them; the peer misreads it."""
    m, n = 21, 6
    a, b = whole(m, n, "float32")
    bits = np.random.default_rng(4).integers(0, 2, (128, n)).astype(np.uint8)
    larger = np.full((64, n), 0xAA, np.uint8, order="F")
    larger[32:48] = np.packbits(bits, axis=0, bitorder="little")
    mask = larger[32:48]
    assert mask.strides == (1, 64)
    result = eg.matmul(library.of(a), library.of(b), epilog=epilog, epilog_inputs={"relu_aux": library.of(mask)})
    d = result[0] if isinstance(result, tuple) else result
    assert np.array_equal(library.numpy(d), np.where(bits[:m], a @ b, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilog", ["dgelu", "dgelu_bgrad"])
def test_a_padded_sliced_gelu_aux(library: Any, epilog: str, dtype: str) -> None:
    m, n = 21, 6
    rng = np.random.default_rng(4)
    a, b = (rng.normal(size=s).astype(DTYPES[dtype]) for s in ((m, 4), (4, n)))
    larger = np.full((40, n), np.nan, DTYPES[dtype], order="F")
    aux = larger[8:32]
    aux[:m] = rng.normal(size=(m, n))
    result = eg.matmul(library.of(a), library.of(b), epilog=epilog, epilog_inputs={"gelu_aux": library.of(aux)})
    product = Product(a, (b,), inputs={"gelu_aux": aux}, order="col", d_dtype=dtype)
    expected = evaluate(product, epilog)
    d = result[0] if isinstance(result, tuple) else result
    numeric.assert_close(library.numpy(d), expected[0].bounded, dtype, epilog)
    if len(expected) > 1:
        numeric.assert_close(library.numpy(result[1]["dgelu_bgrad"])[:, None], expected[1].bounded, dtype, "dgelu_bgrad")


@pytest.mark.parametrize("kind", ["row", "col", "padded", "padded_col", "stepped", "misaligned", "broadcast_rows"])
def test_user_masks_may_lie_in_any_way(library: Any, kind: str) -> None:
    m, n = 9, 20
    a, b = whole(m, n, "float32")
    bits = np.random.default_rng(3).integers(0, 2, (m, n)).astype(bool)
    packed = np.packbits(np.pad(bits, ((0, 0), (0, 128 - n))), axis=1, bitorder="little")
    mask = place(packed, kind)
    kept = np.unpackbits(np.ascontiguousarray(mask.array), axis=1, bitorder="little")[:, :n].astype(bool)
    select = lambda acc, mask: eg.where(eg.unbitmask(mask), acc, 0.0)
    d = eg.matmul(library.of(a), library.of(b), epilog=select, epilog_inputs={"mask": library.of(mask.array)})
    assert np.array_equal(library.numpy(d), np.where(kept, a @ b, 0))


@pytest.mark.parametrize("m", [1, 7, 8, 9])
def test_gelu_aux_is_padded_to_eight_rows(library: Any, m: int) -> None:
    a, b = whole(m, 3, "float32")
    d, extra = eg.matmul(library.of(a), library.of(b), epilog="gelu_aux")
    aux = library.numpy(extra["gelu_aux"])
    assert aux.shape == (-(-m // 8) * 8, 3)
    assert aux.strides == (4, 4 * aux.shape[0])
    assert np.array_equal(aux[:m], a @ b)
    assert tuple(d.shape) == (m, 3)


def test_wrong_masks_are_refused(library: Any) -> None:
    a, b = map(library.of, whole(21, 6, "float32"))
    with pytest.raises(ValueError, match="must be 'uint8'"):
        eg.matmul(a, b, epilog="drelu", epilog_inputs={"relu_aux": library.of(np.zeros((16, 6), "f4"))})
    with pytest.raises(ValueError, match=r"must have the MM shape \(\.\.\., 16, 6\)"):
        eg.matmul(a, b, epilog="drelu", epilog_inputs={"relu_aux": library.of(np.zeros((3, 6), np.uint8))})


def test_a_mask_that_simplification_leaves_unread(library: Any) -> None:
    """where(mask, x, x) is x; its mask is still a mask and no matrix that does not fit."""
    a, b = whole(9, 20, "float32")
    mask = library.of(np.zeros((9, 16), np.uint8))
    d = eg.matmul(
        library.of(a), library.of(b), epilog=lambda acc, mask: eg.where(eg.unbitmask(mask), acc, acc), epilog_inputs={"mask": mask}
    )
    assert np.array_equal(library.numpy(d), a @ b)

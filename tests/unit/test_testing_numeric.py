"""The checks on arrays and memory, each with what it must let pass and what it must not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from epigemm.testing import numeric
from epigemm.testing.bounded import Bounded
from epigemm.testing.formats import pack
from epigemm.testing.placing import LAYOUTS, NEGATIVE, SHARED, numpy_view, order_of, place, strides, torch_view


def exact(values: list[float]) -> Bounded:
    return Bounded.exact(np.array(values))


def test_correct_rounding_passes_and_its_neighbour_does_not() -> None:
    third = np.array([1 / 3], np.float16)
    numeric.assert_close(third, exact([1 / 3]), "float16", "x")
    with pytest.raises(AssertionError, match=r"1 of 1 elements are wrong; the first is at \(0,\)") as caught:
        numeric.assert_close(np.nextafter(third, np.float16(1)), exact([1 / 3]), "float16", "x")
    assert "off by 1 ulp of float16" in str(caught.value)


def test_the_ends_of_the_range_pass_and_nothing_beyond() -> None:
    bounded = Bounded(np.array([1.0]), np.array([2.0**-10]))
    for value, passes in ((1.0, True), (1 + 2.0**-10, True), (1 - 2.0**-10, True), (1 + 2.0**-9, False)):
        got = np.array([value], np.float32)
        if passes:
            numeric.assert_close(got, bounded, "float32", "x")
        else:
            with pytest.raises(AssertionError, match="allowed"):
                numeric.assert_close(got, bounded, "float32", "x")


@pytest.mark.parametrize(
    ("got", "want"), [(0.0, np.nan), (np.nan, 0.0), (np.inf, np.nan), (np.nan, np.inf), (np.inf, -np.inf), (3.4e38, np.inf), (np.inf, 1.0)]
)
def test_nan_and_infinity_must_match(got: float, want: float) -> None:
    numeric.assert_close(np.array([want], np.float32), exact([want]), "float32", "x")
    with pytest.raises(AssertionError, match="1 of 1 elements are wrong"):
        numeric.assert_close(np.array([got], np.float32), exact([want]), "float32", "x")


def test_overflow_of_the_stored_type() -> None:
    numeric.assert_close(np.array([np.inf, 65504], np.float16), exact([65520.0, 65519.0]), "float16", "x")
    numeric.assert_close(np.array([448.0], ml_dtypes.float8_e4m3fn), exact([1e6]), "float8_e4m3fn", "x")
    with pytest.raises(AssertionError, match="elements are wrong"):
        numeric.assert_close(np.array([np.nan], ml_dtypes.float8_e4m3fn), exact([1e6]), "float8_e4m3fn", "x")


def test_shape_and_dtype_must_match() -> None:
    with pytest.raises(AssertionError, match="the dtype is float64, it should be float32"):
        numeric.assert_close(np.zeros(2), exact([0.0, 0.0]), "float32", "x")
    with pytest.raises(AssertionError, match=r"the shape is \(1,\), it should be \(2,\)"):
        numeric.assert_close(np.zeros(1, np.float32), exact([0.0, 0.0]), "float32", "x")


def test_an_undecided_element_passes_but_not_many_of_them() -> None:
    error = np.zeros(40)
    error[0] = np.inf
    got = np.zeros(40, np.float32)
    got[0] = np.nan
    numeric.assert_close(got, Bounded(np.zeros(40), error), "float32", "x")
    numeric.check_decided(np.isinf(error), "x")
    with pytest.raises(AssertionError, match="leaves 10% of the elements undecided"):
        numeric.check_decided(np.arange(40) < 4, "x")


def test_complex_parts_are_checked_each() -> None:
    numeric.assert_close(np.array([1 + 2j], np.complex64), Bounded.exact(np.array([1 + 2j])), "complex64", "x")
    with pytest.raises(AssertionError, match="imaginary part of x"):
        numeric.assert_close(np.array([1 - 2j], np.complex64), Bounded.exact(np.array([1 + 2j])), "complex64", "x")


def test_complex_infinities_must_stay_not_finite() -> None:
    want = Bounded.exact(np.array([complex(np.inf, np.nan), 1 + 2j]))
    numeric.assert_close(np.array([complex(np.nan, np.inf), 1 + 2j], np.complex64), want, "complex64", "x")
    with pytest.raises(AssertionError, match=r"1 elements are finite that should not be; the first is at \(0,\)"):
        numeric.assert_close(np.array([1 + 1j, 1 + 2j], np.complex64), want, "complex64", "x")
    with pytest.raises(AssertionError, match=r"the first is at \(1,\)"):
        numeric.assert_close(np.array([complex(np.nan, np.inf), np.nan], np.complex64), want, "complex64", "x")


@pytest.mark.parametrize("order", ["row", "col"])
def test_mask_bits_padding_and_doubt(order: str) -> None:
    bits = np.random.default_rng(0).integers(0, 2, (30, 30)).astype(bool)
    bounded = Bounded.exact(bits)
    numeric.assert_mask(pack(bits, order), bounded, order, "x")
    flipped = bits.copy()
    flipped[3, 5] = ~flipped[3, 5]
    with pytest.raises(AssertionError, match=r"1 of 900 bits are wrong; the first is at \(3, 5\)"):
        numeric.assert_mask(pack(flipped, order), bounded, order, "x")
    doubt = np.zeros(bits.shape)
    doubt[3, 5] = np.inf
    numeric.assert_mask(pack(flipped, order), Bounded(bits, doubt), order, "x")
    with pytest.raises(AssertionError, match="padding bits are set"):
        numeric.assert_mask(pack(bits, order, padding=1), bounded, order, "x")
    with pytest.raises(AssertionError, match="the mask's shape"):
        numeric.assert_mask(pack(bits, "row" if order == "col" else "col"), bounded, order, "x")


def test_equal_means_the_same_bits() -> None:
    x = np.array([0.0, np.nan])
    numeric.assert_equal(x, x.copy(), "x")
    with pytest.raises(AssertionError, match="1 elements differ; the first is at"):
        numeric.assert_equal(np.array([-0.0, np.nan]), x, "x")
    with pytest.raises(AssertionError, match="is not"):
        numeric.assert_equal(x.astype("f4"), x, "x")


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind not in SHARED])
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 4, 5), (1, 1), (0, 3)])
@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2"])
def test_guarded_memory_sees_each_byte_around_the_elements(kind: str, shape: tuple[int, ...], dtype: str) -> None:
    values = np.arange(int(np.prod(shape))).reshape(shape).astype(getattr(ml_dtypes, dtype, dtype))
    tensor = place(values, kind, numeric.CANARY_BYTE)
    assert np.array_equal(tensor.array, values)
    assert tensor.inside.sum() == values.nbytes
    tensor.assert_intact("x")
    tensor.array[...] = 0
    tensor.assert_intact("x")
    outside = np.flatnonzero(~tensor.inside)
    inner = outside[(outside > numeric.GUARD_BYTES) & (outside < tensor.buffer.size - numeric.GUARD_BYTES)]
    for place_of in {outside[0], outside[-1], *inner[:1], *inner[-1:]}:
        tensor.buffer[place_of] ^= 1
        with pytest.raises(AssertionError, match="x: 1 bytes outside the tensor were written"):
            tensor.assert_intact("x")
        tensor.buffer[place_of] ^= 1


def test_poison_is_nan_in_every_float_type() -> None:
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        fresh = numeric.guarded((3, 2), (2, 1), np.dtype(dtype))
        assert np.isnan(fresh.array.astype(float)).all()
        assert np.isnan(np.frombuffer(fresh.buffer.tobytes(), dtype).astype(float)).all()


def test_shared_layouts_do_share_and_orders_are_the_librarys() -> None:
    from epigemm import layouts

    for kind in LAYOUTS:
        shape = (2, 3, 4, 5) if kind.startswith("batch") else (4, 5)
        assert layouts.is_injective(shape, strides(kind, shape)) == (kind not in SHARED), kind
        for extents in (shape, (1, 5), (5, 1), (1, 1), (0, 4), (4, 0)):
            assert layouts.order_of(extents, strides(kind, extents)) == order_of(kind, extents), (kind, extents)
        assert any(s < 0 for s in strides(kind, shape)) == (kind in NEGATIVE), kind


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "uint8"])
def test_torch_views_share_memory_both_ways(dtype: str) -> None:
    pytest.importorskip("torch")
    array = place(np.ones((3, 4)).astype(getattr(ml_dtypes, dtype, dtype)), "padded").array
    tensor = torch_view(array)
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert tensor.stride() == (7, 1)
    back = numpy_view(tensor)
    assert back.dtype == array.dtype
    back[1, 2] = 0
    assert array[1, 2] == 0

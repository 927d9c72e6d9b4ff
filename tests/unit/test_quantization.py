"""Block scales in cuBLASLt's tiled layout, MXFP8 exponents, and packed 4-bit floats."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from epigemm import errors, quantization
from epigemm.quantization import BlockScalingFormat

NVFP4, MXFP8 = BlockScalingFormat.NVFP4, BlockScalingFormat.MXFP8
BLOCK = {NVFP4: 16, MXFP8: 32}
SCALE_DTYPE = {NVFP4: torch.float8_e4m3fn, MXFP8: torch.uint8}

# (batch, m, k): the tile is 128 rows by 4 blocks, so 64 columns for NVFP4 and 128 for MXFP8.
SHAPES = [(128, 128), (256, 384), (384, 128), (3, 128, 256), (2, 3, 256, 128)]


def _offset(batch: tuple[int, ...], outer: int, inner: int, shape: tuple[int, ...], outers: int, inners: int) -> int:
    """The manual's pseudocode, one scale at a time, apart from the module."""
    matrix = 0
    for i, extent in zip(batch, shape, strict=True):
        matrix = matrix * extent + i
    tiles_before = (outer // 128) * (inners // 4) + inner // 4
    outer_in_tile, inner_in_tile = outer % 128, inner % 4
    return matrix * outers * inners + tiles_before * 512 + (outer_in_tile % 32) * 16 + (outer_in_tile // 32) * 4 + inner_in_tile


def _scale_shape(shape: tuple[int, ...], axis: int, block: int) -> tuple[int, ...]:
    made = list(shape)
    made[axis] //= block
    return tuple(made)


def _reference_tiled(scales: torch.Tensor, axis: int) -> list[int]:
    """Bytes of `scales` [..., outer, inner] (axis -1) in the tiled layout, by `_offset` alone."""
    shape = tuple(scales.shape)
    outers, inners = (shape[-2], shape[-1]) if axis == -1 else (shape[-1], shape[-2])
    flat = [-1] * math.prod(shape)
    raw = scales.view(torch.uint8)
    for index in itertools.product(*map(range, shape)):
        outer, inner = (index[-2], index[-1]) if axis == -1 else (index[-1], index[-2])
        flat[_offset(index[:-2], outer, inner, shape[:-2], outers, inners)] = int(raw[index])
    assert -1 not in flat, "the reference layout must be a permutation"
    return flat


def _random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Below 127: neither e4m3's NaN nor a sign; as an exponent, at most 2**-1.
    return torch.randint(0, 127, shape, dtype=torch.uint8, generator=generator).view(dtype)


# ---------------------------------------------------------------- the layout


@pytest.mark.parametrize("format", BlockScalingFormat)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", SHAPES)
def test_offsets_follow_the_manual(shape: tuple[int, ...], axis: Any, format: BlockScalingFormat) -> None:
    shape = shape if axis == -1 else (*shape[:-2], shape[-1], shape[-2])
    scale_shape = _scale_shape(shape, axis, BLOCK[format])
    outers, inners = (scale_shape[-2], scale_shape[-1]) if axis == -1 else (scale_shape[-1], scale_shape[-2])
    rng = random.Random(1)
    for _ in range(200):
        index = tuple(rng.randrange(extent) for extent in scale_shape)
        outer, inner = (index[-2], index[-1]) if axis == -1 else (index[-1], index[-2])
        expected = _offset(index[:-2], outer, inner, shape[:-2], outers, inners)
        assert quantization.get_block_scale_offset(index, shape, format, axis=axis) == expected


def test_offsets_of_the_peers_manual() -> None:
    a = torch.empty(128, 64, dtype=torch.float4_e2m1fn_x2)  # 128 x 128 elements
    assert quantization.get_block_scale_offset((5, 2), a, NVFP4) == 82
    assert quantization.get_block_scale_offset((5, 5), a, NVFP4) == 593
    assert quantization.get_block_scale_offset((2, 5), a.mT, NVFP4) == 82


@pytest.mark.parametrize("format", BlockScalingFormat)
@pytest.mark.parametrize("axis", [-1, -2])
def test_every_offset_once_and_tensors_index_alike(axis: Any, format: BlockScalingFormat) -> None:
    shape = (2, 256, 128)
    grid = torch.meshgrid(*map(torch.arange, _scale_shape(shape, axis, BLOCK[format])), indexing="ij")
    offsets = quantization.get_block_scale_offset(tuple(grid), shape, format, axis=axis)
    assert sorted(offsets.flatten().tolist()) == list(range(math.prod(shape) // BLOCK[format]))
    in_numpy = quantization.get_block_scale_offset(tuple(g.numpy() for g in grid), shape, format, axis=axis)
    np.testing.assert_array_equal(in_numpy, offsets.numpy())


@pytest.mark.parametrize("format", BlockScalingFormat)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (3, 128, 256)])
def test_to_block_scale_and_back(shape: tuple[int, ...], axis: Any, format: BlockScalingFormat) -> None:
    shape = shape if axis == -1 else (*shape[:-2], shape[-1], shape[-2])
    scales = _random_bytes(_scale_shape(shape, axis, BLOCK[format]), SCALE_DTYPE[format])
    flat = quantization.to_block_scale(scales, shape, format, axis=axis)
    assert flat.dtype == scales.dtype
    assert flat.view(torch.uint8).tolist() == _reference_tiled(scales, axis)
    expanded = quantization.expand_block_scale(flat, shape, format, axis=axis)
    assert expanded.shape == shape
    assert expanded.dtype == scales.dtype
    expected = scales.view(torch.uint8).numpy().repeat(BLOCK[format], axis=axis)
    np.testing.assert_array_equal(expanded.view(torch.uint8).numpy(), expected)


def test_to_block_scale_into_out_and_never_the_callers_memory() -> None:
    scales = _random_bytes((128, 4), torch.uint8)
    out = torch.full((512,), 255, dtype=torch.uint8)
    assert quantization.to_block_scale(scales, (128, 128), MXFP8, axis=-1, out=out) is out
    assert out.tolist() == _reference_tiled(scales, -1)
    before = scales.clone()
    quantization.to_block_scale(scales, (128, 128), MXFP8, axis=-1).zero_()
    assert torch.equal(scales, before)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_axis_of_an_operand_is_its_contiguous_one(transposed: bool) -> None:
    x = torch.zeros(256, 128).to(torch.float8_e4m3fn)
    operand, axis = (x.mT, -2) if transposed else (x, -1)
    scales = _random_bytes(_scale_shape(tuple(operand.shape), axis, 32), torch.uint8)
    by_operand = quantization.to_block_scale(scales, operand, MXFP8)
    assert by_operand.tolist() == _reference_tiled(scales, axis)
    assert torch.equal(by_operand, quantization.to_block_scale(scales, operand, MXFP8, axis=axis))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"Incorrect axis: {-3 - axis} for .* operand, expected {axis}"):
        quantization.to_block_scale(scales, operand, MXFP8, axis=-3 - axis)  # type: ignore[arg-type]


# ---------------------------------------------------------------- wrong arguments

offset, tile, expand = quantization.get_block_scale_offset, quantization.to_block_scale, quantization.expand_block_scale


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: offset((0, 0), (128, 128), MXFP8), ValueError, "Axis must be specified"),
        (lambda: offset((0, 0), (64, 128), MXFP8, axis=-1), ValueError, "axis -2 must be a positive multiple of 128"),
        (lambda: offset((0, 0), (128, 64), MXFP8, axis=-1), ValueError, "axis -1 must be a positive multiple of 128"),
        (lambda: offset((0, 0), (128, 32), NVFP4, axis=-1), ValueError, "axis -1 must be a positive multiple of 64"),
        (lambda: offset((0, 0), (128, 0), MXFP8, axis=-1), ValueError, "positive multiple of 128, got 0"),
        (lambda: offset((0, 0, 0), (0, 128, 128), MXFP8, axis=-1), ValueError, "must have positive extents"),
        (lambda: offset((0,), (128,), MXFP8, axis=-1), ValueError, "must be at least 2D"),
        (lambda: offset((0,), torch.zeros(128), MXFP8), ValueError, "must be at least 2D"),
        (lambda: offset((0,), (128, 128), MXFP8, axis=-1), ValueError, "Index length must match"),
        (lambda: offset((128, 0), (128, 128), MXFP8, axis=-1), ValueError, r"index\[0\]"),
        (lambda: offset((0, 4), (128, 128), MXFP8, axis=-1), ValueError, r"index\[1\]"),
        (lambda: offset((0, 0, 0), (2, 128, 128), MXFP8, axis=0), ValueError, "one of the last two dimensions"),
        (lambda: offset((0, 0), (128, 128), "MXFP6", axis=-1), ValueError, "not a valid BlockScalingFormat"),
        (lambda: offset((0, 0), np.zeros((128, 128)), MXFP8), ValueError, "belongs to 'numpy' package"),
        (lambda: tile(np.zeros((128, 4)), (128, 128), MXFP8, axis=-1), TypeError, "must be a torch.Tensor"),
        (lambda: tile(torch.zeros(128, 4), (128, 128), MXFP8, axis=-1), TypeError, "must have dtype torch.uint8"),
        (lambda: tile(_random_bytes((4, 128), torch.uint8), (128, 128), MXFP8, axis=-1), ValueError, "must have shape"),
        (
            lambda: tile(_random_bytes((128, 4), torch.uint8), torch.zeros(128, 64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), MXFP8),
            ValueError,
            "requires block_scaling_format NVFP4, got MXFP8",
        ),
        (lambda: expand(_random_bytes((4,), torch.uint8), (128, 128), MXFP8, axis=-1), ValueError, "have 512 elements"),
        (lambda: expand(_random_bytes((2, 256), torch.uint8), (128, 128), MXFP8, axis=-1), ValueError, "must be 1D"),
        (
            lambda: expand(_random_bytes((512,), torch.uint8), (128, 128), MXFP8, axis=-1, output_dtype=torch.int32),
            TypeError,
            "output_dtype must be 'smallest' or one of",
        ),
        (lambda: quantization.create_mxfp8_scale(torch.zeros(32), 129), ValueError, r"integer from \[-127, 128\] range"),
        (lambda: quantization.create_mxfp8_scale(torch.zeros(33), 0), ValueError, "not made of blocks of 32"),
        (lambda: quantization.create_mxfp8_scale(np.zeros(32), 0), ValueError, "Only torch.Tensor is currently supported by function"),
        (lambda: quantization.invert_mxfp8_scale(torch.zeros(4)), TypeError, "must have dtype torch.uint8"),
        (lambda: quantization.quantize_to_fp4(torch.zeros(3), -1), ValueError, "Packed dimension must be even, got 3"),
        (lambda: quantization.quantize_to_fp4(torch.zeros(4), -2), ValueError, "must be at least 2D"),
        (lambda: quantization.quantize_to_fp4(torch.zeros(4, 4), 0), ValueError, "axis"),
        (lambda: quantization.quantize_to_fp4(torch.zeros(4).half(), -1), ValueError, "x must be float32, got torch.float16"),
        (lambda: quantization.quantize_to_fp4(np.zeros(4), -1), TypeError, "x must be a torch.Tensor"),
        (lambda: quantization.unpack_fp4(torch.zeros(4), -1), ValueError, "must be float4_e2m1fn_x2, got torch.float32"),
        (lambda: quantization.unpack_fp4([0], -1), TypeError, "must be a torch.Tensor"),
    ],
)
def test_wrong_arguments(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        call()
    assert isinstance(caught.value, errors.EpigemmError)


# ---------------------------------------------------------------- MXFP8


@pytest.mark.parametrize("exponent", [-127, -1, 0, 5, 128])
def test_created_scales_are_powers_of_two(exponent: int) -> None:
    x = torch.ones(128, 128).to(torch.float8_e4m3fn)
    scales = quantization.create_mxfp8_scale(x, exponent)
    assert scales.dtype == torch.uint8
    assert scales.tolist() == [exponent + 127] * 512
    applied = quantization.apply_mxfp8_scale(x, scales, output_dtype=torch.float64)
    assert (applied == math.ldexp(1.0, exponent)).all()


def test_inverse() -> None:
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    before = scales.clone()
    inverse = quantization.invert_mxfp8_scale(scales)
    assert torch.equal(scales, before), "the argument must not be modified"
    for exponent, inverted in zip(scales.tolist()[:255], inverse.tolist()[:255], strict=True):
        assert math.ldexp(1.0, exponent - 127) * math.ldexp(1.0, inverted - 127) == 1.0
    assert inverse[255] == 0  # 2**128 has no reciprocal in UE8M0; the nearest is 2**-127


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_applied_scales_agree_with_elementwise_float64(dtype: torch.dtype, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(256, 128, generator=generator).to(dtype)
    x = x.mT if transposed else x
    scales = torch.randint(120, 135, (256 * 128 // 32,), dtype=torch.uint8, generator=generator)
    axis = -2 if transposed else -1
    made = quantization.apply_mxfp8_scale(x, scales, output_dtype=torch.float64)
    values = x.to(torch.float64)
    for index in itertools.product(range(0, x.shape[0], 37), range(0, x.shape[1], 29)):
        block = list(index)
        block[axis] //= 32
        outer, inner = (block[0], block[1]) if axis == -1 else (block[1], block[0])
        scale = int(scales[_offset((), outer, inner, (), 256, 4)])
        assert made[index] == values[index] * math.ldexp(1.0, scale - 127)
        with pytest.warns(DeprecationWarning, match="Please use get_block_scale_offset"):
            assert quantization.get_mxfp8_scale_offset(x, index) == _offset((), outer, inner, (), 256, 4)


@pytest.mark.parametrize(
    ("exponent", "expected"),
    [
        (0, torch.float16),
        (15, torch.float16),
        (16, torch.float32),
        (-14, torch.float16),
        (-15, torch.float32),
        (-127, torch.float64),
        (128, torch.float64),
    ],
)
def test_smallest_output_dtype(exponent: int, expected: torch.dtype) -> None:
    x = torch.ones(128, 128).to(torch.float8_e4m3fn)
    scales = quantization.create_mxfp8_scale(x, exponent)
    made = quantization.apply_mxfp8_scale(x, scales)
    assert made.dtype == expected
    assert (made.to(torch.float64) == math.ldexp(1.0, exponent)).all()
    narrower = {torch.float32: torch.float16, torch.float64: torch.float32}.get(expected)
    if narrower is not None:
        with pytest.raises(ValueError, match=f"Result requires at least {expected}; requested {narrower} would overflow or underflow"):
            quantization.apply_mxfp8_scale(x, scales, output_dtype=narrower)
        with pytest.raises(ValueError, match="Result requires at least"):
            quantization.expand_block_scale(scales, x, MXFP8, output_dtype=narrower)
    with pytest.raises(TypeError, match="output_dtype must be"):
        quantization.apply_mxfp8_scale(x, scales, output_dtype=torch.bfloat16)


def test_zeros_need_no_wide_dtype() -> None:
    x = torch.zeros(128, 128).to(torch.float8_e5m2)
    assert quantization.apply_mxfp8_scale(x, quantization.create_mxfp8_scale(x, 128)).dtype == torch.float16


def test_expanded_scales_as_numbers() -> None:
    flat = torch.full((512,), 130, dtype=torch.uint8)
    assert (quantization.expand_block_scale(flat, (128, 128), MXFP8, axis=-1, output_dtype=torch.float16) == 8).all()
    flat = torch.full((1024,), 1.25).to(torch.float8_e4m3fn)
    made = quantization.expand_block_scale(flat.view(torch.uint8), (128, 128), NVFP4, axis=-2, output_dtype=torch.float32, device="cpu")
    assert made.dtype == torch.float32
    assert (made == 1.25).all()


# ---------------------------------------------------------------- 4-bit floats


def _codes(packed: torch.Tensor) -> list[int]:
    return [code for byte in packed.view(torch.uint8).flatten().tolist() for code in (byte & 0xF, byte >> 4)]


def test_rounding_agrees_with_ml_dtypes() -> None:
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.uniform(-8, 8, 4000), np.arange(-32, 33) / 4, [1e-30, -1e-30, 0.0, -0.0, np.inf, -np.inf, 3e38]])
    x = np.concatenate([x, np.nextafter(np.float32(x), np.float32(np.inf)), np.nextafter(np.float32(x), np.float32(-np.inf))])
    x = np.float32(x[: len(x) // 2 * 2])
    expected = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).tolist()
    assert _codes(quantization.quantize_to_fp4(torch.from_numpy(x), axis=-1)) == expected


def test_ties_go_to_even_and_nan_to_the_largest() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, float("nan"), -float("nan")])
    made = quantization.unpack_fp4(quantization.quantize_to_fp4(x, axis=-1), axis=-1)
    assert made.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -1.0, 6.0, 6.0]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(4, 6), (2, 8, 4), (2, 3, 4, 2)])
def test_fp4_round_trip_layout_and_packing(shape: tuple[int, ...], axis: Any) -> None:
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    x = grid[torch.randint(0, 15, shape, generator=torch.Generator().manual_seed(7))]
    packed = quantization.quantize_to_fp4(x, axis=axis)
    halved = list(shape)
    halved[axis] //= 2
    assert packed.dtype == torch.float4_e2m1fn_x2
    assert list(packed.shape) == halved
    assert packed.stride(axis) == 1
    unpacked = quantization.unpack_fp4(packed, axis=axis)
    assert torch.equal(unpacked, x)
    assert unpacked.stride(axis) == 1
    # The lower index of a pair lies in the lower four bits.
    lower = packed.view(torch.uint8) & 0xF
    first = x.movedim(axis, -1)[..., 0::2].movedim(-1, axis)
    assert torch.equal(lower & 8 == 8, first.signbit())


def test_fp4_of_a_vector_and_of_a_strided_tensor() -> None:
    x = torch.arange(8, dtype=torch.float32)
    assert quantization.unpack_fp4(quantization.quantize_to_fp4(x, axis=-1), axis=-1).tolist() == [0, 1, 2, 3, 4, 4, 6, 6]
    strided = torch.arange(32, dtype=torch.float32).reshape(4, 8)[:, ::2] / 8
    made = quantization.unpack_fp4(quantization.quantize_to_fp4(strided, axis=-1), axis=-1)
    np.testing.assert_array_equal(made.numpy(), strided.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_nvfp4_quantisation_end_to_end() -> None:
    """Quantise a matrix block by block, lay its scales out, and get it back within half a step of each block."""
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(11))
    blocks = x.reshape(128, 8, 16)
    scales = (blocks.abs().amax(-1) / 6).to(torch.float8_e4m3fn)  # [m, k / 16]
    ratios = blocks / scales.float()[..., None]
    packed = quantization.quantize_to_fp4(ratios.reshape(128, 128), axis=-1)
    flat = quantization.to_block_scale(scales, packed, NVFP4)
    made = quantization.unpack_fp4(packed, axis=-1) * quantization.expand_block_scale(flat, packed, NVFP4, output_dtype=torch.float32)
    # A step of E2M1 is at most 2 (between 4 and 6); a ratio above 6, by the scale's own rounding (2**-4), saturates.
    bound = scales.float().repeat_interleave(16, dim=-1) * (1 + 6 * 2**-4)
    assert ((made - x).abs() <= bound).all()
    wrong = quantization.expand_block_scale(flat.roll(1), packed, NVFP4, output_dtype=torch.float32)
    assert ((quantization.unpack_fp4(packed, axis=-1) * wrong - x).abs() > bound).any(), "misplaced scales must show"

"""Helpers for narrow types: block scales in cuBLASLt's tiled layout (MXFP8, NVFP4), and packed 4-bit floats.

A block-scaled operand has one scale for every 32 (MXFP8) or 16 (NVFP4) neighbours along its *blocked* axis, the one that
the product sums over. The scales of an (outer, inner) matrix, `inner` counting blocks, lie in tiles of 128 x 4, tile after
tile along `inner` first, and within a tile at `(outer % 32) * 16 + (outer // 32) * 4 + inner`.

Source: "1D Block Scaling Factors Layout" in NVIDIA's cuBLAS manual; the E2M1 and UE8M0 encodings of the OCP Microscaling
specification. Tensors are torch's; torch is loaded by the functions that need it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from epigemm import errors

if TYPE_CHECKING:
    import torch

__all__ = [
    "BlockScalingFormat",
    "apply_mxfp8_scale",
    "create_mxfp8_scale",
    "expand_block_scale",
    "get_block_scale_offset",
    "get_mxfp8_scale_offset",
    "invert_mxfp8_scale",
    "quantize_to_fp4",
    "to_block_scale",
    "unpack_fp4",
]


class BlockScalingFormat(StrEnum):
    """The two block-scaled formats."""

    NVFP4 = "NVFP4"
    MXFP8 = "MXFP8"


@dataclass(frozen=True, slots=True)
class _Format:
    """`block` elements share a scale of one of the dtypes `scales`, read as `meaning`; operands have one of `operands`."""

    block: int
    operands: tuple[str, ...]
    scales: tuple[str, ...]
    meaning: str


_FORMATS = {
    BlockScalingFormat.NVFP4: _Format(16, ("float4_e2m1fn_x2",), ("float8_e4m3fn", "uint8"), "float8_e4m3fn"),
    BlockScalingFormat.MXFP8: _Format(32, ("float8_e4m3fn", "float8_e5m2"), ("uint8",), "ue8m0"),
}

_TILE_OUTER, _TILE_INNER = 128, 4
_UE8M0_BIAS = 127


@dataclass(frozen=True, slots=True)
class _Blocked:
    """An operand as block scaling sees it: its logical shape, its blocked axis (-1 or -2), its format."""

    shape: tuple[int, ...]
    axis: int
    format: BlockScalingFormat

    @property
    def block(self) -> int:
        return _FORMATS[self.format].block

    @property
    def outer(self) -> int:
        """Extent of the axis that is not blocked."""
        return self.shape[-3 - self.axis]

    @property
    def inner(self) -> int:
        """Blocks along the blocked axis."""
        return self.shape[self.axis] // self.block

    @property
    def scale_count(self) -> int:
        return prod(self.shape) // self.block

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of one scale for each block, lying as the operand does."""
        return (*self.shape[:-2], *((self.outer, self.inner) if self.axis == -1 else (self.inner, self.outer)))


# ---------------------------------------------------------------- checks


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_tensor(value: Any, name: str, function: str) -> torch.Tensor:
    import torch

    if not isinstance(value, torch.Tensor):
        package = type(value).__module__.partition(".")[0]
        what = f"Only torch.Tensor is currently supported by function '{function}'; the specified {name} belongs to '{package}' package."
        raise errors.OperandTypeError(errors.say(what, "torch.from_numpy and torch.as_tensor share memory on the CPU."))
    return value


def _check_scales(scales: torch.Tensor, name: str, format: BlockScalingFormat) -> None:
    allowed = _FORMATS[format].scales
    if _dtype_name(scales) not in allowed:
        what = f"For {format.value}, {name} must have dtype {errors.listed((f'torch.{d}' for d in allowed), 'or')}, got {scales.dtype}"
        raise errors.OptionTypeError(errors.say(what, "`scales.view(...)` reads the same bytes as another 8-bit dtype."))


def _check_fp4_axis(x: torch.Tensor, axis: int, name: str) -> None:
    if axis not in (-1, -2):
        raise errors.wrong_value("axis", axis, "-1 or -2")
    if x.ndim < -axis:
        raise errors.ShapeError(f"{name} must be at least {-axis}D for axis={axis}, got {x.ndim}D.")


def _blocked(operand_or_shape: torch.Tensor | tuple[int, ...], axis: int | None, format: BlockScalingFormat | str) -> _Blocked:
    """The operand that is meant, checked: at least 2-D, one axis blocked, its matrix made of whole tiles."""
    try:
        format = BlockScalingFormat(format)
    except ValueError:
        raise errors.not_a_member(format, "BlockScalingFormat", BlockScalingFormat.__members__) from None
    if isinstance(operand_or_shape, tuple):
        shape = operand_or_shape
        if axis is None:
            raise errors.OptionError(errors.say("Axis must be specified when operand shape is provided.", "Pass -1 for A, -2 for B."))
    else:
        operand = _check_tensor(operand_or_shape, "operand", "block scaling")
        shape = tuple(operand.shape)
        _check_rank(shape)
        axis = _operand_axis(operand, axis, format)
        if _dtype_name(operand) == "float4_e2m1fn_x2":  # two elements a byte, along the blocked axis
            shape = tuple(extent * 2 if i - len(shape) == axis else extent for i, extent in enumerate(shape))
    _check_rank(shape)
    axis = axis - len(shape) if axis >= 0 else axis
    if axis not in (-1, -2):
        raise errors.wrong_value("axis", axis, "one of the last two dimensions")
    blocked = _Blocked(shape, axis, format)
    _check_tiles(blocked)
    return blocked


def _check_rank(shape: tuple[int, ...]) -> None:
    if len(shape) < 2:
        raise errors.ShapeError(f"Operand shape must be at least 2D, got {len(shape)}D with shape {shape}.")


def _operand_axis(operand: torch.Tensor, axis: int | None, format: BlockScalingFormat) -> int:
    """The blocked axis of a tensor is its contiguous one."""
    given = _dtype_name(operand)
    owners = [f.value for f, row in _FORMATS.items() if given in row.operands]
    if owners and format.value not in owners:
        what = f"Operand dtype {given} requires block_scaling_format {owners[0]}, got {format.value}."
        raise errors.DTypeError(errors.say(what, "The format follows from the operand's dtype."))
    inferred = -1 if operand.stride(-2) > operand.stride(-1) else -2
    if axis is None:
        return inferred
    axis = axis - operand.ndim if axis >= 0 else axis
    if axis != inferred:
        layout = "row-major" if inferred == -1 else "col-major"
        what = f"Incorrect axis: {axis} for {layout} operand, expected {inferred}."
        raise errors.LayoutError(errors.say(what, "An operand is blocked along its contiguous dimension; leave `axis` away."))
    return axis


def _check_tiles(blocked: _Blocked) -> None:
    for axis, tile in ((-3 - blocked.axis, _TILE_OUTER), (blocked.axis, _TILE_INNER * blocked.block)):
        extent = blocked.shape[axis]
        if extent <= 0 or extent % tile:
            what = f"The extent at axis {axis} must be a positive multiple of {tile}, got {extent} in shape {blocked.shape}."
            raise errors.ShapeError(errors.say(what, f"Scales of {blocked.format.value} lie in tiles of 128 x 4 blocks; pad with zeros."))
    if min(blocked.shape) <= 0:
        raise errors.ShapeError(f"Operand shape must have positive extents, got {blocked.shape}.")


# ---------------------------------------------------------------- the tiled layout


def _tiled(scales: torch.Tensor, blocked: _Blocked) -> torch.Tensor:
    """Scales lying as the operand -> 1-D, in tiles."""
    matrices = scales if blocked.axis == -1 else scales.mT  # [..., outer, inner]
    tiles = matrices.reshape(-1, blocked.outer // 128, 4, 32, blocked.inner // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(-1)


def _untiled(scales_1d: torch.Tensor, blocked: _Blocked) -> torch.Tensor:
    """1-D scales in tiles -> lying as the operand."""
    tiles = scales_1d.reshape(-1, blocked.outer // 128, blocked.inner // 4, 32, 4, 4)
    matrices = tiles.permute(0, 1, 4, 3, 2, 5).reshape(*blocked.shape[:-2], blocked.outer, blocked.inner)
    return matrices if blocked.axis == -1 else matrices.mT


def get_block_scale_offset(
    index: tuple[Any, ...],
    operand_or_shape: torch.Tensor | tuple[int, ...],
    block_scaling_format: BlockScalingFormat,
    *,
    axis: Literal[-1, -2] | None = None,
) -> Any:
    """Where the scale of a block lies among the 1-D scales.

    Args:
        index: the block: its index along each dimension, counting blocks along the blocked one. Integers, or integer
            tensors (or NumPy arrays) that broadcast.
        operand_or_shape: the operand, or its logical shape (of a 4-bit operand: in elements, not bytes).
        block_scaling_format: NVFP4 (blocks of 16) or MXFP8 (blocks of 32).
        axis: the blocked axis, -1 for A and -2 for B; needed with a shape, and found from the strides of an operand.

    Returns:
        The offset in elements, an int or a tensor of them as `index` has.

    Raises:
        errors.ShapeError, errors.OptionError: the shape is not made of whole tiles, or the index lies outside it.

    Example:
        >>> get_block_scale_offset((5, 2), (128, 128), BlockScalingFormat.NVFP4, axis=-1)
        82
    """
    return _offset(_blocked(operand_or_shape, axis, block_scaling_format), index)


def _offset(blocked: _Blocked, index: tuple[Any, ...]) -> Any:
    shape = blocked.scale_shape
    if len(index) != len(shape):
        what = f"Index length must match the number of dimensions of the operand: {len(index)} given, {len(shape)} expected."
        raise errors.OptionError(what)
    for dimension, (i, extent) in enumerate(zip(index, shape, strict=True)):
        if isinstance(i, (int, np.integer)) and not 0 <= i < extent:
            raise errors.wrong_value(f"index[{dimension}]", i, f"from 0 to {extent - 1} (blocks, along the blocked axis)")
    outer, inner = index[-3 - blocked.axis], index[blocked.axis]
    matrix: Any = 0
    for i, extent in zip(index[:-2], shape[:-2], strict=True):
        matrix = matrix * extent + i
    tile = outer // _TILE_OUTER * (blocked.inner // _TILE_INNER) + inner // _TILE_INNER
    within = outer % 32 * 16 + outer % _TILE_OUTER // 32 * 4 + inner % _TILE_INNER
    return matrix * (blocked.outer * blocked.inner) + tile * (_TILE_OUTER * _TILE_INNER) + within


def to_block_scale(
    scale_tensor: torch.Tensor,
    operand_or_shape: torch.Tensor | tuple[int, ...],
    block_scaling_format: BlockScalingFormat,
    *,
    axis: Literal[-1, -2] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scales of each block, lying as the operand does, as the 1-D tensor that a product takes.

    Args:
        scale_tensor: (..., outer, inner) for axis -1 and (..., inner, outer) for axis -2, `inner` counting blocks; uint8
            exponents (UE8M0) for MXFP8, float8_e4m3fn or its bytes for NVFP4.
        operand_or_shape, block_scaling_format, axis: as in `get_block_scale_offset`.
        out: a 1-D tensor to write into.

    Returns:
        `out`, or a new tensor of `scale_tensor`'s dtype.

    Raises:
        errors.OptionTypeError: `scale_tensor` is no tensor, or of a dtype that the format has no scales of.
        errors.ShapeError: a shape does not fit.
    """
    import torch

    if not isinstance(scale_tensor, torch.Tensor):
        raise errors.OptionTypeError(f"scale_tensor must be a torch.Tensor, got {type(scale_tensor)}.")
    blocked = _blocked(operand_or_shape, axis, block_scaling_format)
    _check_scales(scale_tensor, "scale_tensor", blocked.format)
    if tuple(scale_tensor.shape) != blocked.scale_shape:
        what = f"For operand of shape {blocked.shape}, block_scaling_format {blocked.format.value}, blocked along axis {blocked.axis}, "
        raise errors.ShapeError(f"{what}the scale_tensor must have shape {blocked.scale_shape}, got {tuple(scale_tensor.shape)}.")
    tiled = _tiled(scale_tensor.view(torch.uint8), blocked).view(scale_tensor.dtype)
    if out is None:
        # `reshape` may have returned the caller's own memory.
        return tiled.clone()
    if tuple(out.shape) != tuple(tiled.shape) or out.dtype != tiled.dtype:
        what = f"out must be a 1D tensor of shape {tuple(tiled.shape)} and dtype {tiled.dtype}"
        raise errors.ShapeError(f"{what}, got shape {tuple(out.shape)} and dtype {out.dtype}.")
    out.view(torch.uint8).copy_(tiled.view(torch.uint8))
    return out


def expand_block_scale(
    scales_1d: torch.Tensor,
    operand_or_shape: torch.Tensor | tuple[int, ...],
    block_scaling_format: BlockScalingFormat,
    *,
    axis: Literal[-1, -2] | None = None,
    output_dtype: Literal["smallest"] | torch.dtype = "smallest",
    device: Literal["cuda", "cpu"] | None = None,
) -> torch.Tensor:
    """The scale of every element, of the operand's logical shape.

    Args:
        scales_1d: 1-D scales as a product takes or returns them.
        operand_or_shape, block_scaling_format, axis: as in `get_block_scale_offset`.
        output_dtype: "smallest" is the scales' own form: uint8 exponents for MXFP8, float8_e4m3fn for NVFP4; else that
            form's torch dtype, float16, float32 or float64.
        device: where the result lies; by default where `scales_1d` does.

    Raises:
        errors.OptionTypeError: a wrong dtype.
        errors.ShapeError: the number of scales does not fit.
        errors.OptionError: a scale of 2**x overflows or underflows `output_dtype`.
    """
    import torch

    expanded, format = _expanded(scales_1d, operand_or_shape, block_scaling_format, axis, device)
    own = torch.uint8 if _FORMATS[format].meaning == "ue8m0" else torch.float8_e4m3fn
    if output_dtype in ("smallest", own):
        return expanded.view(own)
    wide = (torch.float16, torch.float32, torch.float64)
    if output_dtype not in wide:
        raise errors.OptionTypeError(f"output_dtype must be 'smallest' or one of {errors.listed((own, *wide))}. Got {output_dtype}.")
    return expanded.view(own).to(output_dtype) if own != torch.uint8 else _narrowed(_exponential(expanded), output_dtype)


def _expanded(
    scales_1d: torch.Tensor, operand_or_shape: Any, format: BlockScalingFormat, axis: int | None, device: str | None
) -> tuple[torch.Tensor, BlockScalingFormat]:
    """The scale bytes of every element."""
    import torch

    if not isinstance(scales_1d, torch.Tensor):
        raise errors.OptionTypeError(f"scales_1d must be a torch.Tensor, got {type(scales_1d)}.")
    if device not in (None, "cuda", "cpu"):
        raise errors.wrong_value("device", device, "'cuda', 'cpu' or None")
    blocked = _blocked(operand_or_shape, axis, format)
    _check_scales(scales_1d, "scales_1d", blocked.format)
    if scales_1d.ndim != 1 or scales_1d.shape[0] != blocked.scale_count:
        what = f"The scale tensor must be 1D and have {blocked.scale_count} elements, one for each block of {blocked.block} in"
        raise errors.ShapeError(f"{what} {blocked.shape}, got shape {tuple(scales_1d.shape)}.")
    scales = scales_1d if device is None else scales_1d.to(device)
    return _untiled(scales.view(torch.uint8), blocked).repeat_interleave(blocked.block, dim=blocked.axis), blocked.format


def _exponential(exponents: torch.Tensor) -> torch.Tensor:
    """2**(x - 127) in float64, where neither 2**128 nor 2**-127 is out of range."""
    import torch

    return torch.exp2(exponents.to(torch.float64) - _UE8M0_BIAS)


def _narrowed(wide: torch.Tensor, output_dtype: Literal["smallest"] | torch.dtype) -> torch.Tensor:
    """`wide` as the smallest of float16, float32 and float64 that its values fit, or as `output_dtype` if they fit that."""
    import torch

    magnitudes = wide[wide != 0].abs()
    most, least = (magnitudes.max().item(), magnitudes.min().item()) if magnitudes.numel() else (0.0, 1.0)
    candidates = (torch.float16, torch.float32, torch.float64)
    fits = [d for d in candidates[:2] if most <= torch.finfo(d).max and least >= torch.finfo(d).tiny]
    smallest = (*fits, torch.float64)[0]
    if output_dtype == "smallest":
        return wide.to(smallest)
    if candidates.index(output_dtype) < candidates.index(smallest):
        what = f"Result requires at least {smallest}; requested {output_dtype} would overflow or underflow."
        raise errors.OptionError(errors.say(what, "Leave output_dtype away to have the smallest that fits."))
    return wide.to(output_dtype)


# ---------------------------------------------------------------- MXFP8


def create_mxfp8_scale(x: torch.Tensor, exponent: int, stream: Any = None) -> torch.Tensor:
    """MXFP8 scales of 2**exponent for every block of `x`.

    Args:
        x: the operand to be scaled, its size a multiple of 32.
        exponent: from -127 to 128.
        stream: for a tensor on a GPU: a torch stream or its pointer, by default the current one.

    Returns:
        1-D, uint8, of `x.numel() // 32` elements, on `x`'s device.

    Raises:
        errors.OptionError: the exponent is out of range.
        errors.ShapeError: `x` is not made of whole blocks.
    """
    import torch

    _check_tensor(x, "tensor", "create_mxfp8_scale")
    if not isinstance(exponent, (int, np.integer)) or not -127 <= exponent <= 128:
        raise errors.OptionError(f"The exponent should be an integer from [-127, 128] range, not {exponent!r}.")
    if x.numel() % 32:
        raise errors.ShapeError(errors.say(f"A tensor of {x.numel()} elements is not made of blocks of 32.", "Pad it with zeros."))
    count, value = x.numel() // 32, int(exponent) + _UE8M0_BIAS
    if stream is None or not x.is_cuda:
        return torch.full((count,), value, dtype=torch.uint8, device=x.device)
    stream = stream if isinstance(stream, torch.cuda.Stream) else torch.cuda.ExternalStream(int(stream), device=x.device)
    with torch.cuda.stream(stream):
        return torch.full((count,), value, dtype=torch.uint8, device=x.device)


def invert_mxfp8_scale(mx_scales: torch.Tensor) -> torch.Tensor:
    """The reciprocals of MXFP8 scales: 2**-x for each 2**x. 2**128, whose reciprocal UE8M0 lacks, gives 2**-127.

    Args:
        mx_scales: uint8 exponents, of any shape; they are not modified.

    Raises:
        errors.OperandTypeError, errors.OptionTypeError: not a torch tensor, or not uint8.
    """
    _check_tensor(mx_scales, "mx_scales tensor", "invert_mxfp8_scale")
    _check_scales(mx_scales, "mx_scales", BlockScalingFormat.MXFP8)
    return 2 * _UE8M0_BIAS - mx_scales.clamp(max=2 * _UE8M0_BIAS)


def get_mxfp8_scale_offset(
    operand_or_shape: torch.Tensor | tuple[int, ...], index: tuple[Any, ...], axis: Literal[-1, -2] | None = None
) -> Any:
    """Where the scale of an *element* lies among the 1-D MXFP8 scales. Deprecated in the peer: use `get_block_scale_offset`.

    Args:
        operand_or_shape, axis: as in `get_block_scale_offset`.
        index: the element, as integers or as tensors that broadcast.
    """
    message = "get_mxfp8_scale_offset is deprecated. Please use get_block_scale_offset instead."
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    blocked = _blocked(operand_or_shape, axis, BlockScalingFormat.MXFP8)
    block_index = tuple(i // blocked.block if d - len(index) == blocked.axis else i for d, i in enumerate(index))
    return _offset(blocked, block_index)


def apply_mxfp8_scale(
    x: torch.Tensor, scales_1d: torch.Tensor, output_dtype: Literal["smallest"] | torch.dtype = "smallest"
) -> torch.Tensor:
    """`x` with its MXFP8 scales applied; computed in float64.

    Args:
        x: float8_e4m3fn or float8_e5m2, blocked along its contiguous dimension.
        scales_1d: its 1-D scales.
        output_dtype: float16, float32 or float64, or "smallest" for the first of them that the result fits.

    Raises:
        errors.OptionError: the result overflows or underflows `output_dtype`.

    Example:
        >>> import torch
        >>> x = torch.ones(128, 128).to(torch.float8_e4m3fn)
        >>> apply_mxfp8_scale(x, create_mxfp8_scale(x, 3))[0, 0]
        tensor(8., dtype=torch.float16)
    """
    import torch

    if output_dtype not in ("smallest", torch.float16, torch.float32, torch.float64):
        raise errors.OptionTypeError("output_dtype must be 'smallest' or one of torch.float16, torch.float32, torch.float64.")
    expanded, _ = _expanded(scales_1d, _check_tensor(x, "tensor", "apply_mxfp8_scale"), BlockScalingFormat.MXFP8, None, None)
    return _narrowed(x.to(torch.float64) * _exponential(expanded), output_dtype)


# ---------------------------------------------------------------- 4-bit floats (E2M1)

# Magnitude of each code; bit 3 is the sign.
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _fp4_boundaries() -> np.ndarray[Any, np.dtype[np.float32]]:
    """The greatest float32 that rounds to each code: midpoints, less one step where the tie goes up to the even code."""
    values = np.array(_FP4_VALUES, np.float32)
    middles = (values[:-1] + values[1:]) / 2
    odd = np.arange(len(middles)) % 2 == 1
    return np.where(odd, np.nextafter(middles, np.float32(0)), middles)


def quantize_to_fp4(x: torch.Tensor, axis: Literal[-1, -2]) -> torch.Tensor:
    """`x` rounded to 4-bit floats (E2M1), two to a byte.

    Rounds to nearest, ties to even, as the hardware's conversion does (the peer's helper rounds ties towards zero).
    Values beyond 6 saturate; NaN, which the type lacks, becomes 6.

    Args:
        x: float32, its extent along `axis` even.
        axis: the axis that is packed: -1 gives (..., q // 2), row-major; -2 gives (..., p // 2, q), column-major. The
            element of the lower index takes the lower four bits.

    Returns:
        A tensor of dtype float4_e2m1fn_x2.

    Raises:
        errors.OptionTypeError: `x` is no tensor.
        errors.DTypeError: it is not float32.
        errors.ShapeError: its extent along `axis` is odd.
    """
    import torch

    if not isinstance(x, torch.Tensor):
        raise errors.OptionTypeError(f"x must be a torch.Tensor, got {type(x)}.")
    if x.dtype != torch.float32:
        raise errors.DTypeError(errors.say(f"x must be float32, got {x.dtype}.", "Widen it with x.float()."))
    _check_fp4_axis(x, axis, "x")
    if x.shape[axis] % 2:
        raise errors.ShapeError(errors.say(f"Packed dimension must be even, got {x.shape[axis]}.", "Pad it with zeros."))
    rows = x if axis == -1 else x.mT
    boundaries = torch.from_numpy(_fp4_boundaries()).to(x.device)
    code = torch.bucketize(rows.abs().contiguous(), boundaries).to(torch.uint8)
    code = torch.where(rows.isnan(), 7, code | (rows.signbit().to(torch.uint8) << 3)).to(torch.uint8)
    packed = (code[..., 0::2] | (code[..., 1::2] << 4)).contiguous().view(torch.float4_e2m1fn_x2)
    return packed if axis == -1 else packed.mT


def unpack_fp4(fp4_tensor: torch.Tensor, axis: Literal[-1, -2]) -> torch.Tensor:
    """The float32 values of packed 4-bit floats.

    Args:
        fp4_tensor: dtype float4_e2m1fn_x2.
        axis: the axis along which it is packed; its extent doubles. The result is contiguous along it.

    Raises:
        errors.OptionTypeError: not a torch tensor.
        errors.DTypeError: of another dtype.

    Example:
        >>> import torch
        >>> unpack_fp4(quantize_to_fp4(torch.tensor([0.7, -1.1, 5.5, 100.0]), axis=-1), axis=-1)
        tensor([ 0.5000, -1.0000,  6.0000,  6.0000])
    """
    import torch

    if not isinstance(fp4_tensor, torch.Tensor):
        raise errors.OptionTypeError(f"fp4_tensor must be a torch.Tensor, got {type(fp4_tensor)}.")
    if fp4_tensor.dtype != torch.float4_e2m1fn_x2:
        raise errors.DTypeError(f"fp4_tensor must be float4_e2m1fn_x2, got {fp4_tensor.dtype}.")
    _check_fp4_axis(fp4_tensor, axis, "fp4_tensor")
    packed = fp4_tensor.view(torch.uint8)
    rows = packed if axis == -1 else packed.mT
    table = torch.tensor((*_FP4_VALUES, *(-value for value in _FP4_VALUES)), dtype=torch.float32, device=packed.device)
    values = table[torch.stack((rows & 0xF, rows >> 4), dim=-1).long()].flatten(-2)
    return values if axis == -1 else values.mT

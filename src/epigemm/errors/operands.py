"""Errors about the operands: extents, layouts, dtypes, libraries, devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from epigemm.errors.types import (
    DeviceMismatchError,
    DTypeError,
    LayoutError,
    OperandTypeError,
    OptionError,
    OverlapError,
    PackageMismatchError,
    RankError,
    ShapeError,
    listed,
    say,
)


def _batch(shape: Sequence[int]) -> str:
    return str(list(shape))


# ---------------------------------------------------------------- operands: extents


def k_mismatch(k_a: int, k_b: int) -> ShapeError:
    what = f"The 'K' extent must match for the operands: K={k_a} in operand A is not equal to K={k_b} in operand B."
    return ShapeError(say(what, "A is [..., M, K] and B is [..., K, N]; pass `b.T` or `b.mT` if B is stored as [N, K] (no copy is made)."))


def scalar_operand(name: str) -> RankError:
    what = f"Operand {name} has no dimension (list index out of range)."
    return RankError(say(what, "A product needs at least 1-D operands; use `alpha` to multiply by a scalar."))


def batch_mismatch(name_1: str, shape_1: Sequence[int], name_2: str, shape_2: Sequence[int]) -> ShapeError:
    what = f"The batch dimensions of operands {name_1} {_batch(shape_1)} and {name_2} {_batch(shape_2)} must match."
    return ShapeError(say(what, "Batches broadcast as in numpy.matmul: aligned at the right, each pair of extents equal or one of them 1."))


def c_without_beta() -> OptionError:
    return OptionError(say("A value for beta must be provided if operand C is provided.", "Pass `beta=1.0` to add C as it is."))


def c_too_few_dimensions(shape: Sequence[int]) -> ShapeError:
    what = "In order to avoid broadcasting behavior ambiguity, `c` must be at least 2-D."
    hint = "Pass `c[:, None]` to repeat it along N, or `c[None, :]` to repeat it along M."
    return ShapeError(say(f"{what} Its shape is {tuple(shape)}.", hint))


def c_extent_mismatch(dimension: str, extent: int, expected: int, *, inplace: bool = False) -> ShapeError:
    """C's M against A's, or C's N against B's; `dimension` is "M" or "N"."""
    operand = {"M": "A", "N": "B"}[dimension]
    what = f"The {dimension} dimension of the C matrix ({extent}) must match the {dimension} dimension of {operand}."
    if inplace:
        return ShapeError(say(f"{what} This is required for inplace operations.", f"D is written into C: {dimension} must be {expected}."))
    return ShapeError(say(what, f"It must be {expected}, or 1 to be repeated along {dimension}."))


def c_batch_mismatch(c_batch: Sequence[int], batch: Sequence[int]) -> ShapeError:
    what = f"The batch dimension of operand C {_batch(c_batch)} must match with that of the other operands {_batch(batch)}."
    return ShapeError(say(what, "C may broadcast to the batch of A @ B, but does not enlarge it; `expand` A or B if that is meant."))


def no_operands(name: str) -> OptionError:
    return OptionError(say(f"`{name}` is an empty sequence.", "Pass one matrix, or one for each accumulator of the epilogue."))


def unequal_b(given: Sequence[tuple[str, Sequence[int]]]) -> ShapeError:
    what = "Several B operands must have one dtype and one shape (..., K, N)."
    return ShapeError(say(what, "They are " + ", ".join(f"{dtype} {tuple(shape)}" for dtype, shape in given) + "."))


def c_with_several_b() -> OptionError:
    what = "C cannot be given with several B operands: it belongs to no single accumulator."
    return OptionError(say(what, "Pass it as an epilogue input and add it there: `def fn(gate, up, c): ...`."))


def inplace_without_c() -> OptionError:
    what = "The operation cannot be inplace if operand C is not provided."
    return OptionError(say(what, "Pass `c` and `beta`, or use `out=` to write into a tensor that is not read."))


def out_mismatch(what: str, given: object, expected: object) -> ShapeError:
    """`out=` whose shape differs; `what` is "shape"."""
    return ShapeError(
        say(f"The {what} of `out` ({given}) must be that of the result ({expected}).", "Leave `out` away to have it allocated.")
    )


def out_dtype_mismatch(given: str, expected: str) -> DTypeError:
    what = f"The dtype of `out` ({given}) must be that of the result ({expected})."
    return DTypeError(say(what, "Set MatmulOptions(result_type=...) to change the result's dtype."))


# ---------------------------------------------------------------- operands: layouts


def unsupported_layout(name: str, shape: Sequence[int], strides: Sequence[int], engine: str = "") -> LayoutError:
    by = f" by engine {engine!r}" if engine else ""
    what = f"Unsupported layout. Operand {name} of shape {tuple(shape)} has strides {tuple(strides)} (in elements), not read in place{by}."
    return LayoutError(say(what, "Give one of its last two dimensions unit stride, or use engine='auto'."))


def batch_not_tileable(name: str, shape: Sequence[int], strides: Sequence[int]) -> LayoutError:
    what = f"The batch layout for {name} corresponding to shape = {tuple(shape)} and strides = {tuple(strides)} is currently not supported"
    return LayoutError(say(f"{what} because it is not tileable.", "Make it contiguous, or use engine='auto'."))


def batch_order_mismatch(name_1: str, order_1: Sequence[int], name_2: str, order_2: Sequence[int]) -> LayoutError:
    what = f"The batch order of operands {name_1} {tuple(order_1)} and {name_2} {tuple(order_2)} must match."
    return LayoutError(say(what, "Make one of them contiguous, or use engine='auto'."))


def misaligned(name: str, alignment_bytes: int, address: int) -> LayoutError:
    what = f"operand {name} should be aligned to {alignment_bytes} bytes."
    return LayoutError(say(what, f"Its address {address:#x} is not; copy it, or slice at a multiple of {alignment_bytes} bytes."))


def out_overlaps(name: str, output: str = "out") -> OverlapError:
    what = f"`{output}` overlaps `{name}` in memory."
    hint = "It may be exactly C or a full (M, N) epilogue input (same pointer and strides), or memory of its own."
    return OverlapError(say(what, hint))


def not_writable(name: str, why: str) -> LayoutError:
    what = f"`{name}` is to be written, and it {why}."
    return LayoutError(say(what, "Pass a tensor of its own memory, or leave it away and copy the result."))


def self_overlap(name: str, shape: Sequence[int], strides: Sequence[int]) -> OverlapError:
    what = f"Elements of `{name}` share memory: its shape is {tuple(shape)} and its strides are {tuple(strides)}."
    return OverlapError(say(what, "A tensor that is written needs an address for each element; it must not be expanded or broadcast."))


# ---------------------------------------------------------------- operands: dtypes


def unsupported_dtype(name: str, dtype: str, supported: Iterable[str] = ()) -> DTypeError:
    supported = tuple(supported)
    hint = f"Supported: {listed(supported)}." if supported else "Cast it to float16, bfloat16, float32, float64 or complex first."
    return DTypeError(say(f"The dtype of operand {name} ({dtype}) is not supported.", hint))


def unsupported_dtypes(dtype_a: str, dtype_b: str) -> DTypeError:
    what = f"Unsupported combination of dtypes for operands A {dtype_a} and B {dtype_b}."
    return DTypeError(say(what, "A and B must have one dtype (float8_e4m3fn and float8_e5m2 may be mixed); cast one of them."))


def unsupported_types(scale_type: str, compute_type: str, dtype_a: str, dtype_b: str, allowed: Iterable[str] = ()) -> DTypeError:
    what = f"Selected scale_type={scale_type} compute_type={compute_type} are not supported for data types {dtype_a} (A) and {dtype_b} (B)."
    allowed = tuple(allowed)
    return DTypeError(say(what, f"Supported for these: {listed(allowed, 'or')}." if allowed else "Leave both away to have them chosen."))


def unsupported_compute_type(compute_type: object) -> DTypeError:
    what = f"Unsupported compute type. The compute type '{compute_type}' is currently not supported."
    return DTypeError(say(what, "Leave compute_type away to have it chosen by the operands' dtype."))


def unsupported_scale_type(scale_type: object) -> DTypeError:
    what = f"Unsupported scale type. The data type '{scale_type}' is currently not supported."
    return DTypeError(say(what, "Use CUDA_R_16F, CUDA_R_16BF, CUDA_R_32F, CUDA_R_64F, CUDA_C_32F or CUDA_C_64F."))


def unsupported_result_type(result_type: object, dtype_a: str) -> DTypeError:
    what = f"The result type '{result_type}' is not supported for operands of dtype {dtype_a}."
    return DTypeError(say(what, "Leave result_type away to have the dtype of C, else of A."))


def needs_blackwell(what: str) -> DTypeError:
    """The one refusal of MXFP8 and NVFP4."""
    text = f"{what} is not supported: block-scaled MXFP8 and NVFP4 products need a Blackwell GPU (compute capability 10.0)."
    return DTypeError(say(text, "Use float8_e4m3fn or float8_e5m2 with tensor-wide scales (block_scaling=False)."))


def not_convertible(name: str, value: object, dtype: str) -> OptionError:
    what = f"The value provided for {name} {value if isinstance(value, complex) else f'({value})'} is not convertible to dtype '{dtype}'."
    return OptionError(say(what, f"`{name}` is a host scalar of the scale type; set scale_type or the operands' dtype to change it."))


# ---------------------------------------------------------------- operands: libraries and devices

PACKAGES = ("numpy", "cupy", "torch")


def unsupported_package(package: str, name: str = "") -> OperandTypeError:
    where = f" Operand `{name}` is of package '{package}'." if name else ""
    what = f"{package} not supported yet. Currently must be one of {list(PACKAGES)}, or a DLPack array.{where}"
    return OperandTypeError(say(what, "Wrap it: numpy.asarray(x), or torch.as_tensor(x)."))


def mixed_packages(packages: Iterable[str]) -> PackageMismatchError:
    what = f"All tensors must be from the same library package. Packages found = {sorted(packages)}."
    return PackageMismatchError(say(what, "Convert them to one library; torch.from_numpy and numpy.asarray share memory on the CPU."))


def package_mismatch(expected: str, given: str, what: str = "") -> PackageMismatchError:
    subject = f"Library package mismatch for {what}" if what else "Library package mismatch"
    return PackageMismatchError(say(f"{subject}: '{expected}' => '{given}'", f"Convert it to {expected!r}, the package of the operands."))


def mixed_devices(devices: Iterable[object]) -> DeviceMismatchError:
    names = sorted(str(device) for device in devices)
    return DeviceMismatchError(say(f"All operands are not on the same device. Devices = {names}.", "Move them to one device first."))


def device_mismatch(name: str, given: object, expected: object) -> DeviceMismatchError:
    what = f'The operand {name} is on device "{given}", but it should be on device "{expected}" to match the original operand.'
    return DeviceMismatchError(say(what, "Move it there, or create another Matmul for this device."))


def epilog_input_device(name: str, given: object, expected: object) -> DeviceMismatchError:
    what = f"The epilog inputs must be in the same memory space as the operands. Expected device {expected}, got {given} for '{name}'."
    return DeviceMismatchError(say(what, f"Move `{name}` to device {expected}."))

"""From arguments and options to a Problem: shapes, batches, dtypes and D's layout, by the rules of the peer and of NumPy."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

from epigemm import compute_types, errors, layouts
from epigemm.arguments import Arguments
from epigemm.dtypes import DType
from epigemm.options import CudaDataType, MatmulComputeType, MatmulOptions
from epigemm.problem import Compute, Operand, Problem
from epigemm.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Product:
    """The product without its epilogue.

    Args:
        problem: complete but for `inputs`, and for D's order where the epilog decides it.
        c_dtype: C's dtype, also where C is absent: the peer's gelu_aux of an 8-bit D has it.
        compute_type, scale_type: resolved.
        squeeze: D's axes that a 1-D operand added, removed from the result.
        d_order: the order that C, `out` or the options fixed for D, or None.
    """

    problem: Problem
    c_dtype: DType
    compute_type: MatmulComputeType
    scale_type: CudaDataType
    squeeze: tuple[int, ...]
    d_order: str | None


def matrices(arguments: Arguments) -> Arguments:
    """The arguments with 1-D operands as matrices: `a` (k,) as (1, k), `b` (k,) as (k, 1).

    Raises:
        errors.RankError: an operand has no dimension.
        errors.ShapeError: C has fewer than two.
    """
    if len(arguments.a.shape) > 1 and (arguments.c is None or len(arguments.c.shape) > 1) and all(len(b.shape) > 1 for b in arguments.b):
        return arguments
    for name, tensor in arguments.operands().items():
        if not tensor.shape:
            raise errors.scalar_operand(name)
    if arguments.c is not None and len(arguments.c.shape) < 2:
        raise errors.c_too_few_dimensions(arguments.c.shape)
    a, b = arguments.a, arguments.b
    if len(a.shape) == 1:
        a = a.view((1, *a.shape), (a.shape[0] * abs(a.strides[0]), *a.strides))
    b = tuple(x.view((*x.shape, 1), (*x.strides, 1)) if len(x.shape) == 1 else x for x in b)
    return replace(arguments, a=a, b=b)


def specify(arguments: Arguments, options: MatmulOptions, conjugate: tuple[bool, ...], original: Arguments) -> Product:
    """The product that matrix arguments and options describe.

    Args:
        arguments: from `matrices`.
        options: checked.
        conjugate: whether A and each B are conjugated, lazy bits included.
        original: the arguments before `matrices`: their ranks decide what is squeezed.

    Raises:
        errors.ShapeError, errors.DTypeError, errors.LayoutError, errors.OptionError: what they describe is no product.
    """
    a, bs, c, out = arguments.a, arguments.b, arguments.c, arguments.out
    compute_type, scale_type = compute_types.resolve_compute(a.dtype, bs[0].dtype, options.compute_type, options.scale_type)
    if options.block_scaling:
        raise errors.needs_blackwell("block_scaling=True")
    c_given = None if c is None else c.dtype
    c_dtype, d_dtype = compute_types.result_dtypes(a.dtype, c_given, options.result_type, inplace=options.inplace)
    m, n, k = _extents(a, bs)
    batch = _batch(a, bs)
    _check_c(arguments, m, n, batch, options)
    d, d_order = _d(arguments, (*batch, m, n), d_dtype, options)
    problem = Problem(
        batch=batch,
        m=m,
        n=n,
        k=k,
        a=replace(a.operand(), conjugate=conjugate[0]),
        b=tuple(replace(b.operand(), conjugate=flag) for b, flag in zip(bs, conjugate[1:], strict=True)),
        c=None if c is None else c.operand(),
        d=d,
        device=a.device,
        compute=_compute(options, compute_type, scale_type),
    )
    ranks = (len(original.a.shape), len(original.b[0].shape))
    squeeze = tuple(axis for axis, rank in zip((-2, -1), ranks, strict=True) if rank == 1 and out is None and not options.inplace)
    return Product(problem, c_dtype, compute_type, scale_type, squeeze, d_order)


def _compute(options: MatmulOptions, compute_type: MatmulComputeType, scale_type: CudaDataType) -> Compute:
    return Compute(
        compute_type=int(compute_type),
        scale_type=compute_types.scale_dtype(scale_type),
        rounding=options.rounding,
        fast_accumulation=bool(options.fast_accumulation),
        strict=options.strict,
        sm_count_target=int(options.sm_count_target or 0),
    )


def _extents(a: Tensor, bs: tuple[Tensor, ...]) -> tuple[int, int, int]:
    m, k = a.shape[-2:]
    n = bs[0].shape[-1]
    for b in bs:
        if b.shape[-2] != k:
            raise errors.k_mismatch(k, b.shape[-2])
        if b.shape[-1] != n or b.dtype != bs[0].dtype:
            raise errors.unequal_b([(x.dtype.name, x.shape) for x in bs])
    return m, n, k


def _batch(a: Tensor, bs: tuple[Tensor, ...]) -> tuple[int, ...]:
    for b in bs:
        if layouts.broadcast_batches(a.shape[:-2], b.shape[:-2]) is None:
            raise errors.batch_mismatch("A", a.shape[:-2], "B", b.shape[:-2])
    batch = layouts.broadcast_batches(a.shape[:-2], *(b.shape[:-2] for b in bs))
    if batch is None:
        raise errors.batch_mismatch("B[0]", bs[0].shape[:-2], "B[1]", bs[-1].shape[:-2])
    return batch


def _check_c(arguments: Arguments, m: int, n: int, batch: tuple[int, ...], options: MatmulOptions) -> None:
    c = arguments.c
    if c is None:
        if options.inplace:
            raise errors.inplace_without_c()
        return
    if arguments.beta is None:
        raise errors.c_without_beta()
    if len(arguments.b) > 1:
        raise errors.c_with_several_b()
    inplace = options.inplace
    if c.shape[-2] != m and (inplace or c.shape[-2] != 1):
        raise errors.c_extent_mismatch("M", c.shape[-2], m, inplace=inplace)
    if c.shape[-1] != n and (inplace or c.shape[-1] != 1):
        raise errors.c_extent_mismatch("N", c.shape[-1], n, inplace=inplace)
    if layouts.broadcast_batches(batch, c.shape[:-2]) != batch or (inplace and c.shape[:-2] != batch):
        raise errors.c_batch_mismatch(c.shape[:-2], batch)


def _d(arguments: Arguments, shape: tuple[int, ...], dtype: DType, options: MatmulOptions) -> tuple[Operand, str | None]:
    """D's operand and the order that is fixed for it; where none is, the order is A's until the epilog has its say."""
    target = arguments.c if options.inplace else arguments.out
    if options.inplace and arguments.out is not None:
        raise errors.wrong_value("out", "a tensor", "None together with inplace=True: D is written into C")
    if target is not None:
        if target.shape != shape:
            raise errors.out_mismatch("shape", target.shape, shape)
        if target.dtype != dtype:
            raise errors.out_dtype_mismatch(target.dtype.name, dtype.name)
        if not layouts.is_injective(target.shape, target.strides):
            raise errors.self_overlap("C" if options.inplace else "out", target.shape, target.strides)
        operand = target.operand()
        return operand, Problem.order_of(operand)
    order: str | None = options.result_order
    if order is None and arguments.c is not None and arguments.c.shape[-2:] == shape[-2:]:
        order = layouts.order_of(arguments.c.shape, arguments.c.strides)
    axes = _batch_axes(arguments, shape)
    start = order or layouts.order_of(arguments.a.shape, arguments.a.strides) or layouts.ROW
    return Operand(dtype, shape, layouts.dense_strides(shape, start, axes)), order


def _batch_axes(arguments: Arguments, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order of D's batch axes in memory: that of the first operand that has the whole batch."""
    for tensor in (arguments.a, *arguments.b):
        if tensor.shape[:-2] == shape[:-2]:
            return layouts.batch_axes(tensor.strides, tensor.shape)
    return None


def with_order(product: Product, arguments: Arguments, order: str) -> Problem:
    """The product's problem with a new D in `order`."""
    d = product.problem.d
    strides = layouts.dense_strides(d.shape, order, _batch_axes(arguments, d.shape))
    return replace(product.problem, d=replace(d, strides=strides))


def narrow_scales(product: Product, scales: Any, d_scaled: bool = True) -> None:
    """Checks that exactly the 8-bit operands have scales.

    Args:
        product: gives the dtypes.
        scales: MatmulQuantizationScales.
        d_scaled: whether an 8-bit D has a scale; not where the epilogue casts to it.

    Raises:
        errors.OptionError: one is missing, or one is given that has no meaning.
    """
    problem = product.problem
    narrow = problem.a.dtype.is_narrow or problem.b[0].dtype.is_narrow
    if narrow and scales.a is None and scales.b is None:
        raise errors.scales_required()
    c = problem.c
    needed = {"A": narrow, "B": narrow, "C": c is not None and c.dtype.is_narrow, "D": d_scaled and problem.d.dtype.is_narrow}
    for name, need in needed.items():
        given = getattr(scales, name.lower()) is not None
        if need and not given:
            raise errors.scale_missing(name)
        if given and not need:
            if name == "D":
                raise errors.scale_refused(name)
            message = f"The quantization scale for {name} is ignored: {name} is not an 8-bit operand."
            warnings.warn(message, errors.EpigemmWarning, stacklevel=5)

"""What cuBLASLt is asked, as pure data: layouts, transpositions, strides and attributes, decided without a GPU.

cuBLASLt is told column-major matrices only. A row-major D is computed as Dᵀ = BᵀAᵀ: the library's A is then the caller's B, and a
vector along n becomes its vector along m.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from math import prod

from epigemm import layouts
from epigemm.dtypes import DType, of
from epigemm.enums import MatmulEpilog
from epigemm.layouts import COL, ROW
from epigemm.problem import Operand, Problem

BITS = "bits"

# cublasLtMatmulDescAttributes_t: number and struct format of its value.
ATTRIBUTES: dict[str, tuple[int, str]] = {
    "transa": (3, "i"),
    "transb": (4, "i"),
    "epilogue": (7, "I"),
    "bias_pointer": (8, "Q"),
    "bias_batch_stride": (10, "q"),
    "aux_pointer": (11, "Q"),
    "aux_ld": (12, "q"),
    "aux_batch_stride": (13, "q"),
    "sm_count_target": (15, "i"),
    "a_scale_pointer": (17, "Q"),
    "b_scale_pointer": (18, "Q"),
    "c_scale_pointer": (19, "Q"),
    "d_scale_pointer": (20, "Q"),
    "amax_d_pointer": (21, "Q"),
    "aux_data_type": (22, "i"),
    "aux_scale_pointer": (23, "Q"),
    "aux_amax_pointer": (24, "Q"),
    "fast_accumulation": (25, "b"),
    "bias_data_type": (26, "i"),
}

# cublasLtMatmulPreferenceAttributes_t.
PREFERENCES: dict[str, tuple[int, str]] = {
    "workspace_bytes": (1, "Q"),
    "reduction_scheme_mask": (3, "I"),
    "alignment_a": (5, "I"),
    "alignment_b": (6, "I"),
    "alignment_c": (7, "I"),
    "alignment_d": (8, "I"),
    "max_waves_count": (9, "f"),
    "numerical_impl_mask": (12, "Q"),
}

_OPERATIONS = {"N": 0, "T": 1, "C": 2}  # cublasOperation_t

Attributes = list[tuple[int, bytes]]


class Unsuitable(Exception):
    """Why cuBLASLt cannot be asked; the text is the sentence of the engine's refusal."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix as cuBLASLt sees it: columns `leading_dimension` elements apart, matrices of the batch `batch_stride` apart."""

    dtype: DType
    rows: int
    columns: int
    leading_dimension: int
    batch_count: int = 1
    batch_stride: int = 0

    @property
    def layout(self) -> tuple[int, int, int, int, int, int]:
        """As the compiled core takes it."""
        return self.dtype.cuda_type, self.rows, self.columns, self.leading_dimension, self.batch_count, self.batch_stride


@dataclass(frozen=True, slots=True)
class Vector:
    """The bias that is read, or the vector of sums that is written: cuBLASLt has one pointer for both.

    Args:
        name: of the epilogue's input or output.
        is_output: whether it is written.
        dtype: of its elements.
        batch_stride: in elements.
        alignment_bytes: of each matrix's vector.
    """

    name: str
    is_output: bool
    dtype: DType
    batch_stride: int = 0
    alignment_bytes: int = layouts.MAX_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Auxiliary:
    """The mask (`dtype` "bits", strides in bits) or the pre-activation matrix that is read or written.

    Args:
        name, is_output, alignment_bytes: as of a `Vector`.
        dtype: of its elements, or "bits".
        leading_dimension, batch_stride: in elements or bits.
        zeroed_bytes: of an output with padding, all of it: the library leaves padding as it was, and ours is 0.
    """

    name: str
    is_output: bool
    dtype: str
    leading_dimension: int
    batch_stride: int = 0
    alignment_bytes: int = layouts.MAX_ALIGNMENT_BYTES
    zeroed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Everything that cuBLASLt is told of a product but for the addresses.

    Args:
        swapped: whether A and B, and D's rows and columns, are exchanged.
        transa, transb: "N", "T" or "C", of the library's A and B.
        a, b, c, d: the library's matrices.
        epilogue: a `MatmulEpilog` number, as the library is told it.
        compute_type, scale_type: as numbers.
        bias, aux: what the epilogue reads or writes besides D.
        scales: (attribute, name of the input or output) of FP8 scales and maxima.
        alignments: bytes, of a, b, c, d.
    """

    swapped: bool
    transa: str
    transb: str
    a: Matrix
    b: Matrix
    c: Matrix
    d: Matrix
    epilogue: int
    compute_type: int
    scale_type: int
    bias: Vector | None = None
    aux: Auxiliary | None = None
    scales: tuple[tuple[str, str], ...] = ()
    fast_accumulation: bool = False
    sm_count_target: int = 0
    alignments: tuple[int, int, int, int] = (layouts.MAX_ALIGNMENT_BYTES,) * 4

    @property
    def attributes(self) -> Attributes:
        """The descriptor's attributes as (number, bytes). Addresses are stand-ins of the right alignment, which the heuristic reads."""
        values: dict[str, int] = {"transa": _OPERATIONS[self.transa], "transb": _OPERATIONS[self.transb], "epilogue": self.epilogue}
        if self.bias is not None:
            values |= {"bias_pointer": self.bias.alignment_bytes, "bias_batch_stride": self.bias.batch_stride}
            if self.bias.dtype != self.d.dtype:
                values["bias_data_type"] = self.bias.dtype.cuda_type
        if self.aux is not None:
            values |= {"aux_pointer": self.aux.alignment_bytes, "aux_ld": self.aux.leading_dimension}
            values["aux_batch_stride"] = self.aux.batch_stride
            if self.aux.dtype not in (BITS, self.d.dtype.name):
                values["aux_data_type"] = of(self.aux.dtype).cuda_type
        if self.fast_accumulation:
            values["fast_accumulation"] = 1
        if self.sm_count_target:
            values["sm_count_target"] = self.sm_count_target
        values |= {attribute: layouts.MAX_ALIGNMENT_BYTES for attribute, _ in self.scales}
        return packed(ATTRIBUTES, values)

    def preference(
        self, workspace_bytes: int, reduction_scheme_mask: int = 7, max_waves_count: float = 0.0, impl_mask: int = (1 << 64) - 1
    ) -> Attributes:
        """The heuristic's preferences as (number, bytes)."""
        values: dict[str, float] = {"workspace_bytes": workspace_bytes, "reduction_scheme_mask": reduction_scheme_mask}
        values |= {f"alignment_{name}": bytes_ for name, bytes_ in zip("abcd", self.alignments, strict=True)}
        return packed(PREFERENCES, values | {"max_waves_count": max_waves_count, "numerical_impl_mask": impl_mask})

    @property
    def layouts(self) -> list[tuple[int, int, int, int, int, int]]:
        return [matrix.layout for matrix in (self.a, self.b, self.c, self.d)]

    @property
    def types(self) -> tuple[int, int, int, int, int, int]:
        """Compute, scale, A, B, C and D type, by which the library lists its algorithms."""
        matrices = (matrix.dtype.cuda_type for matrix in (self.a, self.b, self.c, self.d))
        return (self.compute_type, self.scale_type, *matrices)  # type: ignore[return-value]


ZERO_K = 16  # the least k of an 8-bit product


def without_product(descriptor: Descriptor) -> tuple[Descriptor, int]:
    """The same with zero matrices of ZERO_K for A and B, and their bytes: what alpha = 0 means.

    The library multiplies A and B by alpha = 0 all the same, so a NaN in them would reach D. Both are read from one dense zero
    matrix, and the batch shares it.
    """
    a, b = descriptor.a, descriptor.b
    rows, columns = descriptor.d.rows, descriptor.d.columns

    def zero(matrix: Matrix, operation: str, shape: tuple[int, int]) -> Matrix:
        stored = shape if operation == "N" else shape[::-1]
        return Matrix(matrix.dtype, *stored, stored[0], matrix.batch_count, 0)

    best = layouts.MAX_ALIGNMENT_BYTES
    changed = replace(
        descriptor,
        a=zero(a, descriptor.transa, (rows, ZERO_K)),
        b=zero(b, descriptor.transb, (ZERO_K, columns)),
        alignments=(best, best, *descriptor.alignments[2:]),
    )
    return changed, ZERO_K * max(rows * a.dtype.bytes, columns * b.dtype.bytes)


def packed(table: dict[str, tuple[int, str]], values: dict[str, int] | dict[str, float]) -> Attributes:
    """Values by name as (number, bytes as they lie in memory)."""
    return [(table[name][0], struct.pack("=" + table[name][1], value)) for name, value in values.items()]


# ---------------------------------------------------------------- reading operands


def readings(operand: Operand) -> tuple[str, ...]:
    """The orders in which the library can read the operand in place; a vector may have both.

    Example:
        >>> readings(Operand.dense("f16", (64, 48), "col")), readings(Operand.dense("f16", (64, 1)))
        (('col',), ('row', 'col'))
    """
    (rows, columns), (row_stride, column_stride) = operand.shape[-2:], operand.strides[-2:]
    by_row = (column_stride == 1 or columns <= 1) and (row_stride >= columns or rows <= 1)
    by_column = (row_stride == 1 or rows <= 1) and (column_stride >= rows or columns <= 1)
    return (ROW,) * by_row + (COL,) * by_column


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch as cuBLASLt wants it: one count, and one stride an operand.

    Args:
        shape: of the problem.
        axes: its axes from the slowest to the fastest in D's memory, those of extent 1 left out.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    @staticmethod
    def of(problem: Problem) -> Batch:
        axes = layouts.batch_axes(problem.d.strides, problem.d.shape)
        return Batch(problem.batch, tuple(axis for axis in axes if problem.batch[axis] != 1))

    @property
    def count(self) -> int:
        return prod(self.shape)

    def stride(self, name: str, operand: Operand) -> int:
        """The operand's stride from one matrix of the batch to the next, 0 where it is broadcast.

        Raises:
            Unsuitable: no single stride describes it.
        """
        shape = (*self.shape, *operand.shape[-2:])
        strides = layouts.broadcast_strides(operand.shape, operand.strides, shape)
        along = tuple(strides[axis] for axis in self.axes)
        collapsed = layouts.collapsed_batch(tuple(self.shape[axis] for axis in self.axes), along)
        if collapsed is None or collapsed[1] < 0:
            raise Unsuitable(
                f"the batch {self.shape} of {name} with strides {strides[:-2]} has no single stride, which cuBLASLt needs: "
                f"make {name} contiguous"
            )
        return collapsed[1]


def matrix(name: str, operand: Operand, order: str, rows: int, columns: int, batch: Batch) -> Matrix:
    """The operand read in `order`, as a column-major matrix of `rows` times `columns`."""
    ld = layouts.leading_dimension(operand.shape, operand.strides, order)
    return Matrix(operand.dtype, rows, columns, ld, batch.count, batch.stride(name, operand))


def _operand(name: str, operand: Operand, swapped: bool, batch: Batch) -> tuple[str, Matrix]:
    """The operation and the matrix for A or B; `swapped` says that its transpose is what the library multiplies."""
    orders = readings(operand)
    if not orders:
        raise Unsuitable(f"{name} with strides {operand.strides} has no leading dimension: make it contiguous")
    # Column-major memory needs no transposition, row-major memory does; of the transpose it is the reverse.
    plain = ROW if swapped else COL
    # FP8 products take only Aᵀ·B of the library: K contiguous in both. A conjugate comes with a transposition only.
    wanted = _narrow_order(name) if operand.dtype.is_narrow else None
    if operand.conjugate:
        wanted = COL if swapped else ROW
    order = wanted if wanted in orders else orders[0]
    if operand.conjugate and order == plain:
        raise Unsuitable(f"cuBLASLt conjugates only what it also transposes, and {name} is read as it lies: pass {name}.conj() resolved")
    if operand.dtype.is_narrow and order != wanted:
        kept = "row" if name == "A" else "column"
        raise Unsuitable(f"8-bit products need k contiguous in both operands: {name} must be {kept}-major")
    rows, columns = operand.shape[-2:] if order == COL else operand.shape[:-3:-1]
    operation = "N" if order == plain else "C" if operand.conjugate else "T"
    return operation, matrix(name, operand, order, rows, columns, batch)


def _narrow_order(name: str) -> str:
    return ROW if name == "A" else COL


def _c(problem: Problem, order: str, d: Matrix, batch: Batch, without: DType) -> tuple[Matrix, int]:
    """C's matrix and alignment. Where there is none it is D's with the dtype that the library's table asks for: nothing of it is read."""
    c = problem.c
    if c is None:
        return replace(d, dtype=without), layouts.MAX_ALIGNMENT_BYTES
    full = c.shape[-2:] == (problem.m, problem.n)
    if full:
        if order not in readings(c):
            raise Unsuitable(f"C must be {order}-major as D is; it is {c.order or c.strides}")
        return matrix("C", c, order, d.rows, d.columns, batch), c.alignment_bytes
    # One column of the library's D for all: leading dimension 0.
    along = -2 if order == COL else -1
    across = -1 if order == COL else -2
    if c.shape[across] != 1 or c.shape[along] != d.rows or (c.strides[along] != 1 and d.rows > 1):
        kind = f"({problem.m}, 1)" if order == COL else f"(1, {problem.n})"
        raise Unsuitable(f"of a broadcast C cuBLASLt reads only a contiguous {kind} with a {order}-major D; this one is {c.shape}")
    return Matrix(c.dtype, d.rows, d.columns, 0, batch.count, batch.stride("C", c)), c.alignment_bytes


def describe(problem: Problem, order: str, c_dtype: DType) -> Descriptor:
    """The plain product for a D read in `order`; the epilogue is added by `epilogs.fused`.

    Args:
        problem: with one B.
        order: "col", or "row" for the swapped product.
        c_dtype: what C counts as where there is none.

    Raises:
        Unsuitable: the library cannot read an operand in place.
    """
    if 0 in (problem.m, problem.n, problem.k, prod(problem.batch)):
        raise Unsuitable("cuBLASLt computes no empty product")
    if order not in readings(problem.d):
        raise Unsuitable(f"D with strides {problem.d.strides} has no leading dimension: pass a contiguous `out`")
    swapped = order == ROW
    batch = Batch.of(problem)
    a = _operand("A", problem.a, swapped, batch)
    b = _operand("B", problem.b[0], swapped, batch)
    alignments = (problem.a.alignment_bytes, problem.b[0].alignment_bytes)
    if swapped:
        a, b, alignments = b, a, alignments[::-1]
    d_rows, d_columns = (problem.n, problem.m) if swapped else (problem.m, problem.n)
    d = matrix("D", problem.d, order, d_rows, d_columns, batch)
    c, c_alignment = _c(problem, order, d, batch, c_dtype)
    return Descriptor(
        swapped=swapped,
        transa=a[0],
        transb=b[0],
        a=a[1],
        b=b[1],
        c=c,
        d=d,
        epilogue=int(MatmulEpilog.DEFAULT),
        compute_type=problem.compute.compute_type,
        scale_type=of(problem.compute.scale_type).cuda_type,
        fast_accumulation=problem.compute.fast_accumulation and problem.a.dtype.is_narrow,
        sm_count_target=problem.compute.sm_count_target,
        alignments=(*alignments, c_alignment, problem.d.alignment_bytes),
    )

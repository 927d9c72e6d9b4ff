"""Operand and Problem: what is to be computed, as values, without the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from epigemm import dtypes, layouts
from epigemm.dtypes import DType


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor without its data.

    Args:
        dtype: row of the dtype table.
        shape: (*batch, rows, columns).
        strides: in elements, one a dimension; 0 is a broadcast, negative is allowed.
        alignment_bytes: the largest power of two up to 256 that divides the address of every line.
        conjugate: whether the complex conjugate of the stored values is meant.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment_bytes: int = layouts.MAX_ALIGNMENT_BYTES
    conjugate: bool = False

    @staticmethod
    def dense(dtype: DType | str, shape: tuple[int, ...], order: str = layouts.ROW) -> Operand:
        """A new dense tensor of this shape, each matrix in `order`."""
        return Operand(dtypes.of(dtype), shape, layouts.dense_strides(shape, order))

    @property
    def batch(self) -> tuple[int, ...]:
        return self.shape[:-2]

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def order(self) -> str | None:
        """ "row", "col", or None where no leading dimension describes it (`layouts.order_of`)."""
        return layouts.order_of(self.shape, self.strides)

    @property
    def leading_dimension(self) -> int:
        order = self.order
        if order is None:
            raise ValueError(f"{self} has no leading dimension")
        return layouts.leading_dimension(self.shape, self.strides, order)

    @property
    def bytes(self) -> int:
        """Bytes of its elements, without padding."""
        return prod(self.shape) * self.dtype.bytes

    def transposed(self) -> Operand:
        """The same memory read with rows and columns exchanged."""
        return replace(self, shape=layouts.transposed(self.shape), strides=layouts.transposed(self.strides))

    def __str__(self) -> str:
        text = f"{self.dtype} {self.order or self.strides}"
        return text + " conj" if self.conjugate else text


@dataclass(frozen=True, slots=True)
class Compute:
    """How the numbers are treated: what of the options decides a plan.

    Args:
        compute_type: MatmulComputeType's number; 68 is COMPUTE_32F.
        scale_type: dtype name of alpha and beta.
        rounding: "once" (float32 until stored) or "eager" (to D's dtype where an unfused model would store).
        fast_accumulation: fp8 only: do not promote partial sums to float32.
        strict: refuse an engine whose special values differ from the contract.
        memory_limit: bytes of workspace at most, or None.
        sm_count_target: multiprocessors to use, 0 for all.
        reduction_scheme_mask, max_waves_count, numerical_impl_mask: which of cuBLASLt's algorithms may be taken; as in
            `MatmulPlanPreferences`.
        handle: the cuBLASLt handle to launch with, 0 for the device's own.
    """

    compute_type: int = 68
    scale_type: str = "float32"
    rounding: str = "once"
    fast_accumulation: bool = False
    strict: bool = False
    memory_limit: int | None = None
    sm_count_target: int = 0
    reduction_scheme_mask: int = 7
    max_waves_count: float = 0.0
    numerical_impl_mask: int = (1 << 64) - 1
    handle: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """One product and what its epilogue reads: D[m, n] = epilogue(alpha * sum_k A[m, k] B[k, n] + beta * C[m, n]).

    Args:
        batch: the broadcast batch shape of the operands.
        m, n, k: rows of A, columns of B, columns of A.
        a: (*batch_a, m, k); its batch broadcasts to `batch`.
        b: one (*batch_b, k, n) for each accumulator; more than one reads A once.
        c: (*batch_c, m | 1, n | 1), or None. Only with one accumulator.
        d: (*batch, m, n), the result: its dtype and strides.
        inputs: the epilogue's named inputs, (*batch_i, 1 | m, 1 | n), or packed bits along D's contiguous axis, as (*batch_i, bytes, n)
            for a column-major D and (*batch_i, m, bytes) for a row-major one.
        device: "cpu" or "cuda:0".
        compute: numerical options.
    """

    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    a: Operand
    b: tuple[Operand, ...]
    c: Operand | None
    d: Operand
    inputs: tuple[tuple[str, Operand], ...] = ()
    device: str = "cpu"
    compute: Compute = Compute()

    @staticmethod
    def of(
        dtype: str,
        *,
        m: int,
        n: int,
        k: int,
        batch: tuple[int, ...] = (),
        accumulators: int = 1,
        c: bool = False,
        inputs: dict[str, Operand] | None = None,
        order: str = layouts.ROW,
        device: str = "cpu",
        compute: Compute | None = None,
    ) -> Problem:
        """A problem over dense row-major operands of one dtype, for tests, the command line and the tuner.

        Example:
            >>> print(Problem.of("bf16", m=4096, n=11008, k=4096))
            Problem(m=4096, n=11008, k=4096, a=bf16 row, b=bf16 row, d=bf16 row, device=cpu)
        """
        row = dtypes.of(dtype)
        d = Operand.dense(row, (*batch, m, n), order)
        return Problem(
            batch=batch,
            m=m,
            n=n,
            k=k,
            a=Operand.dense(row, (*batch, m, k)),
            b=(Operand.dense(row, (*batch, k, n)),) * accumulators,
            c=d if c else None,
            d=d,
            inputs=tuple((inputs or {}).items()),
            device=device,
            compute=compute or Compute(scale_type=row.accumulator),
        )

    @property
    def order(self) -> str:
        """D's order: the axis along which masks are packed."""
        return self.order_of(self.d)

    @staticmethod
    def order_of(d: Operand) -> str:
        """The order of a D: "row" or "col"; one with other strides counts by its smaller stride."""
        return d.order or (layouts.ROW if abs(d.strides[-1]) <= abs(d.strides[-2]) else layouts.COL)

    @property
    def acc_dtype(self) -> DType:
        """The type in which the product and every step of the epilogue are computed."""
        return self.a.dtype.acc

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products, complex ones counted as four and four."""
        real = 2 * prod(self.batch) * self.m * self.n * self.k * len(self.b)
        return 4 * real if self.a.dtype.is_complex else real

    def input(self, name: str) -> Operand:
        """The operand of the named epilogue input."""
        return dict(self.inputs)[name]

    def __str__(self) -> str:
        parts = [f"batch={self.batch}"] if self.batch else []
        parts += [f"m={self.m}", f"n={self.n}", f"k={self.k}", f"a={self.a}"]
        parts += [f"b={self.b[0]}" if len(self.b) == 1 else "b=(" + ", ".join(map(str, self.b)) + ")"]
        parts += [f"c={self.c}"] if self.c is not None else []
        parts += [f"d={self.d}"]
        parts += [f"{name}={operand.dtype} {operand.shape}" for name, operand in self.inputs]
        return f"Problem({', '.join(parts)}, device={self.device})"

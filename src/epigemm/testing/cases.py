"""The one table of cases that every engine must pass: what is multiplied, how it lies in memory, and what is done with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from epigemm.testing.epilogues import EPILOGUES, PREDEFINED, Input, Row
from epigemm.testing.formats import Array, pack
from epigemm.testing.gradients import gradient_rows
from epigemm.testing.numeric import Guarded
from epigemm.testing.placing import LAYOUTS, NEGATIVE, SHARED, order_of, place

NARROW = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True)
class Case:
    """One product with its epilogue. `str()` of it is its id.

    Args:
        topic: the property that it is there for.
        m, n, k: extents.
        epilogue: "" for none, a predefined epilog in capitals ("RELU_BIAS"), or a row of `EPILOGUES`.
        dtype: of A, and of whatever has no dtype of its own.
        b_dtype, c_dtype, d_dtype: "" is A's; for D also C's, as the contract says.
        batch_a, batch_b, batch_c: leading dimensions.
        layout_a, layout_b, layout_c, layout_in: kinds of `placing.LAYOUTS`; `layout_in` of the matrix inputs.
        c: which of C's axes are there: "" for no C, "mn", "m1", "1n", "11".
        alpha, beta: None leaves them out.
        order: the option `result_order`.
        data: "" is what the epilogue wants, else "normal", "small", "integers", "special" (with NaN and infinities).
        library: "numpy" or "torch".
        conjugate: which of "a" and "b" carry the conjugate qualifier.
        compute: name of a MatmulComputeType, "" for the default.
        poison: the byte around the operands' elements and in the padding bits of masks: 0xFF or 0x00.
        custom: a user epilogue that is no row of the table; `epilogue` is then its text.
    """

    topic: str
    m: int
    n: int
    k: int
    epilogue: str = ""
    dtype: str = "float32"
    b_dtype: str = ""
    c_dtype: str = ""
    d_dtype: str = ""
    batch_a: tuple[int, ...] = ()
    batch_b: tuple[int, ...] = ()
    batch_c: tuple[int, ...] = ()
    layout_a: str = "row"
    layout_b: str = "row"
    layout_c: str = "row"
    layout_in: str = "row"
    c: str = ""
    alpha: complex | None = None
    beta: complex | None = None
    order: str | None = None
    data: str = ""
    library: str = "numpy"
    conjugate: str = ""
    compute: str = ""
    poison: int = 0xFF
    custom: Row | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        parts = [self.topic, self.epilogue or "plain", f"m={self.m} n={self.n} k={self.k}", _SHORT[self.dtype]]
        parts += [f"{name}={getattr(self, name)}" for name in _SHOWN if getattr(self, name) not in ("", (), None)]
        layouts = ("layout_a", "layout_b", "layout_c", "layout_in")
        parts += [f"{name[7:]}:{getattr(self, name)}" for name in layouts if getattr(self, name) != "row"]
        parts += [self.library] if self.library != "numpy" else []
        parts += ["padding=0"] if self.poison == 0 else []
        return " ".join(parts)

    @property
    def is_predefined(self) -> bool:
        return self.row is None and self.epilogue != ""

    @property
    def row(self) -> Row | None:
        """The user epilogue, None for a predefined one or none."""
        return self.custom or EPILOGUES.get(self.epilogue)

    @property
    def accumulators(self) -> int:
        return self.row.accumulators if self.row else 1

    @property
    def inputs(self) -> dict[str, Input]:
        """What the epilogue's inputs are like."""
        if self.row:
            return self.row.inputs
        return PREDEFINED[self.epilogue.lower()] if self.epilogue else {}

    @property
    def batch(self) -> tuple[int, ...]:
        return np.broadcast_shapes(self.batch_a, self.batch_b)

    @property
    def shape(self) -> tuple[int, ...]:
        """D's shape."""
        return (*self.batch, self.m, self.n)

    @property
    def stored_dtype(self) -> str:
        """D's dtype: asked for, else C's, else A's."""
        return self.d_dtype or self.dtype_of_c or self.dtype

    @property
    def dtype_of_c(self) -> str:
        """C's dtype, "" where there is no C."""
        return (self.c_dtype or self.d_dtype or self.dtype) if self.c else ""

    @property
    def aux_dtype(self) -> str:
        """The dtype of a gelu_aux: D's, but where D has 8 bits C's, and float16 without a C."""
        return self.stored_dtype if self.stored_dtype not in NARROW else self.dtype_of_c or "float16"

    @property
    def accumulator(self) -> str:
        """The real type in which it is computed."""
        return "float64" if self.dtype in ("float64", "complex128") else "float32"

    @property
    def result_order(self) -> str:
        """The order that D must have: the option's, else C's, else the epilog's, else A's."""
        if self.order:
            return self.order
        of_c = order_of(self.layout_c, self.shape_c) if self.c and self.shape_c[-2:] == (self.m, self.n) else None
        if of_c is not None:
            return of_c
        if self.is_predefined and self.epilogue not in ("RELU", "GELU", "BGRADA"):
            return "col"
        return order_of(self.layout_a, (*self.batch_a, self.m, self.k)) or "row"

    @property
    def shape_c(self) -> tuple[int, ...]:
        """C's shape."""
        return (*self.batch_c, self.m if self.c[0] == "m" else 1, self.n if self.c[1] == "n" else 1)

    @property
    def tags(self) -> frozenset[str]:
        """What an engine may select by."""
        found = {self.topic, self.dtype, self.stored_dtype, "predefined" if self.is_predefined else "user" if self.epilogue else "plain"}
        kinds = {self.layout_a, self.layout_b, self.layout_c, self.layout_in}
        found |= {"negative"} if kinds & NEGATIVE else set()
        found |= {"shared"} if kinds & SHARED else set()
        found |= {"batched"} if self.batch else set()
        found |= {"empty"} if 0 in (self.m, self.n, self.k, *self.batch) else set()
        found |= {"several"} if self.accumulators > 1 else set()
        return frozenset(found | {self.library})

    def build(self, rng: np.random.Generator) -> Tensors:
        """The tensors of this case, in guarded memory."""
        return _build(self, rng)


_SHOWN = tuple("b_dtype c_dtype d_dtype batch_a batch_b batch_c c alpha beta order data compute conjugate".split())
_SHORT = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "c64",
    "complex128": "c128",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


@dataclass(slots=True)
class Tensors:
    """The tensors of one case.

    Args:
        a, b, c: the operands; `b` has one for each accumulator.
        inputs: the epilogue's inputs.
    """

    a: Guarded
    b: tuple[Guarded, ...]
    c: Guarded | None = None
    inputs: dict[str, Guarded] = field(default_factory=dict)

    def all(self) -> dict[str, Guarded]:
        """Every tensor by name."""
        found = {"a": self.a, **{f"b{i}": one for i, one in enumerate(self.b)}, **self.inputs}
        return found if self.c is None else {**found, "c": self.c}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name, ml_dtypes' included."""
    return np.dtype(getattr(ml_dtypes, name, name))


# ---------------------------------------------------------------- data


def draw(rng: np.random.Generator, kind: str, shape: tuple[int, ...], dtype: str) -> Array:
    """Random numbers of a kind: "normal", "small" (products near 1), "integers" in [-3, 3], "positive", "special"."""
    if kind == "integers":
        values = rng.integers(-3, 4, shape).astype(np.float64)
    elif kind == "positive":
        values = rng.uniform(0.5, 2.0, shape)
    else:
        values = rng.normal(size=shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.normal(size=shape)
    if kind == "special" and values.size:
        flat = values.reshape(-1)
        places = rng.choice(flat.size, size=min(flat.size, 3), replace=False)
        flat[places] = np.array([np.nan, np.inf, -np.inf])[: places.size]
    with np.errstate(all="ignore"):
        return values.astype(numpy_dtype(dtype))


def _build(case: Case, rng: np.random.Generator) -> Tensors:
    data = case.data or (case.row.data if case.row else "normal")
    # "small": accumulators around 1, where the activations bend.
    scale = max(case.k, 1) ** -0.5 if data == "small" else 1.0

    def operand(shape: tuple[int, ...], dtype: str, kind: str, factor: float = 1.0) -> Guarded:
        drawn = draw(rng, data, shape, dtype)
        values = drawn if factor == 1.0 else (drawn.astype(np.complex128 if drawn.dtype.kind == "c" else np.float64) * factor)
        return place(values.astype(numpy_dtype(dtype)), kind, case.poison)

    a = operand((*case.batch_a, case.m, case.k), case.dtype, case.layout_a)
    shape_b = (*case.batch_b, case.k, case.n)
    b = tuple(operand(shape_b, case.b_dtype or case.dtype, case.layout_b, scale) for _ in range(case.accumulators))
    tensors = Tensors(a, b)
    if case.c:
        tensors.c = operand(case.shape_c, case.dtype_of_c, case.layout_c)
    for name, like in case.inputs.items():
        tensors.inputs[name] = _input(case, rng, like, name)
    return tensors


def _input(case: Case, rng: np.random.Generator, like: Input, name: str) -> Guarded:
    m, n = case.m, case.n
    batch = case.batch if like.batched else ()
    if like.extent == "seed":
        return place(np.array(rng.integers(0, 2**40), dtype=np.int64))
    if like.extent == "bits":
        bits = rng.integers(0, 2, (*batch, m, n)).astype(bool)
        kind = case.layout_in if case.layout_in != "row" else case.result_order
        return place(pack(bits, case.result_order, case.poison & 1), kind, case.poison)
    if like.extent == "padded":
        return _padded_aux(case, rng, batch)
    vector = (m,) if case.is_predefined else (n,)
    shapes = {"scalar": (), "column": (m, 1), "row": (1, n), "matrix": (m, n), "vector": vector}
    shape = shapes[like.extent] if like.extent in ("scalar", "vector") else (*batch, *shapes[like.extent])
    values = draw(rng, like.data, shape, like.dtype or case.dtype)
    return place(values, case.layout_in if like.extent in ("matrix", "vector") else "row", case.poison)


def _padded_aux(case: Case, rng: np.random.Generator, batch: tuple[int, ...]) -> Guarded:
    """A gelu_aux as the forward writes it: padded to 8 along D's contiguous axis, NaN in the padding, in D's order."""
    m, n = case.m, case.n
    along_m = case.result_order == "col"
    shape = (*batch, -(-m // 8) * 8, n) if along_m else (*batch, m, -(-n // 8) * 8)
    values = np.full(shape, np.nan, numpy_dtype(case.aux_dtype))
    values[..., :m, :n] = draw(rng, "normal", (*batch, m, n), case.aux_dtype)
    kind = case.layout_in if case.layout_in != "row" else case.result_order
    return place(values, kind, case.poison)


# ---------------------------------------------------------------- the table


def cases() -> tuple[Case, ...]:
    """Every case, each once."""
    made: dict[str, Case] = {}
    for part in (
        _sizes,
        _panels,
        _strides,
        _batches,
        _c_and_scalars,
        _dtypes,
        _predefined,
        _user,
        _orders,
        _special,
        _gradients,
        _libraries,
    ):
        for case in part():
            made.setdefault(str(case), case)
    return tuple(made.values())


_SIZES = (
    (0, 3, 5),
    (3, 0, 5),
    (0, 0, 4),
    (5, 3, 0),
    (1, 1, 1),
    (1, 7, 3),
    (7, 1, 3),
    (5, 3, 1),
    (2, 3, 128),
    (13, 31, 17),
    (67, 29, 41),
    (129, 8, 33),
    (16, 130, 64),
    (31, 257, 7),
)


def _sizes() -> Iterator[Case]:
    for m, n, k in _SIZES:
        yield Case("size", m, n, k)
        for epilogue in ("RELU_AUX_BIAS", "GELU_AUX", "DRELU_BGRAD", "row_stats", "relu_with_mask", "swiglu"):
            yield Case("size", m, n, k, epilogue)
    yield Case("size", 4, 3, 0, "BIAS", c="mn", beta=0.5)
    yield Case("size", 4, 3, 0, "bias_vector", c="1n", beta=0.5, alpha=2.0)
    yield Case("size", 3, 4, 0, "BGRADA")
    yield Case("size", 3, 4, 0, "BGRADB")


def _panels() -> Iterator[Case]:
    """Sizes at which engines cut D into panels, blocks or tiles, with the last ones partly filled."""
    shapes = ((613, 1021, 33), (1030, 70, 300), (70, 1030, 300))
    names = (
        "RELU_AUX_BIAS",
        "DRELU_BGRAD",
        "BGRADB",
        "row_stats",
        "largest",
        "two_masks",
        "masked",
        "dropped",
        "operand_sums",
        "swiglu_saved",
    )
    for m, n, k in shapes:
        for name in ("", *names):
            yield Case("panels", m, n, k, name)
        yield Case("panels", m, n, k, "row_stats", dtype="bfloat16", layout_a="col", layout_b="col")
        yield Case("panels", m, n, k, "DGELU_BGRAD", dtype="float16", order="row")
        yield Case("panels", m, n, k, "row_stats", c="mn", beta=0.5, layout_a="padded", layout_b="stepped", layout_c="negative")
        yield Case("panels", m, n, k, "dropped", layout_a="col")
        yield Case("panels", m, n, k, "two_masks", layout_a="col")
        yield Case("panels", m, n, k, "largest", layout_a="col")
    # k in several steps, where operands are widened or copied a block at a time.
    for dtype, kind in (("bfloat16", "row"), ("float16", "col"), ("float32", "stepped"), ("float8_e4m3fn", "row")):
        yield Case("panels", 260, 130, 9001, "row_stats", dtype=dtype, layout_a=kind, layout_b=kind, d_dtype="float32")
        yield Case("panels", 260, 130, 9001, "two_masks", dtype=dtype, layout_a=kind, layout_b=kind, d_dtype="float32")
    yield Case("panels", 5, 3, 70001, dtype="bfloat16", data="integers", d_dtype="float32")
    yield Case("panels", 3000, 300, 20, "dropped", layout_a="col")
    yield Case("panels", 300, 40, 20, "row_stats", batch_a=(5, 1), batch_b=(7,))
    yield Case("panels", 3, 4, 5, "row_stats", batch_a=(40, 30), batch_b=(30,))


def _strides() -> Iterator[Case]:
    shape: dict[str, Any] = {"m": 11, "n": 9, "k": 13}
    for kind in LAYOUTS:
        batch: tuple[int, ...] = (2, 3) if kind.startswith("batch") else ()
        extents: dict[str, Any] = {**shape, "batch_a": batch, "batch_b": batch}
        yield Case("strides", **extents, layout_a=kind)
        yield Case("strides", **extents, layout_b=kind, epilogue="bias_vector")
        yield Case("strides", **extents, layout_a=kind, layout_b=kind, epilogue="RELU_AUX_BIAS", dtype="bfloat16")
        yield Case("strides", **extents, layout_c=kind, c="mn", batch_c=batch, beta=0.75, alpha=1.5)
        yield Case("strides", **extents, layout_in=kind, epilogue="residual_batched" if batch else "residual_gelu")
        yield Case("strides", **extents, layout_in=kind, epilogue="masked_batched" if batch else "masked")
        yield Case("strides", **extents, layout_in=kind, epilogue="DGELU_BGRAD")
    for kind in ("padded_col", "stepped"):
        yield Case("strides", **shape, layout_in=kind, epilogue="DRELU_BGRAD")
    for kind in ("stepped", "negative", "misaligned"):
        yield Case("strides", **shape, layout_in=kind, epilogue="BIAS")


def _batches() -> Iterator[Case]:
    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
        ((3,), (3,)),
        ((2, 3), (2, 3)),
        ((3,), ()),
        ((), (3,)),
        ((1,), (3,)),
        ((2, 1), (3,)),
        ((2, 3), (1, 3)),
        ((0,), (0,)),
        ((1,), (1,)),
    )
    for a, b in pairs:
        for epilogue in ("", "RELU_AUX_BIAS", "DRELU_BGRAD", "DGELU", "BGRADA", "BGRADB", "row_stats", "bias_batched", "dropped", "swiglu"):
            yield Case("batch", 5, 4, 6, epilogue, batch_a=a, batch_b=b)
        yield Case("batch", 5, 4, 6, "masked_batched", batch_a=a, batch_b=b)
        whole = np.broadcast_shapes(a, b)
        for batch_c in {whole, whole[1:], ()}:
            yield Case("batch", 5, 4, 6, "relu", batch_a=a, batch_b=b, c="mn", batch_c=batch_c, beta=2.0)
    yield Case("batch", 5, 4, 6, batch_a=(2, 3), batch_b=(2, 3), c="m1", batch_c=(3,), beta=-1.0)
    yield Case("batch", 5, 4, 6, batch_a=(2, 3), batch_b=(2, 3), c="1n", batch_c=(2, 1), beta=-1.0)


def _c_and_scalars() -> Iterator[Case]:
    for c in ("mn", "m1", "1n", "11"):
        for alpha, beta in ((None, 1.0), (0.5, 0.25), (0.0, 2.0), (2.0, 0.0), (0.0, 0.0), (-1.5, 3.0)):
            for epilogue in ("", "RELU_BIAS", "bias_vector"):
                yield Case("c", 6, 10, 7, epilogue, c=c, alpha=alpha, beta=beta)
    for alpha in (0.0, -2.0, 0.1):
        yield Case("c", 6, 10, 7, "gelu", alpha=alpha)
        yield Case("c", 6, 10, 7, "swiglu", alpha=alpha)
    for kind in ("row", "col", "padded_col"):
        yield Case("c", 6, 10, 7, "RELU_AUX", c="mn", beta=1.0, layout_c=kind)


_PAIRS = (
    ("float16", ""),
    ("bfloat16", ""),
    ("float32", ""),
    ("float64", ""),
    ("complex64", ""),
    ("complex128", ""),
    ("float8_e4m3fn", ""),
    ("float8_e4m3fn", "float8_e5m2"),
    ("float8_e5m2", "float8_e4m3fn"),
)
_REAL = ("float16", "bfloat16", "float32", "float64")


def _dtypes() -> Iterator[Case]:
    for a, b in _PAIRS:
        yield Case("dtype", 17, 9, 48, dtype=a, b_dtype=b)
        yield Case("dtype", 17, 9, 48, dtype=a, b_dtype=b, c="mn", beta=0.5, alpha=2.0, d_dtype="" if a not in NARROW else "bfloat16")
        if a.startswith("complex"):
            yield Case("dtype", 17, 9, 48, "complex_affine", dtype=a)
            yield Case("dtype", 17, 9, 48, "complex_affine", dtype=a, conjugate="a", alpha=1 - 2j)
            yield Case("dtype", 17, 9, 48, dtype=a, conjugate="b", c="mn", beta=0.5j)
            yield Case("dtype", 17, 9, 48, dtype=a, conjugate="ab", layout_b="negative")
            continue
        for epilogue in ("RELU_AUX_BIAS", "gelu", "row_stats", "swiglu", "GELU_AUX_BIAS", "DRELU_BGRAD"):
            yield Case("dtype", 17, 9, 48, epilogue, dtype=a, b_dtype=b, d_dtype="float16" if a in NARROW else "")
        for d in (*_REAL, *NARROW):
            yield Case("dtype", 17, 9, 48, "bias_vector", dtype=a, b_dtype=b, d_dtype=d)
    for a in ("float16", "bfloat16", "float32"):
        for c in _REAL:
            yield Case("dtype", 7, 9, 12, "relu", dtype=a, c="mn", c_dtype=c, beta=1.0)
            yield Case("dtype", 7, 9, 12, "RELU_BIAS", dtype=a, c="mn", c_dtype=c, d_dtype="float32", beta=1.0)
    for name in ("COMPUTE_32F_FAST_TF32", "COMPUTE_32F_FAST_16F", "COMPUTE_32F_FAST_16BF", "COMPUTE_32F_PEDANTIC"):
        yield Case("compute", 17, 9, 48, "RELU_BIAS", compute=name)
    yield Case("compute", 17, 9, 48, "RELU_BIAS", dtype="float16", compute="COMPUTE_16F")
    yield Case("compute", 17, 9, 48, "RELU_BIAS", dtype="float16", compute="COMPUTE_32F_FAST_16F")
    yield Case("compute", 17, 9, 48, "RELU_BIAS", dtype="bfloat16", compute="COMPUTE_32F_FAST_16BF")


def _predefined() -> Iterator[Case]:
    for name in PREDEFINED:
        for dtype in ("float32", "bfloat16", "float64"):
            yield Case("predefined", 21, 10, 16, name.upper(), dtype=dtype)
        yield Case("predefined", 21, 10, 16, name.upper(), dtype="float16", layout_a="col", layout_b="padded")
        yield Case("predefined", 130, 3, 5, name.upper(), order="row", poison=0)
        yield Case("predefined", 9, 20, 5, name.upper(), c="mn", beta=0.5, layout_c="col", alpha=2.0)
    for m in (1, 7, 8, 9, 127, 128, 129):
        for poison in (0x00, 0xFF):
            for name in ("RELU_AUX", "DRELU", "DRELU_BGRAD"):
                yield Case("mask", m, 3, 4, name, data="integers", poison=poison)
            for name in ("relu_with_mask_exact", "masked"):
                yield Case("mask", 3, m, 4, name, poison=poison, order="row")
                yield Case("mask", m, 3, 4, name, poison=poison, order="col")


def _user() -> Iterator[Case]:
    for name in EPILOGUES:
        dtype = "complex64" if name == "complex_affine" else "float32"
        yield Case("user", 19, 14, 11, name, dtype=dtype)
        yield Case("user", 6, 133, 5, name, dtype=dtype, layout_a="col", batch_a=(2,), batch_b=(2,))
        if dtype == "float32":
            yield Case("user", 19, 14, 11, name, dtype="bfloat16")
            yield Case("user", 7, 12, 11, name, dtype="float64", alpha=0.5)


def _orders() -> Iterator[Case]:
    for epilogue in ("", "RELU_BIAS", "RELU", "BGRADA", "BGRADB", "GELU_AUX", "residual_gelu", "two_masks", "largest"):
        for order in ("row", "col"):
            yield Case("order", 10, 7, 6, epilogue, order=order)
        yield Case("order", 10, 7, 6, epilogue, layout_a="col")


def _special() -> Iterator[Case]:
    for name in EPILOGUES:
        row = EPILOGUES[name]
        if row.accumulators == 1 and name != "complex_affine":
            yield Case("special", 9, 8, 3, name, data="special")
    for name in ("RELU", "RELU_AUX", "GELU", "GELU_AUX", "DRELU_BGRAD", "DGELU", "RELU_BIAS", "GELU_BIAS"):
        for dtype in ("float32", "bfloat16"):
            yield Case("special", 9, 8, 3, name, dtype=dtype, data="special")
    yield Case("special", 9, 8, 3, "relu", data="special", c="mn", alpha=0.0, beta=1.0)


def _gradients() -> Iterator[Case]:
    for row in gradient_rows():
        yield Case("gradient", 19, 14, 11, row.name, custom=row)
        yield Case("gradient", 6, 133, 5, row.name, custom=row, dtype="bfloat16", layout_a="col", batch_a=(2,), batch_b=(2,))


def _libraries() -> Iterator[Case]:
    for case in (*_predefined(), *_user(), *_dtypes(), *_strides(), *_batches()):
        # A third of the table, the same each time: torch shares its engine with NumPy, what differs is the seam.
        if sum(map(ord, str(case))) % 3 == 0 and not {"negative"} & case.tags and 0 not in case.batch:
            yield replace(case, library="torch")

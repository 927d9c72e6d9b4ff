"""The CPU engine against plain float64 NumPy, one test a property; the table of conformance cases is apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import epigemm.expression as eg
from epigemm import dtypes, layouts
from epigemm.engines import outputs
from epigemm.engines.base import Call
from epigemm.engines.cpu.engine import ENGINE
from epigemm.engines.cpu.product import Side
from epigemm.expression.check import check
from epigemm.expression.nodes import Expression
from epigemm.expression.vocabulary import operand_sum
from epigemm.plans import Candidate
from epigemm.problem import Operand, Problem

Array = NDArray[Any]
ORDERS = ("row", "col")


def operand_of(x: Array, conjugate: bool = False) -> Operand:
    strides = tuple(s // x.itemsize for s in x.strides)
    alignment = layouts.alignment_bytes(x.__array_interface__["data"][0], x.shape, strides, x.itemsize)
    return Operand(dtypes.of(x.dtype.name), x.shape, strides, alignment, conjugate)


def poisoned(shape: tuple[int, ...], dtype: str, order: str = "row") -> Array:
    """A new array of all ones bits: NaN in every floating type."""
    turned = shape if order == "row" else (*shape[:-2], shape[-1], shape[-2])
    flat = np.full(int(np.prod(shape)) * dtypes.of(dtype).bytes, 255, np.uint8)
    x = flat.view(dtypes.of(dtype).numpy).reshape(turned)
    return x if order == "row" else x.swapaxes(-1, -2)


def run(
    epilogue: Callable[..., Any] | Expression,
    a: Array,
    *b: Array,
    c: Array | None = None,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    inputs: Mapping[str, Array] | None = None,
    order: str = "row",
    dtype: str = "",
    out: Array | None = None,
    rows: int = 0,
    threads: int = 1,
    conjugate: str = "",
) -> tuple[Array, dict[str, Array]]:
    """D and the extra outputs. `conjugate` names operands, as in "ab"."""
    inputs = inputs or {}
    batch = np.broadcast_shapes(a.shape[:-2], *(x.shape[:-2] for x in b))
    m, n, k = a.shape[-2], b[0].shape[-1], a.shape[-1]
    d = poisoned((*batch, m, n), dtype or a.dtype.name, order) if out is None else out
    problem = Problem(
        batch=batch,
        m=m,
        n=n,
        k=k,
        a=operand_of(a, "a" in conjugate),
        b=tuple(operand_of(x, "b" in conjugate) for x in b),
        c=None if c is None else operand_of(c),
        d=operand_of(d),
        inputs=tuple((name, operand_of(x)) for name, x in inputs.items()),
    )
    expression = epilogue if isinstance(epilogue, Expression) else eg.as_epilogue(epilogue).expression(len(b))
    checked = check(expression, problem)
    extras = {}
    for output in checked.extras:
        place = outputs.operand(problem, output)
        extras[output.name] = poisoned(place.shape, place.dtype.name, problem.order)
    assert ENGINE.supports(problem, checked) is None
    candidate = ENGINE.candidates(problem, checked, 1)[0]
    if rows:
        candidate = Candidate("cpu", (("panel_columns", candidate["panel_columns"]), ("panel_rows", rows), ("threads", threads)))
    ENGINE.prepare(problem, checked, candidate).run(Call(a, b, c, d, dict(inputs), extras, alpha, beta))
    return d, extras


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    rng = np.random.default_rng((seed, *shape))
    x = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(dtypes.of(dtype).numpy)


def wide(x: Array) -> Array:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def assert_near(got: Array, want: Array, units: float, scale: float | Array = 1.0) -> None:
    """Within `units` of the dtype's epsilon of the larger of `scale` and the value."""
    eps = float(ml_dtypes.finfo(got.dtype).eps)
    error = np.abs(wide(got) - want)
    bad = ~(error <= units * eps * np.maximum(np.abs(want), scale))
    assert got.shape == want.shape
    assert not bad.any(), f"{bad.sum()} wrong, first at {np.argwhere(bad)[0]}: {got[bad][0]} for {want[bad][0]}"


def plain(acc: Any) -> Any:
    return acc * 1.0


def bias_relu(acc: Any, bias: Any) -> Any:
    return eg.relu(acc + bias)


# --- the walk


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows", [64, 72, 1000])
def test_every_cut_gives_the_product(order: str, rows: int) -> None:
    a, b, bias = normal(203, 37), normal(37, 151), normal(1, 151)
    d, _ = run(bias_relu, a, b, inputs={"bias": bias}, order=order, rows=rows, threads=2)
    assert_near(d, np.maximum(wide(a) @ wide(b) + bias, 0), 40, 8.0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 9, 5), (9, 1, 5), (2, 3, 1), (67, 5, 131)])
def test_sizes(order: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = normal(m, k), normal(k, n)
    column, row = normal(m, 1), normal(1, n)
    d, _ = run(lambda acc, x, y: acc * x + y, a, b, inputs={"x": column, "y": row}, order=order)
    assert_near(d, (wide(a) @ wide(b)) * column + row, 10 + k, 4.0)


def test_wide_matrices_are_cut_in_columns() -> None:
    a, b = normal(3, 4), normal(4, 40_000)
    d, extras = run(lambda acc: eg.outputs(acc, s=eg.sum(acc, axis="n"), mask=eg.bitmask(acc >= 0), t=eg.sum(acc)), a, b)
    want = wide(a) @ wide(b)
    assert_near(d, want, 8, 4.0)
    assert_near(extras["s"], wide(d).sum(1, keepdims=True), 1)
    assert_near(extras["t"], wide(d).sum(keepdims=True), 1)
    bits = np.unpackbits(extras["mask"], axis=1, bitorder="little")
    assert np.array_equal(bits[:, :40_000], d >= 0)


def test_long_sums_are_cut_in_k() -> None:
    a, b = normal(5, 300_000, dtype="bfloat16"), normal(300_000, 70, dtype="bfloat16")
    d, _ = run(plain, a, b, dtype="float32")
    assert_near(d, wide(a) @ wide(b), 100, 600.0)


# --- scalars and C


@pytest.mark.parametrize("order", ORDERS)
def test_alpha_zero_reads_neither_a_nor_b(order: str) -> None:
    nan = np.full((70, 9), np.nan, np.float32)
    c = normal(70, 11)
    d, _ = run(plain, nan, np.full((9, 11), np.nan, np.float32), c=c, alpha=0.0, beta=2.0, order=order)
    assert np.array_equal(d, 2 * c)


@pytest.mark.parametrize("order", ORDERS)
def test_beta_zero_does_not_read_c(order: str) -> None:
    a, b = normal(33, 9), normal(9, 11)
    d, _ = run(plain, a, b, c=np.full((33, 11), np.nan, np.float32), order=order)
    assert_near(d, wide(a) @ wide(b), 10, 4.0)


def test_the_sum_of_all_terms() -> None:
    two, four, ten = (np.full((1, 1), v, np.float32) for v in (2, 4, 10))
    d, _ = run(lambda acc, bias: acc + bias, two, np.ones((1, 1), np.float32), c=four, alpha=0.5, beta=0.25, inputs={"bias": ten})
    assert d == 12


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("extent", [(1, 1), (1, 7), (65, 1), (65, 7)])
@pytest.mark.parametrize("batch", [(), (1,), (3,)])
def test_c_broadcasts(order: str, extent: tuple[int, int], batch: tuple[int, ...]) -> None:
    a, b, c = normal(3, 65, 5), normal(5, 7), normal(*batch, *extent)
    d, _ = run(plain, a, b, c=c, alpha=-1.5, beta=0.5, order=order)
    assert_near(d, -1.5 * (wide(a) @ wide(b)) + 0.5 * wide(c), 10, 4.0)


def test_k_zero_is_the_epilogue_of_beta_c() -> None:
    c = normal(5, 4)
    d, _ = run(eg.relu, np.empty((5, 0), np.float32), np.empty((0, 4), np.float32), c=c, beta=-1.0)
    assert np.array_equal(d, np.maximum(-c, 0))


@pytest.mark.parametrize(("m", "n"), [(0, 4), (4, 0), (0, 0)])
def test_empty_results_have_zero_reductions(m: int, n: int) -> None:
    def reductions(acc: Any) -> Any:
        return eg.outputs(acc, s=eg.sum(acc), r=eg.sum(acc, axis="m"), c=eg.amax(acc, axis="n"), t=eg.amax(acc))

    d, extras = run(reductions, np.ones((m, 3), np.float32), np.ones((3, n), np.float32))
    assert d.shape == (m, n)
    assert {name: x.shape for name, x in extras.items()} == {"s": (1, 1), "r": (1, n), "c": (m, 1), "t": (1, 1)}
    assert all((x == 0).all() for x in extras.values())


@pytest.mark.parametrize("order", ORDERS)
def test_an_empty_batch_item_of_stride_zero(order: str) -> None:
    """NumPy may give an empty array any strides."""
    d = np.lib.stride_tricks.as_strided(np.empty((2, 0, 1), np.float32), strides=(0, 4, 4))
    _, extras = run(
        lambda acc: eg.outputs(acc, s=eg.sum(acc, axis="m")), np.ones((2, 0, 3), np.float32), normal(2, 3, 1), out=d, order=order
    )
    assert np.array_equal(extras["s"], np.zeros((2, 1, 1)))


def test_empty_rows_still_have_their_columns() -> None:
    def vectors(acc: Any, x: Any, y: Any) -> Any:
        return eg.outputs(acc + x + y, x=eg.exp(x), y=eg.exp(y), s=operand_sum("a"))

    a, x = normal(9, 3), normal(9, 1)
    _, extras = run(vectors, a, np.empty((3, 0), np.float32), inputs={"x": x, "y": np.empty((1, 0), np.float32)})
    assert_near(extras["x"], np.exp(wide(x)), 4)
    assert_near(extras["s"], wide(a).sum(1, keepdims=True), 1)
    assert extras["y"].shape == (1, 0)


# --- several accumulators


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_accumulators(order: str, dtype: str) -> None:
    a, gate, up = normal(130, 40, dtype=dtype), normal(40, 50, dtype=dtype), normal(40, 50, dtype=dtype, seed=1)
    d, extras = run(lambda g, u: eg.outputs(eg.silu(g) * u, g=g), a, gate, up, order=order, dtype="float32", rows=64)
    g, u = wide(a) @ wide(gate), wide(a) @ wide(up)
    assert_near(d, g / (1 + np.exp(-g)) * u, 200, 40.0)
    assert_near(extras["g"], g, 40, 8.0)


def test_a_is_widened_once_for_all_accumulators(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[int, ...]] = []
    fetch = Side.fetch
    monkeypatch.setattr(Side, "fetch", lambda self, block, scratch: (fetched.append(block.shape), fetch(self, block, scratch))[1])
    a, b = normal(128, 16, dtype="float16"), normal(16, 24, dtype="float16")
    run(lambda g, u: g * u, a, b, b, rows=64)
    assert sorted(fetched) == [(16, 24), (16, 24), (64, 16), (64, 16)]


# --- reductions


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_bias_gradient_over_5000_rows_of_ones(order: str, stored: str) -> None:
    ones, identity = np.ones((5000, 8), dtypes.of("bfloat16").numpy), np.eye(8).astype(dtypes.of("bfloat16").numpy)
    _, extras = run(lambda acc: eg.outputs(acc, grad=eg.cast(eg.sum(acc, axis="m"), stored)), ones, identity, order=order)
    want = np.full((1, 8), 5000.0).astype(dtypes.of(stored).numpy)
    assert extras["grad"].dtype == want.dtype
    assert np.array_equal(extras["grad"], want)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("axis", ["m", "n", None])
def test_reductions(order: str, axis: str | None) -> None:
    a, b = normal(301, 20), normal(20, 210)

    def both(acc: Any) -> Any:
        return eg.outputs(acc, s=eg.sum(eg.square(acc), axis=axis), x=eg.amax(acc, axis=axis))

    d, extras = run(both, a, b, order=order, rows=64)
    axes = {"m": 0, "n": 1, None: (0, 1)}[axis]
    squares = (d * d).astype(np.float64)  # float32 squares, summed exactly
    assert_near(extras["s"], squares.sum(axes, keepdims=True), 1)
    assert np.array_equal(extras["x"], d.max(axes, keepdims=True))


def test_sums_are_those_of_exact_arithmetic_where_float32_would_lose() -> None:
    a = np.ones((100_000, 1), np.float32)
    a[0] = 2.0**24
    _, extras = run(lambda acc: eg.outputs(acc, s=eg.sum(acc, axis="m"), t=eg.sum(acc)), a, np.ones((1, 1), np.float32), rows=1024)
    assert extras["s"].item() == extras["t"].item() == np.float32(2.0**24 + 99_999)


@pytest.mark.parametrize("order", ORDERS)
def test_threads_do_not_change_a_bit(order: str) -> None:
    a, b, bias = np.round(normal(2500, 8)), np.round(normal(8, 600)), normal(1, 600)  # products without rounding, however BLAS sums

    def stats(acc: Any, bias: Any) -> Any:
        y = eg.gelu(acc + bias)
        return eg.outputs(y, s=eg.sum(y, axis="m"), t=eg.sum(y * y), r=eg.sum(y, axis="n"), x=eg.amax(y, axis="m"))

    results = [run(stats, a, b, inputs={"bias": bias}, order=order, rows=1024, threads=t) for t in (1, 2, 2)]
    for d, extras in results[1:]:
        assert np.array_equal(d, results[0][0])
        assert all(np.array_equal(x, results[0][1][name]) for name, x in extras.items())


def test_amax_keeps_nan_and_negative_maxima() -> None:
    a = -np.ones((70, 1), np.float32)
    a[69] = np.nan
    _, extras = run(lambda acc: eg.outputs(acc, x=eg.amax(acc), r=eg.amax(acc, axis="n")), a, np.ones((1, 3), np.float32))
    assert np.isnan(extras["x"]).all()
    assert (extras["r"][:69] == -1).all()
    assert np.isnan(extras["r"][69])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_operand_sums(order: str, dtype: str) -> None:
    a, b = normal(40, 5000, dtype=dtype), normal(5000, 30, dtype=dtype)

    def sums(acc: Any) -> Any:
        return eg.outputs(acc + operand_sum("a"), a=operand_sum("a"), b=eg.cast(operand_sum("b"), "bfloat16"))

    d, extras = run(sums, a, b, order=order, dtype="float32")
    a_sum, b_sum = wide(a).sum(1, keepdims=True), wide(b).sum(0, keepdims=True)
    assert_near(extras["a"], a_sum, 0.5 if extras["a"].dtype.name == "float32" else 1, 1e-3)
    assert extras["b"].dtype.name == "bfloat16"
    assert_near(extras["b"], b_sum, 0.5, 1e-3)
    assert_near(d, wide(a) @ wide(b) + a_sum, 100, 100.0)


# --- masks


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 127, 128, 129])
@pytest.mark.parametrize("padding", [0, 255])
def test_masks(order: str, length: int, padding: int) -> None:
    m, n = (length, 5) if order == "col" else (5, length)
    axis = 0 if order == "col" else 1
    a, b = normal(m, 3), normal(3, n)
    _, extras = run(lambda acc: eg.outputs(eg.relu(acc), mask=eg.bitmask(acc >= 0)), a, b, out=poisoned((m, n), "float32", order))
    product = a @ b
    bits = np.unpackbits(extras["mask"], axis=axis, bitorder="little")
    assert extras["mask"].shape[axis] == layouts.mask_bytes(length)
    assert np.array_equal(bits[:m, :n], product >= 0)
    assert bits.sum() == (product >= 0).sum()

    mask = np.unpackbits(extras["mask"], axis=axis, bitorder="little")
    mask[(slice(length, None), slice(None)) if axis == 0 else (slice(None), slice(length, None))] = padding & 1
    packed = np.packbits(mask, axis=axis, bitorder="little")
    packed = packed if order == "row" else np.asfortranarray(packed)
    grad, _ = run(lambda acc, mask: eg.where(eg.unbitmask(mask), acc, 0.0), a, b, inputs={"mask": packed}, order=order)
    assert np.array_equal(grad, np.where(product >= 0, product, 0))


def test_a_mask_of_nan_selects_without_multiplying() -> None:
    a = np.full((4, 1), np.inf, np.float32)
    d, _ = run(lambda acc: eg.where(acc > 1e30, 0.0, acc), a, np.ones((1, 8), np.float32))
    assert (d == 0).all()


# --- `out` on an operand


@pytest.mark.parametrize("order", ORDERS)
def test_out_may_be_c(order: str) -> None:
    a, b, c = normal(300, 7), normal(7, 90), normal(300, 90)
    c = np.asarray(c, order="C" if order == "row" else "F")
    want = wide(a) @ wide(b) + 0.5 * wide(c)
    d, _ = run(plain, a, b, c=c, beta=0.5, out=c, rows=64, threads=2)
    assert_near(d, want, 20, 4.0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", [eg.gelu, eg.mish, eg.softplus, eg.relu, lambda x: x])
def test_out_may_be_an_input(order: str, activation: Callable[[Any], Any]) -> None:
    """Reductions, masks and other outputs read the input before D overwrites it."""
    a, b, x = normal(300, 7), normal(7, 90), normal(300, 90)
    x = np.asarray(x, order="C" if order == "row" else "F")

    def epilogue(acc: Any, x: Any) -> Any:
        return eg.outputs(activation(x), y=acc + x, s=eg.sum(x, axis="m"), mask=eg.bitmask(x >= 0), z=activation(x) * 1.0)

    before = x.copy()
    fresh, _ = run(epilogue, a, b, inputs={"x": before}, order=order, rows=64)
    d, extras = run(epilogue, a, b, inputs={"x": x}, out=x, rows=64, threads=2)
    assert np.array_equal(d, fresh)
    assert np.array_equal(extras["z"], fresh)
    assert_near(extras["y"], wide(a) @ wide(b) + before, 20, 4.0)
    assert_near(extras["s"], wide(before).sum(0, keepdims=True), 1, 1e-3)
    bits = np.unpackbits(extras["mask"], axis=0 if order == "col" else 1, bitorder="little")
    assert np.array_equal(bits[:300, :90], before >= 0)


def test_out_may_be_a_vector_input() -> None:
    """With m = 1 a full input is a row, which is otherwise read once a block."""
    a, b, x = normal(1, 3), normal(3, 50), normal(1, 50)
    want = np.tanh(wide(x)) * (wide(a) @ wide(b)) + x
    total = wide(x).sum(keepdims=True)
    d, extras = run(lambda acc, x: eg.outputs(eg.tanh(x) * acc + x, s=eg.sum(x)), a, b, inputs={"x": x}, out=x)
    assert_near(d, want, 20, 4.0)
    assert_near(extras["s"], total, 1, 1e-3)


# --- strides


def spaced(x: Array) -> Array:
    big = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    big[..., ::2] = x
    return big[..., ::2]


def misaligned(x: Array) -> Array:
    y = np.ndarray(x.shape, x.dtype, buffer=bytearray(x.nbytes + 1), offset=1)
    y[...] = x
    return y


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "col": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "sliced": lambda x: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(2, 3)])[..., 2:-3],
    "spaced": spaced,
    "rows reversed": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "columns reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "misaligned": misaligned,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_strides(kind: str, order: str, dtype: str) -> None:
    lay = LAYOUTS[kind]
    a, b, c, x = (normal(*s, dtype=dtype) for s in ((2, 67, 9), (9, 21), (2, 67, 21), (67, 21)))
    want = eg_gelu(wide(a) @ wide(b) + 0.5 * wide(c)) + wide(x)
    target = lay(poisoned((2, 67, 21), "float32"))
    d, _ = run(lambda acc, x: eg.gelu(acc) + x, lay(a), lay(b), c=lay(c), beta=0.5, inputs={"x": lay(x)}, order=order, dtype="float32")
    e, _ = run(lambda acc, x: eg.gelu(acc) + x, a, b, c=c, beta=0.5, inputs={"x": x}, out=target)
    assert_near(d, want, 20, 8.0)
    assert_near(e, want, 20, 8.0)


def eg_gelu(x: Array) -> Array:
    from math import erf, sqrt

    return np.vectorize(lambda v: 0.5 * v * (1 + erf(v / sqrt(2))))(x)


def test_broadcast_operands_with_stride_zero() -> None:
    a = np.broadcast_to(normal(1, 9), (65, 9))
    b = np.broadcast_to(normal(9, 1), (9, 33))
    d, _ = run(plain, a, b)
    assert_near(d, wide(a) @ wide(b), 20, 4.0)


def test_a_bias_before_a_guard_of_nan() -> None:
    buffer = np.full(21 + 64, np.nan, np.float32)
    buffer[:21] = normal(21)
    d, _ = run(bias_relu, normal(67, 9), normal(9, 21), inputs={"bias": buffer[None, :21]})
    assert np.isfinite(d).all()


def test_a_padded_input() -> None:
    """gelu_aux as the peer pads it: more rows in memory than m."""
    a, b, aux = normal(65, 9), normal(9, 21), poisoned((72, 21), "float32", "col")
    aux[:65] = normal(65, 21)
    d, _ = run(lambda acc, x: acc + x, a, b, inputs={"x": aux[:65]}, order="col")
    assert_near(d, wide(a) @ wide(b) + aux[:65], 20, 4.0)


# --- batches


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch_a", "batch_b"), [((3,), ()), ((), (3,)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((1, 1), (1,)), ((40,), (40,))])
def test_batches_broadcast(batch_a: tuple[int, ...], batch_b: tuple[int, ...], order: str, dtype: str) -> None:
    a, b, x = normal(*batch_a, 17, 5, dtype=dtype), normal(*batch_b, 5, 9, dtype=dtype), normal(1, 9, dtype=dtype)

    def epilogue(acc: Any, x: Any) -> Any:
        return eg.outputs(acc + x, s=eg.sum(acc, axis="n"), mask=eg.bitmask(acc >= 0))

    d, extras = run(epilogue, a, b, inputs={"x": x}, order=order, dtype="float32")
    product = wide(a) @ wide(b)
    assert_near(d, product + wide(x), 10, 8.0)
    assert_near(extras["s"], product.sum(-1, keepdims=True), 40, 8.0)
    bits = np.unpackbits(extras["mask"], axis=-2 if order == "col" else -1, bitorder="little")[..., :17, :9]
    assert np.array_equal(bits.astype(bool)[np.abs(product) > 1e-5], (product >= 0)[np.abs(product) > 1e-5])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [(24, 16, 20), (300, 200, 40)])
def test_large_batches_are_shared_out(order: str, dtype: str, size: tuple[int, int, int]) -> None:
    m, n, k = size
    a, b, x = normal(300, m, k, dtype=dtype), normal(k, n, dtype=dtype), normal(300, 1, n)
    if m > 100:
        a, x = a[:30], x[:30]
    d, extras = run(
        lambda acc, x: eg.outputs(eg.relu(acc + x), s=eg.sum(acc, axis="m")), a, b, inputs={"x": x}, order=order, dtype="float32"
    )
    product = wide(a) @ wide(b)
    assert_near(d, np.maximum(product + x, 0), 60, 8.0)
    assert_near(extras["s"], product.sum(-2, keepdims=True), 200, 20.0)


def test_inputs_broadcast_over_the_batch() -> None:
    a, b, x, y = normal(2, 3, 17, 5), normal(5, 9), normal(3, 17, 9), normal(2, 1, 17, 1)
    d, _ = run(lambda acc, x, y: acc * x + y, a, b, inputs={"x": x, "y": y})
    assert_near(d, (wide(a) @ wide(b)) * x + y, 10, 8.0)


def test_values_without_batch_in_a_batched_strip() -> None:
    """Small matrices share a strip; what is made of inputs without batch is one of them, cast or not."""
    a, b, x = normal(3, 5, 4), normal(4, 6), normal(5, 6)
    d, _ = run(lambda acc, x: acc + eg.cast(eg.relu(x) * 3.0, "float16") + eg.silu(x), a, b, inputs={"x": x})
    half = (np.maximum(x, 0) * 3).astype(np.float16).astype(np.float64)
    assert_near(d, wide(a) @ wide(b) + half + x / (1 + np.exp(-wide(x))), 20, 4.0)


def test_a_b_without_batch_is_widened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[int, ...]] = []
    fetch = Side.fetch
    monkeypatch.setattr(Side, "fetch", lambda self, block, scratch: (fetched.append(block.shape), fetch(self, block, scratch))[1])
    run(plain, normal(4, 300, 256, dtype="float16"), normal(256, 400, dtype="float16"))
    assert fetched.count((256, 400)) == 1


# --- dtypes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("order", ORDERS)
def test_dtypes_are_rounded_once(dtype: str, order: str) -> None:
    a, b = normal(70, 33, dtype=dtype), normal(33, 20, dtype=dtype)
    x = normal(1, 20, dtype=dtype)
    d, _ = run(lambda acc, x: acc + x, a, b, inputs={"x": x}, order=order)
    want = wide(a) @ wide(b) + wide(x)
    accumulated = 40 * float(np.finfo(dtypes.of(dtype).acc.numpy).eps) * 30
    info = ml_dtypes.finfo(d.dtype)
    half = 0.5 * np.maximum(float(info.eps) * np.abs(want), float(info.smallest_subnormal))
    assert (np.abs(wide(d) - want) <= half + accumulated).all()


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_narrow_types_saturate_and_keep_nan(dtype: str, largest: float) -> None:
    a = np.array([[1e9], [-1e9], [np.inf], [np.nan], [1.0]], np.float32)
    _, extras = run(lambda acc: eg.outputs(acc, x=eg.cast(acc, dtype), y=eg.cast(acc, dtype) * 1.0), a, np.ones((1, 1), np.float32))
    want = np.array([[largest], [-largest], [largest], [np.nan], [1.0]])
    assert extras["x"].dtype.name == dtype
    assert np.array_equal(wide(extras["x"]), want, equal_nan=True)
    assert np.array_equal(wide(extras["y"]), want, equal_nan=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("conjugate", ["a", "b", "ab"])
def test_conjugation(dtype: str, conjugate: str, order: str) -> None:
    a, b = normal(30, 8, dtype=dtype), normal(8, 20, dtype=dtype)
    d, _ = run(lambda acc: acc * 2.0, a, b, alpha=0.5j, conjugate=conjugate, order=order)
    left, right = (np.conj(wide(x)) if name in conjugate else wide(x) for name, x in (("a", a), ("b", b)))
    assert_near(d, 1j * (left @ right), 40, 8.0)


# --- special values and random numbers


def test_relu_of_nan_is_nan() -> None:
    d, _ = run(eg.relu, np.array([[np.nan], [-np.inf], [np.inf]], np.float32), np.ones((1, 1), np.float32))
    assert np.array_equal(d, [[np.nan], [0], [np.inf]], equal_nan=True)


def test_dropout_draws_by_coordinates_alone() -> None:
    ones = np.ones((3, 130, 1), np.float32)
    seed = np.array([[-7]], np.int64)
    results = [
        run(lambda acc, seed: eg.dropout(acc, 0.25, seed), ones, np.ones((1, 70), np.float32), inputs={"seed": seed}, **how)[0]
        for how in ({}, {"order": "col"}, {"rows": 64}, {"order": "col", "rows": 64})
    ]
    assert all(np.array_equal(d, results[0]) for d in results)
    assert set(np.unique(results[0])) == {np.float32(0), np.float32(1) * np.float32(1 / 0.75)}
    assert abs((results[0] != 0).mean() - 0.75) < 0.02
    assert not np.array_equal(results[0][0], results[0][1])


def test_the_devices_it_refuses() -> None:
    problem = Problem.of("f32", m=4, n=4, k=4, device="cuda:0")
    refusal = ENGINE.supports(problem, check(eg.as_epilogue(eg.relu).expression(1), problem))
    assert refusal is not None
    assert "cuda:0" in refusal.sentence


def test_notes_name_what_is_copied() -> None:
    problem = Problem.of("bf16", m=4, n=4, k=4)
    assert ENGINE.notes(problem, check(eg.as_epilogue(eg.relu).expression(1), problem)) == (
        "a is widened from bf16 to f32 a block at a time.",
        "b is widened from bf16 to f32 a block at a time.",
    )
    plain_problem = Problem.of("f32", m=4, n=4, k=4)
    assert ENGINE.notes(plain_problem, check(eg.as_epilogue(eg.relu).expression(1), plain_problem)) == ()

"""What cuBLASLt is told, against a model of what it does with it: the descriptors are executed on flat buffers with NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from epigemm import layouts
from epigemm.engines.base import Refusal
from epigemm.engines.cublaslt.descriptors import ATTRIBUTES, Descriptor, Matrix, Unsuitable, describe, readings, without_product
from epigemm.engines.cublaslt.engine import describe as describe_fused
from epigemm.engines.outputs import operand as output_operand
from epigemm.enums import MatmulEpilog
from epigemm.expression.check import check
from epigemm.expression.named import NAMED, named
from epigemm.expression.nodes import Expression, Node, Output, acc, input_
from epigemm.problem import Compute, Operand, Problem

E = MatmulEpilog
M, N, K = 24, 40, 16


# ---------------------------------------------------------------- the model


def _offsets(matrix: Matrix, batch: int) -> np.ndarray:
    """Where element (i, j) of one matrix of the batch lies."""
    i, j = np.ogrid[: matrix.rows, : matrix.columns]
    return batch * matrix.batch_stride + j * matrix.leading_dimension + i


def _op(values: np.ndarray, operation: str) -> np.ndarray:
    return {"N": values, "T": values.T, "C": values.conj().T}[operation]


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _dgelu(x: np.ndarray) -> np.ndarray:
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x * x)


def library(descriptor: Descriptor, a: np.ndarray, b: np.ndarray, c: np.ndarray | None, extra: dict[str, np.ndarray], beta: float) -> None:
    """cublasLtMatmul on flat arrays: writes extra["d"] and the epilogue's outputs; a and b are the caller's."""
    if descriptor.swapped:
        a, b = b, a
    code = descriptor.epilogue
    for batch in range(descriptor.d.batch_count):
        left = _op(a[_offsets(descriptor.a, batch)], descriptor.transa)
        right = _op(b[_offsets(descriptor.b, batch)], descriptor.transb)
        x = left @ right + (beta * c[_offsets(descriptor.c, batch)] if c is not None else 0)
        rows = np.arange(descriptor.d.rows)
        vector = extra[descriptor.bias.name] if descriptor.bias is not None else None
        start = batch * descriptor.bias.batch_stride if descriptor.bias is not None else 0
        if code & 4:
            x = x + vector[start + rows][:, None]
        if descriptor.aux is not None:
            x = _auxiliary(descriptor, x, extra[descriptor.aux.name], batch)
        x = np.maximum(x, 0) if code & 2 else _gelu(x) if code & 32 else x
        if code & 16:
            vector[start + rows] = x.sum(axis=1)
        if code == E.BGRADA:
            vector[start + rows] = left.sum(axis=1)
        if code == E.BGRADB:
            vector[start + np.arange(descriptor.d.columns)] = right.sum(axis=0)
        extra["d"][_offsets(descriptor.d, batch)] = x


def _auxiliary(descriptor: Descriptor, x: np.ndarray, memory: np.ndarray, batch: int) -> np.ndarray:
    aux, code = descriptor.aux, descriptor.epilogue
    i, j = np.ogrid[: descriptor.d.rows, : descriptor.d.columns]
    place = batch * aux.batch_stride + j * aux.leading_dimension + i
    if aux.dtype != "bits":
        if code & 64:
            return x * _dgelu(memory[place])
        memory[place] = x
        return x
    if code & 8:
        return np.where(memory[place // 8] >> (place % 8) & 1, x, 0)
    for index, bit in zip(place.reshape(-1), (x >= 0).reshape(-1), strict=True):
        memory[index // 8] = memory[index // 8] & ~(1 << index % 8) | int(bit) << index % 8
    return x


# ---------------------------------------------------------------- data


def _memory(operand: Operand, rng: np.random.Generator) -> np.ndarray:
    size = layouts.extent_bytes(operand.shape, operand.strides, 1)[1]
    if operand.dtype.name == "uint8":
        return rng.integers(0, 256, size).astype(np.uint8)
    real = rng.standard_normal(size)
    return real + 1j * rng.standard_normal(size) if operand.dtype.is_complex else real


def _view(memory: np.ndarray, operand: Operand) -> np.ndarray:
    strides = tuple(s * memory.itemsize for s in operand.strides)
    return np.lib.stride_tricks.as_strided(memory, operand.shape, strides)


def _problem(
    order_a: str, order_b: str, order_d: str, batch: tuple[int, ...] = (), dtype: str = "f32", c: Operand | None = None
) -> Problem:
    base = Problem.of(dtype, m=M, n=N, k=K, batch=batch, order=order_d)
    b = Operand.dense(dtype, (*batch, K, N), order_b)
    return replace(base, a=Operand.dense(dtype, (*batch, M, K), order_a), b=(b,), c=c)


def _run(problem: Problem, expression: Expression, beta: float = 0.0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(views of what the model read, views of what it wrote); NaN and 0xAA stand in what it has to write."""
    rng = np.random.default_rng(7)
    described = describe_fused(problem, expression)
    assert isinstance(described, Descriptor), described
    memory = {"a": _memory(problem.a, rng), "b": _memory(problem.b[0], rng)}
    memory |= {name: _memory(operand, rng) for name, operand in problem.inputs}
    operands = {"a": problem.a, "b": problem.b[0], **dict(problem.inputs)}
    if problem.c is not None:
        memory["c"], operands["c"] = _memory(problem.c, rng), problem.c
    outputs = {"d": problem.d, **{o.name: output_operand(problem, o) for o in expression.extras}}
    written = {name: _memory(operand, rng) for name, operand in outputs.items()}
    for array in written.values():
        array.fill(0xAA if array.dtype == np.uint8 else np.nan)
    library(described, memory["a"], memory["b"], memory.get("c"), {**memory, **written}, beta)
    return ({k: _view(v, operands[k]) for k, v in memory.items()}, {k: _view(v, outputs[k]) for k, v in written.items()})


def _identity() -> Expression:
    return Expression((Output("d", acc()),))


# ---------------------------------------------------------------- plain products


@pytest.mark.parametrize("order_a", ["row", "col"])
@pytest.mark.parametrize("order_b", ["row", "col"])
@pytest.mark.parametrize("order_d", ["row", "col"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_every_order_is_the_product(order_a, order_b, order_d, batch):
    problem = _problem(order_a, order_b, order_d, batch)
    read, written = _run(problem, check(_identity(), problem))
    np.testing.assert_allclose(written["d"], read["a"] @ read["b"], rtol=1e-12)


def test_sliced_operands_and_a_padded_result():
    problem = _problem("row", "col", "row")
    a = Operand(problem.a.dtype, (M, K), (K + 5, 1))
    d = Operand(problem.d.dtype, (M, N), (N + 3, 1))
    problem = replace(problem, a=a, d=d)
    read, written = _run(problem, check(_identity(), problem))
    np.testing.assert_allclose(written["d"], read["a"] @ read["b"], rtol=1e-12)
    assert describe_fused(problem, check(_identity(), problem)).d.leading_dimension == N + 3


def test_broadcast_batches_have_stride_0_and_permuted_ones_follow_d():
    problem = _problem("row", "row", "row", (2, 3))
    plain = Operand.dense("f32", (K, N))
    strides = layouts.dense_strides((2, 3, M, N), "row", (1, 0))
    permuted = replace(problem, b=(plain,), d=replace(problem.d, strides=strides))
    permuted = replace(permuted, a=replace(problem.a, strides=layouts.dense_strides((2, 3, M, K), "row", (1, 0))))
    described = describe(permuted, "row", problem.d.dtype)
    assert (described.a.batch_stride, described.d.batch_stride, described.d.batch_count) == (0, M * N, 6)
    read, written = _run(permuted, check(_identity(), permuted))
    np.testing.assert_allclose(written["d"], read["a"] @ read["b"], rtol=1e-12)


def test_a_batch_without_one_stride_is_refused_by_name():
    problem = _problem("row", "row", "row", (2, 3))
    a = Operand.dense("f32", (3, M, K))  # broadcast along the first axis only
    with pytest.raises(Unsuitable, match=r"the batch \(2, 3\) of A .* no single stride.*make A contiguous"):
        describe(replace(problem, a=a), "row", problem.d.dtype)


@pytest.mark.parametrize("order_d", ["row", "col"])
def test_c_full_and_broadcast(order_d):
    shapes = {"row": [(M, N), (1, N)], "col": [(M, N), (M, 1)]}[order_d]
    for shape in shapes:
        c = Operand.dense("f32", shape, order_d)
        problem = _problem("row", "row", order_d, c=c)
        read, written = _run(problem, check(_identity(), problem), beta=0.5)
        np.testing.assert_allclose(written["d"], read["a"] @ read["b"] + 0.5 * read["c"], rtol=1e-12)


def test_c_in_another_order_is_refused():
    problem = _problem("row", "row", "row", c=Operand.dense("f32", (M, N), "col"))
    with pytest.raises(Unsuitable, match="C must be row-major as D is"):
        describe(problem, "row", problem.d.dtype)
    problem = _problem("row", "row", "row", c=Operand.dense("f32", (M, 1)))
    with pytest.raises(Unsuitable, match=r"of a broadcast C cuBLASLt reads only a contiguous \(1, 40\) with a row-major D"):
        describe(problem, "row", problem.d.dtype)


def test_conjugation_comes_with_a_transposition():
    for order_d, order_a, order_b in (("col", "row", "row"), ("row", "col", "col")):
        problem = _problem(order_a, order_b, order_d, dtype="c64")
        problem = replace(problem, a=replace(problem.a, conjugate=True), b=(replace(problem.b[0], conjugate=True),))
        read, written = _run(problem, check(_identity(), problem))
        np.testing.assert_allclose(written["d"], read["a"].conj() @ read["b"].conj(), rtol=1e-12)
    problem = _problem("col", "row", "col", dtype="c64")
    problem = replace(problem, a=replace(problem.a, conjugate=True))
    with pytest.raises(Unsuitable, match="conjugates only what it also transposes, and A is read as it lies"):
        describe(problem, "col", problem.d.dtype)


def test_expanded_operands_and_empty_products_are_refused():
    problem = _problem("row", "row", "row")
    with pytest.raises(Unsuitable, match=r"A with strides \(0, 1\) has no leading dimension"):
        describe(replace(problem, a=Operand(problem.a.dtype, (M, K), (0, 1))), "row", problem.d.dtype)
    with pytest.raises(Unsuitable, match="no empty product"):
        describe(replace(problem, k=0), "row", problem.d.dtype)
    assert readings(Operand(problem.a.dtype, (M, K), (-K, 1))) == ()


def test_fp8_needs_k_contiguous_in_both():
    e4m3 = Operand.dense("e4m3", (32, 64), "row")
    b = Operand.dense("e4m3", (64, 48), "col")
    base = Problem.of("bf16", m=32, n=48, k=64)
    for order in ("row", "col"):
        problem = replace(base, a=e4m3, b=(b,), d=Operand.dense("bf16", (32, 48), order), compute=Compute(fast_accumulation=True))
        described = describe(problem, order, problem.d.dtype)
        assert (described.transa, described.transb, described.fast_accumulation) == ("T", "N", True)
    with pytest.raises(Unsuitable, match="A must be row-major"):
        describe(replace(base, a=Operand.dense("e4m3", (32, 64), "col"), b=(b,)), "row", base.d.dtype)
    with pytest.raises(Unsuitable, match="B must be column-major"):
        describe(replace(base, a=e4m3, b=(Operand.dense("e4m3", (64, 48)),)), "row", base.d.dtype)


# ---------------------------------------------------------------- epilogs


def _inputs(epilog: MatmulEpilog, order: str, batch: tuple[int, ...]) -> dict[str, Operand]:
    bits = (layouts.mask_bytes(M), N) if order == "col" else (M, layouts.mask_bytes(N))
    shapes = {
        "bias": Operand.dense("f32", (*batch, M, 1) if order == "col" else (*batch, 1, N)),
        "relu_aux": Operand.dense("uint8", (*batch, *bits), order),
        "gelu_aux": Operand.dense("f32", (*batch, M, N), order),
    }
    return {name: shapes[name] for name in NAMED[epilog].inputs}


def _swapped(expression: Expression) -> Expression:
    """The epilog for a row-major D: its gradient of a bias sums over m."""

    def rewrite(node: Node) -> Node | None:
        return Node("sum", *node.args, axis="m") if node.op == "sum" else None

    return expression.map(rewrite)


def _unpacked(mask: np.ndarray, order: str) -> np.ndarray:
    axis = -2 if order == "col" else -1
    bits = np.unpackbits(mask, axis=axis, bitorder="little")
    return bits[..., :M, :N].astype(bool)


def _expected(epilog: MatmulEpilog, order: str, read: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    x = read["a"] @ read["b"]
    if epilog & 4:
        x = x + read["bias"]
    pre = x
    if "relu_aux" in read:
        x = np.where(_unpacked(read["relu_aux"], order), x, 0)
    if "gelu_aux" in read:
        x = x * _dgelu(read["gelu_aux"])
    x = np.maximum(x, 0) if epilog & 2 else _gelu(x) if epilog & 32 else x
    summed = x.sum(axis=-1 if order == "col" else -2, keepdims=True)
    sums = {"bgrada": read["a"].sum(-1, keepdims=True), "bgradb": read["b"].sum(-2, keepdims=True)}
    return {"d": x, "relu_aux": pre >= 0, "gelu_aux": pre, "drelu_bgrad": summed, "dgelu_bgrad": summed, **sums}


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("order", ["col", "row"])
@pytest.mark.parametrize("epilog", list(NAMED), ids=lambda e: e.name)
def test_every_epilog_in_both_orders(epilog, order, batch):
    expression = named(epilog) if order == "col" else _swapped(named(epilog))
    problem = _problem("row", "row", order, batch)
    problem = replace(problem, inputs=tuple(_inputs(epilog, order, batch).items()))
    read, written = _run(problem, check(expression, problem))
    expected = _expected(epilog, order, read)
    for name, value in written.items():
        if value.dtype == np.uint8:
            np.testing.assert_array_equal(_unpacked(value, order), expected[name])
        else:
            np.testing.assert_allclose(value[..., :M, :N], expected[name], rtol=1e-9, atol=1e-9)


def test_the_model_notices_a_wrong_leading_dimension():
    problem = _problem("row", "row", "row")
    described = describe_fused(problem, check(_identity(), problem))
    wrong = replace(described, a=replace(described.a, leading_dimension=described.a.leading_dimension - 1))
    rng = np.random.default_rng(3)
    a, b, d = _memory(problem.a, rng), _memory(problem.b[0], rng), np.full(M * N, np.nan)
    library(wrong, a, b, None, {"d": d}, 0.0)
    assert not np.allclose(d.reshape(M, N), a.reshape(M, K) @ b.reshape(K, N))


def test_a_bias_along_the_other_axis_is_refused():
    for order, shape, needed in (("row", (M, 1), "column|col"), ("col", (1, N), "row")):
        problem = replace(_problem("row", "row", order), inputs=(("bias", Operand.dense("f32", shape)),))
        refusal = describe_fused(problem, check(named(E.RELU_BIAS), problem))
        assert isinstance(refusal, Refusal)
        assert "a bias along" in str(refusal)
        assert f"and D is {order}-major" in str(refusal)
        assert any(f"only with a {word}" in str(refusal) for word in needed.split("|"))


def test_a_vector_d_takes_the_order_its_bias_needs():
    problem = Problem.of("f32", m=64, n=1, k=16)
    problem = replace(problem, inputs=(("bias", Operand.dense("f32", (64, 1))),))
    described = describe_fused(problem, check(named(E.BIAS), problem))
    assert isinstance(described, Descriptor)
    assert not described.swapped


def test_what_is_not_fused_is_named():
    problem = _problem("row", "row", "row")
    silu = check(Expression((Output("d", Node("silu", acc())),)), problem)
    assert "cannot fuse `silu(acc)`" in str(describe_fused(problem, silu))
    erf = check(Expression((Output("d", Node("gelu", acc(), approximate="none")),)), problem)
    assert "cannot fuse" in str(describe_fused(problem, erf))
    both = replace(problem, b=problem.b * 2)
    two = check(Expression((Output("d", Node("mul", acc(0), acc(1))),), accumulators=2), both)
    assert "one product at a time" in str(describe_fused(both, two))


def test_types_that_the_library_does_not_document():
    problem = replace(_problem("row", "row", "row"), d=Operand.dense("f16", (M, N)))
    assert "does not compute a=float32, b=float32, c=float16, d=float16" in str(describe_fused(problem, check(_identity(), problem)))
    relu = Expression((Output("d", Node("add", acc(), input_("bias"))),), 1, ("bias",))
    bf16 = replace(_problem("row", "row", "row", dtype="bf16"), inputs=(("bias", Operand.dense("f32", (1, N))),))
    assert "reads a bias of bfloat16" in str(describe_fused(bf16, check(relu, bf16)))
    wide = check(
        Expression((Output("d", acc()), Output("bgrada", Node("operand_sum", operand="a")))),
        bf16_without_inputs := replace(bf16, inputs=()),
    )
    assert "writes `bgrada` in D's dtype bfloat16" in str(describe_fused(bf16_without_inputs, wide))


@pytest.mark.parametrize("order", ["row", "col"])
def test_alpha_0_is_the_product_of_zeros(order):
    for batch in ((), (3,)):
        problem = _problem("row", "col", order, batch)
        described = describe_fused(problem, check(_identity(), problem))
        zero, size_bytes = without_product(described)
        zeros = np.zeros(size_bytes // 4)
        d = np.full(layouts.extent_bytes(problem.d.shape, problem.d.strides, 1)[1], np.nan)
        library(zero, zeros, zeros, None, {"d": d}, 0.0)
        assert (_view(d, problem.d) == 0).all()


def test_padding_of_written_masks_is_zeroed():
    for m, padding in ((128, False), (65, True)):
        problem = Problem.of("f32", m=m, n=8, k=16, order="col")
        described = describe_fused(problem, check(named(E.RELU_AUX), problem))
        assert described.aux.zeroed_bytes == (layouts.mask_bytes(m) * 8 if padding else 0)
    problem = replace(problem, inputs=(("relu_aux", Operand.dense("uint8", (layouts.mask_bytes(65), 8), "col")),))
    assert describe_fused(problem, check(named(E.DRELU), problem)).aux.zeroed_bytes == 0


def test_k_1_gradients_are_refused():
    problem = replace(_problem("row", "row", "col"), k=1, a=Operand.dense("f32", (M, 1)), b=(Operand.dense("f32", (1, N)),))
    problem = replace(problem, inputs=tuple(_inputs(E.DRELU, "col", ()).items()))
    assert "does not compute DRELU with k = 1" in str(describe_fused(problem, check(named(E.DRELU), problem)))


def test_an_unpadded_pre_activation_is_refused():
    problem = replace(_problem("row", "row", "col"), m=M - 1, a=Operand.dense("f32", (M - 1, K)), d=Operand.dense("f32", (M - 1, N), "col"))
    problem = replace(problem, inputs=(("gelu_aux", Operand.dense("f32", (M - 1, N), "col")),))
    assert "the leading dimension of `gelu_aux` (23 elements) must be a multiple of 8" in str(
        describe_fused(problem, check(named(E.DGELU), problem))
    )
    padded = replace(problem, inputs=(("gelu_aux", Operand(problem.d.dtype, (M - 1, N), (1, M))),))
    assert describe_fused(padded, check(named(E.DGELU), padded)).aux.leading_dimension == M


def test_fp8_scales_are_taken_from_the_expression():
    base = Problem.of("bf16", m=32, n=48, k=64)
    scalar = Operand.dense("f32", (1, 1))
    problem = replace(
        base, a=Operand.dense("e4m3", (32, 64)), b=(Operand.dense("e4m3", (64, 48), "col"),), d=Operand.dense("e4m3", (32, 48))
    )
    problem = replace(problem, inputs=(("quantization_scale_d", scalar),))
    scaled = Node("mul", Node("relu", acc()), input_("quantization_scale_d"))
    largest = Node("amax", Node("abs", Node("relu", acc())), axis="mn")
    outputs = (Output("d", scaled), Output("result_amax", largest, "float32"))
    described = describe_fused(problem, check(Expression(outputs, 1, ("quantization_scale_d",)), problem))
    assert isinstance(described, Descriptor), described
    assert described.epilogue == E.RELU
    assert described.scales == (("d_scale_pointer", "quantization_scale_d"), ("amax_d_pointer", "result_amax"))
    assert described.c.dtype.name == "float16"
    numbers = {ATTRIBUTES[name][0] for name in ("d_scale_pointer", "amax_d_pointer")}
    assert numbers <= {number for number, _ in described.attributes}

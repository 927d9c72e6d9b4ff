"""The Triton engine's own parts under the interpreter: every configuration, split sums, refusals, generated files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

import epigemm as eg
from epigemm import errors
from epigemm.engines.triton import codegen, configs, launch, module
from epigemm.engines.triton.configs import BLOCKS, PERSISTENT, Config, Machine
from epigemm.engines.triton.engine import ENGINE
from epigemm.engines.triton.oriented import orient
from epigemm.engines.triton.plan import workspace
from epigemm.expression.check import check
from epigemm.expression.nodes import Expression, Output, acc
from epigemm.problem import Compute, Operand, Problem

H200 = Machine((9, 0), 132, 232448)
A100 = Machine((8, 0), 108, 166912)


def plain(problem: Problem) -> Expression:
    return check(
        Expression(tuple(Output(name, acc(i)) for i, name in enumerate(("d", "e", "f")[: len(problem.b)])), len(problem.b)), problem
    )


def integers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Small whole numbers: every sum of their products is exact in float32."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


@eg.epilogue
def everything(x, y, bias):
    z = x + bias
    return eg.outputs(z * y, mask=eg.bitmask(z > 0), rows=eg.sum(z, axis="n"), columns=eg.amax(z, axis="m"), total=eg.sum(y))


def run_everything(algorithm=None, **extents: int):
    a, b, c = (
        integers((extents["m"], extents["k"]), 0),
        integers((extents["k"], extents["n"]), 1),
        integers((extents["k"], extents["n"]), 2),
    )
    bias = integers((extents["n"],), 3)
    with eg.Matmul(a, (b, c)) as product:
        found = product.plan(epilog=everything, epilog_inputs={"bias": bias}, engine="triton")
        d, extras = product.execute(algorithm=found[algorithm or 0])
    z, y = a @ b + bias, a @ c
    np.testing.assert_array_equal(d, z * y)
    np.testing.assert_array_equal(extras["rows"], z.sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(extras["columns"], z.max(axis=0, keepdims=True))
    np.testing.assert_array_equal(extras["total"], y.sum().reshape(1, 1))
    bits = np.packbits(z > 0, axis=1, bitorder="little")
    np.testing.assert_array_equal(extras["mask"][:, : bits.shape[1]], bits)
    assert not extras["mask"][:, bits.shape[1] :].any()
    return found


def test_every_configuration_gives_the_same() -> None:
    """Tails in m, n and k, two accumulators, masks and reductions; operands that tensor maps describe."""
    algorithms = run_everything(m=41, n=72, k=212)
    assert {a.kernel for a in algorithms} == {PERSISTENT, BLOCKS}
    assert {a.splits for a in algorithms} > {1}
    for index in range(1, len(algorithms)):
        run_everything(algorithm=index, m=41, n=72, k=212)


def test_a_large_problem() -> None:
    run_everything(m=150, n=264, k=40)


def test_split_sums_are_added_in_one_order() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(5, 700)).astype(np.float32), rng.normal(size=(700, 9)).astype(np.float32)
    with eg.Matmul(a, b) as product:
        algorithms = product.plan(engine="triton")
        split = next(x for x in algorithms if x.splits > 2)
        first, second = (product.execute(algorithm=split) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, a.astype(np.float64) @ b, rtol=0, atol=700 * 2.0**-24 * np.abs(a).max() * np.abs(b).max() * 26)


def test_d_may_be_an_input() -> None:
    a, b = integers((40, 16), 0), integers((16, 72), 1)
    residual = integers((40, 72), 2)
    expected = a @ b + residual
    result = eg.matmul(
        a, b, epilog=lambda acc, residual: acc + residual, epilog_inputs={"residual": residual}, out=residual, engine="triton"
    )
    assert result is residual
    np.testing.assert_array_equal(residual, expected)


def test_nothing_is_read_that_is_not_used() -> None:
    """alpha = 0 reads neither A nor B, beta = 0 not C: NaN there stays there."""
    nan, a, b = np.full((6, 8), np.nan, np.float32), integers((6, 5), 0), integers((5, 8), 1)
    np.testing.assert_array_equal(eg.matmul(a, b, nan, beta=0.0, engine="triton"), a @ b)
    c = integers((6, 8), 2)
    broken = np.full((6, 5), np.inf, np.float32)
    np.testing.assert_array_equal(eg.matmul(broken, b, c, alpha=0.0, beta=2.0, engine="triton"), 2 * c)


# ---------------------------------------------------------------- the first guess


def test_large_products_take_the_measured_tiles() -> None:
    problem = Problem.of("bf16", m=8192, n=14336, k=4096)
    best = next(configs.candidates(orient(problem, plain(problem)), H200, "ieee"))
    assert best == Config(PERSISTENT, 128, 256, 128, 8, 3, 8, True, store_mapped=True)
    two = Problem.of("bf16", m=8192, n=14336, k=4096, accumulators=2)
    best = next(configs.candidates(orient(two, plain(two)), H200, "ieee"))
    assert (best.block_m, best.block_n, best.group, best.flatten) == (128, 128, 16, False)


@pytest.mark.parametrize("m", [1, 16, 64])
def test_few_rows_share_out_k(m: int) -> None:
    problem = Problem.of("bf16", m=m, n=4096, k=14336)
    oriented = orient(problem, plain(problem))
    best = next(configs.candidates(oriented, H200, "ieee"))
    assert best.kernel == BLOCKS
    assert best.block_m == max(16, m)
    programs = -(-4096 // best.block_n) * best.splits
    assert 132 <= programs <= 2 * 132
    assert workspace(oriented, best).bytes >= best.splits * m * 4096 * 4


def test_older_machines_and_odd_strides_take_pointers() -> None:
    problem = Problem.of("f16", m=4096, n=4096, k=4096)
    assert {c.kernel for c in configs.candidates(orient(problem, plain(problem)), A100, "ieee")} == {BLOCKS}
    odd = Problem.of("f16", m=4096, n=4097, k=4096)
    assert {c.kernel for c in configs.candidates(orient(odd, plain(odd)), H200, "ieee")} == {BLOCKS}
    single = Problem.of("f32", m=4096, n=4096, k=4096)
    assert {c.kernel for c in configs.candidates(orient(single, plain(single)), H200, "ieee")} == {BLOCKS}
    assert next(configs.candidates(orient(single, plain(single)), H200, "tf32")).kernel == PERSISTENT


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("dtype", "sentence"),
    [("f64", "an operand is float64"), ("c64", "an operand is complex64"), ("c128", "an operand is complex128")],
)
def test_what_it_does_not_multiply(dtype: str, sentence: str) -> None:
    problem = Problem.of(dtype, m=4, n=4, k=4)
    refusal = ENGINE.supports(problem, plain(problem))
    assert refusal is not None
    assert sentence in str(refusal)


def test_five_accumulators_are_refused() -> None:
    problem = Problem.of("f32", m=4, n=4, k=4, accumulators=5)
    assert "4 accumulators at most, and there are 5" in str(ENGINE.supports(problem, Expression((Output("d", acc()),), 5)))


def test_too_large_is_refused() -> None:
    row = Operand.dense("f32", (2**31, 1))
    problem = Problem((), 2**31, 1, 1, row, (Operand.dense("f32", (1, 1)),), None, row)
    assert "m=2147483648 n=1 k=1 needs more" in str(ENGINE.supports(problem, Expression((Output("d", acc()),))))


def test_a_memory_limit_is_kept() -> None:
    problem = Problem.of("f32", m=4, n=4, k=1024, compute=Compute(memory_limit=0))
    assert {c.workspace_bytes for c in ENGINE.candidates(problem, plain(problem), 8)} <= {0}


def test_without_the_interpreter_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(errors.UnsupportedProblem, match="computes on CUDA devices, and the operands are on cpu"):
        eg.matmul(np.ones((2, 2), np.float16), np.ones((2, 2), np.float16), engine="triton")


def test_the_interpreter_must_be_chosen_before_triton_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    with pytest.raises(errors.EngineUnavailable, match="imported before TRITON_INTERPRET was set"):
        eg.matmul(np.ones((2, 3), np.float16), np.ones((3, 2), np.float16), engine="triton")


def test_auto_never_interprets() -> None:
    a = np.ones((2, 2), np.float32)
    with eg.Matmul(a, a) as product:
        assert product.plan()[0].engine == "cpu"


# ---------------------------------------------------------------- generated files


def test_the_text_is_a_file_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    problem = Problem.of("f32", m=24, n=40, k=56)
    expression = check(Expression((Output("d", acc()),), name="a_name_of_its_own"), problem)
    text = codegen.text(expression, orient(problem, expression)) + "# only here\n"
    loaded = module.load(expression.name, text)
    (path,) = (tmp_path / "cache" / "triton").iterdir()
    assert path.name.startswith("a_name_of_its_own-")
    assert path.read_text().startswith(text)
    assert loaded.__file__ == str(path)
    assert module.load(expression.name, text) is loaded


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    text = "import triton\n\n\n@triton.jit\ndef epilogue(x):\n    return x\n\n\n# nowhere\n"
    with pytest.warns(errors.EpigemmWarning, match="cannot store"):
        loaded = module.load("nowhere", text)
    assert Path(str(loaded.__file__)).read_text() == text

"""What the unfused engine plans: types of the product, copies, workspace, refusals, notes, candidates. No GPU, no library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import epigemm as eg
from epigemm import errors, layouts
from epigemm.engines import costs
from epigemm.engines.base import AbstractEngine, AbstractExecutable, Refusal
from epigemm.engines.cublaslt.engine import describe
from epigemm.engines.unfused.engine import UnfusedEngine
from epigemm.engines.unfused.recipe import BETA_INPUT, C_INPUT, recipe, shares_memory, ways
from epigemm.engines.unfused.rounding import lossless
from epigemm.engines.unfused.run import CudaDevice
from epigemm.enums import MatmulComputeType, MatmulEpilog
from epigemm.expression import named, simplify
from epigemm.expression.check import check
from epigemm.expression.nodes import Expression
from epigemm.expression.trace import as_epilogue
from epigemm.plans import Candidate
from epigemm.problem import Compute, Operand, Problem


def problem(dtype: str = "bf16", **more: Any) -> Problem:
    return Problem.of(dtype, **{"m": 40, "n": 48, "k": 64, "device": "cuda:0", **more})


def checked(given: Problem, function: Any, **inputs: Operand) -> tuple[Problem, Expression]:
    given = replace(given, inputs=tuple(inputs.items()))
    expression = simplify.simplify(as_epilogue(function).expression(len(given.b)))
    found = check(expression, given)
    return given, simplify.eager(found, given.d.dtype.name) if given.compute.rounding == "eager" else found


BIAS = Operand.dense("bf16", (1, 48))


def gelu_bias(x: Any, bias: Any) -> Any:
    return eg.gelu(x + bias)


# ---------------------------------------------------------------- where the product is stored


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (lambda x: x, True),
        (lambda x: eg.relu(x), True),
        (lambda x: -eg.abs(x), True),
        (lambda x: eg.outputs(x, same=x), True),
        (lambda x: eg.gelu(eg.cast(x, "bfloat16")), True),
        (lambda x: eg.outputs(x, total=eg.sum(eg.cast(x, "bfloat16"))), True),
        (lambda x: x * 2.0, False),  # 2 x is exact here, but what multiplies is not asked what by
        (lambda x: eg.gelu(x), False),
        (lambda x: eg.gelu(eg.cast(x, "float16")), False),
        (lambda x: eg.outputs(x, total=eg.sum(x)), False),
        (lambda x: eg.outputs(x, mask=eg.bitmask(x >= 0)), False),  # of -1e-50 the sign survives, the comparison does not
        (lambda x: eg.outputs(x, wide=eg.cast(x, "float32")), False),
        (lambda x: eg.where(x > 1.0, x, 0.0), False),
    ],
)
def test_where_rounding_before_is_rounding_after(function: Any, want: bool) -> None:
    _, expression = checked(problem(), function)
    assert lossless(expression, "bfloat16") is want


def test_a_selected_accumulator_is_rounded_once_also_in_place() -> None:
    bits = Operand.dense("uint8", (layouts.mask_bytes(40), 48), "col")
    given = replace(problem(order="col"), inputs=(("relu_aux", bits),))
    assert lossless(check(named.named(MatmulEpilog.DRELU), given), "bfloat16")
    assert not lossless(check(named.named(MatmulEpilog.DRELU_BGRAD), given), "bfloat16")


TF32 = int(MatmulComputeType.COMPUTE_32F_FAST_TF32)
HALF = Compute(compute_type=int(MatmulComputeType.COMPUTE_16F), scale_type="float16")


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (problem(), {"exact": "float32", "in_place": "bfloat16"}),
        (problem("f16"), {"exact": "float32", "in_place": "float16"}),
        (problem("f32"), {"exact": "float32"}),
        (problem("f32", compute=Compute(compute_type=TF32)), {"exact": "float32"}),
        (problem("f64", compute=Compute(compute_type=70, scale_type="float64")), {"exact": "float64"}),
        (problem(compute=Compute(strict=True)), {"exact": "float32"}),
        (problem("f16", compute=HALF), {"exact": "float16"}),
        (replace(problem(), d=Operand.dense("f16", (40, 48))), {"exact": "float32"}),
        (replace(problem(), d=Operand.dense("f32", (40, 48))), {"exact": "float32"}),
        (replace(problem("e4m3", n=48, m=48), d=Operand.dense("f16", (48, 48))), {"exact": "float32"}),  # widened: B is row-major
    ],
)
def test_ways(given: Problem, want: dict[str, str]) -> None:
    given, expression = checked(given, lambda x: eg.gelu(x))
    found = {way: recipe(given, expression, way).products[0].d.dtype.name for way in ways(given, expression)}
    assert found == want


def test_an_eager_problem_needs_no_wider_product_unless_a_bias_comes_first() -> None:
    eager = problem(compute=Compute(rounding="eager"))
    given, expression = checked(eager, lambda x: eg.gelu(x))
    assert ways(given, expression) == ("exact",)
    assert recipe(given, expression).in_d
    given, expression = checked(eager, gelu_bias, bias=BIAS)
    assert ways(given, expression) == ("exact", "in_place")
    assert recipe(given, expression).products[0].d.dtype.name == "float32"


def test_a_plain_product_is_only_that() -> None:
    given, expression = checked(problem(), lambda x: x)
    made = recipe(given, expression)
    assert (made.in_d, made.finish, made.scratch_bytes) == (True, None, 0)
    assert made.products[0].d == given.d


def test_d_is_not_written_twice_where_only_sums_of_operands_are_left() -> None:
    given = problem(order="col")
    expression = check(named.named(MatmulEpilog.BGRADB), given)
    made = recipe(given, expression)
    assert made.finish is not None
    assert made.finish.skip == ("d",)
    assert [t.name for t in made.finish.kernel.tensors] == ["b", "bgradb"]
    assert [(s.operand, size) for s, (_, (_, size)) in zip(made.sums, made.places, strict=True)] == [("b", 256)]


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize(
    ("strides", "why"),
    [((128, 2), "no matrix"), ((0, 1), "no matrix"), ((-64, 1), "no matrix"), ((1, 1), "no matrix"), ((72, 1), ""), ((1, 40), "")],
)
def test_strides_that_cublaslt_lacks_are_copied_once(strides: tuple[int, int], why: str) -> None:
    given, expression = checked(problem(), gelu_bias, bias=BIAS)
    given = replace(given, a=Operand(given.a.dtype, (40, 64), strides, 16))
    made = recipe(given, expression)
    assert [c.name for c in made.copies] == (["a"] if why else [])
    assert all(why in c.why for c in made.copies)
    assert not isinstance(describe(made.products[0], checked(problem(), lambda x: x)[1]), Refusal)


def test_batches_without_one_stride_are_copied_and_broadcast_ones_are_not() -> None:
    given, expression = checked(problem(batch=(2, 3)), lambda x: eg.gelu(x))
    swapped = Operand(given.a.dtype, (2, 3, 40, 64), (2560, 5120, 64, 1), 16)
    shared = Operand.dense("bf16", (64, 48))
    made = recipe(replace(given, a=swapped, b=(shared,)), expression)
    assert [(c.name, c.target.shape) for c in made.copies] == [("a", (2, 3, 40, 64))]
    partly = Operand.dense("bf16", (2, 1, 64, 48))
    made = recipe(replace(given, b=(partly,)), expression)
    assert [(c.name, c.target.shape) for c in made.copies] == [("b0", (2, 3, 64, 48))]


def test_a_conjugate_is_copied_to_where_it_is_transposed() -> None:
    given, expression = checked(problem("c64", compute=Compute(scale_type="complex64")), lambda x: x * 2.0)
    for order in ("row", "col"):
        conjugated = replace(Operand.dense("c64", (40, 64), order), conjugate=True)
        made = recipe(replace(given, a=conjugated), expression)
        assert [c.target.order for c in made.copies] == ([] if order == "col" else ["col"])
        assert made.products[0].a.conjugate


def test_eight_bit_operands_are_widened_where_no_8_bit_product_is() -> None:
    given, expression = checked(Problem.of("e4m3", m=48, n=64, k=32, device="cuda:0"), lambda x: eg.gelu(x))
    given = replace(given, d=Operand.dense("bf16", (48, 64)))
    expression = checked(given, lambda x: eg.gelu(x))[1]
    k_contiguous = replace(given, b=(Operand.dense("e4m3", (32, 64), "col"),))
    assert recipe(k_contiguous, expression).copies == ()
    made = recipe(given, expression)
    assert [c.target.dtype.name for c in made.copies] == ["float16", "float16"]
    assert made.widened
    assert made.finish is not None
    assert {t.name for t in made.finish.kernel.tensors} >= {"quantization_scale_a", "quantization_scale_b"}


# ---------------------------------------------------------------- C, alpha, beta, nothing


def test_c_goes_into_the_product_where_it_has_its_dtype() -> None:
    given, expression = checked(problem("f32", c=True), lambda x: eg.gelu(x))
    assert recipe(given, expression).c_read_by == "product"
    assert recipe(given, expression).products[0].c == given.c
    given, expression = checked(problem(c=True), lambda x: eg.gelu(x))
    made = recipe(given, expression)
    assert made.c_read_by == "pass"
    assert made.products[0].c is None
    assert made.finish is not None
    assert {C_INPUT, BETA_INPUT} <= {t.name for t in made.finish.kernel.tensors}
    assert recipe(given, expression, "in_place").c_read_by == "product"
    assert recipe(given, expression, reads_c=False).c_read_by == ""


def test_a_c_that_is_added_afterwards_keeps_the_product_wide() -> None:
    """Else the sum of a rounded product and C would be rounded again."""
    wide = Operand.dense("f16", (40, 48))
    given, expression = checked(replace(problem(), c=wide), lambda x: x)
    made = recipe(given, expression)
    assert (made.c_read_by, made.products[0].d.dtype.name) == ("pass", "float32")


@pytest.mark.parametrize("sizes", [{"m": 0}, {"n": 0}, {"k": 0}, {"batch": (0,)}])
def test_nothing_is_multiplied_where_there_is_nothing(sizes: dict[str, Any]) -> None:
    given, expression = checked(problem(c=True, **sizes), lambda x: eg.outputs(x, total=eg.sum(x)))
    made = recipe(given, expression)
    assert (made.products, made.copies, made.in_d) == ((), (), False)
    assert made.c_read_by == "pass"
    assert made.finish is not None
    assert (made.finish.kernel.blocks == 0) == ("batch" in sizes)


def test_alpha_zero_leaves_the_products_out() -> None:
    given, expression = checked(problem("f32"), lambda x: eg.exp(x))
    made = recipe(given, expression, product=False)
    assert made.products == ()
    assert dict(made.places) == {"zero": (0, 256)}


# ---------------------------------------------------------------- the workspace


def test_places_do_not_overlap_and_lines_are_aligned() -> None:
    given, expression = checked(problem(accumulators=2, m=33, n=17), lambda x, y: eg.outputs(eg.silu(x) * y, sums=eg.operand_sum("a")))
    made = recipe(given, expression)
    end = 0
    for _, (offset, size) in made.places:
        assert offset == end
        assert offset % 256 == 0
        end += size
    assert end == made.scratch_bytes
    assert [name for name, _ in made.places] == ["acc0", "acc1", "sum_a"]
    assert all(p.d.alignment_bytes >= 16 for p in made.products)
    assert dict(made.places)["acc0"][1] == layouts.round_up((32 * 20 + 17) * 4, 256)


def test_an_input_whose_memory_d_may_be_is_named() -> None:
    given, expression = checked(problem("f32"), lambda x, y: x + y, y=Operand.dense("f32", (40, 48)))
    assert shares_memory(given) == ("y",)
    assert recipe(given, expression).scratch_bytes == 0
    assert recipe(given, expression, apart=True).scratch_bytes == 40 * 48 * 4


# ---------------------------------------------------------------- the engine


class Products(AbstractEngine):
    """Describes, and refuses lines of less than some bytes."""

    name = "products"

    def __init__(self, least_alignment: int = 1, workspace_bytes: int = 4096) -> None:
        self.least_alignment, self.workspace_bytes = least_alignment, workspace_bytes

    def supports(self, problem: Problem, expression: Expression) -> Refusal | None:
        described = describe(problem, expression)
        if isinstance(described, Refusal):
            return described
        return Refusal("no algorithm.") if min(described.alignments) < self.least_alignment else None

    def candidates(self, problem: Problem, expression: Expression, limit: int) -> tuple[Candidate, ...]:
        return tuple(Candidate(self.name, (("rank", i),), self.workspace_bytes) for i in range(min(limit, 3)))

    def notes(self, problem: Problem, expression: Expression) -> tuple[str, ...]:
        return ()

    def prepare(self, problem: Problem, expression: Expression, candidate: Candidate) -> AbstractExecutable:
        raise NotImplementedError


class Device(CudaDevice):
    capability = (9, 0)  # type: ignore[assignment]


class OldDevice(CudaDevice):
    capability = (7, 5)  # type: ignore[assignment]


def test_candidates_are_exact_first_and_take_the_products_algorithms() -> None:
    engine = UnfusedEngine(Products(), Device)
    given, expression = checked(problem(), gelu_bias, bias=BIAS)
    found = engine.candidates(given, expression, 8)
    assert [(c["way"], c["product"]) for c in found] == [
        ("exact", 0),
        ("in_place", 0),
        ("exact", 1),
        ("exact", 2),
        ("in_place", 1),
        ("in_place", 2),
    ]
    assert [c.workspace_bytes for c in found[:2]] == [40 * 48 * 4 + 4096, 4096]
    assert len(engine.candidates(given, expression, 1)) == 1
    assert found[0].predicted_us > found[1].predicted_us > costs.product_us(replace(given, inputs=()))


def test_notes_say_what_is_copied_and_what_is_rounded_twice() -> None:
    engine = UnfusedEngine(Products(), Device)
    given, expression = checked(problem(c=True), gelu_bias, bias=BIAS)
    given = replace(given, b=(Operand(given.a.dtype, (64, 48), (96, 2), 4),))
    notes = engine.notes(given, expression)
    assert notes[0].startswith("B is copied into 6144 bytes of workspace: its strides (96, 2)")
    assert any(note.startswith("C is added by the epilogue's kernel") for note in notes)
    assert any(note.startswith("way=exact: the product is stored as float32 in the workspace") for note in notes)
    assert any(note.startswith("way=in_place rounds the product to bfloat16 before the epilogue") for note in notes)
    strict = replace(given, compute=Compute(strict=True))
    assert not any("in_place" in note for note in engine.notes(strict, expression))
    plain_product, plain_expression = checked(problem(), lambda x: x)
    assert engine.notes(plain_product, plain_expression) == ("way=exact: D is the product itself",)


def test_operands_for_which_there_is_no_algorithm_are_copied() -> None:
    engine = UnfusedEngine(Products(least_alignment=16), Device)
    given, expression = checked(problem("f32", k=63), lambda x: eg.exp(x))
    given = replace(given, a=Operand.dense("f32", (40, 63)), b=(Operand.dense("f32", (63, 48)),))
    given = replace(given, a=replace(given.a, alignment_bytes=4))
    assert engine.supports(given, expression) is None
    assert engine.notes(given, expression)[0].startswith("A is copied into 10080 bytes of workspace: no algorithm reads it")


def limited(given: Problem, limit: int) -> Problem:
    return replace(given, compute=replace(given.compute, memory_limit=limit))


def test_refusals() -> None:
    engine = UnfusedEngine(Products(workspace_bytes=0), Device)
    given, expression = checked(problem(), gelu_bias, bias=BIAS)
    needed = 40 * 48 * 4
    assert engine.supports(limited(given, needed), expression) is None
    (only,) = {c["way"] for c in engine.candidates(limited(given, needed - 1), expression, 8)}
    assert only == "in_place"
    strict = limited(replace(given, compute=Compute(strict=True)), needed - 1)
    assert str(engine.supports(strict, expression)).startswith(f"unfused needs {needed} bytes of workspace")
    assert "on cpu" in str(engine.supports(replace(given, device="cpu"), expression))
    assert "8.0" in str(UnfusedEngine(Products(), OldDevice).supports(given, expression))
    narrow = replace(given, c=Operand.dense("e4m3", (40, 48)))
    assert "no C of float8_e4m3fn" in str(engine.supports(narrow, expression))
    none = UnfusedEngine(Products(least_alignment=512), Device)
    assert str(none.supports(given, expression)) == "no algorithm."


def test_a_candidate_that_is_none_is_refused() -> None:
    engine = UnfusedEngine(Products(), Device)
    given, expression = checked(problem("f32"), lambda x: eg.exp(x))
    for config in ((("product", 0), ("way", "in_place")), (("product", 7), ("way", "exact"))):
        with pytest.raises(errors.AlgorithmError, match="unfused has no way="):
            engine.prepare(given, expression, Candidate("unfused", config))


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize("column", [0, 1, 2, 3])
def test_predictions_keep_the_order_of_what_was_measured(column: int) -> None:
    """Epilogs whose measured ratios are far apart are predicted in their order, and the ratios themselves to within a third."""
    dtype, k = [("bf16", 4096), ("bf16", 1024), ("f16", 4096), ("f16", 1024)][column]
    given = Problem.of(dtype, m=4096, n=16384, k=k, order="col")
    plain_us = costs.fused_us(given, MatmulEpilog.DEFAULT)
    for epilog, habit in costs.HABITS.items():
        predicted = costs.fused_us(given, epilog) / plain_us
        assert predicted == pytest.approx(habit.ratios[column], rel=0.34), epilog.name


def test_hidden_kernels_lose_against_a_kernel_of_our_own() -> None:
    bits = Operand.dense("uint8", (512, 16384), "col")
    given = replace(Problem.of("bf16", m=4096, n=16384, k=1024, order="col", device="cuda:0"), inputs=(("relu_aux", bits),))
    expression = check(named.named(MatmulEpilog.DRELU_BGRAD), given)
    ours = UnfusedEngine(Products(), Device).candidates(given, expression, 1)[0].predicted_us
    assert ours < costs.fused_us(given, MatmulEpilog.DRELU_BGRAD)
    biased, gelu = checked(given, gelu_bias, bias=Operand.dense("bf16", (4096, 1)))
    assert UnfusedEngine(Products(), Device).candidates(biased, gelu, 1)[0].predicted_us > costs.fused_us(biased, MatmulEpilog.GELU_BIAS)

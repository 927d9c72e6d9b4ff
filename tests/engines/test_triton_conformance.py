"""The Triton engine over the whole table of cases, its kernels interpreted on the CPU, through the public API."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

pytest.importorskip("triton")

import epigemm as eg
from epigemm.engines.triton.configs import BLOCKS, PERSISTENT
from epigemm.testing import conformance
from epigemm.testing.cases import Case, cases
from epigemm.testing.planted import just_beyond
from epigemm.testing.strategies import problems

ENGINE = "triton"

# What it multiplies. float64 and complex operands it refuses.
MULTIPLIED = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")

# The CPU engine's panels are made of problems that take the interpreter seconds: a few of them.
CASES = (*(c for c in cases() if c.topic != "panels"), *[c for c in cases() if c.topic == "panels"][::12])
FEW = [case for case in CASES if case.library == "numpy" and case.dtype in MULTIPLIED]


def is_refused(case: Case) -> bool:
    return case.dtype not in MULTIPLIED


@pytest.fixture(autouse=True)
def _without_torch(request: pytest.FixtureRequest) -> None:
    case = getattr(request.node, "callspec", None)
    if case is not None and getattr(case.params.get("case"), "library", "") == "torch":
        pytest.importorskip("torch")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    verdict = conformance.run_case(case, ENGINE)
    assert bool(verdict.refusal) == is_refused(case), verdict.refusal
    assert not is_refused(case) or f"an operand is {case.dtype}" in verdict.refusal


@pytest.mark.parametrize("mode", ["out", "stateful"])
@pytest.mark.parametrize("case", FEW[::13], ids=str)
def test_out_and_stateful(case: Case, mode: str) -> None:
    assert conformance.run_case(case, ENGINE, mode=mode).refusal == ""


def first(case: Case) -> dict[str, object]:
    """The settings that a case is run with."""
    tensors = case.build(np.random.default_rng(0))
    several = tuple(one.array for one in tensors.b)
    inputs = {name: one.array for name, one in tensors.inputs.items()} or None
    with eg.Matmul(tensors.a.array, several if len(several) > 1 else several[0], **conformance.keywords(case)) as product:
        algorithms = product.plan(epilog=conformance.epilog_of(case), epilog_inputs=inputs, engine=ENGINE)
        return dict(algorithms[0].candidate.config)


def aligned() -> list[Case]:
    """The table's epilogues over operands that tensor maps describe: several tiles, with tails along m."""
    whole = [c for c in CASES if c.topic in ("predefined", "user") and c.library == "numpy" and not c.c and c.batch_a == ()]
    found = {
        (c.epilogue, c.order): replace(c, topic="mapped", m=40, n=144, k=80, dtype="float16", layout_a="row", layout_b="row") for c in whole
    }
    made = [c for c in found.values() if c.epilogue != "complex_affine"]
    more = [replace(c, batch_a=(3,), batch_b=(), layout_b="col") for c in made[::4]]
    return [*made, *more, *(replace(c, batch_a=(), batch_b=(2,), layout_a="col", dtype="bfloat16") for c in made[1::4])]


@pytest.mark.parametrize("case", aligned(), ids=str)
def test_tensor_maps(case: Case) -> None:
    assert first(case)["kernel"] == PERSISTENT
    assert conformance.run_case(case, ENGINE).refusal == ""


def test_what_no_tensor_map_describes_goes_through_pointers() -> None:
    assert first(Case("pointers", 40, 144, 80, dtype="float16", layout_a="misaligned"))["kernel"] == BLOCKS
    assert first(Case("pointers", 40, 144, 80, dtype="float16", layout_b="stepped"))["kernel"] == BLOCKS
    assert first(Case("pointers", 40, 144, 81, dtype="float16"))["kernel"] == BLOCKS


@pytest.mark.parametrize("case", FEW[::41], ids=str)
def test_same_inputs_give_the_same_bits(case: Case) -> None:
    def outputs() -> dict[str, bytes]:
        seen: dict[str, bytes] = {}
        conformance.run_case(case, ENGINE, corrupt=lambda found: seen.update({k: v.tobytes() for k, v in found.items()}))
        return seen

    assert outputs() == outputs() != {}


@pytest.mark.parametrize("case", [c for c in FEW if c.topic in ("predefined", "user")][::13], ids=str)
def test_a_wrong_element_of_the_engine_is_found(case: Case) -> None:
    """The engine's own result with one element moved past its tolerance."""
    tensors = case.build(np.random.default_rng(0))

    def corrupt(outputs: dict[str, np.ndarray]) -> None:
        just_beyond(case, tensors, outputs)

    with pytest.raises(AssertionError, match="elements are wrong"):
        conformance.run_case(case, ENGINE, corrupt=corrupt)


@pytest.mark.parametrize("what", ["", "predefined", "tree", "several"])
def test_random_problems(what: str) -> None:
    """The same problems each time; those of the CPU engine's tests, fewer."""
    pytest.importorskip("torch")
    ran: list[Case] = []
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

    @settings(max_examples=40, derandomize=True, database=None, deadline=None, print_blob=True, suppress_health_check=slow)
    @given(problems(what))
    def is_right(case: Case) -> None:
        verdict = conformance.run_case(case, ENGINE, undecided=1.0)
        assert bool(verdict.refusal) == is_refused(case), verdict.refusal
        ran.append(case)

    is_right()
    assert sum(not is_refused(case) for case in ran) >= 20

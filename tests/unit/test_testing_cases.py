"""The table of cases reaches all that it is there for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import epigemm as eg
from epigemm import testing
from epigemm.compute_types import COMPUTE_RULES
from epigemm.expression.named import NAMED
from epigemm.expression.nodes import walk
from epigemm.expression.ops import OPS
from epigemm.testing.cases import Case, cases
from epigemm.testing.epilogues import PREDEFINED
from epigemm.testing.placing import LAYOUTS

CASES = cases()


def test_ids_are_unique_and_equal_cases_have_equal_ids() -> None:
    assert len({str(case) for case in CASES}) == len(CASES)
    assert len(set(CASES)) == len(CASES)


def test_every_op_is_in_a_user_epilogue_of_the_table() -> None:
    found = set()
    for row in {case.epilogue: case.row for case in CASES if case.row}.values():
        expression = eg.epilogue(row.function).expression(row.accumulators)
        found |= {node.op for node in walk(output.node for output in expression.outputs)}
    # sum_like stands in gradients of inputs whose extent is not known, which do not run.
    assert set(OPS) - found == {"sum_like"}


def test_all_fifteen_epilogs_in_several_types_orders_and_libraries() -> None:
    assert {name.upper() for name in PREDEFINED} == {member.name for member in NAMED}
    assert len(PREDEFINED) == 15
    for name in PREDEFINED:
        own = [case for case in CASES if case.epilogue == name.upper()]
        assert {case.dtype for case in own} >= {"float16", "bfloat16", "float32", "float64"}
        assert {case.result_order for case in own} == {"row", "col"}
        assert {case.library for case in own} == {"numpy", "torch"}
        assert any(case.c for case in own)


def test_every_pair_of_dtypes_and_every_result() -> None:
    assert {(case.dtype, case.b_dtype or case.dtype) for case in CASES} == set(COMPUTE_RULES)
    real = {"float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"}
    for a, b in COMPUTE_RULES:
        own = {case.stored_dtype for case in CASES if (case.dtype, case.b_dtype or case.dtype) == (a, b)}
        assert own >= (real if not a.startswith("complex") else {a})


def test_every_stride_kind_for_every_operand() -> None:
    for operand in ("layout_a", "layout_b", "layout_c", "layout_in"):
        assert {getattr(case, operand) for case in CASES} == set(LAYOUTS), operand


def test_sizes_batches_c_and_scalars() -> None:
    for axis in "mnk":
        assert {getattr(case, axis) for case in CASES} >= {0, 1}, axis
        assert any(getattr(case, axis) % 2 and getattr(case, axis) > 30 for case in CASES), axis
    assert {case.c for case in CASES} == {"", "mn", "m1", "1n", "11"}
    assert {case.alpha for case in CASES} >= {None, 0.0, 0.5}
    assert {case.beta for case in CASES} >= {None, 0.0, 0.25}
    assert {(bool(case.batch_a), bool(case.batch_b)) for case in CASES} == {(a, b) for a in (False, True) for b in (False, True)}
    assert not any(case.m == case.n == case.k and case.m > 1 for case in CASES)


def test_building_is_deterministic_and_operands_lie_as_asked() -> None:
    case = Case("one", 4, 6, 5, "residual_gelu", layout_a="padded", layout_in="col", c="m1", beta=1.0, dtype="bfloat16")
    first, second = (case.build(np.random.default_rng(0)) for _ in range(2))
    assert set(first.all()) == {"a", "b0", "c", "bias", "residual"}
    for name, tensor in first.all().items():
        assert tensor.array.tobytes() == second.all()[name].array.tobytes()
    assert first.a.array.strides == (16, 2)
    assert first.c is not None
    assert first.c.array.shape == (4, 1)
    assert first.inputs["residual"].array.strides == (2, 8)


def test_result_order_follows_option_then_c_then_epilog_then_a() -> None:
    base = {"topic": "x", "m": 4, "n": 6, "k": 5}
    assert Case(**base).result_order == "row"  # type: ignore[arg-type]
    assert Case(**base, layout_a="col").result_order == "col"  # type: ignore[arg-type]
    assert Case(**base, epilogue="BIAS").result_order == "col"  # type: ignore[arg-type]
    assert Case(**base, epilogue="BIAS", c="mn").result_order == "row"  # type: ignore[arg-type]
    assert Case(**base, epilogue="BIAS", c="m1").result_order == "col"  # type: ignore[arg-type]
    assert Case(**base, epilogue="BIAS", c="mn", order="col").result_order == "col"  # type: ignore[arg-type]


def test_the_reference_shares_no_code_with_the_engines() -> None:
    """What decides is written again: it imports neither an engine nor the ops' own formulas."""
    folder = Path(testing.__file__).parent
    for name in ("formats.py", "bounded.py", "reference.py", "numeric.py"):
        text = (folder / name).read_text()
        lines = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
        ours = [line for line in lines if "epigemm" in line and "epigemm.testing" not in line]
        assert ours in ([], ["from epigemm.expression.nodes import Expression, Node"]), (name, ours)

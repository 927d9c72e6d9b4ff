"""The CPU engine over the whole table of cases, through the public API in each of its three forms."""

from __future__ import annotations

import numpy as np
import pytest

from epigemm.testing import conformance
from epigemm.testing.cases import Case, cases
from epigemm.testing.planted import just_beyond

ENGINE = "cpu"

# What the CPU engine does not run. It is the meaning of every plan: nothing.
REFUSED: frozenset[str] = frozenset()

CASES = cases()


@pytest.fixture(autouse=True)
def _without_torch(request: pytest.FixtureRequest) -> None:
    case = getattr(request.node, "callspec", None)
    if case is not None and getattr(case.params.get("case"), "library", "") == "torch":
        pytest.importorskip("torch")


@pytest.mark.parametrize("mode", ["stateless", "out", "stateful"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, mode: str) -> None:
    verdict = conformance.run_case(case, ENGINE, mode=mode)
    assert bool(verdict.refusal) == (str(case) in REFUSED), verdict.refusal


def outputs_of(case: Case) -> dict[str, bytes]:
    seen: dict[str, bytes] = {}
    conformance.run_case(case, ENGINE, corrupt=lambda outputs: seen.update({k: v.tobytes() for k, v in outputs.items()}))
    return seen


@pytest.mark.parametrize("case", [case for case in CASES if case.library == "numpy"][::25], ids=str)
def test_same_inputs_give_the_same_bits(case: Case) -> None:
    assert outputs_of(case) == outputs_of(case) != {}


REAL = [c for c in CASES if c.topic in ("predefined", "user") and not c.dtype.startswith("complex")]


@pytest.mark.parametrize("case", REAL[::7], ids=str)
def test_a_wrong_element_of_the_engine_is_found(case: Case) -> None:
    """The engine's own result with one element moved past its tolerance."""
    tensors = case.build(np.random.default_rng(0))

    def corrupt(outputs: dict[str, np.ndarray]) -> None:
        just_beyond(case, tensors, outputs)

    with pytest.raises(AssertionError, match="elements are wrong"):
        conformance.run_case(case, ENGINE, corrupt=corrupt)

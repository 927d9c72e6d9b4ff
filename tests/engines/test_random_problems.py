"""Random problems over the whole space on the CPU engine: at least 2,000 in CI, the same ones each time.

`EPIGEMM_TEST_EXAMPLES=20` draws twenty times as many, new ones at each run. What fails is printed with a blob that runs it again.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings

from epigemm.testing import conformance
from epigemm.testing.cases import Case
from epigemm.testing.numeric import UNDECIDED_SHARE
from epigemm.testing.strategies import problems

pytest.importorskip("torch")

FACTOR = int(os.environ.get("EPIGEMM_TEST_EXAMPLES", "1"))
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

# What is drawn -> how many examples; together they are more than 2,000.
EXAMPLES = {"": 800, "predefined": 1000, "tree": 1600, "several": 600}
assert sum(EXAMPLES.values()) >= 2000


def run(what: str) -> None:
    """Draws and runs the examples of one kind; the reference must decide nearly all of their elements."""
    verdicts: list[conformance.Verdict] = []

    @settings(
        max_examples=EXAMPLES[what] * FACTOR,
        derandomize=FACTOR == 1,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=SLOW,
    )
    @given(problems(what))
    def is_right(case: Case) -> None:
        # One of the API's three forms, which the case itself picks.
        mode = ("stateless", "out", "stateful")[sum(map(ord, str(case))) % 3]
        # One small example may be undecided altogether, say where two equal errors meet in a comparison.
        verdict = conformance.run_case(case, "cpu", mode=mode, undecided=1.0)
        assert verdict.refusal == ""
        verdicts.append(verdict)

    is_right()
    assert len(verdicts) >= EXAMPLES[what]
    assert sum(v.undecided for v in verdicts) < UNDECIDED_SHARE * sum(v.elements for v in verdicts)


def test_products() -> None:
    run("")


def test_predefined_epilogs() -> None:
    run("predefined")


def test_expression_trees() -> None:
    run("tree")


def test_several_accumulators() -> None:
    run("several")

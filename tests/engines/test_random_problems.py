"""Random problems over the whole space on the CPU engine: at least 2,000 in CI, the same ones each time.

`EPIGEMM_TEST_EXAMPLES=20` draws twenty times as many, new ones at each run. What fails is printed with a blob that runs it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings

from epigemm.testing import conformance
from epigemm.testing.cases import Case
from epigemm.testing.strategies import problems

pytest.importorskip("torch")

FACTOR = int(os.environ.get("EPIGEMM_TEST_EXAMPLES", "1"))
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

# What is drawn -> how many examples; together they are the 2,000 and more.
EXAMPLES = {"": 500, "predefined": 600, "tree": 800, "several": 300}
assert sum(EXAMPLES.values()) >= 2000


def examples(what: str) -> Callable[[Callable[[Case], None]], Callable[[], None]]:
    def decorate(test: Callable[[Case], None]) -> Callable[[], None]:
        run = settings(
            max_examples=EXAMPLES[what] * FACTOR,
            derandomize=FACTOR == 1,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=SLOW,
        )
        made: Callable[[], None] = run(given(problems(what))(test))
        return made

    return decorate


def right(case: Case) -> None:
    """The engine is right in one of the API's three forms, which the case itself picks."""
    mode = ("stateless", "out", "stateful")[sum(map(ord, str(case))) % 3]
    # What two errors beside each other leave undecided in one small example says nothing; over all examples it is bounded below.
    verdict = conformance.run_case(case, "cpu", mode=mode, undecided=1.0)
    assert verdict.refusal == ""


@examples("")
def test_products(case: Case) -> None:
    right(case)


@examples("predefined")
def test_predefined_epilogs(case: Case) -> None:
    right(case)


@examples("tree")
def test_expression_trees(case: Case) -> None:
    right(case)


@examples("several")
def test_several_accumulators(case: Case) -> None:
    right(case)

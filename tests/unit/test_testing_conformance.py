"""`run_case` finds what an engine does wrong to memory and to its promises: the CPU engine, wrapped, with one mischief each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from epigemm import engines, errors
from epigemm.engines.base import AbstractEngine, AbstractExecutable, Call, Refusal
from epigemm.expression.nodes import Expression
from epigemm.plans import Candidate
from epigemm.problem import Problem
from epigemm.testing.cases import Case
from epigemm.testing.conformance import Verdict, refused, run_case

CPU = engines.get("cpu")
Mischief = Callable[[Call, Callable[[], None]], None]


class WrappedExecutable(AbstractExecutable):
    def __init__(self, inner: AbstractExecutable, mischief: Mischief) -> None:
        self.inner, self.mischief = inner, mischief

    def run(self, call: Call) -> None:
        self.mischief(call, lambda: self.inner.run(call))


class WrappedEngine(AbstractEngine):
    """The CPU engine with a mischief around each run, or a refusal."""

    name = "cpu"

    def __init__(self, mischief: Mischief, refusal: str = "") -> None:
        self.mischief, self.refusal = mischief, refusal

    def supports(self, problem: Problem, expression: Expression) -> Refusal | None:
        return Refusal(self.refusal) if self.refusal else CPU.supports(problem, expression)

    def candidates(self, problem: Problem, expression: Expression, limit: int) -> tuple[Candidate, ...]:
        return CPU.candidates(problem, expression, limit)

    def prepare(self, problem: Problem, expression: Expression, candidate: Candidate) -> AbstractExecutable:
        return WrappedExecutable(CPU.prepare(problem, expression, candidate), self.mischief)

    def notes(self, problem: Problem, expression: Expression) -> tuple[str, ...]:
        return CPU.notes(problem, expression)


def honest(call: Call, run: Callable[[], None]) -> None:
    run()


def writes_past_the_end(call: Call, run: Callable[[], None]) -> None:
    run()
    behind = np.lib.stride_tricks.as_strided(call.d, (*call.d.shape[:-1], call.d.shape[-1] + 1), call.d.strides)
    behind[..., -1, -1] = 0


def writes_before_the_start(call: Call, run: Callable[[], None]) -> None:
    run()
    address = call.d.__array_interface__["data"][0]
    np.ctypeslib.as_array((np.ctypeslib.ctypes.c_byte * 1).from_address(address - 1))[0] ^= 1


def changes_a(call: Call, run: Callable[[], None]) -> None:
    run()
    call.a[0, 0] = np.nextafter(call.a[0, 0], np.float32(np.inf))  # within every tolerance


def changes_an_input(call: Call, run: Callable[[], None]) -> None:
    run()
    call.inputs["bias"][0, 0] = np.nextafter(call.inputs["bias"][0, 0], np.float32(np.inf))


def leaves_the_last_row(call: Call, run: Callable[[], None]) -> None:
    kept = call.d[-1].copy()
    run()
    call.d[-1] = kept


def reads_past_a(call: Call, run: Callable[[], None]) -> None:
    """The last row of A one element further on, where the poison lies."""
    run()
    further = np.lib.stride_tricks.as_strided(call.a[-1, 1:], (call.a.shape[1],), (call.a.strides[1],))
    call.d[-1] = further @ call.b[0]


RUNS = itertools.count()


def differs_each_time(call: Call, run: Callable[[], None]) -> None:
    run()
    if next(RUNS) % 2:
        call.d[0, 0] = np.nextafter(call.d[0, 0], np.float32(np.inf))


CASE = Case("planted", 11, 7, 5, "bias_vector")

MISCHIEF: dict[str, tuple[Mischief, str, str]] = {
    "writes past the end": (writes_past_the_end, "out", "bytes outside the tensor were written"),
    "writes before the start": (writes_before_the_start, "out", "1 bytes outside the tensor were written, the first -1 bytes"),
    "changes a": (changes_a, "stateless", "was changed"),
    "changes an input": (changes_an_input, "stateless", "was changed"),
    "leaves the last row": (leaves_the_last_row, "out", "7 of 77 elements are wrong"),
    "reads past a": (reads_past_a, "stateless", "7 of 77 elements are wrong"),
    "differs each time": (differs_each_time, "stateful", "of the second execution of"),
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(mischief: Mischief, refusal: str = "") -> None:
        engine = WrappedEngine(mischief, refusal)
        monkeypatch.setattr(engines, "get", lambda name: engine)
        from epigemm import api

        api._plans.clear()  # a plan of the honest engine would run instead

    return use


@pytest.fixture(autouse=True)
def _forget_plans() -> Any:
    yield
    from epigemm import api

    api._plans.clear()


@pytest.mark.parametrize("name", MISCHIEF)
def test_mischief_is_found(planted: Callable[..., None], name: str) -> None:
    mischief, mode, message = MISCHIEF[name]
    planted(mischief)
    with pytest.raises(AssertionError, match=message):
        run_case(CASE, "cpu", mode=mode)


@pytest.mark.parametrize("mode", ["stateless", "out", "stateful"])
def test_an_honest_wrapped_engine_passes(planted: Callable[..., None], mode: str) -> None:
    planted(honest)
    verdict = run_case(CASE, "cpu", mode=mode)
    assert verdict == Verdict(CASE, elements=77)
    assert refused(CASE, "cpu") == ""


def test_a_refusal_is_a_verdict_and_says_why(planted: Callable[..., None]) -> None:
    planted(honest, "cpu cannot add on Sundays.")
    verdict = run_case(CASE, "cpu")
    assert "cannot add on Sundays" in verdict.refusal
    assert "cannot add on Sundays" in refused(CASE, "cpu")


def test_an_error_that_is_no_refusal_is_not_swallowed() -> None:
    with pytest.raises(errors.OptionError, match="nowhere"):
        run_case(CASE, "nowhere")

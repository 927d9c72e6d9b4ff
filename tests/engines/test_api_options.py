"""What each option and preference does: on the CPU in fact, on a GPU up to the libraries, which are stood in for."""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import epigemm as eg
from epigemm import api, execution
from epigemm.engines.cpu import engine as cpu
from epigemm.engines.cublaslt import engine as lt
from epigemm.engines.cublaslt import library
from epigemm.engines.cuda import libraries
from epigemm.expression.check import check
from epigemm.expression.nodes import Expression, Output, acc
from epigemm.linalg.advanced import MatmulOptions, MatmulPlanPreferences
from epigemm.problem import Compute, Problem

A, B = (np.random.default_rng(seed).standard_normal(shape).astype("f4") for seed, shape in ((1, (6, 5)), (2, (5, 4))))
ON_GPU = Problem.of("f16", m=16, n=24, k=32, order="col", device="cuda:1")
PLAIN = check(Expression((Output("d", acc()),)), ON_GPU)
PHASES = ["SPECIFICATION", "PLANNING", "EXECUTION"]


class Allocator:
    def memalloc(self, size: int) -> Any:
        raise AssertionError("nothing allocates on a device here")


class Told(logging.Handler):
    """A logger of its own and the phases that it was told of."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[str] = []
        self.logger = logging.Logger("told", logging.INFO)
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        assert record.getMessage().startswith("= ")
        self.phases.append(record.getMessage().split()[1])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A driver that writes down what it is asked."""
    asked: list[tuple[Any, ...]] = []
    stand_in = SimpleNamespace(
        device_total_bytes=lambda index: 1000,
        synchronize=lambda index, stream: asked.append(("synchronize", index, stream)),
        release_workspaces=lambda: asked.append(("release",)),
    )
    monkeypatch.setattr(libraries, "open_driver", lambda: stand_in)
    return asked


# ---------------------------------------------------------------- on the CPU


def test_the_logger_is_told_of_each_phase() -> None:
    told = Told()
    api._plans.clear()
    eg.matmul(A, B, options={"logger": told.logger})
    assert told.phases == PHASES[1:]
    eg.matmul(A, B, options=MatmulOptions(logger=told.logger))
    eg.matmul(A, B, options={"logger": told.logger})  # planned before
    assert told.phases == [*PHASES[1:], *PHASES[1:], "EXECUTION"]


def test_a_matmuls_logger_is_told_and_may_be_replaced() -> None:
    first, second = Told(), Told()
    with eg.Matmul(A, B, options={"logger": first.logger}) as mm:
        mm.plan()
        mm.execute()
        assert first.phases == PHASES
        mm.plan(options={"logger": second.logger})
        mm.execute()
    assert (first.phases, second.phases) == (PHASES, PHASES[1:])


@pytest.mark.parametrize(
    "options",
    [
        {"handle": 5},
        {"blocking": True},
        {"allocator": Allocator()},
        {"sm_count_target": 3},
        {"fast_accumulation": True},
        {"strict": True},
        {"memory_limit": "1%"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_for_gpus_changes_nothing_here(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert eg.matmul(A, B, options=options).tobytes() == eg.matmul(A, B).tobytes()


# ---------------------------------------------------------------- on a GPU, whose libraries are stood in for


def test_preferences_limit_what_cublaslt_may_offer(driver: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[library.Preferences] = []

    def heuristic(descriptor: Any, device: str, limit: int, preferences: library.Preferences) -> tuple[library.Result, ...]:
        asked.append(preferences)
        return ()

    monkeypatch.setattr(library, "heuristic", heuristic)
    monkeypatch.setattr(libraries, "open_cublaslt", lambda: None)
    preferences = MatmulPlanPreferences(reduction_scheme_mask=1, max_waves_count=2.5, numerical_impl_mask=3)
    compute = execution._compute(ON_GPU, MatmulOptions(memory_limit="50%"), preferences)
    problem = Problem.of("f16", m=16, n=24, k=32, order="col", device="cuda:1", compute=compute)
    refusal = lt.CublasLtEngine().supports(problem, PLAIN)
    assert asked[0] == library.Preferences(500, 1, 2.5, 3)
    assert refusal is not None


def test_defaults_limit_nothing_but_the_workspace(driver: list[Any]) -> None:
    compute = execution._compute(ON_GPU, MatmulOptions(), MatmulPlanPreferences())
    assert library.Preferences.of(compute) == library.Preferences(workspace_bytes=800)
    assert compute == Compute(scale_type=ON_GPU.compute.scale_type, memory_limit=800)


def test_a_given_handle_launches(driver: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    class Matmul:
        def __init__(self, *_: Any) -> None: ...

        def check(self, device: int, algorithm: bytes, handle: int = 0) -> tuple[Any, ...]:
            given.append(handle)
            return algorithm, 0, 0, 0.0

    def launch(*arguments: Any) -> Any:
        given.append(arguments[-2])
        return SimpleNamespace(run=None)

    core = SimpleNamespace(LtMatmul=Matmul, LtLaunch=launch, Scalars=lambda *_: None)
    monkeypatch.setattr(libraries, "open_cublaslt", lambda: core)
    monkeypatch.setattr(lt.algorithms, "raw_of", lambda candidate: bytes(64))
    for options, expected in ((MatmulOptions(handle=0x77), 0x77), (MatmulOptions(), 0)):
        given.clear()
        compute = execution._compute(ON_GPU, options, MatmulPlanPreferences())
        problem = Problem.of("f16", m=16, n=24, k=32, order="col", device="cuda:1", compute=compute)
        lt.CublasLtEngine().prepare(problem, PLAIN, None)  # type: ignore[arg-type]
        assert given == [expected, expected]


@pytest.mark.parametrize(("blocking", "waits"), [(True, 1), ("auto", 0)])
def test_blocking_waits_for_the_stream(blocking: Any, waits: int, driver: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[str, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(execution, "wait", lambda device, stream: waited.append((device, stream)))
        with eg.Matmul(A, B, options={"blocking": blocking}) as mm:
            mm.plan()
            mm.execute(stream=0x30)
            mm.autotune(iterations=1)  # scratch runs wait for nothing
    assert waited == [("cpu", 0x30)] * waits
    execution.wait("cuda:1", 0x30)
    execution.wait("cpu", 0x30)
    assert driver == [("synchronize", 1, 0x30)]


def test_workspaces_are_given_back_where_that_is_asked(driver: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(execution, "release_workspaces", released.append)
        with eg.Matmul(A, B) as mm:
            mm.plan()
            mm.execute()
            assert released == []
            mm.execute(release_workspace=True)
            mm.autotune(iterations=1, release_workspace=True)
    assert released == ["cpu", "cpu"]
    execution.release_workspaces("cpu")
    assert driver == []
    execution.release_workspaces("cuda:0")
    assert driver == [("release",)]


def test_applicable_algorithm_ids_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(cpu.ENGINE), "applicable_algorithm_ids", lambda self, problem, expression, limit: [66, 24][:limit])
    with eg.Matmul(A, B) as mm:
        mm.plan()
        assert mm.applicable_algorithm_ids(1) == [66]
        assert mm.applicable_algorithm_ids() == [66, 24]

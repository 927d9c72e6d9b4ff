"""Algorithm as a user stores and changes it; with the stand-in cuBLASLt in test_native_launch.py."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

import epigemm as eg
from epigemm import errors
from epigemm.plans import Candidate


def product(m: int = 8, epilog: str | None = None) -> tuple[eg.Matmul, eg.Algorithm]:
    mm = eg.Matmul(np.ones((m, 4), np.float32), np.ones((4, 6), np.float32))
    return mm, mm.plan(epilog=epilog)[0]


def test_it_travels_as_json():
    _, algorithm = product()
    algorithm.panel_rows = 4
    restored = eg.Algorithm.from_data(json.loads(json.dumps(algorithm.to_data())))
    assert restored.candidate == algorithm.candidate
    assert restored.to_data() == algorithm.to_data()
    mm, _ = product()
    (taken,) = mm.plan(algorithms=[restored])
    assert (taken, taken.panel_rows) == (restored, 4)
    np.testing.assert_array_equal(mm.execute(), np.full((8, 6), 4, np.float32))
    a, b = np.ones((8, 4), np.float32), np.ones((4, 6), np.float32)
    np.testing.assert_array_equal(eg.matmul(a, b, algorithm=restored), a @ b)


@pytest.mark.parametrize(("m", "epilog"), [(9, None), (8, "relu")])
def test_it_is_refused_for_another_problem(m, epilog):
    restored = eg.Algorithm.from_data(product()[1].to_data())
    mm, before = product(m, epilog)
    with pytest.raises(errors.AlgorithmError, match=r"does not fit: its problem is .*\n  Plan or autotune again"):
        mm.plan(algorithms=[restored], epilog=epilog)
    assert mm.algorithms is not None and mm.algorithms[0] is before
    with pytest.raises(errors.AlgorithmError, match="its problem is"):
        eg.matmul(np.ones((m, 4), np.float32), np.ones((4, 6), np.float32), epilog=epilog, algorithm=restored)


def test_it_is_refused_by_another_version():
    data = product()[1].to_data()
    restored = eg.Algorithm.from_data({**data, "versions": {"epigemm": "0.0.1"}})
    with pytest.raises(errors.AlgorithmError, match=r"its versions is {.epigemm.: .0\.0\.1.}"):
        product()[0].plan(algorithms=[restored])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 0}, "its schema is 0, and 1 is needed"),
        ({"settings": None}, "damaged: settings=None"),
        ({"workspace_bytes": "many"}, "damaged: .*workspace_bytes='many'"),
    ],
)
def test_damaged_data(change, words):
    data = product()[1].to_data()
    with pytest.raises(errors.AlgorithmError, match=words):
        eg.Algorithm.from_data({**data, **change})
    with pytest.raises(errors.AlgorithmError, match="damaged: schema, engine, problem or versions are missing"):
        eg.Algorithm.from_data({"settings": {}})


def test_a_pickled_one_is_bound_by_plan():
    mm, algorithm = product()
    restored = pickle.loads(pickle.dumps(algorithm))
    assert restored.candidate == algorithm.candidate
    with pytest.raises(errors.AlgorithmError, match="does not know the problem"):
        restored.to_data()
    mm.plan(algorithms=[restored])
    assert restored.to_data() == algorithm.to_data()


def test_numbers_and_what_cannot_be_set():
    mm, algorithm = product()
    assert [x.algorithm_id for x in mm.algorithms or ()] == mm.applicable_algorithm_ids(limit=len(mm.algorithms or ()))
    assert algorithm.capabilities == ("panel_columns", "panel_rows", "threads")
    for name in ("algorithm_id", "engine", "capabilities"):
        with pytest.raises(errors.AlgorithmError, match=f"{name} of an algorithm cannot be changed"):
            setattr(algorithm, name, 1)
    algorithm.panel_rows = algorithm.panel_rows + 5
    assert algorithm.algorithm_id == -1
    with pytest.raises(AttributeError, match=r"has no .tile.\. It has: panel_columns"):
        algorithm.tile = (64, 64)
    with pytest.raises(errors.AlgorithmError, match="does not know"):
        _ = eg.Algorithm(Candidate("cpu")).algorithm_id

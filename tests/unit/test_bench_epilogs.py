"""The suite of epilogs as far as it goes without a GPU: its rows as JSON and as text, and what it refuses to time."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from epigemm.bench import epilogs
from epigemm.bench.epilogs import BARE, EXACT, FUSED, IN_PLACE, Row, Shape
from epigemm.enums import MatmulEpilog

SHAPE = Shape("bfloat16", 1024)


def row() -> Row:
    times = {BARE: [200.0, 210.0, 190.0], FUSED: [600.0, 630.0, 500.0], EXACT: [300.0, 315.0, 285.0]}
    return Row(SHAPE, "DRELU_BGRAD", "unfused(product=0, way=exact), because", {FUSED: 609.5}, {IN_PLACE: "no"}, times)


def test_a_row_as_json_and_as_text() -> None:
    data = json.loads(json.dumps(row().as_json()))
    assert data["shape"] == {"dtype": "bfloat16", "k": 1024, "compute": "", "m": 4096, "n": 16384}
    assert data["median_us"] == {BARE: 200.0, FUSED: 600.0, EXACT: 300.0}
    assert data["ratio"][EXACT] == {"median": 1.5, "low": 1.5, "high": 1.5}
    assert epilogs.line(row()) == (
        "bfloat16 m=4096 n=16384 k=1024 DRELU_BGRAD    fused 3.00 [2.63, 3.00], unfused exact 1.50 [1.50, 1.50], "
        "unfused in_place refused; auto: unfused"
    )


class FakeTensor:
    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, np.float64)

    def __getitem__(self, at: Any) -> FakeTensor:
        return FakeTensor(self.values[at])

    def double(self) -> FakeTensor:
        return self

    cpu = double

    def numpy(self) -> Any:
        return self.values

    def dim(self) -> int:
        return self.values.ndim


@pytest.mark.parametrize(("error", "named"), [(1.0, "D is off by 1"), (float("nan"), "D is off by nan")])
def test_a_wrong_result_is_not_timed(error: float, named: str) -> None:
    want = np.random.default_rng(0).normal(size=(16, 8))
    wrong = want.copy()
    wrong[3, 4] += error
    operands: Any = SimpleNamespace(shape=SHAPE, sliced=lambda epilog: want)
    runs: Any = {FUSED: lambda: FakeTensor(want), EXACT: lambda: FakeTensor(wrong)}
    epilogs.verify(operands, MatmulEpilog.RELU, {FUSED: runs[FUSED]})
    with pytest.raises(AssertionError, match=f"unfused exact: {named}"):
        epilogs.verify(operands, MatmulEpilog.RELU, runs)


def test_a_wrong_sum_is_not_timed() -> None:
    want = np.ones((16, 8))
    operands: Any = SimpleNamespace(shape=SHAPE, sliced=lambda epilog: want)
    sums = {FUSED: np.full(16, 100.0), EXACT: np.full(16, 120.0)}
    runs: Any = {who: lambda s=s: (FakeTensor(want), {"drelu_bgrad": FakeTensor(s)}) for who, s in sums.items()}
    with pytest.raises(AssertionError, match="drelu_bgrad differs"):
        epilogs.verify(operands, MatmulEpilog.DRELU_BGRAD, runs)

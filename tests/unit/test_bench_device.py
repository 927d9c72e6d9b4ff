"""The suites on a GPU without one: turns, bars, what fails, the table."""

from __future__ import annotations

import json

import pytest

from epigemm.bench import device, report
from epigemm.bench.device import Bar, Group


def _group():
    group = Group("a shape", "us", bars=(Bar("ours", "theirs", 1.0), Bar("ours", "gone", 1.0), Bar("theirs", "ours")))
    clocks = {"ours": iter([9.0, 1.0, 2.0, 3.0]), "theirs": iter([9.0, 2.0, 2.0, 2.0])}
    runs = {name: lambda clock=clock: next(clock) for name, clock in clocks.items()}

    def gone():
        raise RuntimeError("no such library")

    device.time_in_turn(group, {**runs, "gone": gone}, 3)
    return group


def test_rounds_are_kept_but_for_the_first_and_a_failure_is_told():
    group = _group()
    assert group.times == {"ours": [1.0, 2.0, 3.0], "theirs": [2.0, 2.0, 2.0]}
    assert group.failed == {"gone": "RuntimeError: no such library"}


def test_a_bar_judges_the_median_of_the_ratios():
    judged = _group().judged()
    assert [(bar["row"], bar["other"], bar["holds"]) for bar in judged] == [("ours", "theirs", True), ("theirs", "ours", None)]
    assert judged[0]["ratio"] == {"median": 1.0, "low": 0.5, "high": 1.5}
    group = _group()
    group.bars = (Bar("ours", "theirs", 0.95), Bar("ours", "theirs", 1 / 20))
    assert [bar["holds"] for bar in group.judged()] == [False, False]


def test_a_small_bar_has_a_small_slack():
    group = Group("a shape", "us", {"a": [5.2], "b": [100.0]}, bars=(Bar("a", "b", 1 / 20),))
    assert group.judged()[0]["holds"] is False


def test_a_maker_that_fails_is_told():
    group = Group("a shape", "us")
    assert device.made(group, {"one": lambda: 1, "two": lambda: 1 / 0}) == {"one": 1}
    assert group.failed == {"two": "ZeroDivisionError: division by zero"}


def test_json_and_text():
    group = _group()
    group.facts["ours"] = {"percent_of_peak": 70.1}
    group.more.append({"what": "MiB beyond the outputs", "value": 3.0, "bar": 2.0, "holds": False})
    data = device.as_json("headline", "cublaslt", 3, [group], {"gpu": "H200"})
    assert data["holds"] is False
    assert json.loads(report.text(data)) == data
    text = "\n".join(device.lines(data))
    for part in ("percent_of_peak 70.1", "failed: RuntimeError", "ours / theirs = 1.000 (0.500–1.500), bar 1.000 holds", "MISSED"):
        assert part in text


def test_without_a_gpu_the_suites_say_so():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(RuntimeError, match="measures on a GPU"):
        device.torch_with_gpu()

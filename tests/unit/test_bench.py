"""The benchmark verifies before it times, times in turn, judges by the median of ratios and writes stamped results."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from epigemm.bench import baselines, measure, memory, report, stamp
from epigemm.bench.baselines import NUMPY, OURS, TORCH, Data
from epigemm.bench.measure import Ratio, Row
from epigemm.bench.suites import SUITES, Case

CASE = Case("bias_relu", 40, 24, 96, "float32", 0.9)


@pytest.fixture
def data():
    return Data.normal(CASE.m, CASE.n, CASE.k, CASE.dtype)


# ---------------------------------------------------------------- verification


@pytest.mark.parametrize("epilogue", list(baselines.EPILOGUES))
def test_every_contender_computes_the_same(data, epilogue):
    case = Case(epilogue, CASE.m, CASE.n, CASE.k, "float32", None)
    runs = baselines.contenders(epilogue, data, "cpu")
    assert {OURS, NUMPY} <= set(runs)
    for who, run in runs.items():
        assert 0 < measure.verify(case, data, np.asarray(run()), who) < 1


def test_one_wrong_element_is_found(data):
    result = baselines.numpy_steps("bias_relu", data)()
    result[33, 7] += 1e-3
    with pytest.raises(AssertionError, match=r"planted: d\[33, 7\] is .*, not "):
        measure.verify(CASE, data, result, "planted")


def test_what_was_never_written_is_found(data):
    result = baselines.numpy_steps("bias_relu", data)()
    result[0, 0] = np.nan
    with pytest.raises(AssertionError, match=r"d\[0, 0\] is nan"):
        measure.verify(CASE, data, result, "planted")


def test_operands_rounded_to_tf32_are_found(data):
    """The tolerance is that of float32, not of a tensor core."""
    bits = [x.view(np.uint32) + 0x1000 & 0xFFFFE000 for x in (data.x, data.weight, data.bias)]
    rounded = Data(*(x.view(np.float32) for x in bits))
    with pytest.raises(AssertionError, match="planted"):
        measure.verify(CASE, data, baselines.numpy_steps("bias_relu", rounded)(), "planted")


def test_the_other_gelu_is_found():
    scipy = pytest.importorskip("scipy.special")
    data = Data.normal(64, 64, 4, "float32")
    case = Case("bias_gelu", 64, 64, 4, "float32", None)
    y = (data.x @ data.weight.T + data.bias).astype(np.float64)
    with pytest.raises(AssertionError, match="erf form"):
        measure.verify(case, data, 0.5 * y * (1 + scipy.erf(y / np.sqrt(2))), "erf form")


# ---------------------------------------------------------------- timing and judgement


def test_each_contender_is_timed_in_every_round():
    calls = {"a": 0, "b": 0}

    def counted(who):
        def run():
            calls[who] += 1
            return sum(range(20000))

        return run

    seen = []
    times, others = measure.time_interleaved_ms({who: counted(who) for who in calls}, 3, lambda: seen.append(dict(calls)), 0)
    assert len(others) == len(seen) == 3
    assert {who: len(t) for who, t in times.items()} == {"a": 3, "b": 3}
    assert all(t > 0 for who in times for t in times[who])


def test_disturbed_rounds_are_timed_again(monkeypatch):
    """The first, third and fifth of six rounds are disturbed; the quiet ones are taken, whatever their times."""
    shares = iter([0.9, 0.01, 0.5, 0.02, 0.3, 0.0])
    monkeypatch.setattr(measure, "_others_share", lambda before, after: next(shares))
    seen = []
    _, others = measure.time_interleaved_ms({"a": lambda: None}, 3, lambda: seen.append(1), 60)
    assert others == [0.0, 0.01, 0.02]
    assert len(seen) == 3


def test_patience_ends(monkeypatch):
    shares = iter([0.9, 0.5, 0.7])
    monkeypatch.setattr(measure, "_others_share", lambda before, after: next(shares))
    seen = []
    _, others = measure.time_interleaved_ms({"a": lambda: None}, 3, lambda: seen.append(1), 0)
    assert others == [0.5, 0.7, 0.9]
    assert len(seen) == 3


def test_what_others_took_is_what_is_left():
    assert measure._others_share((0.0, 0.0, 0.0), (10.0, 6.0, 4.0)) == pytest.approx(0.2)
    assert measure._others_share((0.0, 5.0, 5.0), (0.0, 6.0, 6.0)) == 0
    there, worked, own = measure._processor_s()
    assert there >= worked >= own > 0


def test_a_ratio_is_taken_round_by_round():
    assert Ratio.of([1.0, 4.0, 9.0], [2.0, 4.0, 3.0]) == Ratio(1.0, 0.5, 3.0)


@pytest.mark.parametrize(("mine", "holds"), [(0.8, True), (0.909, True), (0.92, False)])
def test_a_bar_holds_up_to_a_hundredth_above_it(mine, holds):
    assert Row(CASE, "", 0.1, {OURS: [mine] * 7, TORCH: [1.0] * 7}).holds is holds


def test_without_pytorch_or_a_bar_nothing_is_judged():
    assert Row(CASE, "", 0.1, {OURS: [1.0], NUMPY: [1.0]}).holds is None
    assert Row(SUITES["smoke"][0], "", 0.1, {OURS: [1.0], TORCH: [1.0]}).holds is None


def test_the_suite_holds_what_it_promises():
    bars = {(case.epilogue, case.m, case.n, case.k): case.bar for case in SUITES["linear"]}
    shapes = [(2048, 4096, 1024), (8192, 2048, 256), (64, 2048, 2048)]
    assert bars == {(e, *s): bar for e, bar in (("bias_relu", 0.9), ("bias_gelu", 1.0)) for s in shapes}


# ---------------------------------------------------------------- memory


@pytest.mark.skipif(not memory.supported(), reason="the kernel does not reset peaks")
def test_peak_memory_is_the_output_and_panels_for_ours_and_twice_for_numpy(monkeypatch):
    monkeypatch.setattr(memory, "CONTENDERS", (OURS, NUMPY))
    mine, numpy_s = memory.measure("cpu", m=8192, n=4096)
    assert mine.output_bytes == numpy_s.output_bytes == 128 << 20
    assert 0.99 * mine.output_bytes < mine.peak_bytes < mine.output_bytes + (40 << 20)
    assert numpy_s.peak_bytes > 1.9 * numpy_s.output_bytes


# ---------------------------------------------------------------- results


def test_the_stamp_says_where_and_with_what():
    made = stamp.stamp()
    assert made["cpu"]
    assert made["threads"] >= 1
    assert made["blas"]
    assert made["packages"]["numpy"] == np.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", made["date"])
    assert re.fullmatch(r"([0-9a-f]{12}(\+changes)?)?", made["commit"])
    json.dumps(made)


def test_written_json_is_what_was_measured(tmp_path):
    row = Row(CASE, "cpu()", 0.1, {OURS: [1.0, 2.0], TORCH: [2.0, 2.5]})
    data = report.Report("linear", "cpu", 2, stamp.stamp(), (row,)).as_json()
    path = tmp_path / "new" / "result.json"
    report.write(data, path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(data))
    assert "[1.0, 2.0]" in path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "result.json"
    report.write({"a": 1}, path)
    with pytest.raises(TypeError):
        report.write({"a": object()}, path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]

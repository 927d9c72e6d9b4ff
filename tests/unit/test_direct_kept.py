"""Which direct calls `matmul` keeps."""

from __future__ import annotations

import pytest

from epigemm import api
from epigemm.plans import PlanCache


@pytest.mark.parametrize(("capacity", "kept"), [(0, []), (1, ["second"]), (2, ["first", "second"])])
def test_no_more_direct_calls_are_kept_than_plans(monkeypatch, capacity, kept):
    monkeypatch.setattr(api, "_plans", PlanCache(capacity))
    monkeypatch.setattr(api, "_direct_calls", {})
    for key in ("first", "second"):
        api._keep_direct(key, lambda a, b, inputs, out: None)
    api._keep_direct("none", None)
    assert list(api._direct_calls) == kept

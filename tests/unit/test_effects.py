"""What explain() says of options that do nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import epigemm as eg
from epigemm import effects, engines
from epigemm.options import MatmulOptions, MatmulPlanPreferences


class Allocator:
    def memalloc(self, size: int) -> Any:
        raise AssertionError("the CPU engine needs no device memory")


@pytest.mark.parametrize(
    ("options", "preferences", "words"),
    [
        ({"sm_count_target": 4}, {}, "sm_count_target does nothing on the engine cpu: it has no multiprocessors"),
        ({"handle": 7}, {}, "handle does nothing on the engine cpu: it calls no cuBLASLt"),
        ({"allocator": Allocator()}, {}, "allocator does nothing on the engine cpu: its workspace does not come from an allocator"),
        ({"blocking": True}, {}, "blocking does nothing on the engine cpu: every call returns when it is done"),
        ({"fast_accumulation": True}, {}, "fast_accumulation does nothing on the engine cpu"),
        ({"strict": True}, {}, "strict does nothing on the engine cpu"),
        ({}, {"reduction_scheme_mask": 1}, "reduction_scheme_mask does nothing on the engine cpu"),
        ({}, {"max_waves_count": 1.0}, "max_waves_count does nothing on the engine cpu"),
        ({}, {"numerical_impl_mask": 1}, "numerical_impl_mask does nothing on the engine cpu"),
    ],
)
def test_an_option_without_effect_is_named(options, preferences, words):
    a = np.ones((4, 4), np.float32)
    with eg.Matmul(a, a, options=options) as mm:
        mm.plan(preferences=preferences)
        assert words in mm.explain()
        assert mm.explain().count("does nothing") == 1
        np.testing.assert_array_equal(mm.execute(), a @ a)


def test_usual_options_are_not_named():
    assert effects.notes(MatmulOptions(), MatmulPlanPreferences(), "cpu") == ()
    a = np.ones((4, 4), np.float32)
    mm = eg.Matmul(a, a, options={"memory_limit": "1 GiB"})
    mm.plan(preferences={"limit": 2})
    assert "does nothing" not in mm.explain()


def test_cublaslt_reads_all():
    options = MatmulOptions(sm_count_target=4, handle=7, allocator=Allocator(), blocking=True, strict=True)
    preferences = MatmulPlanPreferences(reduction_scheme_mask=1, max_waves_count=1.0, numerical_impl_mask=1)
    for engine in engines.ENGINES:
        expected = {"cublaslt": 0, "unfused": 0, "cpu": 8}.get(engine, 5)
        assert len(effects.notes(options, preferences, engine)) == expected, engine

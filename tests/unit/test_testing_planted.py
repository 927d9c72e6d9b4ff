"""Each planted error is found by the checks, and the reference's own result passes them."""

from __future__ import annotations

import re

import pytest

from epigemm.testing.planted import PLANTED, Planted, found


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: p.name)
def test_planted_error_is_found(planted: Planted) -> None:
    message = found(planted)
    assert str(planted.case) in message or "planted" in message


def test_names_are_unique() -> None:
    assert len({planted.name for planted in PLANTED}) == len(PLANTED)


def test_the_message_has_the_coordinate_both_values_and_the_distance() -> None:
    message = found(next(p for p in PLANTED if p.name == "just beyond the tolerance, f16"))
    assert re.search(r"1 of 252 elements are wrong; the first is at \(\d+, \d+\)", message)
    assert re.search(r"got .+, expected .+, allowed \[.+, .+\]: off by [\d.]+ ulp of float16", message)

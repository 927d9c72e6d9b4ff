"""What the tests of the public API on a GPU share: they are skipped without one, and write what they count where they are told to."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    if not torch.cuda.is_available() and "EPIGEMM_REHEARSE" not in os.environ:  # what can run on a CPU then does
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(autouse=True)
def _finished_work(request):
    """What a test left running ends with it; a broken context is told once, not by every test after it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@pytest.fixture
def record():
    """Appends one line of JSON to $EPIGEMM_RESULTS/counts.jsonl; nothing where that is not set."""

    def write(name: str, data: dict) -> None:
        folder = os.environ.get("EPIGEMM_RESULTS")
        if folder:
            with open(Path(folder) / "counts.jsonl", "a") as file:
                file.write(json.dumps({"what": name, **data}) + "\n")

    return write


@pytest.fixture
def close():
    """Asserts that a result is within rounding of a float64 one: k products summed in `unit`, one rounding when stored."""

    def check(found, a, b, expected=None, factor=1.0, unit=2.0**-24):
        exact = a.double() @ b.double() if expected is None else expected.double()
        magnitude = a.double().abs() @ b.double().abs() + 1
        stored = torch.finfo(found.dtype).eps
        allowed = factor * 1.2 * (a.shape[-1] + 4) * unit * magnitude + stored * exact.abs() + torch.finfo(found.dtype).smallest_normal
        wrong = ~((found.double() - exact).abs() <= allowed)
        assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()} elements are wrong: {found[wrong][:3]} for {exact[wrong][:3]}"

    return check


@pytest.fixture
def normal():
    """Seeded standard normal tensors on the GPU."""

    def make(*shape, dtype=torch.float16, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed + 7919 * sum(shape))
        return torch.randn(shape, device="cuda", dtype=torch.float32, generator=generator).to(dtype)

    return make

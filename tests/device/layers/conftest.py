"""The layers' cases of tests/layers, on the GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent


def _table():
    spec = importlib.util.spec_from_file_location("layer_cases", HERE.parents[1] / "layers" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by its name.
    __import__("sys").modules["layer_cases"] = module
    spec.loader.exec_module(module)
    return module


TABLE = _table()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(params=TABLE.CASES, ids=lambda case: case.name)
def case(request):
    """Every case."""
    return request.param


@pytest.fixture(params=TABLE.ONE_EACH)
def each(request):
    """One case of each function."""
    return TABLE.BY_NAME[request.param]


@pytest.fixture
def named():
    """Cases by name."""
    return TABLE.BY_NAME


@pytest.fixture
def on_gpu():
    """(case, dtype, seed) -> its operands on the GPU."""
    return lambda case, dtype, seed=0: [t.detach().cuda().requires_grad_() for t in case.tensors(dtype, seed)]


@pytest.fixture
def assert_agrees():
    """(actual, expected, bounds, what): fails at the first element that is further away than its bound."""
    return TABLE.differences

"""`import epigemm` is quick and loads no optional library; each public name is loaded when first used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import epigemm

OPTIONAL = ("torch", "triton", "cupy", "cuda", "nvidia", "sklearn", "matplotlib", "typer", "rich", "scipy")
IMPORT_S = 0.15  # beyond NumPy
FIRST_USE_S = 0.3  # and until the first product can be planned: the vocabulary, the API and the options


def python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(epigemm.__file__).parents[1])}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True).stdout


def loaded_after(code: str) -> set[str]:
    return set(json.loads(python(f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))")))


def best_time_s(code: str, runs: int = 5) -> float:
    """The least processor time of some runs after NumPy's import, each in a process of its own, so that a busy machine does not count."""
    timed = f"import numpy, time\nstart = time.process_time()\n{code}\nprint(time.process_time() - start)"
    return min(float(python(timed).splitlines()[-1]) for _ in range(runs))


def test_import_loads_no_optional_library_and_no_layer():
    loaded = loaded_after("import epigemm")
    assert loaded & set(OPTIONAL) == set()
    assert {name for name in loaded if name.startswith("epigemm")} == {"epigemm"}


def test_a_product_of_numpy_arrays_loads_no_optional_library():
    code = "import numpy, epigemm\na = numpy.ones((2, 3), 'f4')\nassert (epigemm.matmul(a, a.T, epilog='relu') == 3).all()"
    assert loaded_after(code) & set(OPTIONAL) == set()


def test_import_is_quick():
    assert best_time_s("import epigemm") < IMPORT_S


def test_the_first_use_is_quick():
    assert best_time_s("import epigemm; epigemm.matmul; epigemm.epilogue; epigemm.MatmulEpilog") < FIRST_USE_S


def test_the_time_is_measured():
    assert best_time_s("while time.process_time() < start + 0.2: pass", runs=1) >= 0.2


def test_the_peer_s_way_to_write_it():
    assert python("import epigemm as nvmath; print(nvmath.linalg.advanced.Matmul is nvmath.Matmul)").strip() == "True"


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="module 'epigemm' has no attribute 'matmull'"):
        epigemm.matmull  # noqa: B018
    with pytest.raises(ImportError):
        from epigemm import matmull  # noqa: F401


def test_dir_shows_the_public_names():
    assert set(epigemm.__all__) <= set(dir(epigemm))
    assert "linalg" in dir(epigemm)


@pytest.mark.parametrize("name", epigemm._SUBMODULES)
def test_every_submodule_that_is_shown_is_there(name):
    """So that `hasattr` and `inspect.getmembers` find nothing that fails; PyTorch's own may be missing."""
    if name == "pytorch":
        pytest.importorskip("torch")
    assert getattr(epigemm, name).__name__ == f"epigemm.{name}"

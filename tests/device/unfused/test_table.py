"""The whole table of cases on a GPU: `unfused` runs it all, `cublaslt` what it fuses, "auto" as much as `unfused`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import epigemm
from epigemm.testing import conformance
from epigemm.testing.cases import Case, cases

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

SHARES = max(1, min(14, (os.cpu_count() or 2) - 1))
TOPICS = sorted({case.topic for case in cases()})
# What the engine refuses: a pass over an empty D writes no columns or rows.
REFUSED = "unfused has no pass over an empty D"
EMPTY = frozenset(str(case) for case in cases() if case.m == 0 or case.n == 0)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Every run of the table: dictionaries as `table.py` writes them."""
    folder = tmp_path_factory.mktemp("table")
    script = Path(__file__).with_name("table.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(epigemm.__file__).parents[1]), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    commands = [[sys.executable, str(script), str(folder / f"{i}.json"), str(i), str(SHARES)] for i in range(SHARES)]
    running = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    found = []
    for i, process in enumerate(running):
        said, _ = process.communicate()
        assert process.returncode == 0, f"share {i} ended with {process.returncode}:\n{said[-4000:]}"
        found += json.loads((folder / f"{i}.json").read_text())["rows"]
    return found


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("engine", ["unfused", "cublaslt", "auto"])
def test_topic(rows, engine, topic):
    mine = [row for row in rows if (row["engine"], row["topic"]) == (engine, topic)]
    assert mine or (engine, topic) in {("cublaslt", "special"), ("auto", "special")}
    failed = [row for row in mine if row["failure"]]
    shown = "\n\n".join(f"{row['case']} [{row['engine']}, {row['mode']}]\n{row['failure']}" for row in failed[:5])
    assert not failed, f"{len(failed)} of {len(mine)} failed:\n{shown}"


@pytest.mark.parametrize("engine", ["unfused", "auto"])
def test_nothing_is_refused(rows, engine):
    refused = [row for row in rows if row["engine"] == engine and row["refusal"]]
    wrong = [row for row in refused if row["case"] not in EMPTY or REFUSED not in row["refusal"]]
    assert not wrong, f"{len(wrong)} refused, the first: {wrong[0]['case']}\n{wrong[0]['refusal']}"


def test_cublaslt_runs_what_it_fuses(rows):
    ran = Counter(bool(row["refusal"]) for row in rows if row["engine"] == "cublaslt" and row["topic"] in ("predefined", "dtype", "c"))
    assert ran[False] > 100, ran
    assert all("\n  cublaslt: " in row["refusal"] for row in rows if row["engine"] == "cublaslt" and row["refusal"])


def test_a_planted_error_is_found():
    """One bit of the largest element of what the engine itself computed."""
    table = _table()
    case = Case("planted", 64, 48, 32, "row_stats", dtype="float16", data="integers")
    tensors = case.build(np.random.default_rng(0))
    operands = [torch.from_numpy(np.array(one.array)).cuda() for one in (tensors.a, tensors.b[0])]
    inputs = {name: torch.from_numpy(np.array(one.array)).cuda() for name, one in tensors.inputs.items()} or None
    d, extras = epigemm.matmul(*operands, epilog=conformance.epilog_of(case), epilog_inputs=inputs, engine="unfused")
    outputs = {"d": table.on_host(d), **{name: table.on_host(one) for name, one in extras.items()}}
    conformance.check(case, tensors, outputs, arithmetic=table.arithmetic(case, "unfused"))
    for name, array in outputs.items():
        wrong = {**outputs, name: np.array(array)}
        at = np.unravel_index(int(np.argmax(np.abs(array.astype(np.float64)))), array.shape)
        wrong[name][at] = wrong[name][at] * 1.01
        with pytest.raises(AssertionError, match="elements are wrong"):
            conformance.check(case, tensors, wrong, arithmetic=table.arithmetic(case, "unfused"))


def _table():
    import importlib.util

    spec = importlib.util.spec_from_file_location("unfused_table", Path(__file__).with_name("table.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

"""README's code runs and prints what README shows, its commands and links exist, and its figures are those under results/."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from epigemm import engines

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULT = ROOT / "results" / "cpu-linear.json"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}
MIB = 1 << 20


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_code_runs_and_prints_what_is_shown(tmp_path):
    """All blocks in order as one program, in a file, since an epilogue is read from its source."""
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == README.count("```python")
    assert len(blocks) >= 2
    shown = "".join(output for _, output in blocks)
    path = tmp_path / "readme.py"
    path.write_text("\n".join(code for code, _ in blocks))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path))
    assert printed.getvalue() == shown


def test_the_example_is_five_lines():
    (code,) = re.findall(r"```python\nimport numpy as np\n(.*?)```", README, flags=re.DOTALL)
    lines = [line for line in code.splitlines() if line and not line.startswith("import")]
    assert len(lines) == 5


def test_the_peer_s_program_runs():
    done = python(str(ROOT / "examples" / "seed.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("D = weights @ x + bias: (1024, 512) float16")


def test_make_targets_exist():
    targets = re.findall(r"^    make (\w+)", README, flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["demo", "check"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_commands_and_their_options_exist():
    pytest.importorskip("typer")
    lines = re.findall(r"^    (epigemm .*?)  ", README, flags=re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        _, command, *words = shlex.split(line)
        help_text = python("-m", "epigemm.cli", command, "--help").stdout
        assert help_text.startswith("Usage: epigemm")
        for option in (word for word in words if word.startswith("--")):
            assert option in help_text


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_table_of_engines_is_honest():
    """What can be chosen is said to be, what cannot is said to be built."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", README, flags=re.MULTILINE)
    chosen = {name for name, state in rows if state.startswith("can be chosen: ")}
    assert chosen == set(engines.ENGINES)
    assert all(state == "being built, cannot be chosen yet" for name, state in rows if name not in chosen)


# ---------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def result():
    return json.loads(RESULT.read_text())


def test_figures_are_those_of_the_stored_result(result):
    words = {"bias_relu": "ReLU", "bias_gelu": "GELU (tanh)"}
    rows = []
    for row in result["rows"]:
        ratio = row["ratio"]["torch"]
        cell = f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"
        rows.append(f"| {words[row['epilogue']]} | m={row['m']} n={row['n']} k={row['k']} | {cell} | {row['bar']:.1f} |")
    _, _, table = README.partition("| activation | shape | time / PyTorch's | bar |\n|---|---|---|---|\n")
    assert table.partition("\n\n")[0].splitlines() == rows


def test_how_it_was_measured_is_that_of_the_stored_result(result):
    text = " ".join(README.split())
    peaks = {peak["who"]: peak["peak_bytes"] / MIB for peak in result["memory"]}
    others = [share for row in result["rows"] for share in row["others"]]
    assert f"epigemm {peaks['epigemm']:.0f} MiB, PyTorch {peaks['torch']:.0f} MiB and NumPy {peaks['numpy']:.0f} MiB" in text
    assert f"on the same {result['stamp']['threads']} threads" in text
    assert f"the median of {result['rounds']} interleaved rounds" in text
    if max(others) > 0.1:
        assert f"other programs took {min(others):.0%} to {max(others):.0%} of the processors meanwhile" in text


def test_the_stored_result_holds_its_bars(result):
    assert result["rounds"] >= 7
    assert result["stamp"]["commit"]
    assert "OPENBLAS_CORETYPE" not in result["stamp"]["environment"]
    for row in result["rows"]:
        assert row["holds"] is True
        assert all(len(times) == result["rounds"] for times in row["times_ms"].values())

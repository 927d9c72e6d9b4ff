"""The command `epigemm`, run as users run it: what it prints, as text and as JSON, and its exit statuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import epigemm

pytest.importorskip("typer")
pytest.importorskip("rich")

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(epigemm.__file__).parents[1]), "COLUMNS": "100"}


def run(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "epigemm.cli", *words]
    return subprocess.run(command, env=ENVIRONMENT | changes, capture_output=True, text=True, timeout=300, check=False)


def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"{epigemm.__version__}\n")


def test_help_names_the_commands():
    done = run("--help")
    assert done.returncode == 0
    for name in ("info", "demo", "bench", "explain"):
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("words", [["frobnicate"], ["demo", "--epochs", "0"], ["bench", "--rounds", "few"], ["explain"]])
def test_wrong_use_exits_with_2(words):
    done = run(*words)
    assert done.returncode == 2
    assert "Usage:" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- info


def test_info_as_json(tmp_path):
    done = run("info", "--json", EPIGEMM_CACHE_DIR=str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"name": "cpu", "device": "cpu", "ready": True, "detail": ""} in found["engines"]
    assert found["threads"] >= 1
    assert found["blas"]
    assert found["store"] == {"folder": str(tmp_path / "store"), "entries": 0, "bytes": 0, "limit_bytes": 1 << 30}
    assert not (tmp_path / "store").exists()  # looking makes nothing


def test_info_says_what_to_install():
    code = (
        "import importlib.metadata as m, sys; real = m.version\n"
        "def version(name):\n    if name == 'torch': raise m.PackageNotFoundError\n    return real(name)\n"
        "m.version = version\nfrom epigemm.cli import main\nsys.argv = ['epigemm', 'info']\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT | {"COLUMNS": "160"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "– torch " in line]
    assert 'pip install "epigemm[torch]"' in line
    assert f"epigemm         {epigemm.__version__}" in done.stdout
    assert "✓ cpu" in done.stdout


# ---------------------------------------------------------------- explain


def test_explain():
    done = run("explain", "m=4096 n=11008 k=4096 bf16 gelu_bias")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("problem     Problem(m=4096, n=11008, k=4096, a=bf16 row, ")
    assert "expression  d = gelu_tanh(acc + bias[m])" in rest
    assert any(line.startswith("plan        cpu(") for line in rest)


@pytest.mark.parametrize("epilog", ["", *(name.lower() for name in epigemm.MatmulEpilog.__members__ if name != "DEFAULT")])
def test_every_predefined_epilog_can_be_explained(epilog):
    from epigemm.cli.problems import explain

    for extents in ("m=65 n=48 k=32", "m=16 n=8 k=4 batch=3"):
        assert "cpu: cpu(" in explain(f"{extents} f16 {epilog}")


def test_explain_as_json():
    done = run("explain", "k=3 n=2 m=1", "--json")
    assert json.loads(done.stdout)["explain"][0].startswith("problem     Problem(m=1, n=2, k=3, a=f32 row")


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("m=4 n=4 f16", "The problem 'm=4 n=4 f16' lacks k."),
        ("m=4 n=4 k=4 relu_biass", "'relu_biass' is neither an extent"),
        ("m=4 n=4 k=-4", "'k=-4' is neither an extent"),
    ],
)
def test_a_problem_that_cannot_be_read_is_explained(problem, message):
    done = run("explain", problem)
    assert done.returncode == 1
    assert done.stderr.startswith(f"epigemm: {message}")
    assert 'as in "m=4096 n=11008 k=4096 bf16 gelu_bias"' in done.stderr
    assert done.stdout == ""


def test_an_unknown_engine_is_refused():
    done = run("explain", "m=4 n=4 k=4", "--engine", "abacus")
    assert done.returncode == 1
    assert "abacus" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- bench


def test_bench_writes_what_it_shows(tmp_path):
    path = tmp_path / "out" / "smoke.json"
    done = run("bench", "smoke", "--rounds", "2", "--no-memory", "--patience", "0", "--json", str(path), "--check")
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert [row["epilogue"] for row in found["rows"]] == ["bias_relu", "bias_gelu"]
    for row in found["rows"]:
        assert len(row["times_ms"]["epigemm"]) == 2
        assert 0 < row["error_share"] < 1
    assert found["stamp"]["blas"]
    assert found["memory"] == []
    assert "m=37 n=53 k=29" in done.stdout


def test_bench_as_json_alone_on_stdout():
    done = run("bench", "smoke", "--rounds", "1", "--no-memory", "--patience", "0", "--json", "-")
    assert json.loads(done.stdout)["suite"] == "smoke"


def test_a_missed_bar_exits_with_1_if_asked():
    code = (
        "import sys; from epigemm.bench import suites\n"
        "suites.SUITES['never'] = (suites.Case('bias_relu', 8, 8, 8, 'float32', -1.0),)\n"
        "from epigemm.cli import main\n"
        "sys.argv = ['epigemm', 'bench', 'never', '--rounds', '1', '--no-memory', '--patience', '0', *sys.argv[1:]]\nsys.exit(main())"
    )
    pytest.importorskip("torch")
    for words, status in (([], 0), (["--check"], 1)):
        done = subprocess.run([sys.executable, "-c", code, *words], env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert "✗ missed" in done.stdout


def test_an_unknown_suite_is_refused():
    done = run("bench", "linaer")
    assert done.returncode == 1
    assert "linear" in done.stderr


# ---------------------------------------------------------------- demo


def test_demo(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    done = run("demo", "--epochs", "6", "--plot", str(tmp_path / "demo.png"))
    assert done.returncode == 0, done.stderr
    assert "held-out digits told right" in done.stdout
    assert "Where it ran" in done.stdout
    assert "expression  t0 = acc + bias[m]" in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_demo_as_json():
    pytest.importorskip("sklearn")
    done = run("demo", "--epochs", "6", "--seed", "1", "--json")
    found = json.loads(done.stdout)
    assert found["epochs"] == 6
    assert all(one["accuracy"] >= 0.9 for one in found["networks"].values())


def test_demo_without_scikit_learn_says_what_to_install():
    code = (
        "import sys; sys.modules['sklearn.datasets'] = None; sys.argv = ['epigemm', 'demo']\nfrom epigemm.cli import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == 'epigemm: The demo needs scikit-learn, which is not installed.\n  Run `pip install "epigemm[demo]"`.\n'


def _default_interrupt():
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_quietly():
    pytest.importorskip("sklearn")
    command = [sys.executable, "-u", "-m", "epigemm.cli", "demo", "--epochs", "1000"]
    # A background job of a shell ignores SIGINT and hands that down: the command is to have a terminal's.
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_default_interrupt
    )
    try:
        assert process.stdout is not None
        assert "network learns" in process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in stderr


# ---------------------------------------------------------------- without the extra


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_the_command_says_what_to_install(package):
    code = f"import sys; sys.modules['{package}'] = None\nfrom epigemm.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    message = f"epigemm: The command `epigemm` needs {package}, which is not installed.\n"
    assert done.stderr == message + '  Run `pip install "epigemm[cli]"`.\n'

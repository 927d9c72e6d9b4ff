"""Environment variables: their defaults, their forms, and the error for a text that is none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from epigemm import config, errors


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for variable in config.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.mark.parametrize("variable", config.VARIABLES, ids=lambda v: v.name)
@pytest.mark.parametrize("text", [None, "", "  "])
def test_unset_or_empty_is_the_default(variable, text, monkeypatch):
    if text is not None:
        monkeypatch.setenv(variable.name, text)
    assert variable.get() == variable.default


@pytest.mark.parametrize("variable", config.VARIABLES, ids=lambda v: v.name)
def test_every_row_is_complete(variable):
    assert variable.name.startswith("EPIGEMM_")
    assert variable.form
    assert variable.meaning.endswith(".")


def test_names_are_unique():
    assert len({variable.name for variable in config.VARIABLES}) == len(config.VARIABLES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("7", 7),
        ("12 B", 12),
        ("1KiB", 1024),
        ("1.5 kib", 1536),
        ("2 MB", 2_000_000),
        ("1GiB", 1 << 30),
        ("0.5 TB", 500_000_000_000),
    ],
)
def test_sizes(text, expected, monkeypatch):
    monkeypatch.setenv("EPIGEMM_CACHE_BYTES", text)
    assert config.CACHE_BYTES.get() == expected


@pytest.mark.parametrize("text", ["-1", "1 PiB", "GiB", "1e9", "80%", "nan", "1 2", "none"])
def test_what_is_no_size_is_refused(text, monkeypatch):
    monkeypatch.setenv("EPIGEMM_CACHE_BYTES", text)
    with pytest.raises(errors.ConfigError, match=r"EPIGEMM_CACHE_BYTES is '.*'\.\n  It must be a size such as '512 MiB'; unset it"):
        config.CACHE_BYTES.get()


@pytest.mark.parametrize("text", ["-1", "1.5", "many"])
def test_what_is_no_count_is_refused(text, monkeypatch):
    monkeypatch.setenv("EPIGEMM_PLAN_CACHE_SIZE", text)
    with pytest.raises(ValueError, match=r"EPIGEMM_PLAN_CACHE_SIZE .*\n  It must be a whole number >= 0"):
        config.PLAN_CACHE_SIZE.get()


def test_a_folder_is_made_absolute_and_its_home_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", "~/kernels")
    assert config.CACHE_DIR.get() == tmp_path / "kernels"
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", "kernels")
    assert config.CACHE_DIR.get() == Path.cwd() / "kernels"


def test_a_change_takes_effect_at_once(monkeypatch):
    monkeypatch.setenv("EPIGEMM_PLAN_CACHE_SIZE", "3")
    assert config.PLAN_CACHE_SIZE.get() == 3
    monkeypatch.setenv("EPIGEMM_PLAN_CACHE_SIZE", "4")
    assert config.PLAN_CACHE_SIZE.get() == 4


def test_every_variable_is_read_and_named_here_alone():
    texts = {path.name: path.read_text() for path in Path(config.__file__).parent.rglob("*.py") if path.name != "config.py"}
    rows = [name for name, value in vars(config).items() if isinstance(value, config.Variable)]
    assert len(rows) == len(config.VARIABLES)
    assert [row for row in rows if not any(f"config.{row}.get()" in text for text in texts.values())] == []
    constants = {
        (name, node.value)
        for name, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert [(name, text) for name, text in constants if re.fullmatch(r"EPIGEMM_\w+", text)] == []

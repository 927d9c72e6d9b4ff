"""What `make` installs is pinned to one version each, and those versions lie in the ranges that users get."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def lines(name: str) -> list[str]:
    texts = (line.split("#")[0].strip() for line in (ROOT / "requirements" / name).read_text().splitlines())
    return [text for text in texts if text and not text.startswith("-")]


def pins() -> dict[str, str]:
    pairs = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines("pins.txt")]
    assert all(pairs), "every line of pins.txt is name==version"
    return {canonicalize_name(pair[1]): pair[2] for pair in pairs if pair}


def ranges() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    texts = [*project["build-system"]["requires"], *project["project"]["dependencies"], *(text for extra in extras for text in extra)]
    return [requirement for requirement in map(Requirement, texts) if requirement.name != "epigemm"]


@pytest.mark.parametrize("name", ["check.txt", "demo.txt"])
def test_what_is_installed_is_pinned(name):
    assert [line for line in lines(name) if canonicalize_name(line) not in pins()] == []


def test_pins_lie_in_the_ranges_of_the_project():
    checked = [requirement for requirement in ranges() if canonicalize_name(requirement.name) in pins()]
    assert {"numpy", "ml_dtypes", "platformdirs", "torch"} <= {requirement.name for requirement in checked}
    assert [str(requirement) for requirement in checked if pins()[canonicalize_name(requirement.name)] not in requirement.specifier] == []


def test_what_the_package_needs_is_installed_by_the_demo():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["cli"], *project["optional-dependencies"]["demo"]]
    installed = {canonicalize_name(line) for line in lines("demo.txt")}
    assert {canonicalize_name(Requirement(text).name) for text in needed} - {"epigemm"} <= installed


def test_ci_runs_what_everyone_runs():
    script = ROOT / ".ci" / "run"
    assert "exec make check </dev/null" in script.read_text()
    assert os.access(script, os.X_OK)
    assert os.access(ROOT / "scripts" / "venv", os.X_OK)

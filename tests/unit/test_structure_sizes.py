"""Functions have at most 50 lines and files 600. The exceptions stand in the tables below, each with its reason."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTION_LINES, FILE_LINES = 50, 600

# Device code: a kernel is one function by nature. Matched as suffix of the path.
DEVICE_CODE = (".cuh", ".cu", "engines/triton/kernels.py")
LONG_FILES: dict[str, str] = {}
# "path::function": why it is long.
LONG_FUNCTIONS: dict[str, str] = {}

FOLDERS = ("src", "tests", "scripts", "examples")
SUFFIXES = (".py", ".cpp", ".h", ".cuh", ".cu", ".sh")


def sources(root: Path) -> list[Path]:
    files = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    return sorted(path for path in files if not str(path).endswith(DEVICE_CODE))


def long_files(root: Path) -> dict[str, int]:
    counts = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in sources(root)}
    return {name: count for name, count in counts.items() if count > FILE_LINES}


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to its last line, without the docstring: documenting a function well must not make it too long."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def long_functions(root: Path) -> dict[str, int]:
    found = {}
    for path in sources(root):
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (count := lines_of(node)) > FUNCTION_LINES:
                found[f"{path.relative_to(root)}::{node.name}"] = count
    return found


def test_files():
    assert {name: count for name, count in long_files(ROOT).items() if name not in LONG_FILES} == {}


def test_functions():
    assert {name: count for name, count in long_functions(ROOT).items() if name not in LONG_FUNCTIONS} == {}


def test_every_exception_is_still_needed():
    assert set(LONG_FILES) <= set(long_files(ROOT))
    assert set(LONG_FUNCTIONS) <= set(long_functions(ROOT))
    assert all([*LONG_FILES.values(), *LONG_FUNCTIONS.values()]), "each has a reason"


def test_what_is_too_long_is_found(tmp_path):
    (tmp_path / "src").mkdir()
    body = "    x = 1\n" * 49
    docstring = '    """Doc.\n\n    More.\n    """\n'
    (tmp_path / "src" / "a.py").write_text(f"def fits():\n{docstring}{body}\n\ndef long():\n    y = 2\n{body}")
    (tmp_path / "src" / "b.cpp").write_text("\n" * 601)
    (tmp_path / "src" / "c.h").write_text("\n" * 600)
    (tmp_path / "src" / "d.cuh").write_text("\n" * 900)
    assert long_functions(tmp_path) == {"src/a.py::long": 51}
    assert long_files(tmp_path) == {"src/b.cpp": 601}

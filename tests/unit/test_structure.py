"""The order of imports, what may be imported where, and names. Everything here reads sources; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

# The layers, lowest first: a module imports from its own line and from those above it. A package counts as one.
LAYERS = (
    "errors config",
    "store",
    "enums dtypes layouts options compute_types",
    "problem",
    "expression",
    "plans",
    "tensors",
    "engines",
    "tuning",
    "algorithms api arguments specification binding execution direct effects mirrors workspace",
    "linalg quantization",
    "pytorch",
    "distributed",
    "testing",
    "bench",
    "demo",
    "cli",
)
LAYER_OF = {module: number for number, line in enumerate(LAYERS) for module in line.split()}
# The compiled core is a leaf: it imports nothing of ours, and only what runs on a device uses it.
NATIVE, NATIVE_USERS = "_native", ("tensors", "engines", "tuning", "bench", "testing", "cli")

# (importing module, imported module): why this import points up.
UPWARD: dict[tuple[str, str], str] = {}

OPTIONAL = frozenset(["torch", "triton", "cupy", "cuda", "nvidia", "sklearn", "matplotlib", "typer", "rich"])
# Modules up to here know nothing of these, not even inside a function.
LAST_PURE_LAYER = "plans"


def modules(source: Path) -> dict[str, Path]:
    """Every module by its dotted name below the package: "engines.cpu.masks"; the package itself is ""."""
    found = {}
    for path in sorted((source / "epigemm").rglob("*.py")):
        parts = path.relative_to(source / "epigemm").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, name: str, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import in the file, at any depth; of `from epigemm import x` it is `epigemm.x`."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".") if package else []
                parents = parents[: len(parents) - (node.level - 1)]
                base = ".".join(["epigemm", *parents, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_module = inner.removeprefix("epigemm.") in known or inner == f"epigemm.{NATIVE}"
                yield node.lineno, inner if is_module else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            text = node.args[0]
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield node.lineno, text.value


def top(name: str) -> str:
    return name.split(".")[0]


def wrong_imports(source: Path) -> list[str]:
    """What breaks the order of the layers, one sentence each."""
    known = modules(source)
    wrong = []
    for name, path in known.items():
        if name == "":
            continue  # the table of public names, checked below
        if top(name) not in LAYER_OF:
            wrong.append(f"{name} has no layer: name it in LAYERS")
            continue
        for line, target in imported(path, name, known):
            at = f"{name}:{line}"
            if top(target) in OPTIONAL and LAYER_OF[top(name)] <= LAYER_OF[LAST_PURE_LAYER]:
                wrong.append(f"{at} imports {target}")
            if top(target) != "epigemm" or target == "epigemm":
                continue
            inner = target.removeprefix("epigemm.")
            if top(inner) == NATIVE:
                if top(name) not in NATIVE_USERS:
                    wrong.append(f"{at} imports the native core")
            elif top(inner) not in LAYER_OF:
                wrong.append(f"{at} imports {target}, which has no layer")
            elif LAYER_OF[top(inner)] > LAYER_OF[top(name)] and (name, inner) not in UPWARD:
                wrong.append(f"{at} imports {target}, which comes later")
    return wrong


def cycles(source: Path) -> list[str]:
    """Modules that import each other when they load. An import inside a function is no part of a cycle."""
    known = modules(source)
    edges: dict[str, set[str]] = {}
    for name, path in known.items():
        tree = ast.parse(path.read_text())
        inside = {
            node.lineno
            for outer in ast.walk(tree)
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_type_checking(outer)
            for node in ast.walk(outer)
            if isinstance(node, (ast.Import, ast.ImportFrom))
        }
        targets = {target.removeprefix("epigemm.") for line, target in imported(path, name, known) if line not in inside}
        edges[name] = {target for target in targets if target in known and target not in ("", name)}
    found, done = [], set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append(" → ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for target in sorted(edges[name]):
                visit(target, [*trail, name])
            done.add(name)

    for name in edges:
        visit(name, [])
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def without_future(source: Path) -> list[str]:
    """Modules with code (imports do not count) that lack `from __future__ import annotations`."""
    found = []
    for name, path in modules(source).items():
        body = ast.parse(path.read_text()).body
        has_code = any(not isinstance(node, (ast.Expr, ast.Import, ast.ImportFrom)) for node in body)
        if has_code and not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in body):
            found.append(name)
    return found


def public_tables() -> tuple[dict[str, str], dict[str, str]]:
    """The public names with their modules: as `__init__.py`'s table has them, and as its imports for type checkers do."""
    tree = ast.parse((SOURCE / "epigemm" / "__init__.py").read_text())
    table: dict[str, str] = {}
    typed: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES_BY_MODULE":
            rows = ast.literal_eval(node.value)
            table = {name: module for module, names in rows.items() for name in names.split()}
        elif is_type_checking(node):
            assert isinstance(node, ast.If)
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                typed |= {alias.asname or "": line.module or "" for alias in line.names}
    return table, typed


# ---------------------------------------------------------------- our tree


def test_imports_point_one_way():
    assert wrong_imports(SOURCE) == []


def test_modules_do_not_import_each_other_in_a_circle():
    assert cycles(SOURCE) == []


def test_every_exception_is_still_needed():
    known = modules(SOURCE)
    used = {(name, target.removeprefix("epigemm.")) for name, path in known.items() for _, target in imported(path, name, known)}
    assert set(UPWARD) <= used


def test_every_module_postpones_annotations():
    assert without_future(SOURCE) == []


def test_no_public_name_is_a_submodule():
    table, _ = public_tables()
    submodules = {top(name) for name in modules(SOURCE)} | {NATIVE}
    assert table
    assert sorted(set(table) & submodules) == []


def test_type_checkers_see_the_table_of_public_names():
    table, typed = public_tables()
    assert table == typed


def test_tests_are_no_packages():
    assert [str(path) for path in (SOURCE.parent / "tests").rglob("__init__.py")] == []


# ---------------------------------------------------------------- planted errors


@pytest.fixture
def tree(tmp_path):
    def make(**files: str) -> Path:
        for name, text in {"__init__": "", **files}.items():
            path = tmp_path / "epigemm" / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


@pytest.mark.parametrize(
    "text",
    [
        "from epigemm import api",
        "from epigemm.api import matmul",
        "import epigemm.api",
        "def f():\n    from epigemm.api import matmul",
        "from . import api",
        "from .api import matmul",
        "import importlib\nimportlib.import_module('epigemm.api')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from epigemm.api import Matmul",
    ],
)
def test_an_import_that_points_up_is_found(tree, text):
    (message,) = wrong_imports(tree(plans=text, api=""))
    assert "imports epigemm.api, which comes later" in message


@pytest.mark.parametrize("text", ["import torch", "from torch import nn", "def f():\n    import cupy", "import nvidia.cublas"])
def test_an_optional_library_in_a_pure_module_is_found(tree, text):
    assert len(wrong_imports(tree(options=text))) == 1
    assert wrong_imports(tree(options="", engines=text)) == []


def test_a_module_without_a_layer_is_found(tree):
    assert wrong_imports(tree(helpers="")) == ["helpers has no layer: name it in LAYERS"]


def test_the_native_core_is_for_devices(tree):
    assert len(wrong_imports(tree(problem="from epigemm import _native"))) == 1
    assert wrong_imports(tree(problem="", engines="from epigemm import _native")) == []


def test_a_circle_is_found(tree):
    assert cycles(tree(problem="from epigemm import plans", plans="import epigemm.problem")) == ["plans → problem → plans"]
    assert cycles(tree(problem="def f():\n    from epigemm import plans", plans="import epigemm.problem")) == []

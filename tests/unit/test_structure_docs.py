"""The exported surface is documented, and the examples in docstrings run and show their answers."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import epigemm

SOURCE = Path(epigemm.__file__).parent
OPTIONAL = {"torch", "triton", "cupy", "cuda", "typer", "rich", "sklearn", "matplotlib"}


def exported() -> dict[str, object]:
    """What users import, by its full name: the public names, and the peer's under the peer's path."""
    advanced = importlib.import_module("epigemm.linalg.advanced")
    names = {f"epigemm.{name}": getattr(epigemm, name) for name in epigemm.__all__}
    return names | {f"epigemm.linalg.advanced.{name}": getattr(advanced, name) for name in advanced.__all__}


def is_documented(value: object) -> bool:
    """Whether it has a docstring of its own: neither inherited, nor the signature that `dataclass` writes."""
    own = vars(value).get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", None)
    return bool(own and own.strip()) and not own.startswith(f"{getattr(value, '__name__', '')}(")


def members(cls: type) -> dict[str, object]:
    """The public methods and properties that the class itself defines."""
    kinds = (staticmethod, classmethod, property)
    found = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
    return {name: value for name, value in found.items() if inspect.isfunction(value) or isinstance(value, kinds)}


def undocumented(surface: dict[str, object]) -> list[str]:
    missing = []
    for name, value in surface.items():
        if isinstance(value, type):
            if not is_documented(value):
                missing.append(name)
            missing += [f"{name}.{member}" for member, inner in members(value).items() if not is_documented(inner)]
        elif callable(value) and not is_documented(value):
            missing.append(name)
    return missing


def test_every_public_name_loads():
    assert len(exported()) >= len(epigemm.__all__)


def test_the_exported_surface_is_documented():
    assert undocumented(exported()) == []


def test_what_is_not_documented_is_found():
    class Bare:
        def method(self): ...

        @property
        def value(self): ...

    class Documented:
        """It is."""

        def method(self):
            """So is this."""

    assert undocumented({"Bare": Bare, "Documented": Documented, "f": lambda: 0}) == ["Bare", "Bare.method", "Bare.value", "f"]


def module_names() -> list[str]:
    paths = [path.relative_to(SOURCE).with_suffix("") for path in sorted(SOURCE.rglob("*.py"))]
    return [".".join(("epigemm", *path.parts)).removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize("name", module_names())
def test_examples_run_and_show_their_answers(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").split(".")[0] in OPTIONAL:
            pytest.skip(f"{error.name} is not installed")
        raise
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, report=True)
    assert result.failed == 0

"""What a function reads from outside itself, and so decides what it is traced to besides its code and its constants."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
# Packages whose functions, classes and numbers do not change while a program runs.
_FIXED = frozenset({"builtins", "epigemm", "math", "ml_dtypes", "numpy", "torch"})


def captured(function: Callable[..., Any]) -> tuple[Hashable, ...] | None:
    """A key that differs when the function may be traced to another expression; None where that cannot be seen.

    Numbers and texts count by value, functions by identity and by what they read in turn. What an object, a list or a class of the
    user's holds can change without a trace: there is no key for it.

    Example:
        >>> slope = 0.5
        >>> first = captured(lambda acc: acc * slope)
        >>> slope = 0.25
        >>> captured(lambda acc: acc * slope) == first
        False
        >>> slopes = [0.5]
        >>> captured(lambda acc: acc * slopes[0])
    """
    found: list[Hashable] = []
    known = isinstance(function, FunctionType) and _function(function, found, set())
    return tuple(found) if known else None


def _function(function: FunctionType, found: list[Hashable], seen: set[FunctionType]) -> bool:
    """Adds what a function reads to `found`; False where it cannot be seen."""
    if function in seen:
        return True
    seen.add(function)
    names, outside = _names(function.__code__), function.__globals__
    values = [outside[name] for name in names if name in outside]
    if function.__closure__:
        values += [_cell(cell) for cell in function.__closure__]
    return all(_value(value, names, found, seen) for value in values)


def _value(value: Any, names: Iterable[str], found: list[Hashable], seen: set[FunctionType]) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        found.append((kind, value or repr(value)))  # repr tells -0.0 from 0.0
    elif isinstance(value, ModuleType):
        inside = {} if value.__name__.partition(".")[0] in _FIXED else value.__dict__
        return all(_value(inside[name], names, found, seen) for name in names if name in inside)
    elif isinstance(value, np.generic):
        found.append((kind, value.tobytes()))
    elif isinstance(value, FunctionType):
        found.append(value)
        return _package(value) in _FIXED or _function(value, found, seen)
    elif isinstance(value, (BuiltinFunctionType, np.ufunc, Enum)) or (isinstance(value, type) and _package(value) in _FIXED):
        found.append(value)
    elif isinstance(value, tuple):
        return all(_value(x, names, found, seen) for x in value)
    elif isinstance(value, AbstractFunction):
        found.append(value.constants)
        return isinstance(value.function, FunctionType) and _value(value.function, names, found, seen)
    else:
        return False
    return True


class AbstractFunction:
    """A function with constants that another one may call: an epilogue."""

    function: Callable[..., Any]
    constants: tuple[tuple[str, Hashable], ...]


def _package(value: Any) -> str:
    return str(value.__module__).partition(".")[0]


def _names(code: CodeType) -> tuple[str, ...]:
    """The names that code reads as globals or attributes, that of the functions within it too."""
    names = code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _names(constant)
    return names


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None

"""From a Python function to an Expression: the function is called once, with values that record what it does."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, overload

from epigemm.errors import TraceError
from epigemm.errors.types import listed, say
from epigemm.expression.captured import AbstractFunction, captured
from epigemm.expression.format import lines, text
from epigemm.expression.nodes import Expression, Node, Output, acc, input_
from epigemm.expression.rules import kind
from epigemm.expression.values import Value

if TYPE_CHECKING:
    from epigemm.expression.grad import Gradient

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_REQUIRED = inspect.Parameter.empty
_CACHE_NAME = "__epigemm_epilogue__"
_CONSTANTS = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True, slots=True)
class Outputs:
    """What an epilogue returns when it writes more than D: made by `outputs`."""

    d: Value
    extras: tuple[tuple[str, Value], ...]

    def __getattr__(self, name: str) -> Value:
        for key, value in self.extras:
            if key == name:
                return value
        raise AttributeError(f"these outputs are d, {listed(key for key, _ in self.extras)}; there is no {name!r}")


def outputs(d: Value, /, **extras: Value) -> Outputs:
    """D and further outputs by name, as an epilogue's return value.

    Raises:
        TraceError: a name is "d" or no identifier, or something is not a value of the epilogue.

    Example:
        >>> from epigemm.expression import bitmask, relu
        >>> print(epilogue(lambda acc, bias: outputs(relu(acc + bias), mask=bitmask(acc + bias >= 0))))
        t0 = acc + bias
        d = relu(t0)
        mask = bitmask(t0 >= 0)
    """
    for name, value in extras.items():
        if name == "d" or not name.isidentifier():
            raise TraceError(say(f"An output cannot be called {name!r}.", "'d' is the result itself; give another identifier."))
        if not isinstance(value, Value):
            raise TraceError(_not_a_value(f"The output {name!r}", value))
    if not isinstance(d, Value):
        raise TraceError(_not_a_value("D", d))
    return Outputs(d, tuple(extras.items()))


def _not_a_value(what: str, value: object) -> str:
    if value is None:
        return say(f"{what} is None.", "Did the function end without `return`?")
    if isinstance(value, (tuple, list, dict)):
        return say(f"{what} is a {type(value).__name__}.", "Return several outputs by eg.outputs(d, name=value).")
    return say(f"{what} is {value!r}, not a value of the epilogue.", "Compute it from the accumulator or an input.")


@dataclass(frozen=True, slots=True)
class _Signature:
    """What of a function's parameters matters: positional names, and keyword-only names with their defaults."""

    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]


def _signature(function: Callable[..., Any], name: str) -> _Signature:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise TraceError(say(f"`{name}` has no signature to read.", "Wrap it: lambda acc: f(acc).")) from error
    names, constants = [], []
    for p in parameters:
        if p.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise TraceError(say(f"`{name}` takes {p}: the inputs of an epilogue are known by name.", "Name each parameter."))
        if p.kind in _POSITIONAL:
            if p.default is not _REQUIRED:
                what = f"The parameter `{p.name}` of `{name}` has a default, so it is a constant, not an input."
                remedy = f"Make it keyword-only: put `*,` before {p.name}={p.default!r}; or wrap it: lambda acc: {name}(acc)."
                raise TraceError(say(what, remedy))
            names.append(p.name)
        else:
            constants.append((p.name, p.default))
    return _Signature(tuple(names), tuple(constants))


@dataclass(frozen=True, eq=False)
class Epilogue(AbstractFunction):
    """A traced function over the accumulator; made by `@epilogue`.

    Called with values of another epilogue it is inlined there; called with keyword-only constants it is the same epilogue with these
    constants. Equal if function, constants and number of accumulators are.

    Args:
        function: the Python function.
        constants: keyword-only constants that differ from the function's defaults.
        accumulators: how many of its first parameters are accumulators; None leaves it to the call (one product: one).
    """

    function: Callable[..., Any]
    constants: tuple[tuple[str, Hashable], ...] = ()
    accumulators: int | None = None
    _traced: dict[Hashable, Expression] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # A rebuilt epilogue (pickle, replace) starts without traces.
        object.__setattr__(self, "_parameters", _signature(self.function, self.name))

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the accumulators and inputs."""
        return self._parameters.names  # type: ignore[attr-defined, no-any-return]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Epilogue):
            return NotImplemented
        return self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> Hashable:
        return self.function, self.constants, repr(self.constants), self.accumulators

    def __repr__(self) -> str:
        constants = [f"{key}={value!r}" for key, value in self._constant_values().items()]
        inside = ", ".join([*self.parameters, *(["*", *constants] if constants else [])])
        return f"<epilogue {self.name}({inside})>"

    def __str__(self) -> str:
        return text(self.expression())

    def __reduce__(self) -> tuple[Any, ...]:
        module, name = getattr(self.function, "__module__", ""), getattr(self.function, "__qualname__", "")
        held = getattr(sys.modules.get(module), name, None)
        if isinstance(held, Epilogue) and held.function is self.function:
            # The name leads to the decorated function, so the function itself cannot be found under it.
            return _reopen, (module, name, self.constants)
        return Epilogue, (self.function, self.constants, self.accumulators)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """With values: the function's result on them. With keywords alone: this epilogue with other constants.

        Raises:
            TraceError: called with arrays, or with a constant that it does not have.
        """
        values = [a for a in (*args, *kwargs.values()) if isinstance(a, Value)]
        if values:
            constants = {key: value for key, value in self._constant_values().items() if key not in kwargs}
            return self.function(*args, **kwargs, **constants)
        if args:
            what = f"`{self.name}` was called with {listed(type(a).__qualname__ for a in args)}: an epilogue does not compute by itself."
            raise TraceError(say(what, f"Pass it on: matmul(a, b, epilog={self.name}, epilog_inputs={{...}})."))
        return self._with_constants(kwargs) if kwargs else self

    def _with_constants(self, changed: dict[str, Any]) -> Epilogue:
        known = dict(self._parameters.constants)  # type: ignore[attr-defined]
        for key, value in changed.items():
            if key not in known:
                remedy = f"It has {listed(known)}." if known else "It has none: put `*,` before a parameter to make it one."
                raise TraceError(say(f"`{self.name}` has no keyword-only constant {key!r}.", remedy))
            _verify_constant(key, value)
        merged = {**dict(self.constants), **changed}
        return Epilogue(self.function, tuple(sorted(merged.items())), self.accumulators)

    def _constant_values(self) -> dict[str, Any]:
        return {**dict(self._parameters.constants), **dict(self.constants)}  # type: ignore[attr-defined]

    def expression(self, accumulators: int | None = None) -> Expression:
        """The expression of this epilogue over `accumulators` products, traced once and kept.

        It is traced again when what the function, or one that it calls, reads from its closure or its module has changed, and each
        time where that cannot be seen (an attribute of an object, an element of a list).

        Args:
            accumulators: how many products feed it; None is the number it was declared with, or 1.

        Raises:
            TraceError: the function does what no expression can hold.
            ExpressionError: an op is given what it does not take.
        """
        count = accumulators or self.accumulators or 1
        if self.accumulators not in (None, count):
            what = f"`{self.name}` is declared with {self.accumulators} accumulators and is used with {count}."
            raise TraceError(say(what, f"Pass {self.accumulators} matrices: matmul(a, (b0, b1), ...)."))
        outside = captured(self.function)
        if outside is None:
            return self._trace(count)
        key = (count, outside)
        found = self._traced.get(key)
        if found is None:
            self._traced.clear()
            found = self._traced[key] = self._trace(count)
        return found

    def _trace(self, count: int) -> Expression:
        constants = self._constant_values()
        for key, value in constants.items():
            if value is _REQUIRED:
                raise TraceError(say(f"The constant `{key}` of `{self.name}` has no value.", f"Give it: {self.name}({key}=...)."))
            _verify_constant(key, value)
        if len(self.parameters) < count:
            what = f"`{self.name}` has {len(self.parameters)} positional parameters; its first {count} are the accumulators."
            raise TraceError(say(what, f"Give it one parameter for each of the {count} products."))
        inputs = self.parameters[count:]
        nodes: list[Node] = [*map(acc, range(count)), *map(input_, inputs)]
        result = self.function(*map(Value, nodes), **constants)
        if not isinstance(result, Outputs):
            if not isinstance(result, Value):
                raise TraceError(_not_a_value(f"What `{self.name}` returned", result))
            result = Outputs(result, ())
        if kind(result.d.node) != "value":
            what = f"D of `{self.name}` is `{text(result.d.node)}`, a {kind(result.d.node)}."
            raise TraceError(say(what, "D holds numbers: eg.where(condition, 1.0, 0.0); masks and reductions are further outputs."))
        found = [Output("d", result.d.node), *(Output(key, value.node) for key, value in result.extras)]
        return Expression(tuple(found), count, inputs, self.name)

    def grad(self, accumulators: int | None = None, **extents: str) -> Gradient:
        """The derivative of this epilogue and what its forward saves; print it.

        Args:
            accumulators: how many products feed it, if not one and not declared: `swiglu.grad(accumulators=2)`.
            extents: of inputs, by name: "row" (the default), "column", "matrix", "scalar".

        Returns:
            A Gradient: `forward` and `backward` as expressions, and what lies between them. epigemm.pytorch runs both.

        Raises:
            GradientError: an op has no derivative.
        """
        from epigemm.expression.grad import gradient

        return gradient(self.expression(accumulators), extents)

    def lines(self) -> list[tuple[str, str]]:
        """(name, formula) of each line that printing shows."""
        return lines(self.expression())


def _reopen(module: str, name: str, constants: tuple[tuple[str, Hashable], ...]) -> Epilogue:
    held: Epilogue = getattr(importlib.import_module(module), name)
    return Epilogue(held.function, constants, held.accumulators)


def _verify_constant(name: str, value: object) -> None:
    if not isinstance(value, _CONSTANTS):
        what = f"The constant `{name}` is a {type(value).__qualname__}; a constant is a number, a string, a bool or None."
        raise TraceError(say(what, f"Put `{name}` before the `*` to make it an input."))


@overload
def epilogue(function: Callable[..., Any], /) -> Epilogue: ...


@overload
def epilogue(*, accumulators: int) -> Callable[[Callable[..., Any]], Epilogue]: ...


def epilogue(function: Callable[..., Any] | None = None, /, *, accumulators: int | None = None) -> Any:
    """A Python function as an epilogue: its first parameters are accumulators, the others inputs, keyword-only ones constants.

    Args:
        function: over the accumulator, written with arithmetic and epigemm's functions.
        accumulators: how many of its first parameters are accumulators, where that is to be fixed.

    Raises:
        TraceError: a parameter has a default without being keyword-only, or the function takes *args or **kwargs.

    Example:
        >>> from epigemm.expression import gelu
        >>> @epilogue
        ... def residual_gelu(acc, bias, residual):
        ...     return gelu(acc + bias) + residual
        >>> print(residual_gelu)
        d = gelu(acc + bias) + residual
    """
    if function is None:
        return lambda f: Epilogue(f, accumulators=accumulators)
    if isinstance(function, Epilogue):
        return function
    return Epilogue(function, accumulators=accumulators)


def as_epilogue(function: Callable[..., Any]) -> Epilogue:
    """`function` as an Epilogue; one that a plain function already has is found again on the function itself.

    Raises:
        TraceError: as `epilogue`.
    """
    if isinstance(function, Epilogue):
        return function
    if not isinstance(function, FunctionType):
        return Epilogue(function)
    # On the function, so that they live and die together; a WeakKeyDictionary's value would keep its own key alive.
    found = function.__dict__.get(_CACHE_NAME)
    if found is None or found.function is not function:
        found = function.__dict__[_CACHE_NAME] = Epilogue(function)
    return found  # type: ignore[no-any-return]

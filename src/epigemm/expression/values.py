"""Value: what an epilogue function computes with while it is traced."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from numbers import Number
from typing import Any, NoReturn

from epigemm.errors import TraceError
from epigemm.errors.types import say
from epigemm.expression.format import text
from epigemm.expression.nodes import Node, constant
from epigemm.expression.rules import verify

# Functions of NumPy, torch and math that people reach for, and ours.
_OURS = {
    "absolute": "abs",
    "clip": "clamp",
    "clamp_min": "maximum",
    "max": "maximum (of two values) or eg.amax (along an axis)",
    "min": "minimum",
    "swish": "silu",
    "expit": "sigmoid",
    "power": "exp(y * eg.log(x)), or x ** number",
    "pow": "exp(y * eg.log(x)), or x ** number",
    **{name: name for name in "exp log sqrt rsqrt tanh erf sigmoid relu leaky_relu gelu silu softplus mish hardswish square".split()},
    **{name: name for name in "where minimum maximum clamp abs amax sum dropout".split()},
}
# NumPy's ufuncs that stand for an operator: np.float32(2) * acc arrives as one.
_OPERATORS = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
}


def lift(x: Any) -> Node:
    """The node of a value or a number.

    Raises:
        TraceError: it is an array, or something else that no expression holds.
    """
    if isinstance(x, Value):
        return x.node
    if isinstance(x, (bool, int, float, complex)):
        return constant(x)  # type: ignore[arg-type]
    if isinstance(x, Number) and hasattr(x, "item"):  # a NumPy scalar
        return constant(x.item())
    what = f"an epilogue computes with its parameters and with numbers, not with a {type(x).__module__}.{type(x).__qualname__}."
    if hasattr(x, "__array__") or hasattr(x, "__dlpack__"):
        what = f"an epilogue cannot read a {type(x).__qualname__} from outside (shape {tuple(getattr(x, 'shape', ()))})."
        raise TraceError(say(what, "Make it a parameter of the function, and pass it in epilog_inputs={name: array}."))
    raise TraceError(say(what, "Make it a parameter, or a keyword-only constant."))


def apply(op: str, *args: Any, **params: Hashable) -> Value:
    """The value of an op over values and numbers; wrong kinds are refused here, at the line that wrote them."""
    # A whole number is the same number in the accumulator's type; only a seed keeps its 64 bits.
    nodes = map(lift, args) if op == "uniform" else map(_as_number, map(lift, args))
    return Value(verify(Node(op, *nodes, **params)))


def _as_number(node: Node) -> Node:
    value = node.param("value") if node.op == "constant" else None
    return constant(_float(value)) if type(value) is int else node


def _float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        raise TraceError(say(f"An integer of {len(str(number))} digits is beyond every number's range.", "Scale it.")) from None


def _binary(op: str) -> tuple[Any, Any]:
    def forward(self: Value, other: Any) -> Value:
        return apply(op, self, other)

    def reflected(self: Value, other: Any) -> Value:
        return apply(op, other, self)

    return forward, reflected


class Value:
    """A value of the epilogue: it stands for every element at once, so it has no number yet."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"Value({text(self.node)})"

    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("sub")
    __mul__, __rmul__ = _binary("mul")
    __truediv__, __rtruediv__ = _binary("div")
    __lt__, __gt__ = _binary("lt")[0], _binary("gt")[0]
    __le__, __ge__ = _binary("le")[0], _binary("ge")[0]
    __and__, __rand__ = _binary("logical_and")
    __or__, __ror__ = _binary("logical_or")
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Any:
        return apply("eq", self, other)

    def __ne__(self, other: object) -> Any:
        return apply("ne", self, other)

    def __neg__(self) -> Value:
        return apply("neg", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return apply("abs", self)

    def __invert__(self) -> Value:
        return apply("logical_not", self)

    def __pow__(self, exponent: Any) -> Value:
        if isinstance(exponent, Value):
            what = f"`{text(self.node)} ** {text(exponent.node)}`: the exponent must be a number."
            raise TraceError(say(what, "Write eg.exp(y * eg.log(x))."))
        return power(self, lift(exponent).param("value"))

    def __rpow__(self, base: Any) -> Value:
        what = f"`{base} ** {text(self.node)}`: the exponent must be a number."
        raise TraceError(say(what, "Write eg.exp(y * math.log(base))."))

    # ------------------------------------------------ what needs the number itself

    def __bool__(self) -> bool:
        what = f"the truth of `{text(self.node)}` differs from element to element: `if`, `and`, `or`, `not`, min() and max() cannot use it."
        self._refuse(what, "Use eg.where(condition, x, y); eg.minimum and eg.maximum; & | ~ for and, or, not.")

    def __iter__(self) -> Iterator[Any]:
        self._refuse(f"`{text(self.node)}` cannot be iterated or unpacked.", "Return several values by eg.outputs.")

    def __getitem__(self, index: Any) -> Value:
        self._refuse(f"`{text(self.node)}` cannot be indexed.", "It stands for each element; pass slices as inputs of their own.")

    def __contains__(self, item: object) -> bool:
        self._refuse(f"`in` cannot look into `{text(self.node)}`.", "It stands for each element; compare it with ==.")

    def __len__(self) -> int:
        self._refuse(f"`{text(self.node)}` has no length.", "It stands for each element; pass sizes as keyword-only constants.")

    def _number(self, *_: Any) -> Any:
        what = f"`{text(self.node)}` has no single number, so float(), int(), round() and the functions of `math` cannot take it."
        self._refuse(what, "Use epigemm's functions: eg.exp, eg.tanh, eg.sqrt, ...")

    __float__ = __int__ = __index__ = __complex__ = __round__ = __floor__ = __ceil__ = __trunc__ = _number

    def _unknown(self, *_: Any) -> Any:
        what = f"`//`, `%`, `@`, `^`, `<<` and `>>` are not ops of the epilogue language (on `{text(self.node)}`)."
        self._refuse(what, "It has + - * / ** and the functions that `import epigemm as eg` shows.")

    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __matmul__ = __rmatmul__ = _unknown
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _unknown

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise TraceError(say(what, remedy))

    # ------------------------------------------------ other libraries' functions

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._refuse(f"`{text(self.node)}` is not an array and cannot become one.", "It stands for each element; use epigemm's functions.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Value:
        if method == "__call__" and ufunc.__name__ in _OPERATORS and len(inputs) == 2:
            return apply(_OPERATORS[ufunc.__name__], *inputs)
        raise _foreign("numpy", ufunc.__name__, self)

    def __array_function__(self, function: Any, *_: Any) -> NoReturn:
        raise _foreign("numpy", function.__name__, self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        tensor = next((a for a in args if not isinstance(a, Value) and hasattr(a, "__dlpack__")), None)
        if name.startswith("__") or tensor is not None:
            lift(tensor)
        raise _foreign("torch", name, next((a for a in args if isinstance(a, Value)), None))


def _foreign(library: str, name: str, value: Value | None) -> TraceError:
    where = f" (on `{text(value.node)}`)" if value is not None else ""
    remedy = f"Use eg.{_OURS[name]}." if name in _OURS else "Use epigemm's functions; `import epigemm as eg; dir(eg)` lists them."
    return TraceError(say(f"{library}.{name} is not an op of the epilogue language{where}.", remedy))


def power(x: Any, exponent: Any) -> Value:
    """x ** number; small integers and halves by the ops that are exact or fast for them."""
    if isinstance(exponent, complex):
        raise TraceError(say(f"The exponent {exponent} is complex.", "Give a real number."))
    if exponent in (1, 2, 3, 4):
        square = apply("square", x)
        return {1: lambda: Value(lift(x)), 2: lambda: square, 3: lambda: apply("mul", square, x), 4: lambda: apply("square", square)}[
            int(exponent)
        ]()
    special = {0.5: "sqrt", -0.5: "rsqrt"}.get(_float(exponent))
    if special:
        return apply(special, x)
    if exponent == -1:
        return apply("div", 1.0, x)
    return apply("power", x, exponent=float(exponent))

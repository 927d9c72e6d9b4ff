"""Random problems for hypothesis: cases drawn from the whole space, epilogues drawn as expression trees.

A tree is a nested tuple, ("add", ("acc", 0), ("input", "row")): it prints, hypothesis can shrink it, and `Tree` is the callable that
the library traces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import epigemm as eg
from epigemm.compute_types import COMPUTE_RULES
from epigemm.testing.cases import NARROW, Case
from epigemm.testing.epilogues import PREDEFINED, Input, Row
from epigemm.testing.placing import LAYOUTS, NEGATIVE

Recipe = Any

# ---------------------------------------------------------------- epilogues

# Of numbers: name -> how it is written. Domains are kept (log and sqrt of positive numbers, no divisor near 0).
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": lambda x: -x,
    "abs": lambda x: eg.abs(x),
    "square": lambda x: eg.square(x),
    "cube": lambda x: x**3,
    "exp": lambda x: eg.exp(eg.minimum(x, 8.0)),
    "log": lambda x: eg.log(eg.abs(x) + 0.5),
    "sqrt": lambda x: eg.sqrt(eg.abs(x) + 0.25),
    "rsqrt": lambda x: eg.rsqrt(eg.abs(x) + 0.25),
    "power": lambda x: (eg.abs(x) + 0.25) ** 0.75,
    "tanh": lambda x: eg.tanh(x),
    "erf": lambda x: eg.erf(x),
    "sigmoid": lambda x: eg.sigmoid(x),
    "relu": lambda x: eg.relu(x),
    "leaky_relu": lambda x: eg.leaky_relu(x, slope=0.125),
    "gelu": lambda x: eg.gelu(x),
    "gelu_tanh": lambda x: eg.gelu(x, approximate="tanh"),
    "silu": lambda x: eg.silu(x),
    "softplus": lambda x: eg.softplus(x),
    "mish": lambda x: eg.mish(x),
    "hardswish": lambda x: eg.hardswish(x),
    "clamp": lambda x: eg.clamp(x, -1.5, 2.0),
    "half": lambda x: eg.cast(x, "float16"),
    "brain": lambda x: eg.cast(x, "bfloat16"),
    "eight": lambda x: eg.cast(x, "float8_e4m3fn"),
    "dropout": lambda x: eg.dropout(x, 0.25, 99),
    "doubled": lambda x: x * 2.0,
    "plus_zero": lambda x: x + 0.0,
    "times_one": lambda x: x * 1.0,
    "reflected": lambda x: 1.0 - x,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (eg.abs(y) + 1.0),
    "minimum": lambda x, y: eg.minimum(x, y),
    "maximum": lambda x, y: eg.maximum(x, y),
}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
}
_LOGIC: dict[str, Callable[..., Any]] = {"and": lambda x, y: x & y, "or": lambda x, y: x | y, "not": lambda x: ~x}

_INPUTS = {
    "row": Input("row"),
    "column": Input("column"),
    "matrix": Input("matrix"),
    "scalar": Input("scalar"),
    "vector": Input("vector", "float32"),
    "batched": Input("matrix", batched=True),
    "whole": Input("row", "int32", "integers"),
    "mask": Input("bits"),
}


@dataclass(frozen=True)
class Tree:
    """A callable over accumulators and inputs, made of recipes: D's, and the further outputs'."""

    accumulators: int
    inputs: tuple[str, ...]
    d: Recipe
    extras: tuple[tuple[str, Recipe], ...] = ()

    @property
    def __signature__(self) -> inspect.Signature:
        names = [*(f"acc{i}" for i in range(self.accumulators)), *self.inputs]
        return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])

    def __call__(self, *values: Any) -> Any:
        known = dict(zip(self.__signature__.parameters, values, strict=True))
        d = _made(self.d, known)
        extras = {name: _made(recipe, known) for name, recipe in self.extras}
        return eg.outputs(d, **extras) if extras else d


def _made(recipe: Recipe, known: dict[str, Any]) -> Any:
    op, *arguments = recipe
    if op == "acc":
        return known[f"acc{arguments[0]}"]
    if op == "input":
        return known[arguments[0]]
    if op == "constant":
        return arguments[0]
    if op == "unbitmask":
        return eg.unbitmask(known["mask"])
    if op in ("sum", "amax"):
        return (eg.sum if op == "sum" else eg.amax)(_made(arguments[0], known), axis=arguments[1])
    if op == "operand_sum":
        return eg.operand_sum(arguments[0])
    made = [_made(argument, known) for argument in arguments]
    if op == "where":
        return eg.where(*made)
    if op == "bitmask":
        return eg.bitmask(*made)
    table: dict[str, Callable[..., Any]] = {**_UNARY, **_BINARY, **_COMPARE, **_LOGIC}
    return table[op](*made)


def used_inputs(*recipes: Recipe) -> tuple[str, ...]:
    """The inputs that recipes read, in a fixed order."""
    found: set[str] = set()
    stack = list(recipes)
    while stack:
        op, *arguments = stack.pop()
        found |= {arguments[0]} if op == "input" else {"mask"} if op == "unbitmask" else set()
        stack += [argument for argument in arguments if isinstance(argument, tuple)]
    return tuple(name for name in _INPUTS if name in found)


@st.composite
def values(draw: st.DrawFn, accumulators: int, depth: int) -> Recipe:
    """The recipe of a number."""
    kinds = ("leaf",) if depth == 0 else ("leaf", "unary", "unary", "binary", "binary", "where")
    kind = draw(st.sampled_from(kinds))
    if kind == "unary":
        return draw(st.sampled_from(sorted(_UNARY))), draw(values(accumulators, depth - 1))
    if kind == "binary":
        return draw(st.sampled_from(sorted(_BINARY))), draw(values(accumulators, depth - 1)), draw(values(accumulators, depth - 1))
    if kind == "where":
        return (
            "where",
            draw(conditions(accumulators, depth - 1)),
            draw(values(accumulators, depth - 1)),
            draw(values(accumulators, depth - 1)),
        )
    leaf = draw(st.sampled_from(("acc", "acc", "input", "input", "constant", "operand_sum")))
    if leaf == "acc":
        return "acc", draw(st.integers(0, accumulators - 1))
    if leaf == "input":
        return "input", draw(st.sampled_from([name for name in _INPUTS if name != "mask"]))
    if leaf == "operand_sum":
        return "operand_sum", draw(st.sampled_from(("a", "b")))
    return "constant", draw(st.sampled_from((0.0, 1.0, -1.0, 0.5, 0.1, 3.0)))


@st.composite
def conditions(draw: st.DrawFn, accumulators: int, depth: int) -> Recipe:
    """The recipe of a condition."""
    kind = draw(st.sampled_from(("compare", "compare", "logic", "mask") if depth > 0 else ("compare", "mask")))
    if kind == "mask":
        return ("unbitmask",)
    if kind == "compare":
        x = ("acc", draw(st.integers(0, accumulators - 1))) if depth == 0 else draw(values(accumulators, depth - 1))
        return draw(st.sampled_from(sorted(_COMPARE))), _traceable(x), draw(values(accumulators, 0))
    op = draw(st.sampled_from(sorted(_LOGIC)))
    return (op, *(draw(conditions(accumulators, depth - 1)) for _ in range(1 if op == "not" else 2)))


def _traceable(recipe: Recipe) -> Recipe:
    """The recipe, an accumulator added where it would be a Python number that records nothing."""
    return recipe if _records(recipe) else ("add", ("acc", 0), recipe)


def _records(recipe: Recipe) -> bool:
    op, *arguments = recipe
    if op in ("acc", "input", "unbitmask", "operand_sum"):
        return True
    return op != "constant" and all(_records(a) for a in arguments if isinstance(a, tuple))


def _anchored(recipe: Recipe) -> Recipe:
    """The recipe with an accumulator beside every subtree of constants alone: eg's functions take values."""
    op, *arguments = recipe
    made = (op, *(_anchored(a) if isinstance(a, tuple) else a for a in arguments))
    numbers = [a for a in made[1:] if isinstance(a, tuple)]
    if numbers and op != "where" and all(a[0] == "constant" for a in numbers):
        return (op, ("add", ("acc", 0), made[1]), *made[2:])
    if op == "where" and all(a[0] == "constant" for a in made[2:]):
        return ("where", made[1], ("add", ("acc", 0), made[2]), made[3])
    return made


@st.composite
def trees(draw: st.DrawFn, accumulators: int, depth: int = 3) -> Row:
    """A user epilogue: D, and up to three further outputs."""
    d = draw(values(accumulators, depth))
    extras = []
    for index in range(draw(st.sampled_from((0, 0, 1, 2, 3)))):
        kind = draw(st.sampled_from(("value", "bitmask", "sum", "amax")))
        if kind == "value":
            recipe = draw(values(accumulators, 2))
        elif kind == "bitmask":
            recipe = ("bitmask", draw(conditions(accumulators, 2)))
        else:
            recipe = (kind, draw(values(accumulators, 2)), draw(st.sampled_from(("m", "n", None))))
        extras.append((f"extra{index}", recipe))
    d = _traceable(_anchored(d))
    # A cast as D's root would decide D's dtype, which is a contract of its own.
    d = ("mul", d, ("constant", 0.5)) if d[0] in ("half", "brain", "eight") else d
    made = tuple((name, _top(_anchored(recipe))) for name, recipe in extras)
    names = used_inputs(d, *(recipe for _, recipe in made))
    tree = Tree(accumulators, names, d, made)
    return Row(str(tree), tree, {name: _INPUTS[name] for name in names}, accumulators, data="small")


def _top(recipe: Recipe) -> Recipe:
    """A further output must record something too."""
    if recipe[0] in ("sum", "amax"):
        return (recipe[0], _traceable(recipe[1]), recipe[2])
    return recipe if recipe[0] == "bitmask" else _traceable(recipe)


# ---------------------------------------------------------------- problems

_EXTENTS = st.one_of(st.integers(1, 9), st.sampled_from((0, 1, 13, 16, 31, 64, 129)))
_BATCHES = (
    *(((), ()),) * 5,
    *(((2,), (2,)), ((3,), ()), ((), (2,)), ((1,), (3,)), ((2, 1), (3,)), ((2, 3), (2, 3)), ((2, 3), (3,)), ((0,), (0,))),
)
_REAL = ("float16", "bfloat16", "float32", "float64")


@st.composite
def problems(draw: st.DrawFn, epilogue: str = "") -> Case:
    """A case of any shape, strides, dtypes, batches, C, scalars and order.

    Args:
        epilogue: "" for a plain product, "predefined", "tree" (one accumulator) or "several" (two or three).
    """
    a, b = draw(st.sampled_from(sorted(COMPUTE_RULES if not epilogue else [p for p in COMPUTE_RULES if not p[0].startswith("complex")])))
    batch_a, batch_b = draw(st.sampled_from(_BATCHES))
    row, name = None, ""
    if epilogue == "predefined":
        name = draw(st.sampled_from(sorted(PREDEFINED))).upper()
    elif epilogue:
        row = draw(trees(1 if epilogue == "tree" else draw(st.integers(2, 3))))
        name = row.name
    kinds = [draw(st.sampled_from((*("row", "col") * 4, *LAYOUTS))) for _ in range(4)]
    library = "numpy" if set(kinds) & NEGATIVE else draw(st.sampled_from(("numpy", "numpy", "torch")))
    layout_a, layout_b, layout_c, layout_in = kinds
    fields: dict[str, Any] = draw(_c(a, np.broadcast_shapes(batch_a, batch_b), epilogue))
    if name.startswith("GELU_AUX") and fields.get("c_dtype", "") in ("", *NARROW):
        fields |= {"c_dtype": "float16"} if fields else {}  # an 8-bit gelu_aux needs a scale of its own
    return Case(
        "random",
        draw(_EXTENTS),
        draw(_EXTENTS),
        draw(_EXTENTS),
        name,
        dtype=a,
        b_dtype=b if b != a else "",
        d_dtype=draw(st.sampled_from(("", "", *_results(a)))),
        batch_a=batch_a,
        batch_b=batch_b,
        layout_a=layout_a,
        layout_b=layout_b,
        layout_c=layout_c,
        layout_in=layout_in,
        alpha=draw(st.sampled_from((None, None, 1.0, 0.5, -2.0, 0.0, 0.1))),
        order=draw(st.sampled_from((None, None, "row", "col"))),
        data=draw(st.sampled_from(("", "", "normal", "small", "integers", "special"))),
        library=library,
        poison=draw(st.sampled_from((0xFF, 0x00))),
        custom=row,
        **fields,
    )


def _results(a: str) -> tuple[str, ...]:
    return ("complex64", "complex128") if a.startswith("complex") else (*_REAL, *NARROW)


@st.composite
def _c(draw: st.DrawFn, a: str, batch: tuple[int, ...], epilogue: str) -> dict[str, Any]:
    if epilogue == "several" or draw(st.booleans()):
        return {}
    return {
        "c": draw(st.sampled_from(("mn", "mn", "m1", "1n", "11"))),
        "batch_c": draw(st.sampled_from((batch, batch[1:], ()))),
        "c_dtype": draw(st.sampled_from(("", *(_results(a))))),
        "beta": draw(st.sampled_from((1.0, 0.0, -0.5, 0.1))),
    }

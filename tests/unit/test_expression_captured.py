"""An epilogue is traced anew when what it reads from outside itself has changed, whatever kind of thing that is."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from epigemm import expression as eg
from epigemm.errors import TraceError
from epigemm.expression.captured import captured
from epigemm.expression.format import text
from epigemm.expression.nodes import Expression, Node, acc, constant
from epigemm.expression.trace import as_epilogue, epilogue

FACTOR: Any = 2.0


def test_a_number_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(acc: Any) -> Any:
        return acc * FACTOR

    assert _factor(scaled) == 2
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert _factor(scaled) == 5


def _factor(function: Callable[..., Any]) -> Any:
    """What the accumulator is multiplied by."""
    return as_epilogue(function).expression().d.node.args[1].param("value")


def from_cell(get: Callable[[Any], Any], before: Any, after: Any) -> tuple[Any, Any]:
    """The factor that a closure over `before` traces to, and that after the cell is assigned `after`."""
    held = before

    def scaled(acc: Any) -> Any:
        return acc * get(held)

    first = _factor(scaled)
    held = after
    return first, _factor(scaled)


CELLS = [
    (lambda x: x, np.float32(2), np.float32(5)),
    (lambda x: x, np.int64(2), np.int64(5)),
    (lambda x: x[0], [2.0], [5.0]),
    (lambda x: x[1][0], (1, (2.0,)), (1, (5.0,))),
    (lambda x: x["k"], {"k": 2.0}, {"k": 5.0}),
    (lambda x: x.k, SimpleNamespace(k=2.0), SimpleNamespace(k=5.0)),
    (lambda x: x(), lambda: 2.0, lambda: 5.0),
]


@pytest.mark.parametrize(("get", "before", "after"), CELLS)
def test_a_cell_that_is_assigned(get: Callable[[Any], Any], before: Any, after: Any) -> None:
    assert from_cell(get, before, after) == (2, 5)


def test_zeros_of_both_signs() -> None:
    first, second = from_cell(lambda x: x, 0.0, -0.0)
    assert (math.copysign(1, first), math.copysign(1, second)) == (1, -1)


def test_objects_that_change_inside() -> None:
    values, space, module = [2.0], SimpleNamespace(k=2.0), ModuleType("settings")
    module.k = 2.0  # type: ignore[attr-defined]

    class Scale:
        k = 2.0

        def apply(self, acc: Any) -> Any:
            return acc * self.k

        def __call__(self, acc: Any) -> Any:
            return acc * self.k

    scale = Scale()
    functions = [
        lambda acc: acc * values[0],
        lambda acc: acc * space.k,
        lambda acc: acc * module.k,
        lambda acc: acc * Scale.k,
        lambda acc: (lambda y: y * values[0])(acc),
        epilogue(scale.apply),
        epilogue(scale),
    ]
    assert [_factor(f) for f in functions] == [2] * 7
    values[0] = space.k = module.k = Scale.k = 5.0  # type: ignore[attr-defined]
    assert [_factor(f) for f in functions] == [5] * 7


def test_what_a_called_function_reads() -> None:
    k = 2.0

    def helper(y: Any) -> Any:
        return y * k

    inner = epilogue(helper)
    functions = [lambda acc: helper(acc), lambda acc: inner(acc)]
    assert [_factor(f) for f in functions] == [2, 2]
    k = 5.0
    assert [_factor(f) for f in functions] == [5, 5]


def test_another_function_under_the_same_name() -> None:
    act = eg.relu

    def fn(acc: Any) -> Any:
        return act(acc)

    assert as_epilogue(fn).expression().d.node.op == "relu"
    act = eg.abs
    assert as_epilogue(fn).expression().d.node.op == "abs"


def test_what_does_not_change_is_traced_once() -> None:
    def plain(acc: Any) -> Any:
        return eg.relu(acc) * math.pi * FACTOR + eg.gelu(acc)

    made = as_epilogue(plain)
    assert captured(plain) is not None
    assert made.expression() is made.expression()


def test_functions_that_call_each_other() -> None:
    def even(y: Any, n: int) -> Any:
        return y if n == 0 else odd(y, n - 1)

    def odd(y: Any, n: int) -> Any:
        return even(y * 2, n - 1)

    assert _factor(lambda acc: odd(acc, 1)) == 2


# ---------------------------------------------------------------- size, and numbers beyond range


def chain(length: int) -> Expression:
    def fn(acc: Any) -> Any:
        for i in range(length):
            acc = acc * 1.5 + i
        return acc

    return epilogue(fn).expression()


def test_a_long_chain_is_printed_derived_and_pickled() -> None:
    found = chain(3000)
    assert str(as_epilogue(lambda acc: acc * 2)) == "d = acc * 2"
    assert text(found).startswith("d = ")
    assert pickle.loads(pickle.dumps(found)) == found
    node = Node("tanh", acc())
    for _ in range(3000):
        node = Node("add", node, constant(1.0))
    assert pickle.loads(pickle.dumps(node)) is node


def test_the_derivative_of_a_long_chain() -> None:
    def fn(acc: Any) -> Any:
        for _ in range(1500):
            acc = acc * 1.0001 + 0.5
        return acc

    assert "backward" in str(epilogue(fn).grad())


@pytest.mark.parametrize("use", [lambda x: x * 10**400, lambda x: x**10**400, lambda x: eg.where(x > 10**400, x, 0)])
def test_integers_beyond_range_are_refused(use: Callable[[Any], Any]) -> None:
    with pytest.raises(TraceError, match="beyond every number's range"):
        epilogue(lambda acc: use(acc)).expression()


def test_in_is_refused() -> None:
    with pytest.raises(TraceError, match="cannot look into"):
        epilogue(lambda acc: acc * (1 in acc)).expression()

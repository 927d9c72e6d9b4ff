"""Node and Expression: an epilogue as a small graph of values.

Nodes are interned: two nodes with the same op, arguments and parameters are one object, so a shared subexpression is stored, hashed and
computed once and comparing two expressions is comparing their outputs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

# Where a node's value varies: nowhere, along m, along n, everywhere; "bits" is a packed mask in memory.
SCALAR, COLUMN, ROW, MATRIX, BITS = "scalar", "column", "row", "matrix", "bits"

_LONGEST_REPR = 1000

_interned: WeakValueDictionary[Hashable, Node] = WeakValueDictionary()
_lock = threading.Lock()


def _free_lock() -> None:
    """In a forked child: a thread that held the lock is gone, and would hold it for ever."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_lock)


class Node:
    """One step of an epilogue: an op of `ops.py` over other nodes.

    Leaves are `acc` (index=), `input` (name=, and once checked extent=, dtype=), `constant` (value=) and `operand_sum` (operand=).
    """

    __slots__ = ("__weakref__", "_hash", "args", "op", "params")

    op: str
    args: tuple[Node, ...]
    params: tuple[tuple[str, Hashable], ...]
    _hash: int

    def __new__(cls, op: str, *args: Node, **params: Hashable) -> Node:
        items = tuple(sorted(params.items()))
        # repr tells 1 from 1.0 and True, and 0.0 from -0.0, which compare equal.
        key = (op, args, items, repr(items))
        with _lock:
            node = _interned.get(key)
            if node is None:
                node = super().__new__(cls)
                node.op, node.args, node.params, node._hash = op, args, items, hash(key)
                _interned[key] = node
            return node

    def __reduce__(self) -> tuple[Callable[..., Node], tuple[object, ...]]:
        # A table of all nodes below, arguments by their row: a long chain would exceed the depth that pickle can follow.
        rows: dict[Node, int] = {}
        table = []
        for node in walk([self]):
            table.append((node.op, tuple(rows[a] for a in node.args), node.params))
            rows[node] = len(rows)
        return _rebuild, (tuple(table),)

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: object) -> Node:
        return self

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "_hash"):
            raise AttributeError(f"Node is immutable; {name} cannot be set")
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other

    def param(self, name: str) -> Hashable:
        """The value of one parameter, None where the node has none of that name."""
        for key, value in self.params:
            if key == name:
                return value
        return None

    def __repr__(self) -> str:
        """The node as text, `gelu(add(acc, bias))`; `format.py` writes it as a person would."""
        # Cut short: a shared part would be written 2^depth times.
        known: dict[Node, str] = {}
        for node in walk([self]):
            known[node] = _shown(node, known)[:_LONGEST_REPR]
        return known[self]


def _shown(node: Node, known: dict[Node, str]) -> str:
    if node.op == "input":
        return str(node.param("name"))
    if node.op == "constant":
        return repr(node.param("value"))
    inside = [known[a] for a in node.args] + [f"{k}={v!r}" for k, v in node.params]
    return f"{node.op}({', '.join(inside)})" if inside else node.op


def _rebuild(table: tuple[tuple[str, tuple[int, ...], tuple[tuple[str, Hashable], ...]], ...]) -> Node:
    nodes: list[Node] = []
    for op, args, params in table:
        nodes.append(Node(op, *(nodes[i] for i in args), **dict(params)))
    return nodes[-1]


@dataclass(frozen=True, slots=True)
class Output:
    """One thing an epilogue writes.

    Args:
        name: "d" for D, else the key in the returned dictionary.
        node: its value.
        dtype: the dtype name it is stored in; "" is the rule of its kind (D's dtype for matrices, the accumulator's for reductions,
            uint8 for masks), which `check` fills in.
        extent: "matrix", "column", "row", "scalar" or "bits"; "" until `check` fills it in.
        pad: rows (along D's contiguous axis) are padded to a multiple of this in memory: 8 for the peer's gelu_aux.
    """

    name: str
    node: Node
    dtype: str = ""
    extent: str = ""
    pad: int = 1


@dataclass(frozen=True, slots=True)
class Expression:
    """An epilogue's outputs, D first. Equal and hashed by content.

    Args:
        outputs: what is written; the first is D.
        accumulators: how many products feed it.
        input_names: its inputs in the order of the function's parameters (also those it does not use).
        name: for people; not part of its identity.
    """

    outputs: tuple[Output, ...]
    accumulators: int = 1
    input_names: tuple[str, ...] = ()
    name: str = ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Expression):
            return NotImplemented
        return self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[object, ...]:
        return self.outputs, self.accumulators, self.input_names

    @property
    def d(self) -> Output:
        """D's output."""
        return self.outputs[0]

    @property
    def extras(self) -> tuple[Output, ...]:
        """The outputs besides D."""
        return self.outputs[1:]

    def nodes(self) -> tuple[Node, ...]:
        """Every node once, arguments before their users."""
        return tuple(walk(o.node for o in self.outputs))

    def map(self, rewrite: Callable[[Node], Node | None]) -> Expression:
        """The expression with `rewrite` applied to each node, arguments first; None keeps a node."""
        memo: dict[Node, Node] = {}
        return replace(self, outputs=tuple(replace(o, node=transform(o.node, rewrite, memo)) for o in self.outputs))


def walk(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node below `roots` once, arguments before their users, in a stable order."""
    seen: set[Node] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            node, expanded = stack.pop()
            if node in seen:
                continue
            if expanded:
                seen.add(node)
                yield node
            else:
                stack.append((node, True))
                stack.extend((a, False) for a in reversed(node.args))


def transform(root: Node, rewrite: Callable[[Node], Node | None], memo: dict[Node, Node] | None = None) -> Node:
    """`root` with `rewrite` applied to each node below it, arguments first; None keeps a node."""
    memo = {} if memo is None else memo
    for node in walk([root]):
        if node not in memo:
            args = tuple(memo[a] for a in node.args)
            rebuilt = node if args == node.args else Node(node.op, *args, **dict(node.params))
            memo[node] = rewrite(rebuilt) or rebuilt
    return memo[root]


def constant(value: float | int | bool) -> Node:
    """A number of the expression."""
    return Node("constant", value=value)


def acc(index: int = 0) -> Node:
    """The accumulator of product `index`."""
    return Node("acc", index=index)


def input_(name: str) -> Node:
    """A named input, its extent still unknown."""
    return Node("input", name=name)

"""The cheapest set of values that separates what the forward computes from what the backward needs: a minimum vertex cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from epigemm.expression.nodes import Node, walk

Vertex = tuple[Node | None, bool]  # (node, is its output side); (None, False) is the source, (None, True) the sink

_SOURCE: Vertex = (None, False)
_SINK: Vertex = (None, True)


def cheapest_cut(needed: Iterable[Node], costs: Mapping[Node, int | None], free: Iterable[Node]) -> list[Node]:
    """The nodes to keep so that every node of `needed` can be computed from them and from `free` leaves.

    By maximum flow: each node is an edge of its cost's capacity from its input side to its output side, and its value flows on to its users
    without limit. Among cuts of equal cost it is the one nearest to the leaves.

    Args:
        needed: what must be computable.
        costs: of keeping a node; None where it cannot be kept.
        free: leaves that need not be kept.

    Returns:
        The kept nodes, arguments before their users.
    """
    needed, free = list(needed), set(free)
    order = list(walk(needed))
    capacity: dict[Vertex, dict[Vertex, int]] = {_SOURCE: {}, _SINK: {}}
    # More than any cut can cost.
    endless = 1 + sum(cost for cost in costs.values() if cost is not None)
    for node in order:
        cost = costs[node]
        _edge(capacity, (node, False), (node, True), endless if cost is None else cost)
        for argument in node.args:
            _edge(capacity, (argument, True), (node, False), endless)
        if not node.args and node not in free:
            _edge(capacity, _SOURCE, (node, False), endless)
    for node in needed:
        _edge(capacity, (node, True), _SINK, endless)
    reached = _saturate(capacity)
    return [node for node in order if (node, False) in reached and (node, True) not in reached]


def _edge(capacity: dict[Vertex, dict[Vertex, int]], tail: Vertex, head: Vertex, amount: int) -> None:
    capacity.setdefault(tail, {})[head] = amount
    capacity.setdefault(head, {}).setdefault(tail, 0)


def _saturate(capacity: dict[Vertex, dict[Vertex, int]]) -> set[Vertex]:
    """Push flow along shortest paths until none is left (Edmonds and Karp); the vertices that the source still reaches."""
    while True:
        before: dict[Vertex, Vertex] = {_SOURCE: _SOURCE}
        queue = deque([_SOURCE])
        while queue and _SINK not in before:
            tail = queue.popleft()
            for head, room in capacity[tail].items():
                if room > 0 and head not in before:
                    before[head] = tail
                    queue.append(head)
        if _SINK not in before:
            return set(before)
        path = [_SINK]
        while path[-1] != _SOURCE:
            path.append(before[path[-1]])
        edges = list(zip(path[1:], path[:-1], strict=True))
        amount = min(capacity[tail][head] for tail, head in edges)
        for tail, head in edges:
            capacity[tail][head] -= amount
            capacity[head][tail] += amount

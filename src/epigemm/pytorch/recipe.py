"""Recipe: all that is known of one network before its data: what the forward writes, what is held, what the backward computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from epigemm.expression.check import extent, input_usage
from epigemm.expression.grad import Gradient, gradient
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, Expression, Node, Output, acc, input_, transform, walk
from epigemm.expression.rules import VALUE, kind
from epigemm.pytorch.network import Network, decode, encode, place

# The size for which the cheapest set to save is chosen. A fixed one: a dynamic number of rows must not change what is saved.
_ROWS, _COLUMNS = 4096, 4096

# An MLP's first result: a slot, and the further output by which its backward computes it again.
HIDDEN = "hidden"

_COTANGENT = acc(0)
# A bias gradient where nothing follows the bias: the sum of D's cotangent over the rows.
_ROW_SUM = Node("sum", _COTANGENT, axis="m")


@dataclass(frozen=True, slots=True)
class Needs:
    """Which gradients are wanted: of x, of each weight, of each input."""

    x: bool
    weights: tuple[bool, ...]
    inputs: tuple[bool, ...]

    @property
    def flags(self) -> tuple[bool, ...]:
        return (self.x, *self.weights, *self.inputs)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one network with inputs of given extents runs forward and backward.

    What is held between the two has slots: "x", "w0", "w1", ..., "in<position>" an input, "made:<name>" what the forward writes for the
    backward alone, "out:<name>" an output, "hidden" an MLP's first result. A gradient has the slot of what it belongs to.

    Args:
        network: what is computed.
        extents: of the inputs.
        dtype: name of x's dtype.
        needs: which gradients are wanted.
        forward: the first layer as it runs.
        gradient: the first layer's; None where nothing in it wants one.
        backward: over the cotangent of the first layer's D; a further output "hidden" computes that D again.
        recomputing: what the backward runs first, to get what is not held; None where all is held.
        held: slots.
        fresh: those of `held` that the forward makes besides the outputs.
        passed: slots of inputs whose gradient is D's cotangent itself.
        sums: slots of inputs whose gradient is the sum of D's cotangent over the rows.
        computed: slots of the gradients that are not passed.
        kept: where `held` are among (x, *weights, *inputs, *outputs, *fresh).
        once: of each further output whose formula varies less than D, by name: whether it does not vary along the rows, the columns.
        tall: of each output that the user gets, whether it has x's leading dimensions: it varies along the rows, or could.
    """

    network: Network
    extents: tuple[str, ...]
    dtype: str
    needs: Needs
    forward: Expression
    gradient: Gradient | None = None
    backward: Expression | None = None
    recomputing: Expression | None = None
    held: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()
    tall: tuple[bool, ...] = (True,)
    once: tuple[tuple[str, tuple[bool, bool]], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the first layer has one product, whose cotangent is that of its D."""
        return self.backward is None or (self.network.first.accumulators == 1 and self.backward.d.node is _COTANGENT)


def recipe(network: Network, extents: tuple[str, ...], flags: tuple[bool, ...], dtype: torch.dtype) -> Recipe:
    """The recipe, made once for a network object and kept with it.

    Args:
        network: what is computed.
        extents: of its inputs, from `place`.
        flags: which of (x, *weights, *inputs) want a gradient.
        dtype: x's.
    """
    key = (extents, flags, dtype)
    found: Recipe | None = network.recipes.get(key)
    if found is None:
        needs = Needs(flags[0], flags[1 : 1 + network.weights], flags[1 + network.weights :])
        where = {o.name: placed(o.node, network, extents) for o in network.last.extras}
        tall = (True, *(each in (MATRIX, COLUMN, BITS) for each in where.values()))
        less = [o.name for o in network.last.extras if kind(o.node) == VALUE and where[o.name] != MATRIX]
        once = tuple((name, (where[name] not in (COLUMN, MATRIX), where[name] not in (ROW, MATRIX))) for name in less)
        plain = Recipe(network, extents, str(dtype).removeprefix("torch."), needs, network.first, tall=tall, once=once)
        found = network.recipes[key] = _make(plain)
    return found


def placed(node: Node, network: Network, extents: tuple[str, ...]) -> str:
    """The extent of a value of the network's first layer."""
    places = dict(zip(network.first.input_names, extents, strict=False))

    def fill(x: Node) -> Node | None:
        return Node("input", name=x.param("name"), extent=places[str(x.param("name"))]) if x.op == "input" else None

    return extent(transform(node, fill))


@dataclass(frozen=True, slots=True)
class Form:
    """All calls whose operands look the same.

    Args:
        network: what is computed.
        extents: of the inputs.
        operands: (shape, dtype) of x, of each weight and of each input: what their gradients have.
        dtype: x's.
        without: the recipe without a gradient.
        recipes: by which of the operands want one, those used so far.
    """

    network: Network
    extents: tuple[str, ...]
    operands: tuple[tuple[Any, Any], ...]
    dtype: torch.dtype
    without: Recipe
    recipes: dict[tuple[bool, ...], Recipe] = field(default_factory=dict)

    @staticmethod
    def of(network: Network, x: Any, weights: Sequence[Any], inputs: Sequence[Any]) -> Form:
        """The form of a call."""
        extents = tuple([place(t.shape) for t in inputs])
        operands = tuple([(t.shape, t.dtype) for t in (x, *weights, *inputs)])
        return Form(network, extents, operands, x.dtype, recipe(network, extents, (False,) * len(operands), x.dtype))

    def recipe(self, flags: tuple[bool, ...]) -> Recipe:
        """The recipe where these of the operands want a gradient."""
        found = self.recipes.get(flags)
        if found is None:
            found = self.recipes[flags] = recipe(self.network, self.extents, flags, self.dtype)
        return found


def text(made: Recipe) -> str:
    """The recipe as text: what a registered op of the backward carries."""
    flags = ",".join(str(int(flag)) for flag in made.needs.flags)
    return "\n".join((encode(made.network), ",".join(made.extents), flags, made.dtype))


@lru_cache(512)
def of_text(written: str) -> Recipe:
    """The recipe that `text` wrote."""
    network, extents, flags, dtype = written.split("\n")
    return recipe(
        decode(network), tuple(x for x in extents.split(",") if x), tuple(x == "1" for x in flags.split(",")), getattr(torch, dtype)
    )


# ---------------------------------------------------------------- making


def _make(made: Recipe) -> Recipe:
    """Without any gradient wanted, the recipe as it is."""
    network, needs = made.network, made.needs
    if not any(needs.flags):
        return made
    if needs.x or any(needs.weights[: network.first.accumulators]) or any(needs.inputs[: len(network.first.input_names)]):
        made = _with_gradient(made)
    held = _held(made)
    fresh = tuple(slot for slot in held if slot.startswith("made:") or slot == HIDDEN)
    passed, sums = _direct(made)
    wanted = [f"in{i}" for i, want in enumerate(needs.inputs) if want]
    slots = (*(["x"] if needs.x else []), *(f"w{i}" for i, want in enumerate(needs.weights) if want), *wanted)
    ways, names = range(network.weights), network.last.outputs
    places = ["x", *(f"w{i}" for i in ways), *(f"in{i}" for i in range(len(needs.inputs))), *(f"out:{o.name}" for o in names), *fresh]
    kept = tuple(places.index(slot) for slot in held)
    computed = tuple(s for s in slots if s not in passed)
    return replace(made, held=held, fresh=fresh, kept=kept, passed=passed, sums=sums, computed=computed)


def _with_gradient(made: Recipe) -> Recipe:
    """With the first layer's derivative; an MLP's gets the hidden result as a further output, where that can be computed again."""
    network, needs = made.network, made.needs
    expression = network.first
    usage = input_usage(expression)
    given = list(zip(expression.input_names, made.extents, needs.inputs, strict=False))
    places = {name: BITS if usage.get(name) == BITS else where for name, where, _ in given}
    wrt = [name for name, _, want in given if want and usage.get(name, VALUE) == VALUE]
    found = gradient(expression, places, wrt=wrt, cotangents=flowing(expression), m=_ROWS, n=_COLUMNS, dtype=made.dtype)
    made = replace(made, gradient=found, backward=found.backward, forward=found.forward)
    hidden = _again(found) if _wants_hidden(made) else None
    if hidden is not None:
        names = dict.fromkeys((*found.backward.input_names, *_inputs_below([hidden])))
        outputs = (*found.backward.outputs, Output(HIDDEN, hidden))
        made = replace(made, backward=replace(found.backward, outputs=outputs, input_names=tuple(names)))
    if network.recompute and (_made(found) or _holds_hidden(made)):
        made = replace(made, forward=expression, recomputing=_recomputing(made))
    return made


def flowing(expression: Expression) -> tuple[str, ...]:
    """The outputs besides D through which a gradient can flow: no masks, maxima or sums of operands."""
    stopped = ("amax", "operand_sum")
    return tuple(o.name for o in expression.extras if kind(o.node) != BITS and not any(x.op in stopped for x in walk([o.node])))


def _wants_hidden(made: Recipe) -> bool:
    """Whether the backward of an MLP needs its first result: for the gradient of the second weight."""
    return made.network.second is not None and made.needs.weights[-1]


def _holds_hidden(made: Recipe) -> bool:
    """Whether an MLP's first result must be there before the backward begins."""
    if made.network.second is None:
        return False
    reads = made.gradient is not None and any(s.source == "result" for s in made.gradient.saved)
    again = made.backward is not None and any(o.name == HIDDEN for o in made.backward.outputs)
    return reads or (_wants_hidden(made) and not again)


def _made(found: Gradient) -> tuple[str, ...]:
    """The names of what the forward writes for the backward alone."""
    return tuple(s.name for s in found.saved if s.is_extra)


def _again(found: Gradient) -> Node | None:
    """D of the forward from what is saved of it anyway; None where that is not enough."""
    memo = {s.node: Node("unbitmask", input_(s.name)) if s.extent == BITS else input_(s.name) for s in found.saved if s.is_extra}
    node = transform(found.forward.d.node, lambda _: None, memo)
    return None if any(x.op in ("acc", "operand_sum") for x in walk([node])) else node


def _recomputing(made: Recipe) -> Expression:
    """The forward cut to what the backward wants; where the result is not wanted, a saved value takes D's place."""
    found = made.gradient
    assert found is not None
    outputs = {o.name: o for o in found.forward.outputs}
    d, extras = found.forward.d, list(_made(found))
    matrices = [s.name for s in found.saved if s.source == "value" and s.extent == MATRIX]
    if matrices and not _holds_hidden(made):
        d = replace(outputs[matrices[0]], name=matrices[0])
        extras.remove(matrices[0])
    rest = tuple(outputs[name] for name in extras)
    return Expression((d, *rest), found.forward.accumulators, _inputs_below([d.node, *(o.node for o in rest)]), found.forward.name)


def _inputs_below(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(x.param("name")) for x in walk(nodes) if x.op == "input"))


def values(found: Gradient) -> tuple[Node, ...]:
    """What the backward reads of the forward besides inputs and masks: a double backward computes it again, to differentiate it."""
    return tuple(s.node for s in found.saved if s.source in ("value", "result", "output"))


def _held(made: Recipe) -> tuple[str, ...]:
    """The slots to hold: what the backward reads, and what lies below the values that a double backward computes again."""
    network, needs, found, again = made.network, made.needs, made.gradient, made.recomputing
    if found is None:
        return (HIDDEN,) if needs.weights[-1] else ()
    ways = network.first.accumulators
    computes = bool(values(found)) or again is not None or network.second is not None
    slots = ["x"] if any(needs.weights[:ways]) or computes else []
    slots += [f"w{i}" for i in range(ways)] if needs.x or computes else []
    slots += [f"w{ways}"] if network.second is not None else []
    roots = [*values(found), *(o.node for o in (again.outputs if again else ()))]
    roots += [network.first.d.node] if _wants_hidden(made) else []
    read = {*_inputs_below(roots), *(s.origin for s in found.saved if s.source == "input")}
    slots += [f"in{i}" for i, name in enumerate(network.first.input_names) if name in read]
    if again is None:
        slots += [f"made:{name}" for name in _made(found)] + [HIDDEN] * _holds_hidden(made)
    if network.second is None:
        slots += [f"out:{name}" for name in dict.fromkeys(s.origin for s in found.saved if s.source in ("result", "output"))]
    return tuple(slots)


def _direct(made: Recipe) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Slots of the inputs whose gradient is D's cotangent, and of those whose gradient is its sum over the rows."""
    network = made.network
    first = len(network.first.input_names)
    passed: list[str] = []
    sums: list[str] = []
    for index, (name, want, where) in enumerate(zip(network.input_names, made.needs.inputs, made.extents, strict=True)):
        slot = f"in{index}"
        if want and index >= first:
            (passed if where == MATRIX else sums).append(slot)
        elif want and network.second is None and made.is_plain and made.backward is not None:
            node = next((o.node for o in made.backward.outputs if o.name == f"d_{name}"), None)
            passed += [slot] if node is _COTANGENT and where == MATRIX else []
            sums += [slot] if node is _ROW_SUM else []
    return tuple(passed), tuple(sums)


def reads(made: Recipe) -> dict[str, str]:
    """The slot of each input that the backward expression reads; cotangents of further outputs have none."""
    found = made.gradient
    if found is None or made.backward is None:
        return {}
    names = made.network.first.input_names
    slots = {name: f"in{i}" for i, name in enumerate(names)}
    for s in found.saved:
        if s.is_extra:
            slots[s.name] = f"made:{s.name}"
        elif s.source == "result":
            slots[s.name] = HIDDEN if made.network.second is not None else "out:d"
        elif s.source in ("result", "output"):
            slots[s.name] = f"out:{s.origin}"
    return {name: slots[name] for name in made.backward.input_names if name in slots}

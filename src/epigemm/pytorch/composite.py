"""A network in PyTorch's own operations: what is differentiated twice, mapped or transformed by functorch, and what tensor subclasses run.

It rounds where an unfused model rounds (the product, once) and computes the epilogue in the accumulator's type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epigemm import layouts
from epigemm.expression.nodes import BITS, Expression, Node, walk
from epigemm.expression.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, WORDS
from epigemm.expression.rules import BOOL, kind
from epigemm.pytorch.fused import accumulator
from epigemm.pytorch.network import Network
from epigemm.pytorch.recipe import HIDDEN, Recipe, reads, values

_WORD = 0xFFFFFFFF

# op -> over tensors and numbers, with the node's parameters by name
TORCH: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x: -x,
    "square": lambda x: x * x,
    "power": lambda x, exponent: x**exponent,
    "abs": lambda x: torch.abs(x),
    "exp": lambda x: torch.exp(x),
    "log": lambda x: torch.log(x),
    "sqrt": lambda x: torch.sqrt(x),
    "rsqrt": lambda x: torch.rsqrt(x),
    "tanh": lambda x: torch.tanh(x),
    "erf": lambda x: torch.erf(x),
    "sigmoid": lambda x: torch.sigmoid(x),
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "logical_and": lambda x, y: x & y,
    "logical_or": lambda x, y: x | y,
    "logical_not": lambda x: torch.logical_not(x),
    "where": lambda cond, x, y: torch.where(cond, x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "maximum": lambda x, y: torch.maximum(x, y),
    "relu": lambda x: F.relu(x),
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope),
    "gelu": lambda x, approximate: F.gelu(x, approximate=approximate),
    "silu": lambda x: F.silu(x),
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "mish": lambda x: F.mish(x),
    "hardswish": lambda x: F.hardswish(x),
    "cast": lambda x, dtype: _cast(x, dtype),
}


_CLAMPS = {"minimum": "max", "maximum": "min"}


def _cast(x: Tensor, dtype: str) -> Tensor:
    """x rounded; the gradient passes as if it were not."""
    kind_of = getattr(torch, dtype)
    rounded = x.detach()
    if kind_of.itemsize == 1:
        largest = torch.finfo(kind_of).max
        rounded = rounded.clamp(-largest, largest)
    rounded = rounded.to(kind_of).to(x.dtype)
    return rounded + torch.where(torch.isfinite(x), x - x.detach(), 0.0)


# ---------------------------------------------------------------- bits


def pack(condition: Tensor) -> Tensor:
    """Packed bits along the last axis, bit j % 8 of byte j // 8, padded to 16 bytes."""
    length = condition.shape[-1]
    padded = F.pad(condition.to(torch.int32), (0, 8 * layouts.mask_bytes(length) - length))
    bits = padded.reshape(*condition.shape[:-1], -1, 8)
    return (bits << torch.arange(8, device=bits.device, dtype=torch.int32)).sum(-1).to(torch.uint8)


def unpack(bits: Tensor, length: int) -> Tensor:
    """The condition of `length` columns that `pack` packed."""
    if bits.dtype is torch.bool:
        return bits
    shifts = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return ((bits.unsqueeze(-1) >> shifts) & 1).reshape(*bits.shape[:-1], -1)[..., :length] != 0


# ---------------------------------------------------------------- random numbers


def uniform(seed: Tensor | int, rows: Tensor, columns: Tensor) -> Tensor:
    """`expression.philox.uniform` of one batch, in 64-bit integers."""
    seed = torch.as_tensor(seed, dtype=torch.int64, device=rows.device)
    key = [seed & _WORD, (seed >> 32) & _WORD]
    zero = torch.zeros_like(rows + columns)
    c = [columns // WORDS + zero, rows + zero, zero, zero]
    for _ in range(ROUNDS):
        (low0, high0), (low1, high1) = (_words(c[i], m) for i, m in zip((0, 2), MULTIPLIERS, strict=True))
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(k + step) & _WORD for k, step in zip(key, KEY_STEPS, strict=True)]
    which = columns % WORDS
    word = torch.where(which == 0, c[0], torch.where(which == 1, c[1], torch.where(which == 2, c[2], c[3])))
    return (word >> 8).to(torch.float32) * 2.0**-24


def _words(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Low and high word of a product of two 32-bit numbers; in two halves, since 64 bits are signed."""
    low, high = (x & 0xFFFF) * multiplier, (x >> 16) * multiplier
    whole = high + (low >> 16)
    return (whole << 16 | low & 0xFFFF) & _WORD, whole >> 16


# ---------------------------------------------------------------- expressions


class Evaluation:
    """The values of an expression's nodes, each computed once.

    Args:
        accs: the accumulators.
        inputs: by name, as they broadcast against the accumulators; packed bits as they are, or as the condition itself.
        shape: of D.
    """

    def __init__(self, accs: Sequence[Tensor], inputs: Mapping[str, Tensor], shape: tuple[int, ...], like: Tensor) -> None:
        self.accs, self.inputs, self.shape, self.like = accs, inputs, shape, like
        self.known: dict[Node, Any] = {}

    def __call__(self, node: Node) -> Any:
        for each in walk([node]):
            if each not in self.known:
                self.known[each] = self._leaf(each) if not each.args else self._inner(each)
        return self.known[node]

    def _leaf(self, node: Node) -> Any:
        if node.op == "acc":
            return self.accs[int(str(node.param("index")))]
        if node.op == "constant":
            value = node.param("value")
            return self.like.new_full((), value, dtype=torch.bool if isinstance(value, bool) else self.like.dtype)  # type: ignore[arg-type]
        if node.op == "input":
            tensor = self.inputs[str(node.param("name"))]
            return tensor if tensor.dtype in (torch.uint8, torch.bool) else tensor.to(self.like.dtype)
        raise NotImplementedError(f"{node.op} reads the operands, of which this path knows only the product")

    def _inner(self, node: Node) -> Any:
        args = [self.known[a] for a in node.args]
        if node.op in ("sum", "amax"):
            return self._reduced(args[0], node.op, str(node.param("axis")))
        if node.op == "bitmask":
            return pack(args[0].expand(self.shape))
        if node.op == "unbitmask":
            return unpack(args[0], self.shape[-1])
        if node.op in _CLAMPS and "constant" in (node.args[0].op, node.args[1].op):
            # Against a number the other argument has the whole gradient at a tie.
            x, bound = args if node.args[1].op == "constant" else args[::-1]
            return torch.clamp(x, **{_CLAMPS[node.op]: bound})
        if node.op == "uniform":
            return self._uniform(node.args[0])
        return TORCH[node.op](*args, **dict(node.params))

    def _reduced(self, x: Tensor, op: str, axis: str) -> Tensor:
        whole = x.expand(self.shape)
        if axis != "n":
            whole = whole.reshape(-1, self.shape[-1]) if axis == "m" else whole.reshape(1, -1)
        dim = 0 if axis == "m" else -1
        return whole.sum(dim, keepdim=True) if op == "sum" else whole.amax(dim, keepdim=True)

    def _uniform(self, seed: Node) -> Tensor:
        lead = self.shape[:-1]
        rows = torch.arange(prod(lead), device=self.like.device).reshape(*lead, 1)
        columns = torch.arange(self.shape[-1], device=self.like.device)
        # Not the node's value: that is a float, which cannot hold 64 bits.
        number = int(str(seed.param("value"))) if seed.op == "constant" else self.inputs[str(seed.param("name"))].reshape(())
        return uniform(number, rows, columns).to(self.like.dtype)


def forward(network: Network, x: Tensor, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The network's outputs, of x's leading dimensions."""
    count = len(network.first.input_names)
    names = network.input_names
    first, second = dict(zip(names[:count], inputs, strict=False)), dict(zip(names[count:], inputs[count:], strict=True))
    ways = network.first.accumulators
    found = _layer(network.first, x, weights[:ways], first, network.result if network.second is None else "")
    if network.second is not None:
        found = _layer(network.second, found[0], weights[ways:], second, network.result)
    return found


def _layer(expression: Expression, x: Tensor, weights: Sequence[Tensor], inputs: Mapping[str, Tensor], result: str) -> list[Tensor]:
    wide = accumulator(x)
    with torch.autocast(x.device.type, enabled=False):
        accs = [F.linear(x, w).to(wide) for w in weights]
        value_of = Evaluation(accs, inputs, tuple(accs[0].shape), accs[0])
        stored = getattr(torch, result) if result else x.dtype
        return [_stored(value_of, o.node, wide, stored, index == 0) for index, o in enumerate(expression.outputs)]


def _stored(value_of: Evaluation, node: Node, wide: torch.dtype, stored: torch.dtype, is_d: bool) -> Tensor:
    value: Tensor = value_of(node)
    if node.op == "cast":
        return value.to(getattr(torch, str(node.param("dtype"))))
    if node.op in ("sum", "amax"):
        return value.to(wide)
    value = value.expand(value_of.shape) if is_d else torch.atleast_2d(value)
    return value.to(stored) if kind(node) != BITS else value


# ---------------------------------------------------------------- backward


def backward(recipe: Recipe, held: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]) -> list[Tensor]:
    """The gradients that `recipe.computed` names, as `fused.backward` gives them, differentiable by what is held and by the cotangents."""
    network, needs = recipe.network, recipe.needs
    ways, g = network.first.accumulators, cotangents["d"]
    g = g if network.second is None else g.to(getattr(torch, recipe.dtype))
    wide = accumulator(g)
    found: dict[str, Tensor] = {slot: g.to(wide).sum(0, keepdim=True) for slot in recipe.sums}
    hidden = held.get(HIDDEN)
    if recipe.gradient is not None:
        value_of = _first_again(recipe, held, g)
        if network.second is not None and needs.weights[-1]:
            hidden = value_of(network.first.d.node).expand(value_of.shape).to(held["x"].dtype)
        d = g if network.second is None else g @ held[f"w{ways}"]
        outputs = _backward_of_first(recipe, held, cotangents, d.to(wide), value_of)
        steps = [outputs[name].expand(d.shape).to(held["w0" if "w0" in held else "x"].dtype) for name in _accs(ways)]
        found |= {f"w{i}": s.t() @ held["x"] for i, (s, want) in enumerate(zip(steps, needs.weights, strict=False)) if want}
        if needs.x:
            parts = [s @ held[f"w{i}"] for i, s in enumerate(steps)]
            found["x"] = sum(parts[1:], parts[0])
        found |= {f"in{i}": outputs[f"d_{name}"] for i, name in enumerate(network.first.input_names) if f"d_{name}" in outputs}
    if network.second is not None and needs.weights[-1]:
        assert hidden is not None
        found[f"w{ways}"] = g.t() @ hidden
    return [found[slot] for slot in recipe.computed]


def _accs(ways: int) -> list[str]:
    return ["d", *(f"d_acc{i}" for i in range(1, ways))]


def _first_again(recipe: Recipe, held: Mapping[str, Tensor], g: Tensor) -> Evaluation:
    """The first layer's values, as differentiable functions of what is held; without its products where only masks are read."""
    network, found = recipe.network, recipe.gradient
    assert found is not None
    wide = accumulator(g)
    names = network.first.input_names
    inputs = {name: held[f"in{i}"] for i, name in enumerate(names) if f"in{i}" in held}
    ways = range(network.first.accumulators)
    if values(found) or recipe.recomputing is not None or network.second is not None:
        accs = [(held["x"] @ held[f"w{i}"].t()).to(wide) for i in ways]
        return Evaluation(accs, inputs, tuple(accs[0].shape), accs[0])
    return Evaluation([], inputs, tuple(g.shape), g.to(wide))


def _backward_of_first(
    recipe: Recipe, held: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], d: Tensor, value_of: Evaluation
) -> dict[str, Tensor]:
    """The outputs of the backward expression, by name."""
    found, backward = recipe.gradient, recipe.backward
    assert found is not None
    assert backward is not None
    slots = reads(recipe)
    env = {name: cotangents[output] for name, output in found.cotangents}
    for s in found.saved:
        # A mask is held or, as a condition, computed again; values always are, so that they can be differentiated.
        is_mask = kind(s.node) == BOOL and s.source != "input"
        env[s.name] = held[slots[s.name]] if s.source == "input" or (is_mask and slots[s.name] in held) else value_of(s.node)
    evaluate = Evaluation([d], env, tuple(d.shape), d)
    return {o.name: evaluate(o.node) for o in backward.outputs if o.name != HIDDEN}

"""The functions: linear, gated_linear, mlp, gated_mlp and, for any epilogue, apply. Their backward is derived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from epigemm.errors import EpilogInputError, OptionError, ShapeError
from epigemm.errors.types import listed, say
from epigemm.expression.nodes import Expression, Node, Output, acc, input_, transform
from epigemm.expression.trace import as_epilogue
from epigemm.pytorch import activations
from epigemm.pytorch.activations import Activation
from epigemm.pytorch.dispatch import autocasted, is_plain, run, traced
from epigemm.pytorch.network import Network, encode
from epigemm.pytorch.product import dtype_name
from epigemm.pytorch.recipe import Form

F = TypeVar("F", bound=Callable[..., Any])

# An MLP's second layer is None for the others.
Layers = tuple[Expression, Expression | None]

_KEPT = 256

autocast_is_on = torch._C._is_any_autocast_enabled


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = None,
    residual: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """activation(x @ weight.T + bias) + residual, in one kernel.

    Args:
        x: (*, k).
        weight: (n, k), as nn.Linear keeps it; used where it lies.
        bias: (n,).
        activation: a name of `ACTIVATIONS` ("relu", "gelu" (the erf form), "gelu_tanh", "silu", ...) or an epilogue function of one value.
        residual: (*, n), or what broadcasts to it; D has its dtype if that is the wider one.
        recompute: save nothing for the backward but the operands, and compute the product there again.

    Returns:
        (*, n).

    Raises:
        ShapeError: the extents do not fit.
        OptionError: the activation is not known.

    Example:
        >>> linear(torch.eye(2), torch.tensor([[1.0, -3.0]]), torch.tensor([1.0]), activation="relu")
        tensor([[2.],
                [0.]])
    """
    return _call("linear", activation, recompute, x, weight, bias, residual)


def gated_linear(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    *,
    activation: Activation = "silu",
    residual: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """activation(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up) + residual, in one kernel that reads x once.

    Args:
        x: (*, k).
        w_gate, w_up: (n, k), used where they lie.
        b_gate, b_up: (n,).
        activation, residual, recompute: as in `linear`.

    Returns:
        (*, n).
    """
    return _call("gated_linear", activation, recompute, x, w_gate, w_up, b_gate, b_up, residual)


def mlp(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: Activation = "gelu",
    residual: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """activation(x @ w_up.T + b_up) @ w_down.T + b_down + residual.

    In the backward the activation's gradient, the gradient of b_up and, for most activations, the hidden result itself (which is not
    held then) are computed inside the product that makes the hidden result's gradient.

    Args:
        x: (*, k).
        w_up: (hidden, k).
        w_down: (n, hidden).
        b_up, b_down: (hidden,) and (n,).
        activation, residual: as in `linear`.
        recompute: hold x alone, and compute the first product again in the backward.

    Returns:
        (*, n).
    """
    return _call("mlp", activation, recompute, x, w_up, w_down, b_up, b_down, residual)


def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: Activation = "silu",
    residual: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """(activation(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up)) @ w_down.T + b_down + residual.

    Args:
        x: (*, k).
        w_gate, w_up: (hidden, k).
        w_down: (n, hidden).
        b_gate, b_up, b_down: (hidden,), (hidden,) and (n,).
        activation, residual, recompute: as in `mlp`.

    Returns:
        (*, n).
    """
    return _call("gated_mlp", activation, recompute, x, w_gate, w_up, w_down, b_gate, b_up, b_down, residual)


def apply(
    function: Callable[..., Any],
    x: Tensor,
    weight: Tensor | tuple[Tensor, ...],
    *,
    recompute: bool = False,
    **inputs: Any,
) -> Any:
    """function(x @ weight.T, inputs): any epilogue after the product, with the backward that is derived from it.

    Args:
        function: an epilogue: a function over the accumulator (one a weight) and named inputs.
        x: (*, k).
        weight: (n, k), or several, which give the epilogue one accumulator each.
        recompute: as in `linear`.
        inputs: by name: (n,), (*, 1), (*, n), scalars or packed bits; read in their own dtypes, also under autocast.

    Returns:
        D of shape (*, n), or (D, {name: tensor}) where the epilogue has further outputs.

    Raises:
        EpilogInputError: names are missing or unknown.
        GradientError: a gradient is asked of an op that has none.

    Example:
        >>> from epigemm.expression import sigmoid
        >>> scale = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> y = apply(lambda acc, scale: acc * scale, torch.ones(1, 3), torch.ones(2, 3), scale=scale)
        >>> y.sum().backward(); scale.grad
        tensor([3., 3.])
    """
    weights = weight if isinstance(weight, tuple) else (weight,)
    _check(x, [(f"weight[{i}]" if len(weights) > 1 else "weight", w) for i, w in enumerate(weights)], [])
    if autocast_is_on():
        x, *weights_ = autocasted((x, *weights), x.device.type)
        weights = tuple(weights_)
    names = _names(function, len(weights), "inputs").split()
    if set(names) != set(inputs):
        what = f"The epilogue takes the inputs {listed(names) or 'none'}, and is given {listed(inputs) or 'none'}."
        raise EpilogInputError(say(what, "Pass each by its name."))
    tensors = tuple([_spread(name, _tensor(inputs[name], x), x, weights[0].shape[0]) for name in names])
    found: Sequence[Tensor]
    if torch.compiler.is_compiling():
        found = traced(_text_of(function, len(weights), recompute), x, weights, tensors)
    else:
        found = run(
            Form.of(_network_of(function, len(weights), recompute), x, weights, tensors),
            x,
            weights,
            tensors,
            is_plain((x, *weights, *tensors)),
        )
    extras = _names(function, len(weights), "outputs").split()
    return (found[0], {name: found[i] for i, name in enumerate(extras, 1)}) if extras else found[0]


def _call(kind: str, activation: Activation, recompute: bool, x: Tensor, *operands: Tensor | None) -> Tensor:
    """D of a network that the table below makes.

    Args:
        kind: a key of `_KINDS`.
        activation, recompute: as in `linear`.
        x: (*, k).
        operands: the weights, a bias for each or None, and the residual or None.
    """
    if torch.compiler.is_compiling():
        return _traced_call(kind, activation, recompute, x, *operands)
    if autocast_is_on():
        x, *cast = autocasted((x, *operands[:-1]), x.device.type)
        operands = (*cast, operands[-1])
    weights, residual = len(operands) // 2, operands[-1]
    key, form, plain = None, None, is_plain((x, *operands))
    # An activation that is a function may mean something else at the next call; a subclass may have extents that are no numbers.
    if plain and (activation is None or isinstance(activation, str)):
        key = (kind, activation, recompute, x.shape, x.dtype, *[t if t is None else (t.shape, t.dtype) for t in operands])
        form = _forms.get(key)
    inputs: tuple[Any, ...] = tuple([t for t in operands[weights:] if t is not None])
    given: tuple[Any, ...] = operands[:weights]
    if residual is not None:
        inputs = (*inputs[:-1], _spread("residual", residual, x, given[-1].shape[0]))
    if form is None:
        form = _remember(key, Form.of(_checked(kind, activation, recompute, x, operands), x, given, inputs))
    return run(form, x, given, inputs, plain)[0]


_forms: dict[Any, Form] = {}


def _remember(key: Any, form: Form) -> Form:
    """Keeps what is known of a call under its key, if it has one; when there is too much, all is forgotten."""
    if len(_forms) >= 4 * _KEPT:
        _forms.clear()
    if key is not None:
        _forms[key] = form
    return form


def _checked(kind: str, activation: Activation, recompute: bool, x: Tensor, operands: Sequence[Tensor | None]) -> Network:
    """The network of a call, once its operands are found to fit."""
    _fit(kind, x, operands)
    residual = operands[-1]
    biases = tuple([b is not None for b in operands[len(operands) // 2 : -1]])
    result = "" if residual is None else _wider(x.dtype, residual.dtype)
    return _network(kind, activations.expression(activation), biases, residual is not None, recompute, result)


def _fit(kind: str, x: Tensor, operands: Sequence[Tensor | None]) -> None:
    """Refuses weights and biases whose extents do not fit."""
    weights, two = len(operands) // 2, kind.endswith("mlp")
    named = list(zip(_OPERANDS[kind], operands, strict=True))
    _check(x, named[: weights - two], named[weights : len(named) - 1 - two])
    if two:
        _check_down(named[weights - 2], named[weights - 1], named[-2])


def _traced_call(kind: str, activation: Activation, recompute: bool, x: Tensor, *operands: Any) -> Tensor:
    """The same while a graph is traced."""
    if autocast_is_on():
        x, *cast = autocasted((x, *operands[:-1]), x.device.type)
        operands = (*cast, operands[-1])
    _fit(kind, x, operands)
    weights, residual = len(operands) // 2, operands[-1]
    biases = operands[weights:-1]
    inputs = [b for b in biases if b is not None]
    result = ""
    if residual is not None:
        inputs.append(_spread("residual", residual, x, operands[weights - 1].shape[0]))
        result = _wider(x.dtype, residual.dtype)
    text = _text(kind, activation, tuple([b is not None for b in biases]), residual is not None, recompute, result)
    return traced(text, x, tuple(operands[:weights]), tuple(inputs))[0]


# ---------------------------------------------------------------- networks


@lru_cache(_KEPT)
def _network(kind: str, activation: Expression | None, biases: tuple[bool, ...], residual: bool, recompute: bool, result: str) -> Network:
    first, second = _KINDS[kind](activation, biases)
    last = first if second is None else second
    if residual:
        names = (*last.input_names, "residual")
        last = replace(last, outputs=(Output("d", Node("add", last.d.node, input_("residual"))),), input_names=names)
    return Network(last, None, recompute, result) if second is None else Network(first, last, recompute, result)


def _linear(activation: Expression | None, biases: tuple[bool, ...]) -> Layers:
    node, names = _biased(acc(0), "bias", biases[0])
    return Expression((Output("d", _activated(activation, node)),), 1, names, "linear"), None


def _gated(activation: Expression | None, biases: tuple[bool, ...]) -> Layers:
    gate, gate_names = _biased(acc(0), "b_gate", biases[0])
    up, up_names = _biased(acc(1), "b_up", biases[1])
    node = Node("mul", _activated(activation, gate), up)
    return Expression((Output("d", node),), 2, gate_names + up_names, "gated_linear"), None


def _mlp(activation: Expression | None, biases: tuple[bool, ...]) -> Layers:
    return _linear(activation, biases[:1])[0], _linear(None, biases[1:])[0]


def _gated_mlp(activation: Expression | None, biases: tuple[bool, ...]) -> Layers:
    return _gated(activation, biases[:2])[0], _linear(None, biases[2:])[0]


_KINDS: dict[str, Callable[[Expression | None, tuple[bool, ...]], Layers]] = {
    "linear": _linear,
    "gated_linear": _gated,
    "mlp": _mlp,
    "gated_mlp": _gated_mlp,
}


def _biased(node: Node, name: str, bias: bool) -> tuple[Node, tuple[str, ...]]:
    return (Node("add", node, input_(name)), (name,)) if bias else (node, ())


def _activated(activation: Expression | None, node: Node) -> Node:
    return node if activation is None else transform(activation.d.node, lambda x: node if x is acc(0) else None)


@lru_cache(_KEPT)
def _of_expression(expression: Expression, recompute: bool) -> Network:
    return Network(expression, None, recompute)


def _network_of(function: Callable[..., Any], accumulators: int, recompute: bool) -> Network:
    return _of_expression(as_epilogue(function).expression(accumulators), recompute)


def _constant(function: F) -> F:
    """While a graph is traced the function runs, and its result is a constant of the graph."""
    decorated: F = torch.compiler.assume_constant_result(function)
    return decorated


@_constant
def _text(kind: str, activation: Activation, biases: tuple[bool, ...], residual: bool, recompute: bool, result: str) -> str:
    return encode(_network(kind, activations.expression(activation), biases, residual, recompute, result))


@_constant
def _text_of(function: Callable[..., Any], accumulators: int, recompute: bool) -> str:
    return encode(_network_of(function, accumulators, recompute))


@_constant
def _names(function: Callable[..., Any], accumulators: int, what: str) -> str:
    """The names of an epilogue's "inputs", or of its "outputs" besides D, with spaces between."""
    expression = as_epilogue(function).expression(accumulators)
    return " ".join(expression.input_names if what == "inputs" else (o.name for o in expression.extras))


@_constant
def _wider(x: torch.dtype, residual: torch.dtype) -> str:
    """The dtype name of a D that a residual makes wider than x, else ""."""
    wider = torch.promote_types(x, residual)
    return "" if wider is x else dtype_name(wider)


# ---------------------------------------------------------------- arguments


_OPERANDS = {
    "linear": ("weight", "bias", "residual"),
    "gated_linear": ("w_gate", "w_up", "b_gate", "b_up", "residual"),
    "mlp": ("w_up", "w_down", "b_up", "b_down", "residual"),
    "gated_mlp": ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down", "residual"),
}

Named = tuple[str, Tensor | None]


def _check(x: Tensor, weights: Sequence[Named], biases: Sequence[Named]) -> None:
    """The extents of weights (n, k) beside x (*, k), and of their biases (n,)."""
    n = None
    for name, w in weights:
        if w is None or w.ndim != 2 or x.ndim == 0 or w.shape[1] != x.shape[-1]:
            what = f"x has the shape {tuple(x.shape)} and {name} {_shape(w)}: they do not fit."
            raise ShapeError(say(what, "x is (*, k) and a weight (n, k), as nn.Linear keeps it."))
        if n is not None and w.shape[0] != n:
            raise ShapeError(say(f"The weights have {n} and {w.shape[0]} rows.", "They make results of one shape."))
        n = w.shape[0]
    for bias in biases:
        _check_bias(bias, n)


def _check_down(up: Named, down: Named, bias: Named) -> None:
    (up_name, w_up), (name, w_down) = up, down
    if w_up is None or w_down is None or w_down.ndim != 2 or w_down.shape[1] != w_up.shape[0]:
        what = f"{up_name} has {_shape(w_up)} and {name} {_shape(w_down)}: they do not fit."
        raise ShapeError(say(what, f"{up_name} is (hidden, k) and {name} (n, hidden)."))
    _check_bias(bias, w_down.shape[0])


def _check_bias(bias: Named, n: int | None) -> None:
    name, tensor = bias
    if tensor is not None and tensor.shape != (n,):
        raise ShapeError(say(f"{name} has the shape {tuple(tensor.shape)}; its weight has {n} rows.", f"Pass a bias of shape ({n},)."))


def _shape(tensor: Tensor | None) -> str:
    return "is missing" if tensor is None else f"the shape {tuple(tensor.shape)}"


def _spread(name: str, tensor: Tensor, x: Tensor, n: int) -> Tensor:
    """An input as a row, a column, a scalar or a whole matrix: one that varies along some of x's leading dimensions only is expanded."""
    lead = tensor.shape[:-1]
    if lead == x.shape[:-1] or all(extent == 1 for extent in lead):
        if len(lead) < x.ndim or lead == x.shape[:-1]:
            return tensor
        raise ShapeError(say(f"{name} has the shape {tuple(tensor.shape)}, x {tuple(x.shape)}.", "It must broadcast to the result."))
    try:
        return tensor.expand(*x.shape[:-1], tensor.shape[-1])
    except RuntimeError as error:
        what = f"{name} has the shape {tuple(tensor.shape)}, which does not broadcast to the result's {(*x.shape[:-1], n)}."
        raise ShapeError(say(what, "Its leading dimensions must be x's, or 1.")) from error


def _tensor(value: Any, x: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionError(say(f"An input of the epilogue is {value!r}.", "Pass a tensor or a number."))
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else wide, device=x.device)

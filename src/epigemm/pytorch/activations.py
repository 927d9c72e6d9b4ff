"""The activations by name: what they are in an epilogue, and which PyTorch module they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from torch import nn

from epigemm.errors import OptionError
from epigemm.errors.types import listed, say
from epigemm.expression import vocabulary as eg
from epigemm.expression.nodes import Expression
from epigemm.expression.trace import as_epilogue

# A name of the table, a function of one value of an epilogue, or nothing.
Activation = str | Callable[..., Any] | None


@dataclass(frozen=True, slots=True)
class Row:
    """One activation.

    Args:
        function: of a value of the epilogue.
        module: the PyTorch module that computes it.
        settings: attributes that the module must have for it to be this one.
    """

    function: Callable[[Any], Any]
    module: type[nn.Module]
    settings: dict[str, Any] = field(default_factory=dict)


ACTIVATIONS: dict[str, Row] = {
    "relu": Row(eg.relu, nn.ReLU),
    "gelu": Row(eg.gelu, nn.GELU, {"approximate": "none"}),
    "gelu_tanh": Row(partial(eg.gelu, approximate="tanh"), nn.GELU, {"approximate": "tanh"}),
    "silu": Row(eg.silu, nn.SiLU),
    "sigmoid": Row(eg.sigmoid, nn.Sigmoid),
    "tanh": Row(eg.tanh, nn.Tanh),
    "leaky_relu": Row(eg.leaky_relu, nn.LeakyReLU, {"negative_slope": 0.01}),
    "softplus": Row(eg.softplus, nn.Softplus, {"beta": 1.0, "threshold": 20.0}),
    "mish": Row(eg.mish, nn.Mish),
    "hardswish": Row(eg.hardswish, nn.Hardswish),
}


def expression(activation: Activation) -> Expression | None:
    """The activation as an expression over one accumulator, None for none.

    Raises:
        OptionError: it is neither None, a name of `ACTIVATIONS`, nor a function.
        TraceError: the function cannot be traced.
    """
    if activation is None:
        return None
    if isinstance(activation, str):
        return _named(activation)
    if not callable(activation) or isinstance(activation, nn.Module):
        what = f"activation={activation!r} is neither a name nor an epilogue function."
        raise OptionError(say(what, f"The names are {listed(ACTIVATIONS)}; a module is turned into one by from_torch."))
    return as_epilogue(activation).expression(1)


@cache
def _named(name: str) -> Expression:
    if name not in ACTIVATIONS:
        raise OptionError(say(f"activation={name!r} is not known.", f"The names are {listed(ACTIVATIONS)}; a function does as well."))
    function = ACTIVATIONS[name].function
    return as_epilogue(lambda acc: function(acc)).expression(1)


def of_module(module: nn.Module) -> str:
    """The name of the activation that a PyTorch module computes.

    Raises:
        OptionError: it is none of the table's.

    Example:
        >>> of_module(nn.GELU(approximate="tanh"))
        'gelu_tanh'
    """
    for name, row in ACTIVATIONS.items():
        if type(module) is row.module and all(getattr(module, key) == value for key, value in row.settings.items()):
            return name
    modules = listed(dict.fromkeys(row.module.__name__ for row in ACTIVATIONS.values()))
    raise OptionError(say(f"{module} is no activation that is known here.", f"Those are {modules}, with their default settings."))

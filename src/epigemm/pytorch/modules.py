"""The modules: Linear, MLP and GatedMLP, whose parameters, names and initialisation are those of nn.Linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from epigemm.errors import OptionError
from epigemm.errors.types import say
from epigemm.pytorch import activations
from epigemm.pytorch.activations import Activation
from epigemm.pytorch.functions import gated_mlp, linear, mlp


# An nn.Linear by class too: what looks for one in a model (tensor parallelism, weight decay groups) finds it.
class Linear(nn.Linear):
    """activation(x @ weight.T + bias) + residual in one kernel: nn.Linear with what follows it.

    Args:
        in_features, out_features, bias, device, dtype: as nn.Linear's.
        activation: a name of `ACTIVATIONS`, an epilogue function of one value, or None.
        recompute: save nothing for the backward but the operands, and compute the product there again.

    Example:
        >>> layer = Linear(16, 32, activation="relu")
        >>> layer(torch.ones(2, 16)).shape, layer
        (torch.Size([2, 32]), Linear(in_features=16, out_features=32, bias=True, activation='relu'))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: Activation = None,
        recompute: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        activations.expression(activation)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.activation = activation
        self.recompute = recompute

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The layer's output, (*, out_features)."""
        return linear(x, self.weight, self.bias, activation=self.activation, residual=residual, recompute=self.recompute)

    def extra_repr(self) -> str:
        """The settings, as printed."""
        return super().extra_repr() + _settings(self.activation, self.recompute)

    @classmethod
    def from_torch(cls, module: nn.Module, *, recompute: bool = False) -> Linear:
        """The same layer, with the same parameters, made of nn.Linear or of nn.Sequential(nn.Linear, an activation).

        Raises:
            OptionError: it is neither, or the activation is not known.

        Example:
            >>> Linear.from_torch(nn.Sequential(nn.Linear(4, 2), nn.GELU()))
            Linear(in_features=4, out_features=2, bias=True, activation='gelu')
        """
        parts = list(module) if isinstance(module, nn.Sequential) else [module]
        if len(parts) not in (1, 2) or not isinstance(parts[0], nn.Linear):
            raise _not_convertible(module, "Linear", "nn.Linear, or nn.Sequential(nn.Linear, an activation)")
        activation = activations.of_module(parts[1]) if len(parts) == 2 else None
        return _with_parameters(parts[0], activation, recompute, module.training)


class MLP(nn.Module):
    """fc2(activation(fc1(x))): two layers whose activation and bias gradients run inside the products, forward and backward.

    Its parameters are those of two nn.Linear, `fc1` and `fc2`. These hold them and are not called: their forward hooks do not run.

    Args:
        in_features, hidden_features: extents.
        out_features: None is `in_features`.
        bias: whether both layers have one.
        activation: a name of `ACTIVATIONS`, or an epilogue function of one value.
        recompute: hold x alone, and compute the first product again in the backward.
        device, dtype: as nn.Linear's.

    Example:
        >>> sorted(MLP(8, 32).state_dict())
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        activation: Activation = "gelu",
        recompute: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        activations.expression(activation)
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features, bias, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features or in_features, bias, device=device, dtype=dtype)
        self.activation = activation
        self.recompute = recompute

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The MLP's output, (*, out_features)."""
        up, down = self.fc1, self.fc2
        settings: dict[str, Any] = {"activation": self.activation, "residual": residual, "recompute": self.recompute}
        return mlp(x, up.weight, down.weight, up.bias, down.bias, **settings)

    def extra_repr(self) -> str:
        """The settings, as printed."""
        return _settings(self.activation, self.recompute).removeprefix(", ")

    @classmethod
    def from_torch(cls, module: nn.Module, *, recompute: bool = False) -> MLP:
        """The same MLP, with the same parameters, made of nn.Sequential(nn.Linear, an activation, nn.Linear).

        An nn.Dropout or nn.Identity that does nothing is left out; any other module is refused.

        Raises:
            OptionError: it is none of these.
        """
        parts = [part for part in module.children() if not _does_nothing(part)] if isinstance(module, nn.Sequential) else []
        if len(parts) != 3 or not isinstance(parts[0], nn.Linear) or not isinstance(parts[2], nn.Linear):
            raise _not_convertible(module, "MLP", "nn.Sequential(nn.Linear, an activation, nn.Linear)")
        made = _empty(cls, parts[0], activation=activations.of_module(parts[1]), recompute=recompute)
        made.fc1, made.fc2 = _shared(parts[0]), _shared(parts[2])
        return made.train(module.training)


class GatedMLP(nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)): the gate runs inside the product, x is read once, the weights stay as they lie.

    Its parameters are those of three nn.Linear, `gate_proj`, `up_proj` and `down_proj`, as checkpoints of gated models name them.
    These hold them and are not called: their forward hooks do not run.

    Args:
        in_features, hidden_features: extents.
        out_features: None is `in_features`.
        bias: whether the layers have one.
        activation: a name of `ACTIVATIONS`, or an epilogue function of one value.
        recompute: hold x alone, and compute the first products again in the backward.
        device, dtype: as nn.Linear's.

    Example:
        >>> GatedMLP(8, 32)(torch.ones(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = False,
        *,
        activation: Activation = "silu",
        recompute: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        activations.expression(activation)
        super().__init__()
        self.gate_proj = nn.Linear(in_features, hidden_features, bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(in_features, hidden_features, bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(hidden_features, out_features or in_features, bias, device=device, dtype=dtype)
        self.activation = activation
        self.recompute = recompute

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The MLP's output, (*, out_features)."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        settings: dict[str, Any] = {"activation": self.activation, "residual": residual, "recompute": self.recompute}
        return gated_mlp(x, gate.weight, up.weight, down.weight, gate.bias, up.bias, down.bias, **settings)

    def extra_repr(self) -> str:
        """The settings, as printed."""
        return _settings(self.activation, self.recompute).removeprefix(", ")

    @classmethod
    def from_torch(cls, module: nn.Module, *, recompute: bool = False) -> GatedMLP:
        """The same MLP, with the same parameters, made of a module that has `gate_proj`, `up_proj`, `down_proj` and `act_fn`.

        Raises:
            OptionError: one of these is missing or is no nn.Linear, or the activation is not known.
        """
        children: Mapping[str, nn.Module] = dict(module.named_children())
        names = ("gate_proj", "up_proj", "down_proj")
        if not all(isinstance(children.get(name), nn.Linear) for name in names) or "act_fn" not in children:
            raise _not_convertible(module, "GatedMLP", "a module with the layers gate_proj, up_proj, down_proj and the activation act_fn")
        layers: list[Any] = [children[name] for name in names]
        made = _empty(cls, layers[0], activation=activations.of_module(children["act_fn"]), recompute=recompute)
        for name, layer in zip(names, layers, strict=True):
            setattr(made, name, _shared(layer))
        return made.train(module.training)


# ---------------------------------------------------------------- helpers


def _settings(activation: Activation, recompute: bool) -> str:
    shown = activation if activation is None or isinstance(activation, str) else getattr(activation, "__name__", activation)
    return (f", activation={shown!r}" if shown is not None else "") + (", recompute=True" if recompute else "")


def _with_parameters(layer: nn.Linear, activation: Activation, recompute: bool, training: bool) -> Linear:
    """A Linear that has the layer's own parameters."""
    with torch.device("meta"):
        made = Linear(layer.in_features, layer.out_features, layer.bias is not None, activation=activation, recompute=recompute)
    made.weight, made.bias = layer.weight, layer.bias
    return made.train(training)


def _shared(layer: nn.Linear) -> nn.Linear:
    """A plain nn.Linear that has the layer's own parameters."""
    with torch.device("meta"):
        made = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)


def _empty(cls: Any, layer: nn.Linear, **settings: Any) -> Any:
    """An MLP whose parameters are yet to be set."""
    return cls(layer.in_features, layer.out_features, device="meta", **settings)


def _does_nothing(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and module.p == 0)


def _not_convertible(module: nn.Module, name: str, what: str) -> OptionError:
    return OptionError(say(f"{name}.from_torch cannot take {type(module).__name__}.", f"It takes {what}."))

"""Linear, MLP and GatedMLP: parameters, state dicts, initialisation, printing, copies, pickles, and what they are made of."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import epigemm as eg
from epigemm import pytorch as ep

MODULES = {
    "Linear": lambda: ep.Linear(6, 8, activation="relu"),
    "MLP": lambda: ep.MLP(6, 8, 5),
    "GatedMLP": lambda: ep.GatedMLP(6, 8, bias=True),
}


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param]()


class Gated(nn.Module):
    """A gated MLP as models write it."""

    def __init__(self, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(6, 8, bias), nn.Linear(6, 8, bias), nn.Linear(8, 6, bias)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def close(module, other, x=None):
    x = torch.randn(3, 6) if x is None else x
    torch.testing.assert_close(module(x), other(x), rtol=1e-5, atol=1e-6)


def test_a_linear_is_nn_linear_s_checkpoint_and_back():
    plain, fused = nn.Linear(6, 8), ep.Linear(6, 8)
    assert list(fused.state_dict()) == list(plain.state_dict())
    fused.load_state_dict(plain.state_dict())
    close(fused, plain)
    with torch.no_grad():
        fused.weight.mul_(2)
    plain.load_state_dict(fused.state_dict())
    close(fused, plain)


def test_a_gated_mlp_is_a_model_s_checkpoint_and_back():
    plain, fused = Gated(), ep.GatedMLP(6, 8)
    assert list(fused.state_dict()) == list(plain.state_dict())
    fused.load_state_dict(plain.state_dict())
    close(fused, plain)
    plain.load_state_dict(ep.GatedMLP(6, 8).state_dict())


def test_an_mlp_s_layers_are_nn_linear_s():
    fused = ep.MLP(6, 8)
    plain = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    plain[0].load_state_dict(fused.fc1.state_dict())
    plain[2].load_state_dict(fused.fc2.state_dict())
    close(fused, plain)


def test_initialisation_is_nn_linear_s():
    torch.manual_seed(0)
    plain = nn.Linear(6, 8)
    torch.manual_seed(0)
    fused = ep.Linear(6, 8, activation="gelu")
    assert torch.equal(fused.weight, plain.weight)
    assert torch.equal(fused.bias, plain.bias)
    fused.reset_parameters()
    assert not torch.equal(fused.weight, plain.weight)


def test_training_changes_every_parameter(module):
    before = copy.deepcopy(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.randn(16, 6)).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_printing():
    assert repr(ep.Linear(6, 8)) == "Linear(in_features=6, out_features=8, bias=True)"
    shown = "Linear(in_features=6, out_features=8, bias=False, activation='relu', recompute=True)"
    assert repr(ep.Linear(6, 8, bias=False, activation="relu", recompute=True)) == shown
    assert "activation='gelu'" in repr(ep.MLP(6, 8))
    assert "activation='mish'" in repr(ep.GatedMLP(6, 8, activation=eg.mish))


def test_deep_copies_are_their_own(module):
    x = torch.randn(3, 6)
    module(x).sum().backward()  # what it has cached is not copied wrongly
    twin = copy.deepcopy(module)
    close(twin, module, x)
    with torch.no_grad():
        next(twin.parameters()).mul_(2)
    assert not torch.allclose(twin(x), module(x))


def test_pickles(module):
    x = torch.randn(3, 6)
    module(x)
    close(pickle.loads(pickle.dumps(module)), module, x)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    close(torch.load(buffer, weights_only=False), module, x)


def test_moves_and_dtypes(module):
    module.to(torch.float64)
    assert module(torch.randn(3, 6, dtype=torch.float64)).dtype is torch.float64
    module.bfloat16()
    assert module(torch.randn(3, 6, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert all(p.device.type == "meta" for p in module.to("meta").parameters())


def test_residuals():
    x, residual = torch.randn(3, 6), torch.randn(3, 6)
    fused = ep.MLP(6, 8)
    torch.testing.assert_close(fused(x, residual), fused(x) + residual)
    linear = ep.Linear(6, 6, activation="relu")
    torch.testing.assert_close(linear(x, residual=residual), linear(x) + residual)


def test_from_torch():
    first = nn.Sequential(nn.Linear(6, 8), nn.GELU(approximate="tanh"))
    fused = ep.Linear.from_torch(first)
    assert fused.weight is first[0].weight
    assert fused.activation == "gelu_tanh"
    close(fused, first)
    plain = nn.Linear(6, 8, bias=False)
    close(ep.Linear.from_torch(plain), plain)
    mlp = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 5)).eval()
    made = ep.MLP.from_torch(mlp, recompute=True)
    assert (made.fc1.weight is mlp[0].weight, made.recompute, made.training) == (True, True, False)
    close(made, mlp)
    for bias in (False, True):
        gated = Gated(bias)
        close(ep.GatedMLP.from_torch(gated), gated)


@pytest.mark.parametrize(
    ("convert", "module"),
    [
        (ep.Linear.from_torch, nn.ReLU()),
        (ep.Linear.from_torch, nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))),
        (ep.MLP.from_torch, nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(3, 2))),
        (ep.GatedMLP.from_torch, nn.Sequential(nn.Linear(2, 3))),
    ],
)
def test_what_cannot_be_converted_is_refused(convert, module):
    with pytest.raises(eg.OptionError, match="from_torch cannot take"):
        convert(module)


@pytest.mark.parametrize("module", [nn.LeakyReLU(0.2), nn.ELU(), nn.Softplus(beta=2)], ids=str)
def test_unknown_activations_are_refused(module):
    with pytest.raises(eg.OptionError, match="is no activation that is known here"):
        ep.Linear.from_torch(nn.Sequential(nn.Linear(2, 3), module))
    with pytest.raises(eg.OptionError, match="is not known"):
        ep.Linear(2, 3, activation="elu")


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Sigmoid(), nn.Tanh(), nn.LeakyReLU(), nn.Softplus(), nn.Mish(), nn.Hardswish()],
    ids=str,
)
def test_every_activation_is_pytorch_s(activation):
    plain = nn.Sequential(nn.Linear(6, 8), activation).double()
    close(ep.Linear.from_torch(plain), plain, torch.randn(16, 6, dtype=torch.float64))

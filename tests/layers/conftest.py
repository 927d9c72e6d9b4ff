"""The layers and their eager counterparts, one table for all properties, and how far apart they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from epigemm import pytorch as ep  # noqa: E402

# name -> (PyTorch's function, the most that its slope and its second derivative come to)
ACTIVATIONS: dict[str, tuple[Callable[[Any], Any], float, float]] = {
    "relu": (F.relu, 1.0, 0.0),
    "gelu": (F.gelu, 1.13, 0.8),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), 1.13, 0.8),
    "silu": (F.silu, 1.1, 0.5),
    "sigmoid": (torch.sigmoid, 0.25, 0.1),
    "tanh": (torch.tanh, 1.0, 0.77),
    "leaky_relu": (F.leaky_relu, 1.0, 0.0),
    "softplus": (F.softplus, 1.0, 0.25),
    "mish": (F.mish, 1.1, 0.6),
    "hardswish": (F.hardswish, 1.5, 1 / 3),
}


def _same(x):
    return x


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        name: of the function and what it is called with.
        kind: the function's name.
        activation: of the table above, or None.
        biases: whether it has them.
        residual: whether it has one.
        roundings: how many stored tensors lie on the way from the operands to a gradient.
    """

    name: str
    kind: str
    activation: str | None
    biases: bool = True
    residual: bool = False
    roundings: int = 4

    M, K, HIDDEN, N = 6, 7, 10, 5

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The operands in the order of the function's parameters."""
        out, ways = (self.HIDDEN, {"gated_mlp": 2, "gated_linear": 2}.get(self.kind, 1))
        two = self.kind.endswith("mlp")
        shapes: dict[str, tuple[int, ...]] = {"x": (2, 3, self.K)}
        shapes |= {f"w{i}": (out, self.K) for i in range(ways)}
        shapes |= {"w_down": (self.N, out)} if two else {}
        if self.biases:
            shapes |= {f"b{i}": (out,) for i in range(ways)}
            shapes |= {"b_down": (self.N,)} if two else {}
        if self.residual:
            shapes["residual"] = (2, 3, self.N if two else out)
        return shapes

    def tensors(self, dtype: Any = torch.float64, seed: int = 0, requires_grad: bool = True) -> list[Any]:
        """Random operands."""
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in self.shapes.values()]
        return [t.requires_grad_(requires_grad) for t in made]

    def ours(self, *tensors: Any, **settings: Any) -> Any:
        """The fused call."""
        *rest, residual = tensors if self.residual else (*tensors, None)
        return getattr(ep, self.kind)(*rest, activation=self.activation, residual=residual, **settings)

    def eager(self, *tensors: Any, activation: Callable[[Any], Any] | None = None) -> Any:
        """The same, step by step."""
        act = activation or (ACTIVATIONS[self.activation][0] if self.activation else _same)
        given = dict(zip(self.shapes, tensors, strict=True))
        x = given["x"]
        value = act(F.linear(x, given["w0"], given.get("b0")))
        if "w1" in given:
            value = value * F.linear(x, given["w1"], given.get("b1"))
        if "w_down" in given:
            value = F.linear(value, given["w_down"], given.get("b_down"))
        return value + given["residual"] if self.residual else value

    def bounds(self, tensors: list[Any], g: Any, dtype: Any) -> list[Any]:
        """How far the result and each gradient may be from exact ones, element by element.

        The same network over absolute values, with an activation whose slope bounds the activation's slope and how much that changes with
        an error of its argument, gives what every rounding is relative to. Sums are accumulated in float32.
        """
        slope, bend = ACTIVATIONS[self.activation][1:] if self.activation else (1.0, 0.0)
        sizes = [t.detach().double().abs().requires_grad_() for t in tensors]
        value = self.eager(*sizes, activation=lambda x: slope * x + bend * x * x / 2)
        whole = [value, *torch.autograd.grad(value, sizes, g.double().abs())]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        unit = 2 * self.roundings * torch.finfo(dtype).eps / 2 + (self.K + self.HIDDEN + 16) * torch.finfo(wide).eps
        return [unit * w + torch.finfo(dtype).tiny for w in whole]


CASES = (
    *(Case(f"linear {name}", "linear", name) for name in ACTIVATIONS),
    Case("linear", "linear", None),
    Case("linear without bias", "linear", None, biases=False),
    Case("linear without bias gelu", "linear", "gelu", biases=False),
    Case("linear residual", "linear", None, residual=True),
    Case("linear relu residual", "linear", "relu", residual=True),
    Case("gated_linear", "gated_linear", "silu"),
    Case("gated_linear relu without biases", "gated_linear", "relu", biases=False),
    Case("gated_linear gelu residual", "gated_linear", "gelu", residual=True),
    Case("gated_linear bilinear", "gated_linear", None, residual=True),
    *(Case(f"mlp {name}", "mlp", name, roundings=6) for name in ("relu", "gelu", "gelu_tanh", "tanh", "leaky_relu")),
    Case("mlp relu without biases residual", "mlp", "relu", biases=False, residual=True, roundings=6),
    Case("mlp linear", "mlp", None, roundings=6),
    Case("gated_mlp", "gated_mlp", "silu", roundings=6),
    Case("gated_mlp without biases", "gated_mlp", "silu", biases=False, roundings=6),
    Case("gated_mlp gelu residual", "gated_mlp", "gelu", residual=True, roundings=6),
)
BY_NAME = {case.name: case for case in CASES}
# One of each function, with all that it takes.
ONE_EACH = ("linear relu residual", "linear gelu", "gated_linear gelu residual", "mlp relu", "mlp gelu", "gated_mlp gelu residual")


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    """Every case."""
    return request.param


@pytest.fixture(params=ONE_EACH)
def each(request):
    """One case of each function."""
    return BY_NAME[request.param]


@pytest.fixture
def named():
    """Cases by name."""
    return BY_NAME


@pytest.fixture
def activations():
    """PyTorch's function of each activation."""
    return {name: row[0] for name, row in ACTIVATIONS.items()}


def differences(actual, expected, bounds, what):
    """Fails at the first element that is further from the expected one than its bound."""
    for index, (got, want, bound) in enumerate(zip(actual, expected, bounds, strict=True)):
        assert got.shape == want.shape, f"{what}, tensor {index}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        distance = (got.detach().double() - want.detach().double()).abs()
        bad = ~(distance <= bound)
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            pytest.fail(f"{what}, tensor {index} at {at}: {got[at].item()!r}, expected {want[at].item()!r}, allowed {bound[at].item():.3g}")


@pytest.fixture
def assert_agrees():
    """(actual, expected, bounds, what): fails at the first element that is further away than its bound."""
    return differences


def _agrees_with_eager(case, dtype=torch.float64, run=None, seed=0, **settings):
    """Result and all gradients of a case against eager PyTorch in float64 on the same numbers."""
    tensors = case.tensors(dtype, seed)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = case.eager(*exact)
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64).to(dtype)
    actual = (run or case.ours)(*tensors, **settings)
    assert actual.dtype is dtype
    grads = torch.autograd.grad(actual, tensors, g)
    assert all(grad.dtype is dtype for grad in grads)
    wanted = [expected, *torch.autograd.grad(expected, exact, g.double())]
    differences([actual, *grads], wanted, case.bounds(tensors, g, dtype), f"{case.name} {dtype}")


@pytest.fixture
def agrees_with_eager():
    """(case, dtype, run, **settings): result and gradients against eager PyTorch in float64 on the same numbers."""
    return _agrees_with_eager

"""The direct path on tensors of the host, with a launch that writes down what it is given: addresses, new tensors, and what it leaves
to the other way."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from epigemm import direct
from epigemm.engines.base import DirectLaunch
from epigemm.expression.nodes import Output, acc
from epigemm.problem import Operand, Problem

torch = pytest.importorskip("torch")

M, N, K = 48, 32, 64


def aligned(x: Operand) -> Operand:
    return replace(x, alignment_bytes=16)


@dataclass
class Launches:
    """An executable and the plan around it; `calls` holds the arguments of each launch."""

    inputs: tuple[str, ...] = ("bias",)
    extras: tuple[tuple[Output, Operand], ...] = ()
    dtype: str = "f32"
    calls: list[tuple[int, ...]] = field(default_factory=list)

    def prepared(self) -> Any:
        problem = Problem.of(self.dtype, m=M, n=N, k=K, order="col", device="cuda:0")
        inputs = tuple((name, aligned(Operand.dense("f32", (M, 1)))) for name in self.inputs)
        problem = replace(problem, a=aligned(problem.a), b=(aligned(problem.b[0]),), d=aligned(problem.d), inputs=inputs)
        names = ("a", "b", "", "d", *self.inputs, *(o.name for o, _ in self.extras))
        launch = DirectLaunch(lambda *values: self.calls.append(values), names)
        executable = SimpleNamespace(direct=lambda: launch)
        return SimpleNamespace(
            plan=SimpleNamespace(problem=problem),
            product=SimpleNamespace(squeeze=()),
            epilog=SimpleNamespace(member=None),
            extras=self.extras,
            inplace=False,
            blocking=False,
            executable=lambda candidate: executable,
        )


@pytest.fixture(autouse=True)
def _host_tensors_are_read(monkeypatch):
    """Tensors of the host are taken for a GPU's; the current stream is 7."""
    own = direct.Reader(
        "torch",
        direct._torch_form,
        direct._torch_pointer,
        lambda index: 7,
        direct._torch_empty,
        direct._torch_written,
        direct._torch_writable,
    )
    monkeypatch.setattr(direct, "reader", cache(lambda cls: own if cls in (torch.Tensor, torch.nn.Parameter) else None))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)


def new(*shape: int, order: str = "row") -> Any:
    return torch.randn(shape[::-1]).T if order == "col" else torch.randn(shape)


def operands() -> tuple[Any, Any, dict[str, Any]]:
    return new(M, K), new(K, N), {"bias": new(M, 1)}


def bound(launches: Launches, a: Any, b: Any, inputs: dict[str, Any], result: Any) -> Any:
    def wrapped(x: Any) -> Any:
        return SimpleNamespace(array=x)

    arguments = SimpleNamespace(a=wrapped(a), b=(wrapped(b),), inputs={k: wrapped(x) for k, x in inputs.items()}, alpha=None)
    return direct.bound(launches.prepared(), None, arguments, result)  # type: ignore[arg-type]


def test_a_new_d_has_the_planned_form_and_the_launch_gets_every_address():
    launches = Launches()
    a, b, inputs = operands()
    d = direct.call(launches.prepared(), None)(a, b, inputs, None)  # type: ignore[arg-type, misc]
    assert (d.shape, d.stride()) == ((M, N), (1, M))
    assert launches.calls == [(a.data_ptr(), b.data_ptr(), 0, d.data_ptr(), inputs["bias"].data_ptr(), 0 + 7)]


@pytest.mark.parametrize("inputs", [(), ("bias", "scale")])
def test_inputs_arrive_in_the_launches_order(inputs):
    launches = Launches(inputs)
    given = {name: new(M, 1) for name in reversed(inputs)}
    a, b, _ = operands()
    d = direct.call(launches.prepared(), None)(a, b, given, None)  # type: ignore[arg-type, misc]
    assert launches.calls == [(a.data_ptr(), b.data_ptr(), 0, d.data_ptr(), *(given[n].data_ptr() for n in inputs), 7)]


def test_further_outputs_are_new_tensors_by_name():
    launches = Launches(extras=((Output("mask", acc(), "uint8", "bits"), Operand.dense("uint8", (16, N), "col")),))
    a, b, inputs = operands()
    d, extras = direct.call(launches.prepared(), None)(a, b, inputs, None)  # type: ignore[arg-type, misc]
    assert {name: (x.shape, x.stride(), x.dtype) for name, x in extras.items()} == {"mask": ((16, N), (1, 16), torch.uint8)}
    assert launches.calls[0][-2] == extras["mask"].data_ptr()
    assert d.shape == (M, N)


def test_bound_operands_need_only_out():
    launches = Launches()
    a, b, inputs = operands()
    out = new(M, N, order="col")
    run = bound(launches, a, b, inputs, out)
    expected = (a.data_ptr(), b.data_ptr(), 0, out.data_ptr(), inputs["bias"].data_ptr(), 7)
    versions = []
    for _ in range(3):
        assert run(out) is out
        versions.append(out._version)
    assert launches.calls == [expected] * 3
    assert versions == [versions[0], versions[0] + 1, versions[0] + 2]  # autograd hears of every write
    d = run(None)
    assert (d.shape, d.stride(), launches.calls[-1][3]) == ((M, N), (1, M), d.data_ptr())


def test_an_out_that_others_changed_is_checked_again():
    launches = Launches()
    a, b, inputs = operands()
    out = new(M, N, order="col")
    run = bound(launches, a, b, inputs, out)
    assert run(out) is out
    out.zero_()
    assert run(out) is out
    out.t_()
    assert run(out) is direct.MISS
    out.t_()
    assert run(out) is out
    out.set_(new(M, N, order="col"))
    assert run(out) is out
    assert launches.calls[-1][3] == out.data_ptr()


def outs(a: Any) -> dict[str, Any]:
    flat = torch.empty(M * N + 8)
    return {
        "row-major": new(M, N),
        "another shape": new(M, N + 1, order="col"),
        "another dtype": new(M, N, order="col").double(),
        "misaligned": flat[1 : 1 + M * N].view(N, M).T,
        "over an operand": a.flatten()[: M * N].view(N, M).T,
        "requires grad": new(M, N, order="col").requires_grad_(),
        "no tensor": importlib.import_module("numpy").empty((M, N), "f4", order="F"),
    }


@pytest.mark.parametrize("what", outs(torch.empty(M, K)))
def test_what_is_not_plain_is_left_to_the_other_way(what):
    launches = Launches()
    a, b, inputs = operands()
    run = bound(launches, a, b, inputs, new(M, N, order="col"))
    assert run(outs(a)[what]) is direct.MISS
    assert launches.calls == []


def test_operands_of_less_alignment_are_left_to_the_other_way():
    launches = Launches()
    a, b, inputs = operands()
    function = direct.call(launches.prepared(), None)  # type: ignore[arg-type]
    assert function is not None
    for place in range(3):
        tensors = [a, b, inputs["bias"]]
        x = tensors[place]
        tensors[place] = torch.empty(x.numel() + 1)[1:].view(x.shape)
        assert function(tensors[0], tensors[1], {"bias": tensors[2]}, None) is direct.MISS
    assert launches.calls == []


def test_the_key_tells_every_form_apart():
    a, b, inputs = operands()
    read = direct.reader(torch.Tensor)
    assert read is not None
    complex_part = torch.randn(M, K, dtype=torch.complex64).conj().imag
    keys = [
        direct.key(read, *call)
        for call in (
            (a, b, inputs, None),
            (a, b, None, None),
            (a, b, {"other": inputs["bias"]}, None),
            (a, b, {"bias": inputs["bias"].half()}, None),
            (a, b, inputs, new(M, N)),
            (a, b, inputs, new(M, N, order="col")),
            (new(M, K, order="col"), b, inputs, None),
            (complex_part, b, inputs, None),
            (complex_part.resolve_neg().as_strided((M, K), complex_part.stride()), b, inputs, None)
            if complex_part.resolve_neg().stride() == complex_part.stride()
            else (a.double(), b, inputs, None),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert direct.key(read, *operands(), None) == keys[0]
    for other in ((b.numpy(), inputs), (b, {"bias": 2.0})):
        assert direct.key(read, a, *other, None) is direct.MISS

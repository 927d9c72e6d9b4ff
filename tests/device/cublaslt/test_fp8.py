"""8-bit products: scales on the device, the largest value, fast accumulation, 8-bit results and pre-activations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epigemm.engines.base import Refusal
from epigemm.enums import MatmulEpilog
from epigemm.expression.check import check
from epigemm.expression.named import named
from epigemm.expression.nodes import Expression, Node, Output, acc, input_
from epigemm.problem import Compute, Operand, Problem

torch = pytest.importorskip("torch")

M, N, K = 64, 96, 128
SCALAR = Operand.dense("f32", (1, 1))


def _problem(a="e4m3", b="e4m3", d="bf16", order="row", **compute):
    base = Problem.of("bf16", m=M, n=N, k=K, order=order, device="cuda:0", compute=Compute(**compute))
    return replace(base, a=Operand.dense(a, (M, K)), b=(Operand.dense(b, (K, N), "col"),), d=Operand.dense(d, (M, N), order))


def _allowed(run, expected, factor=1.0):
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-13, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
    return 2.0**-12 * factor * run.magnitude + 1.1 * unit[run.problem.d.dtype.name] * expected.abs() + 2.0**-9 * factor


@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("d", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("a", "b"), [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")])
@pytest.mark.parametrize("fast", [False, True])
def test_products_with_scales(tools, a, b, d, order, fast):
    problem = _problem(a, b, d, order, fast_accumulation=fast)
    scales = {"quantization_scale_a": 0.5, "quantization_scale_b": 4.0}
    run = tools.run(problem, tools.identity(problem), scales=scales)
    assert not isinstance(run, Refusal), run
    expected = 2.0 * (run.a @ run.b)
    tools.assert_within(run.d, expected, _allowed(run, expected, 8.0 if fast else 2.0))


@pytest.mark.parametrize("order", ["row", "col"])
def test_an_8_bit_result_with_its_scale_and_largest_value(tools, order):
    problem = replace(_problem(d="e4m3", order=order), inputs=(("quantization_scale_d", SCALAR),))
    outputs = (
        Output("d", Node("mul", acc(), input_("quantization_scale_d"))),
        Output("result_amax", Node("amax", Node("abs", acc()), axis="mn"), "float32"),
    )
    expression = check(Expression(outputs, 1, ("quantization_scale_d",)), problem)
    run = tools.run(problem, expression, edit=lambda data: data["quantization_scale_d"].view.fill_(0.25))
    assert not isinstance(run, Refusal), run
    exact = run.a @ run.b
    tools.assert_within(run.d, 0.25 * exact, _allowed(run, 0.25 * exact))
    largest = float(exact.abs().max())
    assert abs(float(run.outputs["result_amax"]) - largest) <= 1e-2 * largest


@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("epilog", ["RELU", "BIAS", "RELU_BIAS", "GELU", "GELU_BIAS", "GELU_AUX", "GELU_AUX_BIAS", "RELU_AUX"])
def test_epilogs(tools, epilog, order):
    member = MatmulEpilog[epilog]
    problem = _problem(order=order)
    bias = Operand.dense("bf16", (M, 1) if order == "col" else (1, N))
    problem = replace(problem, inputs=(("bias", bias),) if "BIAS" in epilog else ())
    run = tools.run(problem, check(named(member), problem), scale=0.3)
    if isinstance(run, Refusal):
        pytest.skip(str(run))
    pre = run.a @ run.b + run.inputs.get("bias", 0)
    expected = pre.clamp(min=0) if member & 2 else torch.nn.functional.gelu(pre, approximate="tanh") if member & 32 else pre
    tools.assert_within(run.d, expected, _allowed(run, pre, 2.0))


def test_without_k_contiguous_it_is_refused(tools):
    problem = replace(_problem(), b=(Operand.dense("e4m3", (K, N)),))
    assert "B must be column-major" in str(tools.run(problem, tools.identity(problem)))

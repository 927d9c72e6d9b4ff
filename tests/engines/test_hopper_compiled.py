"""A covering set of the Hopper kernel's variants compiled for sm_90a: no spill, no stack, wgmma not serialised, registers as asked.

ptxas says C7508 and C7511 where it serialises wgmma or its registers do not suffice, C7510 where it ignores setmaxnreg. No GPU is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import epigemm as eg
from epigemm.engines.cuda import compiler, libraries
from epigemm.engines.hopper import bindings, configs, launch
from epigemm.enums import MatmulEpilog
from epigemm.expression import grad
from epigemm.expression.check import check
from epigemm.expression.named import NAMED, named
from epigemm.expression.nodes import Expression
from epigemm.expression.trace import as_epilogue
from epigemm.problem import Operand, Problem

MOST = 120
M, N, K = 16384, 4096, 1024
SERIALISED = ("C7508", "C7510", "C7511")

pytestmark = pytest.mark.skipif(libraries.find("nvrtc") is None, reason="NVRTC is not installed")

SHAPES = {"row": (1, N), "column": (M, 1), "matrix": (M, N)}


def d_silu(x: Any) -> Any:
    s = eg.sigmoid(x)
    return s * (1 + x * (1 - s))


# name -> the function, its inputs' extents. Those whose name begins with "d " are backward passes.
USER: dict[str, tuple[Any, tuple[str, ...]]] = {
    "bias, erf GELU": (lambda acc, bias: eg.gelu(acc + bias), ("row",)),
    "bias, SiLU": (lambda acc, bias: eg.silu(acc + bias), ("row",)),
    "bias, residual": (lambda acc, bias, residual: acc + bias + residual, ("row", "matrix")),
    "squared ReLU": (lambda acc: eg.square(eg.relu(acc)), ()),
    "mish": (lambda acc, bias: eg.mish(acc + bias), ("row",)),
    "hardswish": (lambda acc: eg.hardswish(acc), ()),
    "softplus": (lambda acc: eg.softplus(acc), ()),
    "leaky ReLU, two vectors": (lambda acc, scale, bias: eg.leaky_relu(acc * scale + bias), ("column", "row")),
    "tanh": (lambda acc: eg.tanh(acc), ()),
    "dropout": (lambda acc, bias: eg.dropout(eg.relu(acc + bias), p=0.5, seed=7), ("row",)),
    "GELU saved": (lambda acc, bias: eg.outputs(eg.gelu(acc + bias), saved=acc + bias), ("row",)),
    "row and column sums": (lambda acc: eg.outputs(acc, r=eg.sum(eg.square(acc), axis="n"), c=eg.sum(acc, axis="m")), ()),
    "clamp, cast": (lambda acc: eg.cast(eg.clamp(acc, -1, 1), "bfloat16"), ()),
    "d erf GELU": (
        lambda acc, x: acc * (0.5 * (1 + eg.erf(x * 0.7071067811865476)) + x * eg.exp(-0.5 * x * x) * 0.3989422804014327),
        ("matrix",),
    ),
    "d SiLU, sum": (lambda acc, x: eg.outputs(acc * d_silu(x), bias=eg.sum(acc * d_silu(x), axis="m")), ("matrix",)),
    "d SwiGLU": (lambda acc, gate, up: eg.outputs(acc * up * d_silu(gate), up=acc * eg.silu(gate)), ("matrix", "matrix")),
}


@dataclass(frozen=True)
class Variant:
    """One kernel to compile.

    Args:
        name: what pytest calls it.
        problem, expression: what it computes.
        scaled: whether with alpha.
        rank: of the configuration among the candidates.
    """

    name: str
    problem: Problem
    expression: Expression
    scaled: bool = False
    rank: int = 0


def problem_of(order: str = "row", dtype: str = "bf16", accumulators: int = 1, **more: Any) -> Problem:
    made = Problem.of(dtype, m=M, n=N, k=K, order=order, device="cuda:0", accumulators=accumulators, **more)
    return replace(made, b=(Operand.dense(dtype, (K, N), "col"),) * accumulators)


def with_inputs(problem: Problem, names: tuple[str, ...], extents: tuple[str, ...]) -> Problem:
    dtype = problem.d.dtype.name
    operands = tuple(Operand.dense(dtype, SHAPES[extent], problem.order if extent == "matrix" else "row") for extent in extents)
    return replace(problem, inputs=tuple(zip(names, operands, strict=True)))


def predefined() -> list[Variant]:
    found = []
    for epilog in NAMED:
        for order in ("row", "col"):
            problem = problem_of(order)
            shape = (M // 8, N) if order == "col" else (M, N // 8)
            kinds = {"bias": Operand.dense("bf16", (M, 1)), "relu_aux": Operand.dense("uint8", shape, order)}
            kinds["gelu_aux"] = Operand.dense("bf16", (M, N), order)
            problem = replace(problem, inputs=tuple((name, kinds[name]) for name in NAMED[epilog].inputs))
            expression = check(named(epilog), problem)
            if bindings.refusal(problem, expression) is None:
                found.append(Variant(f"{epilog.name} {order}", problem, expression))
    return found


def users() -> list[Variant]:
    found = []
    for name, (function, extents) in USER.items():
        expression = as_epilogue(function).expression(1)
        for order, dtype in (("row", "bf16"), ("col", "f16")):
            if order == "col" and not name.startswith("d "):
                continue
            problem = with_inputs(problem_of(order, dtype), expression.input_names, extents)
            found.append(Variant(f"{name} {order}", problem, check(expression, problem)))
    return found


DERIVED = {
    "bias, ReLU": (lambda acc, bias: eg.relu(acc + bias), ("row",)),
    "bias, tanh GELU": (lambda acc, bias: eg.gelu(acc + bias, approximate="tanh"), ("row",)),
    "bias, erf GELU": (lambda acc, bias: eg.gelu(acc + bias), ("row",)),
    "SiLU": (lambda acc: eg.silu(acc), ()),
}


def derived() -> list[Variant]:
    """Backward passes as `gradient` makes them, with the gradient of the bias."""
    found = []
    for name, (function, extents) in DERIVED.items():
        expression = as_epilogue(function).expression(1)
        forward = with_inputs(problem_of(), expression.input_names, extents)
        gradient = grad.gradient(check(expression, forward), forward)
        saved = {one.name: one for one in gradient.saved}
        kinds = {"bits": Operand.dense("uint8", (M, N // 8)), **{e: Operand.dense("bf16", shape) for e, shape in SHAPES.items()}}
        inputs = tuple((i, kinds[saved[i].extent]) for i in gradient.backward.input_names)
        problem = replace(problem_of(), inputs=inputs)
        found.append(Variant(f"derivative of {name}", problem, check(gradient.backward, problem)))
    return found


def others() -> list[Variant]:
    """Two weights; alpha, beta and C; every configuration of the bare product; the layouts."""
    gated = as_epilogue(lambda gate, up: eg.silu(gate) * up).expression(2)
    two, plain = problem_of(accumulators=2), as_epilogue(lambda acc: acc).expression(1)
    found = [Variant(f"SwiGLU {rank}", two, check(gated, two), rank=rank) for rank in range(2)]
    scaled = problem_of(c=True)
    found.append(Variant("alpha, beta, C", scaled, check(plain, scaled), scaled=True))
    found += [Variant(f"bare {rank}", problem_of(), check(plain, problem_of()), rank=rank) for rank in range(len(configs.TABLE))]
    for a, b in (("col", "row"), ("row", "row"), ("col", "col")):
        problem = replace(problem_of(dtype="f16"), a=Operand.dense("f16", (M, K), a), b=(Operand.dense("f16", (K, N), b),))
        found.append(Variant(f"bare {a} {b}", problem, check(plain, problem)))
    return found


VARIANTS = [*predefined(), *users(), *derived(), *others()]


def test_the_set_covers_and_is_small() -> None:
    assert len(VARIANTS) <= MOST
    names = {v.name for v in VARIANTS}
    assert len(names) == len(VARIANTS)
    covered = {name.rpartition(" ")[0] for name in names}
    assert covered >= {e.name for e in NAMED if e not in (MatmulEpilog.BGRADA, MatmulEpilog.BGRADB)} | set(USER)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_a_kernel_has_all_in_registers(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path))  # what comes out of a store has no remarks
    compiler.forget()
    assert bindings.refusal(variant.problem, variant.expression) is None
    layout = bindings.layout(variant.problem, variant.expression, variant.scaled)
    fitting = configs.candidates(layout.signature, layout.m, layout.n, layout.k)
    config = fitting[min(variant.rank, len(fitting) - 1)]
    cubin = launch.compile_kernel(layout, config)
    assert [u.entry for u in cubin.usage] and not cubin.spills, (config, cubin.usage)
    assert {u.entry for u in cubin.usage} == {launch.ENTRY, launch.FINISH}
    assert cubin.log
    assert not [word for word in SERIALISED if word in cubin.log], cubin.log


def test_a_spill_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees what it is there for: a backward pass in a tile that `Signature.narrow` keeps from it."""
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path))
    variant = next(v for v in VARIANTS if v.name == "DGELU_BGRAD row")
    layout = bindings.layout(variant.problem, variant.expression)
    config = configs.Config(tile_m=192, tile_n=128)
    assert "registers" in configs.misfit(config, layout.signature)
    assert launch.compile_kernel(layout, config.fitted(layout.signature)).spills

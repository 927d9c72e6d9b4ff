"""Compiles a covering set of the Triton engine's kernels; one line each: what it is, what it is made of, that its parameters fit.

Usage: triton_compile.py sm90|sm80 [all]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget

import epigemm as eg
from epigemm.engines.triton import configs, launch, plan
from epigemm.engines.triton.configs import Config, Machine
from epigemm.engines.triton.launch import Compiled, Launch
from epigemm.engines.triton.oriented import orient
from epigemm.expression.check import check
from epigemm.expression.nodes import Expression
from epigemm.problem import Operand, Problem

MACHINES = {"sm90": Machine((9, 0), 132, 232448), "sm80": Machine((8, 0), 108, 166912)}


@eg.epilogue
def gelu_bias_residual(acc, bias, residual):
    return eg.gelu(acc + bias) + residual


@eg.epilogue
def saved(acc, bias):
    y = acc + bias
    return eg.outputs(eg.gelu(y, approximate="tanh"), saved=y)


@eg.epilogue
def relu_mask(acc, bias):
    y = acc + bias
    return eg.outputs(eg.relu(y), mask=eg.bitmask(y > 0))


@eg.epilogue
def drelu_sums(acc, mask):
    d = eg.where(eg.unbitmask(mask), acc, 0.0)
    return eg.outputs(d, columns=eg.sum(d, axis="m"), largest=eg.amax(d, axis="n"), total=eg.sum(d))


@eg.epilogue
def swiglu(gate, up):
    return eg.silu(gate) * up


@eg.epilogue
def dropped(acc, seed):
    return eg.cast(eg.dropout(acc, 0.3, seed), "bfloat16")


@eg.epilogue
def with_sums(acc):
    return eg.outputs(acc - eg.operand_sum("a"), of_b=eg.operand_sum("b"))


@eg.epilogue
def half_sums(acc):
    return eg.outputs(acc * 2.0, half=eg.cast(eg.sum(acc, axis="m"), "float16"))


@dataclass(frozen=True)
class Piece:
    """One problem with its epilogue."""

    name: str
    problem: Problem
    expression: Expression


def pieces(full: bool) -> Iterator[Piece]:
    def piece(function: eg.Epilogue, count: int = 1, dtype: str = "bf16", order: str = "row", **more) -> Piece:
        extents = {"m": 2048, "n": 4096, "k": 1024, **{k: more.pop(k) for k in "mnk" if k in more}}
        m, n = extents["m"], extents["n"]
        known = {
            "bias": Operand.dense("bf16", (1, n)),
            "residual": Operand.dense("bf16", (m, n), order),
            "mask": Operand.dense("u8", (m // 8, n) if order == "col" else (m, n // 8), order),
            "seed": Operand.dense("i64", (1, 1)),
        }
        traced = function.expression(count)
        inputs = {name: known[name] for name in traced.input_names}
        problem = Problem.of(dtype, **extents, accumulators=count, inputs=inputs, order=order, **more)
        return Piece(f"{traced.name} {dtype} {order}", problem, check(traced, problem))

    yield piece(gelu_bias_residual)
    yield piece(saved, order="col")
    yield piece(swiglu, 2)
    yield piece(drelu_sums, order="col")
    yield piece(relu_mask, m=16)
    if full:
        yield piece(relu_mask)
        yield piece(relu_mask, n=4099)
        yield piece(dropped, batch=(3,))
        yield piece(with_sums, dtype="f16", batch=(2,))
        yield piece(half_sums, dtype="f32")
        yield piece(swiglu, 2, m=16)
        yield piece(swiglu, 2, batch=(2,), order="col")
        yield piece(drelu_sums, dtype="f16")
        yield piece(half_sums, c=True, dtype="f16", n=4097)
        if sys.argv[1:2] != ["sm80"]:
            yield piece(half_sums, dtype="e4m3")


def launches(piece: Piece, machine: Machine, full: bool) -> Iterator[tuple[Config, Launch]]:
    oriented = orient(piece.problem, piece.expression)
    found = list(configs.candidates(oriented, machine, "ieee"))
    for config in found if full else found[:1]:
        made = plan.plan(piece.problem, piece.expression, oriented, config, machine, "ieee")
        yield from ((config, one) for one in made.launches)


class FakeCore:
    """The native core's slots as (kind, bytes)."""

    class Slot:
        """Stands for one parameter."""

        @staticmethod
        def fixed(value: bytes) -> int:
            return len(value)

        @staticmethod
        def value(index: int, size: int = 8) -> int:
            return size

        @staticmethod
        def workspace(offset: int = 0) -> int:
            return 8

        @staticmethod
        def tensor_map(index: int, type: int, extents: list[int], strides_bytes: list[int], box: list[int], **_: int) -> int:
            assert len(extents) == len(strides_bytes) + 1 == len(box)
            assert all(step % 16 == 0 for step in strides_bytes)
            assert all(0 < edge <= 256 for edge in box)
            return 128


SIZES = {"u64": 8, "s64": 8, "b64": 8, "u32": 4, "s32": 4, "b32": 4, "f32": 4, "f64": 8}


def parameters(ptx: str) -> list[int]:
    """The bytes of each parameter of the kernel."""
    head = ptx[ptx.index(".entry") :]
    head = head[: head.index("\n)")]
    found = re.findall(r"\.param (?:\.align \d+ \.b8 \S+\[(\d+)\]|\.(\w\d+))", head)
    return [int(size) if size else SIZES[kind] for size, kind in found]


def main() -> None:
    machine, full = MACHINES[sys.argv[1]], sys.argv[2:] == ["all"]
    for piece in pieces(full):
        for config, one in launches(piece, machine, full):
            compiled: Compiled = launch.compile_launch(one, machine)
            target = GPUTarget("cuda", machine.capability[0] * 10 + machine.capability[1], 32)
            options = {"num_warps": one.warps, "num_stages": compiled.stages, "enable_fp_fusion": True}
            kernel = triton.compile(launch.source(one), target=target, options=options)
            ptx = kernel.asm["ptx"]
            given = launch.slots_of(FakeCore, one, compiled, None)
            expected = parameters(ptx)
            assert given == expected, (given, expected)
            made_of = [name for name in ("wgmma", "mma.sync", "cp.async.cg", "cp.async") if name in ptx]
            made_of += ["tensor maps"] if "cp.async.bulk.tensor" in ptx else []
            asked = f", {one.stages} asked" if one.stages != compiled.stages else ""
            where = f"{config.block_m}x{config.block_n} split {config.splits}"
            print(
                f"{piece.name}: {one.kernel} {where} {compiled.shared_bytes} B {compiled.stages} stages{asked} ({', '.join(made_of)}) fits"
            )


if __name__ == "__main__":
    main()

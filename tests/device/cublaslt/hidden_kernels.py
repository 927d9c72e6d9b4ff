"""Whether cuBLASLt fuses an epilog in fact: how many kernels it runs, and how much of D is the exact value rounded once.

Usage: python tests/device/cublaslt/hidden_kernels.py RESULT.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from epigemm import errors, layouts
from epigemm.engines.base import Call
from epigemm.engines.cublaslt import engine
from epigemm.engines.cublaslt.engine import CublasLtEngine
from epigemm.engines.outputs import operand as output_operand
from epigemm.enums import MatmulEpilog as E
from epigemm.expression.check import check
from epigemm.expression.named import NAMED, named
from epigemm.problem import Operand, Problem

# m, n, k: 16-, 2-, 8- and 4-byte aligned lines of D; then lines of B; then larger.
SHAPES = ((96, 72, 80), (33, 41, 24), (36, 40, 24), (34, 40, 24), (40, 41, 24), (256, 256, 256), (1024, 1024, 1024))
EPILOGS = (E.RELU, E.BIAS, E.RELU_BIAS, E.RELU_AUX_BIAS, E.GELU, E.GELU_BIAS, E.GELU_AUX_BIAS, E.DRELU, E.DGELU)
ENGINE = CublasLtEngine()


def problem_of(epilog, dtype, shape):
    m, n, k = shape
    base = Problem.of(dtype, m=m, n=n, k=k, order="col", device="cuda:0")
    inputs = {
        "bias": Operand.dense(dtype, (m, 1)),
        "relu_aux": Operand.dense("uint8", (layouts.mask_bytes(m), n), "col"),
        "gelu_aux": Operand(base.d.dtype, (m, n), (1, layouts.round_up(m, 8))),
    }
    return replace(base, inputs=tuple((name, inputs[name]) for name in NAMED[epilog].inputs))


def tensor(operand):
    size = layouts.extent_bytes(operand.shape, operand.strides, 1)[1]
    dtype = getattr(torch, operand.dtype.name)
    flat = (
        torch.randint(0, 255, (size,), device="cuda", dtype=dtype) if dtype == torch.uint8 else torch.randn(size, device="cuda").to(dtype)
    )
    return flat.as_strided(operand.shape, operand.strides)


def exact(epilog, data, m):
    x = data["a"].double() @ data["b"].double() + (data["bias"].double() if "bias" in data else 0)
    if "relu_aux" in data:
        bits = (data["relu_aux"].transpose(0, 1).unsqueeze(-1) >> torch.arange(8, device="cuda", dtype=torch.uint8)) & 1
        x = torch.where(bits.flatten(-2)[:, :m].transpose(0, 1).bool(), x, 0.0)
    if "gelu_aux" in data:
        aux = data["gelu_aux"].double().requires_grad_()
        torch.nn.functional.gelu(aux, approximate="tanh").sum().backward()
        x = x * aux.grad
    return x.clamp(min=0) if epilog & 2 else torch.nn.functional.gelu(x, approximate="tanh") if epilog & 32 else x


def measure(epilog, problem, expression, candidate, profiled):
    """(share of D that is the exact value rounded once, kernels)."""
    data = {name: tensor(operand) for name, operand in (("a", problem.a), ("b", problem.b[0]), ("d", problem.d), *problem.inputs)}
    outputs = {o.name: tensor(output_operand(problem, o)) for o in expression.extras}
    executable = ENGINE.prepare(problem, expression, candidate)
    inputs = {name: data[name].data_ptr() for name, _ in problem.inputs}
    written = {name: value.data_ptr() for name, value in outputs.items()}
    stream = torch.cuda.current_stream().cuda_stream
    call = Call(data["a"].data_ptr(), (data["b"].data_ptr(),), None, data["d"].data_ptr(), inputs, written, stream=stream)
    executable.run(call)
    torch.cuda.synchronize()
    once = data["d"] == exact(epilog, data, problem.m).to(data["d"].dtype)
    names = []
    if profiled:
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            executable.run(call)
            torch.cuda.synchronize()
        names = [event.key for event in recorded.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    return round(float(once.double().mean()), 4), names


def main(result: Path) -> None:
    engine._rounding_once = lambda descriptor, epilog, device, preferences, results: results  # what the engine leaves out counts too
    rows = []
    for dtype in ("f16", "bf16"):
        for shape in SHAPES:
            for epilog in EPILOGS:
                problem = problem_of(epilog, dtype, shape)
                expression = check(named(epilog), problem)
                for rank, candidate in enumerate(ENGINE.candidates(problem, expression, 16)):
                    try:
                        once, names = measure(epilog, problem, expression, candidate, rank == 0)
                    except errors.EpigemmError as error:
                        once, names = None, [str(error)[:80]]
                    row = {"epilog": epilog.name, "dtype": dtype, "shape": shape, "rank": rank, "once": once, "kernels": names}
                    rows.append({**row, **{k: v for k, v in candidate.config if k != "data"}})
    result.write_text(json.dumps(rows))
    for row in rows:
        if row["rank"] == 0 and row["once"] is not None and row["once"] < 0.97:
            keys = ("epilog", "dtype", "shape", "once", "algorithm_id", "split_k", "reduction_scheme", "custom_option")
            print(*(row[key] for key in keys), [name[:40] for name in row["kernels"]])


if __name__ == "__main__":
    main(Path(sys.argv[1]))

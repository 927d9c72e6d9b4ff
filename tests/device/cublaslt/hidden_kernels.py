"""Which kernels cuBLASLt runs for each epilog, and whether D was rounded before the epilogue: fusing in name is not fusing in fact.

Usage: python tests/device/cublaslt/hidden_kernels.py RESULT.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from epigemm import layouts
from epigemm.engines.base import Call
from epigemm.engines.cublaslt.engine import ENGINE
from epigemm.engines.outputs import operand as output_operand
from epigemm.enums import MatmulEpilog
from epigemm.expression.check import check
from epigemm.expression.named import NAMED, named
from epigemm.problem import Operand, Problem

SHAPES = ((96, 72, 80), (33, 41, 24), (4096, 4096, 1024))


def problem_of(epilog, dtype, shape, transposed):
    m, n, k = shape
    base = Problem.of(dtype, m=m, n=n, k=k, order="col", device="cuda:0")
    if transposed:
        base = replace(base, b=(Operand.dense(dtype, (k, n), "col"),))
    strides = (1, layouts.round_up(m, 8))
    inputs = {
        "bias": Operand.dense(dtype, (m, 1)),
        "relu_aux": Operand.dense("uint8", (layouts.mask_bytes(m), n), "col"),
        "gelu_aux": Operand(base.d.dtype, (m, n), strides),
    }
    return replace(base, inputs=tuple((name, inputs[name]) for name in NAMED[epilog].inputs))


def tensor(operand):
    size = layouts.extent_bytes(operand.shape, operand.strides, 1)[1]
    dtype = getattr(torch, operand.dtype.name)
    flat = (
        torch.randint(0, 255, (size,), device="cuda", dtype=dtype) if dtype == torch.uint8 else torch.randn(size, device="cuda").to(dtype)
    )
    return flat.as_strided(operand.shape, operand.strides)


def kernels(problem, expression, candidate):
    data = {name: tensor(operand) for name, operand in (("a", problem.a), ("b", problem.b[0]), ("d", problem.d), *problem.inputs)}
    outputs = {o.name: tensor(output_operand(problem, o)) for o in expression.extras}
    executable = ENGINE.prepare(problem, expression, candidate)
    inputs = {name: data[name].data_ptr() for name, _ in problem.inputs}
    written = {name: value.data_ptr() for name, value in outputs.items()}
    stream = torch.cuda.current_stream().cuda_stream
    call = Call(data["a"].data_ptr(), (data["b"].data_ptr(),), None, data["d"].data_ptr(), inputs, written, stream=stream)
    executable.run(call)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        executable.run(call)
        torch.cuda.synchronize()
    return [event.key for event in recorded.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA], data


def rounded_before(epilog, data):
    """The largest error in units of D's last place, where the epilogue is simple enough to say."""
    if epilog not in (MatmulEpilog.BIAS, MatmulEpilog.RELU_BIAS):
        return None
    exact = data["a"].double() @ data["b"].double() + data["bias"].double()
    exact = exact.clamp(min=0) if epilog == MatmulEpilog.RELU_BIAS else exact
    unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}[data["d"].dtype]
    error = ((data["d"].double() - exact).abs() - 1e-5) / (unit * exact.abs().clamp(min=1e-3) * 2)
    return round(float(error.max()), 2)


def main(result: Path) -> None:
    rows = []
    for dtype in ("f16", "bf16", "f32"):
        for shape in SHAPES:
            for transposed in (False, True):
                for epilog in NAMED:
                    problem = problem_of(epilog, dtype, shape, transposed)
                    expression = check(named(epilog), problem)
                    offers = ENGINE.candidates(problem, expression, 1)
                    row = {"epilog": epilog.name, "dtype": dtype, "shape": shape, "b": "col" if transposed else "row"}
                    if not offers:
                        rows.append({**row, "refused": str(ENGINE.supports(problem, expression))})
                        continue
                    names, data = kernels(problem, expression, offers[0])
                    mask = ENGINE.capabilities(offers[0]).epilogue_mask
                    listed = {"id": offers[0]["algorithm_id"], "mask": mask, "kernels": names, "error": rounded_before(epilog, data)}
                    rows.append({**row, **listed})
    result.write_text(json.dumps(rows, indent=0))
    for row in rows:
        if "refused" in row:
            print(row["epilog"], row["dtype"], row["shape"], row["b"], "refused:", row["refused"][:90])
        elif len(row["kernels"]) > 1 or (row["error"] or 0) > 0.6:
            names = [name[:48] for name in row["kernels"]]
            print(row["epilog"], row["dtype"], row["shape"], row["b"], f"id={row['id']} mask={row['mask']}", row["error"], names)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

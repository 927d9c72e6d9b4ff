"""The table of cases on a GPU through the public API, cut into shares so that kernels are compiled and references computed side by side.

Usage: python tests/device/unfused/table.py RESULT.json SHARE SHARES

Of each run it checks what `conformance.check` checks, and on the device that no byte around the tensors and no operand changed. Memory
that the API allocates is full of NaN before.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import epigemm as eg
from epigemm.errors import UnsupportedEpilogue, UnsupportedProblem
from epigemm.testing import conformance
from epigemm.testing.bounded import Arithmetic
from epigemm.testing.cases import NARROW, Case, cases
from epigemm.testing.numeric import Guarded, guarded
from epigemm.testing.placing import numpy_view, strides

# engine, mode; every case in the first, a part of them in the others.
RUNS = (("unfused", "stateless", 1), ("unfused", "out", 3), ("unfused", "stateful", 5), ("cublaslt", "out", 1), ("auto", "stateless", 3))

# A matrix unit aligns the products of a step and cuts off what is below; between steps it adds in float32, truncated.
_SUM_UNITS = {"float16": 2.0**-22, "bfloat16": 2.0**-22}
# 8-bit products keep 13 bits until they are promoted, every 128 of k; ones that are no multiples of 16 are multiplied as float16.
_NARROW_UNIT, _PROMOTED, _NARROW_STEP = 2.0**-13, 128, 16
# cuBLASLt's gelu is within 5.3e-6 of the tanh form: results/cublaslt.
_GELU_UNITS = 128.0
# Its d-gelu may round the product to D's dtype first, and says so.
_STORED_UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def sum_unit(case: Case) -> float | None:
    """The relative error of an addition in a product of the case's type, None for the accumulator's."""
    if case.dtype in NARROW and not any(extent % _NARROW_STEP for extent in (case.m, case.n, case.k)):
        return _NARROW_UNIT * min(1.0, _PROMOTED / max(case.k, 1))
    return _SUM_UNITS.get("float16" if case.dtype in NARROW else case.dtype)


def arithmetic(case: Case, engine: str) -> Arithmetic:
    """What a GPU's products and, in cuBLASLt, its epilogs may be off by."""
    plain = replace(conformance.arithmetic_of(case), to_nearest=False)
    if plain.sum_unit is None:
        plain = replace(plain, sum_unit=sum_unit(case))
    if engine != "unfused":
        plain = replace(plain, function_units=_GELU_UNITS)
        if "DGELU" in case.epilogue:
            plain = replace(plain, product_unit=max(plain.product_unit, _STORED_UNITS.get(case.stored_dtype, 0.0)))
    return plain


def runs_on_a_gpu(case: Case) -> bool:
    """torch has no negative strides; a C of 8 bits has a scale that no GPU call brings."""
    return case.library == "numpy" and "negative" not in case.tags and case.dtype_of_c not in NARROW


def is_meant(case: Case, engine: str) -> bool:
    """cuBLASLt's special values differ, which `explain` tells."""
    return engine == "unfused" or case.topic != "special"


@dataclass
class Moved:
    """A guarded tensor's whole buffer on the device, at the same distance from a 256-byte boundary."""

    name: str
    host: Guarded
    memory: Any
    tensor: Any

    @staticmethod
    def of(name: str, host: Guarded) -> Moved:
        array, start = host.array, host.buffer.ctypes.data
        memory = torch.empty(len(host.buffer) + 512, dtype=torch.uint8, device="cuda")
        shift = start % 256 + -memory.data_ptr() % 256
        part = memory[shift : shift + len(host.buffer)]
        part.copy_(torch.from_numpy(host.buffer))
        dtype = getattr(torch, array.dtype.name)
        offset = shift + array.__array_interface__["data"][0] - start
        steps = tuple(s // array.itemsize for s in array.strides)
        tensor = torch.empty((), dtype=dtype, device="cuda").set_(memory.untyped_storage(), offset // array.itemsize, array.shape, steps)
        return Moved(name, host, part, tensor)

    def check(self, written: bool) -> None:
        """Asserts that only a tensor's own elements were written, and only those of an output."""
        now = self.memory.cpu().numpy()
        bad = (now != self.host.buffer) & (~self.host.inside if written else True)
        assert not bad.any(), f"{self.name}: {int(bad.sum())} bytes were changed"


def on_host(tensor: Any) -> Any:
    """A NumPy array with the order of the tensor's strides."""
    array = numpy_view(tensor.detach().cpu().contiguous())
    column_major = tensor.dim() > 1 and abs(tensor.stride(-1)) > abs(tensor.stride(-2))
    return array.swapaxes(-1, -2).copy().swapaxes(-1, -2) if column_major else array


def run(case: Case, engine: str, mode: str) -> str:
    """The refusal, "" where the case ran and was right."""
    tensors = case.build(np.random.default_rng(0))
    moved = {name: Moved.of(name, one) for name, one in tensors.all().items()}
    out = None
    if mode == "out":
        kind = "padded" if case.result_order == "row" else "padded_col"
        out = Moved.of("out", guarded(case.shape, strides(kind, case.shape), np.dtype(conformance.numpy_dtype(case.stored_dtype))))
    b = tuple(moved[f"b{i}"].tensor for i in range(case.accumulators))
    inputs = {name: moved[name].tensor for name in tensors.inputs} or None
    c = moved["c"].tensor if "c" in moved else None
    given = {"epilog": conformance.epilog_of(case), "epilog_inputs": inputs, "engine": engine}
    operands, more = (moved["a"].tensor, b if len(b) > 1 else b[0], c), conformance.keywords(case)
    try:
        if mode == "stateful":
            with eg.Matmul(*operands, **more) as product:
                product.plan(**given)
                product.execute()
                result = product.execute()
        else:
            result = eg.matmul(*operands, **given, **more, out=None if out is None else out.tensor)
    except (UnsupportedEpilogue, UnsupportedProblem) as refusal:
        return str(refusal)
    torch.cuda.synchronize()
    d, extras = result if isinstance(result, tuple) else (result, {})
    assert out is None or d is out.tensor, "the result is not the `out` that was passed"
    outputs = {"d": on_host(d), **{name: on_host(one) for name, one in extras.items()}}
    conformance.check(case, tensors, outputs, arithmetic=arithmetic(case, engine), undecided=0.2)
    for one in moved.values():
        one.check(written=False)
    if out is not None:
        out.check(written=True)
    return ""


def poison() -> None:
    """Makes torch fill what it allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty_strided((3, 5), (1, 3), device="cuda").isnan().all()


def main(result: Path, share: int, shares: int) -> None:
    poison()
    start, rows = time.time(), []
    for engine, mode, step in RUNS:
        chosen = [c for c in cases() if runs_on_a_gpu(c) and is_meant(c, engine)][::step]
        for case in chosen[share::shares]:
            row = {"engine": engine, "mode": mode, "topic": case.topic, "case": str(case), "refusal": "", "failure": ""}
            try:
                row["refusal"] = run(case, engine, mode)
            except Exception:  # any of them is a failure of this case, and the others still run
                row["failure"] = traceback.format_exc(limit=-3)[-3000:]
            rows.append(row)
    result.write_text(json.dumps({"seconds": round(time.time() - start, 1), "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

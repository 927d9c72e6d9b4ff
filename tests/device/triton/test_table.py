"""The Triton engine on a GPU: the table of cases, real sizes with tails, every configuration alone, the same bits each time.

EPIGEMM_CASE_SECONDS limits a share of the table; `pytest -n` runs the shares side by side, since most of their time is compiling.
"""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import epigemm as eg
from epigemm.testing import conformance
from epigemm.testing.cases import cases
from epigemm.testing.on_device import Copies, tensor_cores

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

SHARES = 16
SECONDS = float(os.environ.get("EPIGEMM_CASE_SECONDS", "60"))
MULTIPLIED = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
TABLE = [case for case in cases() if case.dtype in MULTIPLIED and case.library == "numpy" and "negative" not in case.tags]


@pytest.mark.parametrize("share", range(SHARES))
def test_the_table(share: int) -> None:
    end, ran, failed = time.monotonic() + SECONDS, 0, []
    for index, case in enumerate(TABLE[share::SHARES]):
        if time.monotonic() > end:
            break
        mode = ("stateless", "out", "stateful")[index % 3]
        copies = Copies(out=mode == "out")
        try:
            verdict = conformance.run_case(case, "triton", mode=mode, moved=copies, corrupt=copies.check, arithmetic=tensor_cores(case))
            assert not verdict.refusal, verdict.refusal
            ran += 1
        except Exception as error:
            failed.append(f"{case} [{mode}]: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} of {ran + len(failed)}\n" + "\n".join(failed[:12])
    assert ran > 0


@eg.epilogue
def everything(acc, bias, residual):
    y = acc + bias
    d = eg.relu(y) + residual
    return eg.outputs(d, mask=eg.bitmask(y > 0), rows=eg.sum(d, axis="n"), columns=eg.sum(d, axis="m"), largest=eg.amax(y))


@eg.epilogue
def gated(gate, up):
    return eg.outputs(eg.relu(gate) * up, total=eg.sum(up, axis="m"))


def whole(shape: tuple[int, ...], seed: int, dtype) -> torch.Tensor:
    """Small whole numbers, so that every product and sum is exact."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-1, 2, shape, device="cuda", generator=generator).to(dtype)


SIZES = ((1, 4096, 4096), (16, 4096, 1024), (67, 1032, 264), (1000, 1048, 520), (1001, 1049, 521), (2048, 4096, 128), (130, 70, 2056))


@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_configuration_alone(size: tuple[int, int, int], order: str) -> None:
    """Each candidate twice: exact, and the same bits."""
    m, n, k = size
    a, b, bias, residual = (whole(s, i, torch.float16) for i, s in enumerate(((m, k), (k, n), (1, n), (m, n))))
    acc = a.double() @ b.double()
    y = acc + bias.double()
    d = y.clamp(min=0) + residual.double()
    with eg.Matmul(a, b, options={"result_order": order}) as product:
        inputs = {"bias": bias, "residual": residual}
        algorithms = product.plan(epilog=everything, epilog_inputs=inputs, engine="triton", preferences={"limit": 32})
        assert len(algorithms) >= 2
        for algorithm in algorithms:
            found, extras = product.execute(algorithm=algorithm)
            again, more = product.execute(algorithm=algorithm)
            what = str(algorithm)
            assert torch.equal(found.double(), d.half().double()), what
            assert torch.equal(extras["rows"].double(), d.sum(1, keepdim=True)), what
            assert torch.equal(extras["columns"].double(), d.sum(0, keepdim=True)), what
            assert extras["largest"].item() == y.max().item(), what
            _check_bits(extras["mask"], y > 0, order, what)
            assert all(torch.equal(one, other) for one, other in zip((found, *extras.values()), (again, *more.values()), strict=True)), what


def _check_bits(mask: torch.Tensor, expected: torch.Tensor, order: str, what: str) -> None:
    bits = np.packbits(expected.cpu().numpy(), axis=0 if order == "col" else 1, bitorder="little")
    found = mask.cpu().numpy()
    padded = np.zeros(found.shape, np.uint8)
    padded[: bits.shape[0], : bits.shape[1]] = bits
    np.testing.assert_array_equal(found, padded, err_msg=what)


@pytest.mark.parametrize("size", [(1000, 1048, 520), (16, 4096, 1024), (999, 1041, 517)], ids=str)
def test_two_accumulators_with_every_configuration(size: tuple[int, int, int]) -> None:
    m, n, k = size
    a, gate, up = whole((m, k), 0, torch.bfloat16), whole((n, k), 1, torch.bfloat16).T, whole((n, k), 2, torch.bfloat16).T
    x, y = a.double() @ gate.double(), a.double() @ up.double()
    with eg.Matmul(a, (gate, up)) as product:
        for algorithm in product.plan(epilog=gated, engine="triton", preferences={"limit": 32}):
            found, extras = product.execute(algorithm=algorithm)
            assert torch.equal(found.double(), (x.clamp(min=0) * y).bfloat16().double()), str(algorithm)
            assert torch.equal(extras["total"].double(), y.sum(0, keepdim=True)), str(algorithm)


def test_offsets_beyond_31_bits() -> None:
    """D has more than 2**31 elements; its last rows are right."""
    m, n, k = 65536 + 8, 32768 + 64, 16
    a, b = whole((m, k), 0, torch.float16), whole((k, n), 1, torch.float16)
    d = eg.matmul(a, b, engine="triton")
    assert torch.equal(d[-4:].double(), a[-4:].double() @ b.double())


def test_a_captured_call() -> None:
    """Several launches with a workspace between them, replayed on new data."""
    a, b, bias, residual = (whole(s, i, torch.float16) for i, s in enumerate(((256, 128), (128, 512), (1, 512), (256, 512))))
    inputs = {"bias": bias, "residual": residual}
    with eg.Matmul(a, b) as product:
        product.plan(epilog=everything, epilog_inputs=inputs, engine="triton")
        product.execute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            d, extras = product.execute()
        a.copy_(whole((256, 128), 9, torch.float16))
        graph.replay()
        torch.cuda.synchronize()
    expected = (a.double() @ b.double() + bias.double()).clamp(min=0) + residual.double()
    assert torch.equal(d.double(), expected)
    assert torch.equal(extras["columns"].double(), expected.sum(0, keepdim=True))

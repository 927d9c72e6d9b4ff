"""The Hopper engine on an SM90 GPU through the public API: the table of cases that it accepts, its configurations, aliases, graphs.

The engine is put into the registry for these tests alone. EPIGEMM_CASE_SECONDS limits a share of the table.
"""

from __future__ import annotations

import os
import time

import pytest

import epigemm as eg
from epigemm import engines
from epigemm.testing import conformance
from epigemm.testing.cases import cases
from epigemm.testing.on_device import Copies, tensor_cores

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

SHARES = 8
SECONDS = float(os.environ.get("EPIGEMM_CASE_SECONDS", "60"))
TABLE = [c for c in cases() if c.dtype in ("float16", "bfloat16") and c.library == "numpy" and "negative" not in c.tags]
MODES = ("stateless", "out", "stateful")
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(engines.ENGINES, "hopper", ("epigemm.engines.hopper.engine", "cuda"))
    engines.get.cache_clear()
    yield
    engines.get.cache_clear()


@pytest.mark.parametrize("share", range(SHARES))
def test_the_table(share):
    """Each case is right or refused with a sentence; stateful runs twice and compares bits."""
    end, ran, refused, failed = time.monotonic() + SECONDS, 0, 0, []
    for index, case in enumerate(TABLE[share::SHARES]):
        if time.monotonic() > end:
            break
        mode = MODES[index % 3]
        copies = Copies(out=mode == "out")
        try:
            verdict = conformance.run_case(case, "hopper", mode=mode, moved=copies, corrupt=copies.check, arithmetic=tensor_cores(case))
            ran, refused = ran + (not verdict.refusal), refused + bool(verdict.refusal)
        except Exception as error:
            failed.append(f"{case} [{mode}]: {type(error).__name__}: {error}")
    print(f"{ran} right, {refused} refused, {len(failed)} wrong")
    assert not failed, f"{len(failed)} of {ran + len(failed)}\n" + "\n".join(failed[:12])
    assert ran > 0


@eg.epilogue
def everything(acc, bias, residual):
    y = acc + bias
    d = eg.relu(y) + residual
    return eg.outputs(d, mask=eg.bitmask(y > 0), rows=eg.sum(d, axis="n"), columns=eg.sum(d, axis="m"))


def whole(shape, seed, dtype):
    """Small integers: every sum is exact, whatever its order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-3, 4, shape, device="cuda", generator=generator).to(dtype)


def operands(m, n, k, dtype, a_order="row", b_order="col"):
    a = whole((m, k), 1, dtype) if a_order == "row" else whole((k, m), 1, dtype).T
    b = whole((n, k), 2, dtype).T if b_order == "col" else whole((k, n), 2, dtype)
    return a, b


def equal(found, wanted):
    assert torch.equal(found.double(), wanted.to(found.dtype).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("a_order", ["row", "col"])
@pytest.mark.parametrize("b_order", ["row", "col"])
@pytest.mark.parametrize("shape", [(264, 392, 200), (1000, 520, 1032), (8, 16, 8), (2048, 1096, 72)])
def test_layouts_and_tails(dtype, order, a_order, b_order, shape):
    m, n, _ = shape
    a, b = operands(*shape, dtype, a_order, b_order)
    bias = whole((n,), 3, dtype)
    residual = whole((m, n), 4, dtype) if order == "row" else whole((n, m), 4, dtype).T
    inputs = {"bias": bias, "residual": residual}
    y = a.double() @ b.double() + bias.double()
    want = y.relu() + residual.double()
    for _ in range(2):
        d, more = eg.matmul(a, b, epilog=everything, epilog_inputs=inputs, engine="hopper", options={"result_order": order})
        equal(d, want)
        equal(more["rows"].flatten(), want.sum(1))
        equal(more["columns"].flatten(), want.sum(0))
    reference, others = eg.matmul(a, b, epilog=everything, epilog_inputs=inputs, engine="unfused", options={"result_order": order})
    equal(reference, want)
    assert torch.equal(more["mask"], others["mask"]), "masks, padding included"


@pytest.mark.parametrize("shape", [(520, 648, 264), (4096, 3072, 512)])
def test_every_configuration_alone(shape):
    a, b = operands(*shape, torch.bfloat16)
    with eg.Matmul(a, b) as product:
        algorithms = product.plan(engine="hopper", preferences={"limit": 8})
        assert len(algorithms) == 7
        for algorithm in algorithms:
            equal(product.execute(algorithm=algorithm), a.double() @ b.double())


def test_alpha_beta_and_what_they_do_not_read():
    a, b = operands(264, 392, 200, torch.float16)
    c = whole((264, 392), 5, torch.float16)
    equal(eg.matmul(a, b, c, alpha=2.0, beta=0.5, engine="hopper"), 2 * (a.double() @ b.double()) + 0.5 * c.double())
    nan = torch.full_like(c, float("nan"))
    equal(eg.matmul(a, b, nan, beta=0.0, engine="hopper"), a.double() @ b.double())
    equal(eg.matmul(torch.full_like(a, float("nan")), b, c, alpha=0.0, beta=3.0, engine="hopper"), 3 * c.double())
    equal(eg.matmul(a, b, alpha=3.0, engine="hopper"), 3 * (a.double() @ b.double()))


def test_out_that_is_an_input():
    a, b = operands(1000, 520, 264, torch.bfloat16)
    residual = whole((1000, 520), 6, torch.bfloat16)
    want = a.double() @ b.double() + residual.double()
    add = eg.epilogue(lambda acc, residual: acc + residual)
    out = residual.clone()
    assert eg.matmul(a, b, epilog=add, epilog_inputs={"residual": out}, out=out, engine="hopper") is out
    equal(out, want)


def test_a_graph_replays_with_new_data():
    """A capture: the partial sums' allocation, both kernels and the mask's fill are nodes."""
    a, b = operands(264, 392, 200, torch.bfloat16)
    bias, residual = whole((392,), 3, torch.bfloat16), whole((264, 392), 4, torch.bfloat16)
    product = eg.Matmul(a, b)
    product.plan(epilog=everything, epilog_inputs={"bias": bias, "residual": residual}, engine="hopper")
    product.execute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d, more = product.execute()
    a.copy_(whole((264, 200), 9, torch.bfloat16))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    want = (a.double() @ b.double() + bias.double()).relu() + residual.double()
    equal(d, want)
    equal(more["columns"].flatten(), want.sum(0))


def test_two_streams_do_not_disturb_each_other():
    a, b = operands(2048, 1024, 512, torch.bfloat16)
    inputs = {"bias": whole((1024,), 3, torch.bfloat16), "residual": whole((2048, 1024), 4, torch.bfloat16)}
    want, sums = eg.matmul(a, b, epilog=everything, epilog_inputs=inputs, engine="hopper")
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            found.append(eg.matmul(a, b, epilog=everything, epilog_inputs=inputs, engine="hopper"))
    torch.cuda.synchronize()
    for d, more in found:
        assert torch.equal(d, want)
        assert torch.equal(more["columns"], sums["columns"])

"""Streams, graphs, threads, workspace, leaks, special values, algorithms as data."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

from epigemm import errors, layouts
from epigemm.engines.base import Call
from epigemm.engines.cublaslt.engine import ENGINE
from epigemm.engines.cuda import libraries
from epigemm.enums import MatmulEpilog
from epigemm.expression.check import check
from epigemm.expression.named import named
from epigemm.problem import Compute, Operand, Problem

torch = pytest.importorskip("torch")


class Product:
    """A product of random bf16 matrices with a candidate that takes workspace where there is one."""

    def __init__(self, tools, m=64, n=64, k=8192, seed=0):
        self.problem = Problem.of("bf16", m=m, n=n, k=k, device="cuda:0")
        self.expression = tools.identity(self.problem)
        offers = ENGINE.candidates(self.problem, self.expression, 16)
        self.candidate = next((c for c in offers if c.workspace_bytes), offers[0])
        self.executable = ENGINE.prepare(self.problem, self.expression, self.candidate)
        generator = torch.Generator("cuda").manual_seed(seed)
        self.a = torch.randn((m, k), device="cuda", dtype=torch.bfloat16, generator=generator)
        self.b = torch.randn((k, n), device="cuda", dtype=torch.bfloat16, generator=generator)
        self.d = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        self.expected = self.a.double() @ self.b.double()
        torch.cuda.synchronize()

    def run(self, stream=None):
        stream = torch.cuda.current_stream().cuda_stream if stream is None else stream
        self.executable.run(Call(self.a.data_ptr(), (self.b.data_ptr(),), None, self.d.data_ptr(), stream=stream))

    def right(self) -> bool:
        torch.cuda.synchronize()
        return bool(((self.d.double() - self.expected).abs() <= 1.0 + 0.02 * self.expected.abs()).all())

    def forget(self):
        self.d.fill_(float("nan"))


def test_a_candidate_with_workspace_is_right_and_keeps_one_buffer(tools):
    core = libraries.native()
    product = Product(tools)
    assert product.candidate.workspace_bytes > 0
    for _ in range(50):
        product.run()
    assert product.right()
    kept = core.kept_workspaces()
    product.run()
    assert core.kept_workspaces() == kept
    assert core.kept_workspace_bytes() >= product.candidate.workspace_bytes
    torch.cuda.synchronize()
    assert core.release_workspaces() > 0
    product.forget()
    product.run()
    assert product.right()


def _captured(product):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product.run()
    return graph


def test_a_graph_outlives_its_plan_and_larger_work(tools):
    product = Product(tools)
    product.run()
    graph = _captured(product)
    product.forget()
    product.executable = None
    larger = Product(tools, m=512, n=512, k=16384)
    larger.run()
    libraries.native().release_workspaces()
    graph.replay()
    assert product.right()
    assert larger.right()


def test_capture_before_any_run_and_replay_from_another_thread(tools):
    product = Product(tools, seed=3)
    graph = _captured(product)
    for _ in range(3):
        product.forget()
        worker = threading.Thread(target=graph.replay)
        worker.start()
        worker.join()
        assert product.right()


def test_two_graphs_at_once(tools):
    products = [Product(tools, seed=5), Product(tools, seed=6)]
    graphs = [_captured(p) for p in products]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(20):
        for p in products:
            p.forget()
        torch.cuda.synchronize()
        for _ in range(10):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        assert all(p.right() for p in products)


def test_many_threads_on_their_own_streams(tools):
    products = [Product(tools, seed=i) for i in range(6)]
    shared = Product(tools, seed=20)
    wrong = []

    def work(product):
        stream = torch.cuda.Stream()
        d = torch.empty_like(shared.d)
        for _ in range(50):
            product.run(stream.cuda_stream)
            call = Call(shared.a.data_ptr(), (shared.b.data_ptr(),), None, d.data_ptr(), stream=stream.cuda_stream)
            shared.executable.run(call)
        stream.synchronize()
        if not bool(((d.double() - shared.expected).abs() <= 1.0 + 0.02 * shared.expected.abs()).all()):
            wrong.append("shared plan")

    workers = [threading.Thread(target=work, args=(p,)) for p in products]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert wrong == []
    assert all(p.right() for p in products)


def test_a_fresh_thread_without_a_context(tools):
    product = Product(tools)
    failed = []

    def work():
        try:
            product.run(0)
        except Exception as error:
            failed.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert failed == []
    assert product.right()


def test_nothing_leaks(tools):
    import resource

    problem = Problem.of("f16", m=64, n=64, k=64, device="cuda:0", order="col")
    problem = replace(problem, inputs=(("bias", Operand.dense("f16", (64, 1))),))
    expression = check(named(MatmulEpilog.RELU_BIAS), problem)
    candidate = ENGINE.candidates(problem, expression, 1)[0]
    for _ in range(200):
        ENGINE.prepare(problem, expression, candidate)
    torch.cuda.synchronize()
    before, free = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, torch.cuda.mem_get_info()[0]
    for _ in range(10000):
        ENGINE.prepare(problem, expression, candidate)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 4096, f"{grown_kib} KiB of host memory for 10,000 plans"
    assert free - torch.cuda.mem_get_info()[0] < 1 << 20


# ---------------------------------------------------------------- special values


def test_beta_0_never_reads_c(tools):
    problem = Problem.of("f16", m=64, n=64, k=64, device="cuda:0", c=True)
    run = tools.run(problem, tools.identity(problem), beta=0.0, edit=lambda data: data["c"].view.fill_(float("nan")))
    assert bool(run.d.isfinite().all())


def test_alpha_0_never_reads_a_or_b(tools):
    for dtype in ("f16", "f32", "f64"):
        compute = Compute(70, "float64") if dtype == "f64" else None
        problem = Problem.of(dtype, m=64, n=64, k=64, device="cuda:0", c=True, compute=compute)
        run = tools.run(problem, tools.identity(problem), alpha=0.0, beta=2.0, edit=lambda data: data["a"].view.fill_(float("nan")))
        assert bool((run.d == (2 * run.c)).all()), dtype


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_nan_and_infinities(tools, dtype):
    """What `epilogs.DEVIATIONS` says, and nothing else: NaN stays NaN, gelu(-inf) is NaN, a NaN's mask bit is 1 with float32 alone."""
    base = Problem.of(dtype, m=64, n=64, k=64, device="cuda:0", order="col")
    base = replace(base, inputs=(("bias", Operand.dense(dtype, (64, 1))),))

    def edit(data):
        data["bias"].view[0], data["bias"].view[1], data["bias"].view[2] = float("nan"), float("-inf"), float("inf")

    relu = tools.run(base, check(named(MatmulEpilog.RELU_AUX_BIAS), base), edit=edit)
    assert bool(relu.d[0].isnan().all())
    assert bool((relu.d[1] == 0).all())
    assert bool((relu.d[2] == float("inf")).all())
    bits = relu.outputs["relu_aux"][0].int()
    assert bool(((bits & 1) == int(dtype == "f32")).all())
    assert bool(((bits & 2) == 0).all())
    assert bool(((bits & 4) == 4).all())
    gelu = tools.run(base, check(named(MatmulEpilog.GELU_BIAS), base), edit=edit)
    assert bool(gelu.d[0].isnan().all())
    assert bool(gelu.d[1].isnan().all())
    assert bool((gelu.d[2] == float("inf")).all())


def test_padding_bits_of_a_written_mask(tools):
    problem = Problem.of("f16", m=65, n=64, k=64, device="cuda:0", order="col")
    problem = replace(problem, d=Operand(problem.d.dtype, (65, 64), (1, 72)))
    run = tools.run(problem, check(named(MatmulEpilog.RELU_AUX), problem))
    mask = run.outputs["relu_aux"]
    assert mask.shape == (layouts.mask_bytes(65), 64)
    assert bool((mask[9:] == 0).all()), f"padding bytes {mask[9:, 0].tolist()}"
    assert bool((mask[8] <= 1).all()), f"padding bits {mask[8].tolist()[:8]}"
    problem = replace(
        problem, d=Operand.dense("f32", (65, 64), "col"), a=Operand.dense("f32", (65, 64)), b=(Operand.dense("f32", (64, 64)),)
    )
    mask = tools.run(problem, check(named(MatmulEpilog.RELU_AUX), problem)).outputs["relu_aux"]
    assert bool((mask[9:] == 0).all())
    assert bool((mask[8] <= 1).all())


# ---------------------------------------------------------------- algorithms


def test_algorithms_as_data_and_by_setting(tools):
    problem = Problem.of("bf16", m=512, n=512, k=512, device="cuda:0")
    expression = tools.identity(problem)
    offers = ENGINE.candidates(problem, expression, 8)
    assert 1 < len(offers) <= 8
    capabilities = ENGINE.capabilities(offers[0])
    assert offers[0]["tile"] in capabilities.tile_ids or offers[0]["tile"] == "UNDEFINED"
    assert ENGINE.applicable_algorithm_ids(problem, expression, 8)
    data = json.loads(json.dumps(ENGINE.to_data(problem, expression, offers[1])))
    back = ENGINE.from_data(problem, expression, data)
    run = tools.run(problem, expression, candidate=back)
    expected = run.a @ run.b
    tools.assert_within(run.d, expected, tools.tolerance(run, expected))
    other = Problem.of("bf16", m=512, n=512, k=256, device="cuda:0")
    with pytest.raises(errors.AlgorithmError, match="its problem is"):
        ENGINE.from_data(other, tools.identity(other), data)
    for candidate in offers:
        run = tools.run(problem, expression, candidate=candidate)
        tools.assert_within(run.d, expected, tools.tolerance(run, expected))


def test_a_setting_that_does_not_run_is_refused_before_the_launch(tools):
    problem = Problem.of("bf16", m=512, n=512, k=512, device="cuda:0")
    expression = tools.identity(problem)
    candidate = ENGINE.candidates(problem, expression, 1)[0]
    broken = replace(candidate, config=tuple((k, 9999 if k == "tile" else v) for k, v in candidate.config))
    with pytest.raises(errors.EpigemmError):
        ENGINE.prepare(problem, expression, broken)


def test_a_split_k_that_was_set_runs(tools):
    problem = Problem.of("bf16", m=128, n=128, k=4096, device="cuda:0")
    expression = tools.identity(problem)
    ran = 0
    for candidate in ENGINE.candidates(problem, expression, 16):
        config = {**dict(candidate.config), "split_k": 4, "reduction_scheme": 2}
        changed = replace(candidate, config=tuple(sorted(config.items())))
        try:
            run = tools.run(problem, expression, candidate=changed)
        except errors.AlgorithmError:
            continue
        expected = run.a @ run.b
        tools.assert_within(run.d, expected, tools.tolerance(run, expected))
        ran += 1
    assert ran > 0


def test_a_device_that_is_not_there(tools):
    problem = Problem.of("f16", m=64, n=64, k=64, device="cuda:7")
    refusal = str(ENGINE.supports(problem, tools.identity(problem)))
    assert "INVALID_DEVICE" in refusal or "no GPU of this number" in refusal

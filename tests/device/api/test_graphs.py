"""CUDA graphs of execute() and matmul(): what is captured lives as long as the graph."""

from __future__ import annotations

import gc
import threading

import pytest

import epigemm as eg
from epigemm.engines.cuda import libraries

torch = pytest.importorskip("torch")

M, N, K = 64, 64, 8192  # few tiles and a long sum: algorithms that want workspace


class Captured:
    """A graph of one product, its operands and its result."""

    def __init__(self, normal, how, seed=0):
        self.a, self.b = normal(M, K, seed=seed, dtype=torch.bfloat16), normal(K, N, seed=seed + 1, dtype=torch.bfloat16)
        self.bias = normal(M, 1, seed=seed + 2, dtype=torch.bfloat16)
        self.graph = torch.cuda.CUDAGraph()
        self.product = eg.Matmul(self.a, self.b)
        self.product.plan(epilog="relu_bias", epilog_inputs={"bias": self.bias})
        torch.cuda.synchronize()
        self.d = self.capture(how)

    def capture(self, how):
        if how.endswith("after a run"):
            self.run(how)
            torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            return self.run(how)

    def run(self, how):
        if how.startswith("execute"):
            return self.product.execute()
        return eg.matmul(self.a, self.b, epilog="relu_bias", epilog_inputs={"bias": self.bias})

    def drop(self):
        self.product.free()
        self.product = None
        gc.collect()

    def forget(self):
        self.d.fill_(float("nan"))

    def right(self):
        torch.cuda.synchronize()
        exact = torch.relu(self.a.double() @ self.b.double() + self.bias.double())
        allowed = (K + 4) * 2.0**-24 * 2 * (self.a.double().abs() @ self.b.double().abs()) + 2.0**-8 * exact + 2.0**-8
        return bool(((self.d.double() - exact).abs() <= allowed).all())


WAYS = ["execute", "execute after a run", "matmul after a run"]


@pytest.mark.parametrize("how", WAYS)
def test_after_its_plan_is_dropped_and_larger_work_ran(normal, how):
    captured = Captured(normal, how)
    captured.drop()
    larger = Captured(normal, "execute", seed=50)
    big_a, big_b = normal(1024, 16384, dtype=torch.bfloat16), normal(16384, 512, dtype=torch.bfloat16)
    for _ in range(3):
        eg.matmul(big_a, big_b)
    libraries.native().release_workspaces()
    for _ in range(3):
        captured.forget()
        captured.graph.replay()
        assert captured.right()
    larger.graph.replay()
    assert larger.right()


@pytest.mark.parametrize("how", WAYS)
def test_from_another_thread(normal, how):
    captured = Captured(normal, how, seed=3)
    for _ in range(3):
        captured.forget()
        worker = threading.Thread(target=captured.graph.replay)
        worker.start()
        worker.join()
        assert captured.right()


@pytest.mark.parametrize("how", WAYS)
def test_two_at_once(normal, how):
    pair = [Captured(normal, how, seed=5), Captured(normal, how, seed=9)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(10):
        for captured in pair:
            captured.forget()
        torch.cuda.synchronize()
        for _ in range(10):
            for captured, stream in zip(pair, streams, strict=True):
                with torch.cuda.stream(stream):
                    captured.graph.replay()
        assert all(captured.right() for captured in pair)


def test_operands_changed_between_replays(normal):
    captured = Captured(normal, "execute after a run", seed=20)
    captured.a.copy_(normal(M, K, seed=77, dtype=torch.bfloat16))
    captured.graph.replay()
    assert captured.right()


def test_a_whole_layer_in_one_graph(normal):
    """Forward with a mask, and the gradient that reads it."""
    a, b, bias = normal(256, 128), normal(128, 192, seed=1), normal(256, 1, seed=2)
    warm = eg.matmul(a, b, epilog="relu_aux_bias", epilog_inputs={"bias": bias})
    eg.matmul(a, b, epilog="drelu", epilog_inputs=warm[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d, aux = eg.matmul(a, b, epilog="relu_aux_bias", epilog_inputs={"bias": bias})
        gradient = eg.matmul(a, b, epilog="drelu", epilog_inputs=aux)
    d.fill_(float("nan")), gradient.fill_(float("nan")), aux["relu_aux"].fill_(0xAA)
    graph.replay()
    torch.cuda.synchronize()
    exact = a.double() @ b.double()
    assert bool(((d.double() - torch.relu(exact + bias)).abs() <= 2.0**-10 * (exact.abs() + 20)).all())
    masked = torch.where(exact + bias >= 0, exact, 0)
    near = (exact + bias).abs() < 2.0**-12 * 128  # where the sign of a sum may be either
    assert bool((((gradient.double() - masked).abs() <= 2.0**-10 * (exact.abs() + 20)) | near).all())

"""The suite `headline`: large float16 products with predefined epilogs, beside the same steps one by one, PyTorch and the peer.

D is column-major in all of ours, the order in which cuBLASLt adds a bias along m; the bare product is timed in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import epigemm
from epigemm.bench.device import Bar, Group, Timed, made, peer, time_in_turn

# (m, n, k): the published shape and a cube.
SHAPES = ((65536, 8192, 16384), (8192, 8192, 8192))
LEAST_ROUNDS = 7
PEAK_TFLOPS = 989.5  # dense float16 of an H100 or H200 (SXM), without sparsity

EPILOGS = ("BIAS", "RELU_BIAS", "RELU_AUX_BIAS", "GELU_BIAS")
PLAIN, PEER, MM, MM_ADD, NAIVE = "plain", "nvmath ", "torch.mm", "matmul + add", "matmul, add, relu"

BARS = (
    Bar("BIAS", PLAIN, 1.02),
    Bar("RELU_BIAS", PLAIN, 1.02),
    Bar("RELU_AUX_BIAS", PLAIN, 1.03),
    Bar("GELU_BIAS", PLAIN),
    *(Bar(name, PEER + name, 1.02) for name in (PLAIN, *EPILOGS)),
    Bar("RELU_BIAS", NAIVE, 1 / 1.08),
    Bar("BIAS", MM_ADD),
    Bar(PLAIN, MM),
)

_VERIFIED_ROWS = 32
_SPIN_CYCLES = 1_000_000  # the GPU is busy with this while the host queues what is timed
MIB = 1 << 20


def measure(torch: Any, engine: str, rounds: int, on_round: Callable[[], None] = lambda: None) -> Iterator[Group]:
    """One group a shape: medians in milliseconds of GPU time."""
    for shape in SHAPES:
        yield _measured(torch, engine, max(rounds, LEAST_ROUNDS), shape, on_round)
        torch.cuda.empty_cache()


def _measured(torch: Any, engine: str, rounds: int, shape: tuple[int, int, int], on_round: Callable[[], None]) -> Group:
    m, n, k = shape
    group = Group(f"m={m} n={n} k={k} float16, standard normal data", "ms", bars=BARS)
    data = _Data(torch, m, n, k)
    calls = made(group, {**_ours(data, engine, group), **_torch_s(data), **_peer_s(data)})
    runs: dict[str, Timed] = {}
    for name, call in calls.items():
        try:
            data.verify(call(), name)
            group.facts.setdefault(name, {}).update(_peak(torch, call, name))
            runs[name] = partial(_timed, torch, call)
        except Exception as error:
            group.failed[name] = f"{type(error).__name__}: {error}"
    time_in_turn(group, runs, rounds, on_round)
    for name, times in group.times.items():
        if times:
            group.facts[name]["percent_of_peak"] = round(2e-9 * m * n * k / group.median(name) / PEAK_TFLOPS * 100, 1)
    group.more += _memory_bars(group, m, n)
    return group


class _Data:
    """a [m, k], b [k, n], bias [m, 1], and some rows of their product in float64."""

    def __init__(self, torch: Any, m: int, n: int, k: int) -> None:
        self.torch, self.k = torch, k
        generator = torch.Generator("cuda").manual_seed(0)
        make = {"device": "cuda", "dtype": torch.float16, "generator": generator}
        self.a, self.b, self.bias = torch.randn((m, k), **make), torch.randn((k, n), **make), torch.randn((m, 1), **make)
        self.rows = torch.randint(0, m, (_VERIFIED_ROWS,), device="cuda", generator=generator)
        a = self.a[self.rows].double()
        self.product, self.size = torch.empty((2, _VERIFIED_ROWS, n), device="cuda", dtype=torch.float64)
        for first in range(0, n, 2048):
            b = self.b[:, first : first + 2048].double()
            self.product[:, first : first + 2048], self.size[:, first : first + 2048] = a @ b, a.abs() @ b.abs()

    def verify(self, result: Any, name: str) -> None:
        torch, k = self.torch, self.k
        d = (result[0] if isinstance(result, tuple) else result)[self.rows].double()
        name = name.removeprefix(PEER)
        exact = self.product if name in (PLAIN, MM) else self.product + self.bias[self.rows].double()
        if "RELU" in name or name == NAIVE:
            exact = torch.relu(exact)
        if "GELU" in name:
            exact = torch.nn.functional.gelu(exact, approximate="tanh")
        # Sums of k products, truncated in float32; then at most three roundings to float16 (the steps of the naive way).
        allowed = 2 * k**0.5 * 2.0**-24 * self.size + 3 * 2.0**-11 * (self.product.abs() + 8)
        if not bool(((d - exact).abs() <= allowed).all()):
            raise AssertionError(f"{name} computes something else: off by {float((d - exact).abs().max()):.3g}")


def _ours(data: _Data, engine: str, group: Group) -> dict[str, Callable[[], Callable[[], Any]]]:
    def planned(name: str) -> Callable[[], Any]:
        product = epigemm.Matmul(data.a, data.b, options={"result_order": "col"})
        inputs = None if name == PLAIN else {"bias": data.bias}
        product.plan(epilog=None if name == PLAIN else name.lower(), epilog_inputs=inputs, engine=engine)
        assert product.algorithms is not None
        candidate = product.algorithms[0].candidate
        group.facts[name] = {"plan": str(candidate), "workspace_mib": round(candidate.workspace_bytes / MIB, 1)}
        execute: Callable[[], Any] = product.execute
        return execute

    return {name: partial(planned, name) for name in (PLAIN, *EPILOGS)}


def _torch_s(data: _Data) -> dict[str, Callable[[], Callable[[], Any]]]:
    torch, a, b, bias = data.torch, data.a, data.b, data.bias
    return {
        MM: lambda: lambda: torch.mm(a, b),
        MM_ADD: lambda: lambda: torch.mm(a, b) + bias,
        NAIVE: lambda: lambda: torch.relu(torch.mm(a, b) + bias),
    }


def _peer_s(data: _Data) -> dict[str, Callable[[], Callable[[], Any]]]:
    advanced = peer()
    if advanced is None:
        return {}

    def planned(name: str) -> Callable[[], Any]:
        product = advanced.Matmul(data.a, data.b)
        if name == PLAIN:
            product.plan()
        else:
            product.plan(epilog=advanced.MatmulEpilog[name], epilog_inputs={"bias": data.bias})
        execute: Callable[[], Any] = product.execute
        return execute

    return {PEER + name: partial(planned, name) for name in (PLAIN, *EPILOGS)}


def _timed(torch: Any, call: Callable[[], Any]) -> float:
    """Milliseconds of the GPU for one call, its launches queued before it starts."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_SPIN_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    took: float = start.elapsed_time(end)
    return took


def _peak(torch: Any, call: Callable[[], Any], name: str) -> dict[str, Any]:
    """What one call needs at most beyond its operands, PyTorch's workspace of cuBLAS included, ours apart."""
    torch.cuda.synchronize()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    kept = result if isinstance(result, tuple) else (result, {})
    outputs = sum(x.numel() * x.element_size() for x in (kept[0], *kept[1].values()))
    peak = torch.cuda.max_memory_allocated() - before
    return {"peak_mib": round(peak / MIB, 1), "outputs_mib": round(outputs / MIB, 1)}


def _memory_bars(group: Group, m: int, n: int) -> list[dict[str, Any]]:
    """The outputs and the workspace, nothing else; and the intermediate less than the naive way."""
    found, intermediate = [], 2 * m * n / MIB
    for name in (PLAIN, *EPILOGS):
        facts = group.facts.get(name, {})
        if "peak_mib" in facts:
            over = round(facts["peak_mib"] - facts["outputs_mib"], 1)
            found.append({"what": f"{name}: MiB beyond the outputs and the workspace", "value": over, "bar": 2.0, "holds": over <= 2.0})
    ours, naive = group.facts.get("RELU_BIAS", {}), group.facts.get(NAIVE, {})
    if "peak_mib" in ours and "peak_mib" in naive:
        less = round(naive["peak_mib"] - ours["peak_mib"] - ours["workspace_mib"], 1)
        what = f"RELU_BIAS with its workspace: MiB less than {NAIVE}"
        found.append({"what": what, "value": less, "bar": intermediate, "holds": less >= intermediate - ours["workspace_mib"] - 0.2})
    return found

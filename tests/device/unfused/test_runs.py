"""The unfused engine on a GPU beyond the table of cases: aliases of D, alpha and beta, graphs, threads, workspace, choices."""

from __future__ import annotations

import threading

import pytest

import epigemm as eg

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def normal(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, device="cuda", dtype=torch.float64, generator=generator).to(dtype)


def operands(dtype=torch.bfloat16, m=96, n=72, k=64):
    return normal(m, k, dtype=dtype), normal(k, n, dtype=dtype) / 8


def close(found, want, dtype, k=64, times=1):
    """|found - want| within k roundings of the accumulator and `times` of the stored value, of values around 1."""
    accumulated = k * UNIT[torch.float64 if dtype == torch.float64 else torch.float32] * 8
    allowed = accumulated + 2 * times * UNIT[dtype] * (want.abs() + (1 if times > 1 else 0))
    off = (found.double() - want).abs()
    assert bool((off <= allowed).all()), f"off by {float(off.max()):.3g}"


def residual(x, other):
    return eg.tanh(x) + other


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["exact", "in_place"])
def test_out_may_be_an_input(dtype, way):
    a, b = operands(dtype)
    other = normal(96, 72, dtype=dtype)
    out = other.clone()
    want = torch.tanh(a.double() @ b.double()) + other.double()
    with eg.Matmul(a, b) as product:
        algorithms = product.plan(epilog=residual, epilog_inputs={"other": out}, engine="unfused")
        algorithm = next((x for x in algorithms if x.way == way), None)
        if algorithm is None:
            assert way == "in_place"
            assert dtype in (torch.float32, torch.float64)
            return
    result = eg.matmul(a, b, epilog=residual, epilog_inputs={"other": out}, out=out, engine="unfused", algorithm=algorithm)
    assert result is out
    close(out, want, dtype, times=2 if way == "in_place" else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("beta", [0.0, -0.75])
@pytest.mark.parametrize("inplace", [False, True])
def test_alpha_and_beta(dtype, alpha, beta, inplace):
    """What is not read may be NaN. C is in the product for float32 and float64, and in the pass for 16-bit types."""
    a, b = operands(dtype)
    c = normal(96, 72, dtype=dtype)
    want = torch.tanh(alpha * (a.double() @ b.double()) + beta * c.double())
    if alpha == 0:
        a, b = torch.full_like(a, float("nan")), torch.full_like(b, float("nan"))
    if beta == 0:
        c = torch.full_like(c, float("nan"))
    options = {"inplace": inplace}
    d = eg.matmul(a, b, c, alpha=alpha, beta=beta, epilog=lambda x: eg.tanh(x), options=options, engine="unfused")
    assert (d is c) == inplace
    close(d, want, dtype)


@pytest.mark.parametrize("c_dtype", DTYPES[:3])
@pytest.mark.parametrize("shape", [(96, 72), (96, 1), (1, 72), (1, 1)])
def test_a_c_of_another_dtype_or_shape(c_dtype, shape):
    a, b = operands()
    c = normal(*shape, dtype=c_dtype)
    d = eg.matmul(a, b, c, beta=2.0, epilog=lambda x: eg.tanh(x), options={"result_type": eg.CudaDataType.CUDA_R_16BF}, engine="unfused")
    close(d, torch.tanh(a.double() @ b.double() + 2 * c.double()), torch.bfloat16)


def test_in_place_is_told_and_exact_comes_first():
    a, b = operands()
    with eg.Matmul(a, b) as product:
        algorithms = product.plan(epilog=lambda x: eg.gelu(x), engine="unfused")
        assert [x.way for x in algorithms[:2]] == ["exact", "in_place"]
        assert "way=in_place rounds the product to bfloat16" in product.explain()
        want = torch.nn.functional.gelu(a.double() @ b.double())
        shares = {}
        for x in algorithms[:2]:
            d = product.execute(algorithm=x)
            shares[x.way] = float((d == want.to(d.dtype)).double().mean())
        assert shares["exact"] > 0.98 > shares["in_place"] > 0.2, shares
        product.autotune(iterations=3)
        assert product.algorithms[0].engine == "unfused"
    with eg.Matmul(a, b, options={"strict": True}) as product:
        assert {x.way for x in product.plan(epilog=lambda x: eg.gelu(x), engine="unfused")} == {"exact"}


@pytest.mark.parametrize("layout", ["row", "col"])
def test_eight_bit_products(layout):
    """k contiguous: multiplied as they are; else as float16. The scales are on the device in both ways."""
    a = normal(64, 96, dtype=torch.float32).to(torch.float8_e4m3fn)
    b = normal(96, 48, dtype=torch.float32).to(torch.float8_e4m3fn)
    placed = b if layout == "row" else b.t().contiguous().t()
    scales = {"a": 0.5, "b": torch.tensor(0.25, device="cuda")}
    more = {"quantization_scales": scales, "options": {"result_type": eg.CudaDataType.CUDA_R_16BF}, "engine": "unfused"}
    d = eg.matmul(a, placed, epilog=lambda x: eg.silu(x), **more)
    close(d, torch.nn.functional.silu(0.125 * (a.double() @ b.double())), torch.bfloat16, k=96 * 64)


def swiglu(gate, up):
    return eg.outputs(eg.silu(gate) * up, columns=eg.sum(gate * up, axis="m"))


def test_a_graph_replays_after_larger_work_and_after_the_plan_is_gone():
    x, (gate, up) = normal(256, 128), (normal(128, 192) / 8, normal(128, 192, seed=1) / 8)
    stream = torch.cuda.Stream()
    product = eg.Matmul(x, (gate, up))
    product.plan(epilog=swiglu, engine="unfused")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        want, sums = product.execute()
        want, sums = want.clone(), sums["columns"].clone()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            d, extras = product.execute()
        graphs.append((graph, d, extras["columns"]))
    product.free()
    big = normal(2048, 1024)
    with torch.cuda.stream(stream):
        eg.matmul(big, big.t(), epilog=lambda y: eg.gelu(y), engine="unfused")
    streams = [torch.cuda.Stream() for _ in graphs]
    for (graph, d, s), other in zip(graphs, streams, strict=True):
        d.fill_(float("nan")), s.fill_(float("nan"))
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            graph.replay()
    torch.cuda.synchronize()
    for _, d, s in graphs:
        assert torch.equal(d, want)
        assert torch.equal(s, sums)


def test_threads_and_streams_share_a_plan():
    x, w = normal(512, 256), normal(256, 384) / 16
    with eg.Matmul(x, w) as product:
        product.plan(epilog=lambda y: eg.outputs(eg.gelu(y), total=eg.sum(y)), engine="unfused")
        want, extras = product.execute()
        torch.cuda.synchronize()
        wrong = []

        def work():
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    d, more = product.execute()
                    torch.cuda.current_stream().synchronize()
                    if not (torch.equal(d, want) and torch.equal(more["total"], extras["total"])):
                        wrong.append(1)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_memory_limit_chooses_and_refuses():
    a, b = operands()
    with (
        eg.Matmul(a, b, options={"memory_limit": 1024, "strict": True}) as product,
        pytest.raises(eg.errors.UnsupportedProblem, match="memory_limit allows"),
    ):
        product.plan(epilog=swiglu_one, engine="unfused")


def swiglu_one(x):
    return eg.outputs(eg.silu(x) * x, saved=x)


def test_auto_says_why():
    a, b = normal(2048, 1024), normal(1024, 2048) / 32
    with eg.Matmul(a, b) as product:
        product.plan(epilog="relu_bias", epilog_inputs={"bias": normal(2048)})
        assert "cublaslt" in product.explain()
        product.plan(epilog=lambda x: eg.outputs(eg.mish(x), rows=eg.amax(x, axis="n")))
        text = product.explain()
        assert "cublaslt: refuses" in text
        assert "predicted" in text


def test_nothing_leaks():
    a, b = operands()
    before = None
    for i in range(300):
        with eg.Matmul(a, b) as product:
            product.plan(epilog=residual, epilog_inputs={"other": normal(96, 72)}, engine="unfused")
            product.execute()
        if i == 50:
            torch.cuda.synchronize()
            before = torch.cuda.mem_get_info()[0]
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] < 8 << 20

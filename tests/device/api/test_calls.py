"""Streams, threads, memory, autotune, the direct path: what a call does besides computing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import epigemm as eg
from epigemm import api, errors

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
LONG = 1_500_000_000  # cycles: 0.7 s and more


def same(x, y):
    return bool((x.view(torch.uint8) == y.view(torch.uint8)).all())


# ---------------------------------------------------------------- streams


def _given(kind, stream):
    if kind == "an int":
        return stream.cuda_stream
    if kind == "a CuPy stream":
        return pytest.importorskip("cupy").cuda.ExternalStream(stream.cuda_stream)
    return stream


@pytest.mark.parametrize("kind", ["current", "an int", "a torch stream", "a CuPy stream"])
@pytest.mark.parametrize("form", ["matmul", "execute", "execute again"])
def test_work_goes_to_the_stream(normal, close, kind, form):
    """What was queued on the stream before is seen: operands that a later kernel fills."""
    a, b, new = normal(256, 512), normal(512, 128, seed=1), normal(256, 512, seed=2)
    stream = torch.cuda.Stream()
    with eg.Matmul(a, b) as product:
        product.plan()
        for _ in range(2 if form == "execute again" else 0):
            product.execute()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG // 10)
            a.copy_(new)
        if kind == "current":
            with torch.cuda.stream(stream):
                d = eg.matmul(a, b) if form == "matmul" else product.execute()
        else:
            given = _given(kind, stream)
            d = eg.matmul(a, b, stream=given) if form == "matmul" else product.execute(stream=given)
        stream.synchronize()
        close(d, new, b)


@pytest.mark.parametrize("form", ["matmul", "execute"])
def test_cupy_s_current_stream(form):
    cupy = pytest.importorskip("cupy")
    a, b, new = (cupy.random.standard_normal(s, dtype="float32") for s in ((64, 96), (96, 32), (64, 96)))
    stream = cupy.cuda.Stream(non_blocking=True)
    with eg.Matmul(a, b) as product:
        product.plan()
        product.execute()
        cupy.cuda.Device().synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(LONG // 10)
        with stream:
            a[...] = new
            d = eg.matmul(a, b) if form == "matmul" else product.execute()
        stream.synchronize()
    error = abs(d - new.astype("float64") @ b.astype("float64")).max()
    assert float(error) <= 100 * 2.0**-24 * 96


def test_host_operands_with_a_stream():
    import numpy as np

    stream = torch.cuda.Stream()
    random = np.random.default_rng(0)
    a, b = random.standard_normal((300, 200)), random.standard_normal((200, 100))
    for given in (None, stream, stream.cuda_stream):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG // 20)
        assert abs(eg.matmul(a, b, options={"device_id": 0}, stream=given) - a @ b).max() < 1e-12 * 200
    on_cpu = torch.from_numpy(a)
    with eg.Matmul(on_cpu, torch.from_numpy(b), options={"device_id": 0}) as product:
        product.plan()
        for _ in range(3):  # the second and later calls must not take the path of tensors on the GPU
            found = product.execute()
            assert found.device.type == "cpu"
            assert abs(found.numpy() - a @ b).max() < 1e-12 * 200


def test_planning_and_executing_wait_for_nothing(normal, close):
    a, b, bias = normal(320, 448), normal(448, 192, seed=1), normal(320, 1, seed=2)
    known = normal(320, 320)
    warm = eg.Matmul(known, known)
    warm.plan()
    for _ in range(3):  # the driver may wait when it loads a kernel, and the allocator when it asks for memory
        kept = [warm.execute(), warm.execute(), eg.matmul(known, known)]
    torch.cuda.synchronize()
    del kept
    torch.cuda._sleep(LONG)
    event = torch.cuda.Event()
    event.record()
    start = time.perf_counter()
    product = eg.Matmul(a, b)
    product.plan(epilog="relu_bias", epilog_inputs={"bias": bias})
    planned = time.perf_counter() - start
    waits_in_plan = event.query()
    results = [warm.execute(), warm.execute(), eg.matmul(known, known)]
    waits_in_execute = event.query()
    torch.cuda.synchronize()
    assert not waits_in_plan, f"plan() took {planned:.3f} s: it waited for the stream, or the kernel before it was too short"
    assert not waits_in_execute
    close(results[0], known, known)
    assert same(results[0], results[1])
    close(product.execute(), a, b, torch.relu(a.double() @ b.double() + bias.double()))


# ---------------------------------------------------------------- threads


def test_threads(normal, close):
    """Own objects and shared plans, each thread on a stream of its own."""
    data = [(normal(96, 4096, seed=i), normal(4096, 80, seed=i + 40), normal(96, 1, seed=i + 80)) for i in range(8)]
    torch.cuda.synchronize()
    results, failed = {}, []

    def work(index):
        try:
            a, b, bias = data[index]
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream), eg.Matmul(a, b) as product:
                product.plan(epilog="bias", epilog_inputs={"bias": bias})
                found = [(product.execute(), eg.matmul(a, b, epilog="bias", epilog_inputs={"bias": bias})) for _ in range(40)]
            stream.synchronize()
            results[index] = found
        except Exception as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(data))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failed == []
    for index, found in results.items():
        a, b, bias = data[index]
        for d, stateless in found[::13]:
            close(d, a, b, a.double() @ b.double() + bias.double())
            close(stateless, a, b, a.double() @ b.double() + bias.double())


# ---------------------------------------------------------------- leaks


def resident_kib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def grown(work, warm, count):
    """KiB of host memory and bytes of device memory that `count` calls of `work` leave behind."""
    for _ in range(warm):
        work()
    torch.cuda.synchronize()
    gc.collect()
    host, device = resident_kib(), torch.cuda.mem_get_info()[0]
    for _ in range(count):
        work()
    torch.cuda.synchronize()
    gc.collect()
    return resident_kib() - host, device - torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("form", ["plans", "stateless", "executes"])
def test_nothing_leaks_over_10000(normal, record, form):
    a, b, bias = normal(64, 64), normal(64, 64, seed=1), normal(64, 1, seed=2)
    held = eg.Matmul(a, b)
    held.plan(epilog="relu_bias", epilog_inputs={"bias": bias})
    out = held.execute()

    def plans():
        with eg.Matmul(a, b) as product:
            product.plan(epilog="relu_bias", epilog_inputs={"bias": bias})
            product.execute()

    work = {
        "plans": plans,
        "stateless": lambda: eg.matmul(a, b, epilog="relu_bias", epilog_inputs={"bias": bias}),
        "executes": lambda: held.execute(out=out),
    }[form]
    start = time.monotonic()
    host_kib, device_bytes = grown(work, 500, 10_000)
    record("leaks", {"form": form, "host_kib": host_kib, "device_bytes": device_bytes, "seconds": time.monotonic() - start})
    assert host_kib < 8192, f"{host_kib} KiB of host memory for 10,000 {form}"
    assert device_bytes <= 4 << 20, f"{device_bytes} bytes of device memory for 10,000 {form}"


def test_no_cache_holds_a_tensor(normal):
    import weakref

    a, b = normal(64, 32), normal(32, 48, seed=1)
    references = [weakref.ref(a), weakref.ref(b)]
    for _ in range(3):
        d = eg.matmul(a, b)
    with eg.Matmul(a, b) as product:
        product.plan()
        product.execute()
        product.execute()
    references.append(weakref.ref(d))
    del a, b, d, product
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


# ---------------------------------------------------------------- autotune, algorithms


def test_autotune_leaves_c_and_out_alone(normal, close):
    a, b, c = normal(256, 512), normal(512, 128, seed=1), normal(256, 128, seed=2)
    before = c.clone()
    exact = a.double() @ b.double() + 0.5 * c.double()
    with eg.Matmul(a, b, c, beta=0.5, options={"inplace": True}) as product:
        product.plan(preferences={"limit": 4})
        product.autotune(iterations=3)
        assert same(c, before)
        assert product.execute() is c
        close(c, a, b, exact)
    with eg.Matmul(a, b) as product:
        product.plan(preferences={"limit": 4})
        out = torch.full((256, 128), 7.0, device="cuda", dtype=torch.float16)
        product.execute(out=out)
        kept = out.clone()
        product.autotune(iterations=3)
        assert same(out, kept)
        assert "autotune" in product.explain()


def test_autotune_times_the_stream_that_it_runs_on(normal):
    """A stream of its own with nothing of the default stream: times are those of the work, not zero."""
    a, b = normal(2048, 2048), normal(2048, 2048, seed=1)
    with torch.cuda.stream(torch.cuda.Stream()), eg.Matmul(a, b) as product:
        product.plan(preferences={"limit": 2})
        product.autotune(iterations=5)
        text = product.explain()
    took = float(text.split(" took ")[1].split(" us")[0])
    assert 10 <= took <= 2000, text


def test_a_changed_setting_is_what_the_next_execute_runs(normal, close):
    a, b = normal(512, 512, dtype=torch.bfloat16), normal(512, 512, seed=1, dtype=torch.bfloat16)
    with eg.Matmul(a, b) as product:
        best = product.plan(engine="cublaslt", preferences={"limit": 4})[0]
        product.execute()
        product.execute()
        best.tile = (9999, 9999)
        with pytest.raises(errors.EpigemmError):
            product.execute()


# ---------------------------------------------------------------- the direct path


@pytest.fixture
def direct(normal):
    """Operands whose form is on the direct path, and what the general path gives for them."""
    a, b, bias = normal(64, 96), normal(96, 80, seed=1), normal(64, 1, seed=2)
    inputs = {"epilog": "relu_bias", "epilog_inputs": {"bias": bias}}
    general = eg.matmul(a, b, options={}, **inputs)
    assert same(eg.matmul(a, b, **inputs), general)
    assert len(api._direct_calls) > 0
    return a, b, inputs, general


def poisoned(like):
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cuda").fill_(float("nan"))


def test_the_direct_path_gives_the_same_bits(direct):
    a, b, inputs, general = direct
    with eg.Matmul(a, b) as product:
        product.plan(**inputs)
        for _ in range(3):
            assert same(eg.matmul(a, b, **inputs), general)
            assert same(product.execute(), general)
            for call in (lambda out: eg.matmul(a, b, out=out, **inputs), lambda out: product.execute(out=out)):
                out = poisoned(general)
                assert call(out) is out
                assert same(out, general)


def test_new_tensors_of_the_form(direct, normal, close):
    _, _, _, _ = direct
    for seed in range(3):
        a, b, bias = normal(64, 96, seed=seed + 10), normal(96, 80, seed=seed + 20), normal(64, 1, seed=seed + 30)
        found = eg.matmul(a, b, epilog="relu_bias", epilog_inputs={"bias": bias})
        close(found, a, b, torch.relu(a.double() @ b.double() + bias.double()))


@pytest.mark.parametrize("form", ["matmul", "execute"])
def test_an_out_that_does_not_suit_takes_the_other_way(direct, close, form):
    a, b, inputs, general = direct
    exact = general.double()
    with eg.Matmul(a, b) as product:
        product.plan(**inputs)
        product.execute()

        def call(out):
            return eg.matmul(a, b, out=out, **inputs) if form == "matmul" else product.execute(out=out)

        call(poisoned(general))
        memory = torch.full((64 * 80 + 64,), float("nan"), device="cuda", dtype=torch.float16)
        misaligned = memory[1 : 1 + 64 * 80].as_strided(general.shape, general.stride())
        row = torch.full((64, 80), float("nan"), device="cuda", dtype=torch.float16)
        for out in (misaligned, row):
            for _ in range(2):
                out.fill_(float("nan"))
                assert call(out) is out
                assert bool(((out.double() - exact).abs() <= 2.0**-10 * exact.abs() + 2.0**-10).all())
        assert bool(memory[0].isnan()) and bool(memory[1 + 64 * 80 :].isnan().all())
        for over in (a, b):
            overlapping = over.as_strided(general.shape, general.stride()) if over.numel() >= general.numel() else None
            if overlapping is not None:
                with pytest.raises(errors.EpigemmError, match="overlap"):
                    call(overlapping)


def test_misaligned_operands_on_a_known_form(direct, close):
    a, b, inputs, _ = direct
    memory = torch.empty(a.numel() + 8, device="cuda", dtype=torch.float16)
    shifted = memory[1 : 1 + a.numel()].view(a.shape)
    shifted.copy_(a)
    for _ in range(2):
        found = eg.matmul(shifted, b, **inputs)
        close(found, a, b, torch.relu(a.double() @ b.double() + inputs["epilog_inputs"]["bias"].double()))


def test_autograd_hears_of_what_the_direct_path_writes(direct):
    a, b, inputs, general = direct
    with eg.Matmul(a, b) as product:
        product.plan(**inputs)
        product.execute()
        for call in (lambda out: eg.matmul(a, b, out=out, **inputs), lambda out: product.execute(out=out)):
            out = poisoned(general)
            call(out)
            version = out._version
            call(out)
            assert out._version > version
            recorded = poisoned(general).requires_grad_()
            with pytest.raises(errors.EpigemmError, match="grad"):
                call(recorded)


# ---------------------------------------------------------------- programs


def test_the_seed_program_on_cupy_arrays():
    pytest.importorskip("cupy")
    done = subprocess.run([sys.executable, str(ROOT / "examples" / "seed.py")], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "largest relative error" in done.stdout

"""Verifies and times built variants on a GPU. `probe.py verify NAMES..` and `probe.py time SHAPE NAMES..` run in a child process that a
parent watches: a kernel that hangs costs 25 seconds, not the run. `probe.py plan FILE` runs a list of such lines."""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

START_SECONDS, HANG_SECONDS = 90.0, 25.0
ODD_SHAPES = ((264, 392, 200), (1000, 520, 1032), (8, 16, 8), (2051, 1096, 72))
FULL_SHAPES = ((4096, 3072, 1024),)


def make_operands(signature: Any, m: int, n: int, k: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """Random normal inputs, poisoned outputs; mask padding bits random too."""
    import torch
    from driver import TORCH_TYPES, Operands, ceil_div

    torch.manual_seed(seed)
    kind = TORCH_TYPES[signature.element]

    def normal(rows: int, cols: int, scale: float = 1.0, dtype: Any = kind) -> Any:
        padded = ceil_div(cols, 8) * 8
        return (torch.randn(rows, padded, device="cuda") * scale).to(dtype)[:, :cols]

    def poisoned(rows: int, cols: int, dtype: Any) -> Any:
        padded = ceil_div(cols, 8) * 8
        return torch.full((rows, padded), float("nan"), device="cuda", dtype=dtype)[:, :cols]

    bits_stride = ceil_div(n, 128) * 16
    a = normal(m, k) if signature.a_k_major else normal(k, m).T
    b = tuple(normal(n, k, k**-0.5) if signature.b_k_major else normal(k, n, k**-0.5).T for _ in range(signature.weights))
    return Operands(
        a, b,
        along_n=tuple(torch.randn(n, device="cuda").to(TORCH_TYPES[t]) for t in signature.along_n),
        along_m=tuple(torch.randn(m, device="cuda").to(TORCH_TYPES[t]) for t in signature.along_m),
        tiles_in=tuple(normal(m, n, dtype=TORCH_TYPES[t]) for t in signature.tiles_in),
        tiles_out=tuple(poisoned(m, n, TORCH_TYPES[t]) for t in signature.tiles_out),
        bits_in=tuple(torch.randint(0, 256, (m, bits_stride), device="cuda", dtype=torch.uint8) for _ in range(signature.bits_in)),
        bits_out=tuple(torch.full((m, bits_stride), 0xAA, device="cuda", dtype=torch.uint8) for _ in range(signature.bits_out)),
        sums_m=tuple(torch.full((n,), float("nan"), device="cuda") for _ in range(signature.sums_m)),
        sums_n=tuple(torch.full((m,), float("nan"), device="cuda") for _ in range(signature.sums_n)),
    ), {}  # fmt: skip


def unpack_bits(packed: Any, n: int) -> Any:
    import torch

    shifts = torch.arange(8, device="cuda", dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts & 1).reshape(packed.shape[0], -1)[:, :n].bool()


def first_bad(name: str, got: Any, want: Any, tolerance: Any) -> str | None:
    """None, or where and by how much the first bad element is off."""
    bad = ~((got.double() - want).abs() <= tolerance)
    if not bad.any():
        return None
    at = tuple(bad.nonzero()[0].tolist())
    found = f"got {got[at].item():.6g}, want {want[at].item():.6g} +- {tolerance[at].item():.2g}"
    return f"{name}{list(at)}: {found}; {int(bad.sum())} of {bad.numel()} bad"


def verify_one(kernel: Any, epilogue: Any, m: int, n: int, k: int) -> str | None:
    """Runs twice (bit-equal?) and compares with float64.

    The tolerance: half a unit of the stored type, plus 2^-20 of the products' absolute sum.
    """
    import torch

    s = kernel.signature
    o, _ = make_operands(s, m, n, k, seed=m + n + k)
    bound = kernel.bind(o)
    bound()
    torch.cuda.synchronize()
    outputs = [*o.tiles_out, *o.bits_out, *o.sums_m, *o.sums_n]
    copies = [t.clone() for t in outputs]
    bound()
    torch.cuda.synchronize()
    for first, second in zip(copies, outputs):
        same = first.view(torch.uint8 if first.dtype == torch.uint8 else torch.int16 if first.element_size() == 2 else torch.int32)
        if not torch.equal(same, second.view(same.dtype)):
            return "two runs differ"
    acc = tuple(o.a.double() @ b.double().T for b in o.b)
    size = sum(o.a.double().abs() @ b.double().abs().T for b in o.b)
    inputs = {
        "along_n": [v.double() for v in o.along_n],
        "along_m": [v.double().unsqueeze(1) for v in o.along_m],
        "tiles": [t.double() for t in o.tiles_in],
    }
    inputs["bits"] = [unpack_bits(t, n) for t in o.bits_in]
    want = epilogue.reference(acc=acc, **inputs)
    error = epilogue.gain * 2.0**-20 * size
    half = 2.0**-8 if s.element == "bf16" else 2.0**-11
    for i, (got, expected) in enumerate(zip(o.tiles_out, want["tiles"])):
        bad = first_bad(f"tile{i}", got, expected, error + expected.abs() * half * 1.01 + 2.0**-24)
        if bad:
            return bad
    for i, (got, expected) in enumerate(zip(o.bits_out, want.get("bits", ()))):
        wrong = (unpack_bits(got, n) != (expected >= 0)) & (expected.abs() > error)
        if wrong.any():
            return f"bits{i}: {int(wrong.sum())} wrong, first at {wrong.nonzero()[0].tolist()}"
    magnitude = want["tiles"][0].abs()
    for name, outs, dim in (("sums_m", o.sums_m, 0), ("sums_n", o.sums_n, 1)):
        for i, (got, expected) in enumerate(zip(outs, want.get(name, ()))):
            weight = magnitude if name == "sums_m" else magnitude.square()
            scale = 1.0 if name == "sums_m" else 2 * magnitude + 1
            bad = first_bad(f"{name}{i}", got, expected, (error * scale).sum(dim) + 2.0**-18 * weight.sum(dim) + 1e-6)
            if bad:
                return bad
    return None


def load(name: str) -> Any:
    from driver import Kernel
    from variants import BUILD, parse

    epilogue, config, signature = parse(name)
    stored = json.loads((BUILD / f"{name}.json").read_text())
    assert stored["config"] == asdict(config), (stored, config)
    return Kernel((BUILD / f"{name}.cubin").read_bytes(), config, signature), epilogue


def verify(names: list[str], shapes: Any) -> None:
    from epilogues import BY_NAME

    for name in names:
        print(json.dumps({"begin": name}), flush=True)
        verdicts = {}
        try:
            kernel, epilogue = load(name)
            for m, n, k in shapes:
                s = kernel.signature
                if (not s.a_k_major and m % 8) or (not s.b_k_major and n % 8):
                    m, n = -(-m // 8) * 8, -(-n // 8) * 8
                verdict = verify_one(kernel, BY_NAME[epilogue], m, n, k)
                if verdict:
                    verdicts[f"m={m} n={n} k={k}"] = verdict
        except Exception as error:
            verdicts["error"] = f"{type(error).__name__}: {error}"[:400]
        print(json.dumps({"verify": name, "bad": verdicts}), flush=True)
        if "CUDA" in str(verdicts.get("error")):
            os._exit(3)  # the context is lost


def time_calls(calls: dict[str, list[Any]], rounds: int, target_ms: float) -> dict[str, list[float]]:
    """Microseconds of one call, per round; variants take turns, each over its own rotating buffer sets."""
    import torch

    def once(sets: list[Any], count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(count):
            sets[i % len(sets)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / count

    counts = {name: max(2, int(target_ms * 1e3 / max(once(sets, 2), 1.0))) for name, sets in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, sets in calls.items():
            once(sets, counts[name])  # the clock settles to this variant's power
            times[name].append(once(sets, counts[name]))
    return times


def time_bursts(calls: dict[str, list[Any]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of single calls, each after 2 ms of rest: the clocks are up, so that what differs is structure and not power."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name, sets in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(4_000_000)
            begin.record()
            sets[i % len(sets)]()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
    return times


def best_product(a: Any, b: Any, d: Any) -> int:
    """The fastest of cuBLASLt's algorithms, by a race long enough for the clock to settle: a short one was seen to miss by 6 %."""
    from cublaslt import Product

    product = Product(a, b, d)
    race = time_calls({str(i): [lambda i=i: product(i)] for i in range(product.count)}, rounds=5, target_ms=6.0)
    return int(min(race, key=lambda i: statistics.median(race[i])))


def time_shape(m: int, n: int, k: int, names: list[str], rounds: int = 9, sets: int = 2, target_ms: float = 10.0) -> None:
    """Each variant against the bare product of its own layout (of width 2n for two weights)."""
    import torch
    from cublaslt import Product

    calls: dict[str, list[Any]] = {}
    base: dict[str, str] = {}
    shared: dict[Any, Any] = {}
    for full_name in names:
        name, _, group = full_name.partition("@")
        print(json.dumps({"begin": f"{full_name} {m}x{n}x{k}"}), flush=True)
        try:
            kernel, _ = load(name)
            s = kernel.signature
            key = (s.element, s.a_k_major, s.b_k_major, s.weights)
            if key not in shared:
                shared[key] = [make_operands(s, m, n, k, seed)[0] for seed in range(sets)]
                wide = [(o.a, torch.cat(o.b) if len(o.b) > 1 else o.b[0]) for o in shared[key]]
                outs = [torch.empty(m, n * s.weights, device="cuda", dtype=o.a.dtype) for o in shared[key]]
                best = best_product(wide[0][0], wide[0][1].T, outs[0])
                calls[f"cublaslt{key}"] = [Product(a, b.T, d).with_algorithm(best) for (a, b), d in zip(wide, outs)]
            operands = []
            for seed, common in enumerate(shared[key]):
                o, _ = make_operands(s, m, n, 8, seed)
                o.a, o.b = common.a, common.b
                operands.append(o)
            bound = [kernel.bind(o, int(group.rstrip("sabn") or 16), group.lstrip("0123456789") or "s") for o in operands]
            bound[0]()
            torch.cuda.synchronize()
            calls[full_name] = bound
            base[full_name] = f"cublaslt{key}"
        except Exception as error:
            print(json.dumps({"failed": full_name, "error": f"{type(error).__name__}: {error}"[:300]}), flush=True)
            if "CUDA" in str(error):
                os._exit(3)
    time_calls(calls, rounds=2, target_ms=target_ms)  # warm-up
    times, bursts = time_calls(calls, rounds, target_ms), time_bursts(calls, 9)
    for name in calls:
        print(json.dumps({"begin": name}), flush=True)
        print(json.dumps(timing_row(name, (m, n, k), times[name], times[base.get(name, name)], bursts[name])), flush=True)


def timing_row(name: str, shape: tuple[int, int, int], times: list[float], against: list[float], bursts: list[float]) -> dict[str, Any]:
    """One variant's line: medians in microseconds and its ratio to the bare product of the same round, with the middle half's spread."""
    m, n, k = shape
    ratios = sorted(t / b for t, b in zip(times, against))
    products = 2 if "swiglu-" in name and not name.startswith("d_") else 1
    us, quarter = statistics.median(times), len(ratios) // 4
    return {
        "time": name,
        "shape": list(shape),
        "us": us,
        "ratio": statistics.median(ratios),
        "spread": [ratios[quarter], ratios[-1 - quarter]],
        "burst_us": statistics.median(bursts),
        "tflops": 2 * m * n * k * products / us / 1e6,
    }


def child(arguments: list[str]) -> None:
    if arguments[0] == "verify":
        verify(arguments[1:], (*ODD_SHAPES, *FULL_SHAPES))
    else:
        shape = [int(x) for x in arguments[1].split("x")]
        time_shape(*shape, arguments[2:])


def watch(arguments: list[str], log: list[dict[str, Any]]) -> None:
    """Runs a child, without the variant at which an earlier child hung or crashed, until one ends by itself."""
    head, names = (arguments[:1], arguments[1:]) if arguments[0] == "verify" else (arguments[:2], arguments[2:])
    while names:
        process = subprocess.Popen([sys.executable, __file__, "child", *head, *names], stdout=subprocess.PIPE, text=False)
        assert process.stdout is not None
        current, done, patience = "", set(), START_SECONDS
        buffer = b""
        while True:
            ready, _, _ = select.select([process.stdout], [], [], patience)
            chunk = os.read(process.stdout.fileno(), 65536) if ready else b""
            if not chunk:
                break
            patience = HANG_SECONDS
            buffer += chunk
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                try:
                    row = json.loads(line)
                except ValueError:
                    print(line.decode(), flush=True)
                    continue
                if "begin" in row:
                    current = row["begin"].split()[0]
                    continue
                log.append(row)
                if "verify" in row:
                    done.add(row["verify"])
        process.kill()
        code = process.wait()
        if code == 0:
            return
        log.append({"hung" if not ready else "crashed": current, "code": code})
        names = [n for n in names if n != current and n not in done]


def report(log: list[dict[str, Any]]) -> None:
    for row in log:
        if "verify" in row:
            print(("ok   " if not row["bad"] else "BAD  ") + row["verify"], "; ".join(f"{k}: {v}" for k, v in row["bad"].items())[:700])
        elif "time" in row:
            m, n, k = row["shape"]
            low, high = row["spread"]
            speed = f"{row['us']:9.1f} us {row['tflops']:6.0f} TF  {row['ratio']:.3f} [{low:.3f} {high:.3f}]"
            print(f"{m}x{n}x{k:<6} {row['time']:<52} {speed} burst {row['burst_us']:.1f}")
        else:
            print(row)


def main(arguments: list[str]) -> None:
    if arguments[0] == "child":
        child(arguments[1:])
        return
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    log: list[dict[str, Any]] = [{"gpu": gpu, "date": time.strftime("%Y-%m-%d"), "commit": os.environ.get("COMMIT", "")}]
    plan = [line.split() for line in Path(arguments[1]).read_text().splitlines() if line.strip()] if arguments[0] == "plan" else [arguments]
    out = Path(os.environ.get("OUT", ".")) / "hopper-probe.json"
    for line in plan:
        watch(line, log)
        out.write_text("\n".join(json.dumps(row) for row in log))
    report(log)


if __name__ == "__main__":
    main(sys.argv[1:])

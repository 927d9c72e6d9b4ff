"""Small cases of the table in a random but seeded order, to be run under compute-sanitizer: every tensor is an allocation of its own.

Usage: PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/device/sanitized.py [-n CASES] [-s SEED]
    [-t SECONDS] [-j FILE]
Results are compared with the reference too. What was run is written as JSON, also while it runs.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

from epigemm.testing import conformance
from epigemm.testing.cases import Case, cases
from epigemm.testing.on_device import tensor_cores

LARGEST = 400  # of m, n and k: a sanitizer slows a kernel down a hundred times

ENGINES = ("cublaslt", "unfused")


def on_gpu(array):
    """A copy with the array's strides, and nothing around it."""
    import torch

    from epigemm.testing.placing import torch_view

    view = torch_view(array)
    made = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="cuda")
    if view.numel():
        span = sum((extent - 1) * stride for extent, stride in zip(view.shape, view.stride(), strict=True)) + 1
        made.as_strided((span,), (1,)).copy_(view.as_strided((span,), (1,)))
    return made


def chosen(count: int, seed: int) -> list[tuple[Case, str]]:
    """That many (case, engine) pairs; those that an engine refuses count as well, they launch nothing."""
    small = [case for case in cases() if max(case.m, case.n, case.k) <= LARGEST and case.library == "numpy" and "negative" not in case.tags]
    random.Random(seed).shuffle(small)
    return [(case, ENGINES[index % len(ENGINES)]) for index, case in enumerate(small)][:count]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=300)
    parser.add_argument("-s", type=int, default=0)
    parser.add_argument("-t", type=float, default=80.0)
    parser.add_argument("-j", type=Path)
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    failed: list[str] = []
    start = time.monotonic()

    def write() -> None:
        found = {"asked": given.n, "seed": given.s, "counts": counts, "seconds": round(time.monotonic() - start, 1), "failed": failed[:40]}
        if given.j is not None:
            given.j.write_text(json.dumps(found, indent=1))

    for index, (case, engine) in enumerate(chosen(10 * given.n, given.s)):
        if counts["ran"] >= given.n or time.monotonic() - start > given.t:
            break
        try:
            verdict = conformance.run_case(case, engine, moved=on_gpu, arithmetic=tensor_cores(case))
            counts["refused" if verdict.refusal else "ran"] += 1
        except Exception as error:
            counts["special values told of" if case.data == "special" else "failed"] += 1
            failed += [] if case.data == "special" else [f"{case} [{engine}]: {type(error).__name__}: {error}"[:400]]
        if index % 10 == 0:
            write()
    write()
    print(f"{dict(counts)} in {time.monotonic() - start:.1f} s; {given.n} were asked for")
    raise SystemExit(1 if failed or not counts["ran"] else 0)


if __name__ == "__main__":
    main()

"""The table of cases through the public API on a GPU: PyTorch tensors and CuPy arrays, every result against the float64 reference.

A test runs a share of the table and names everything that went wrong in it. Refusals are counted and listed by reason.
EPIGEMM_CASE_SECONDS limits a share's time; cases that it leaves out are counted too.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import epigemm as eg
from epigemm.testing import conformance
from epigemm.testing.cases import NARROW, Case, cases
from epigemm.testing.on_device import Copies, tensor_cores

torch = pytest.importorskip("torch")

SHARES = 12
SECONDS = float(os.environ.get("EPIGEMM_CASE_SECONDS", "60"))

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn")
EPILOGS = (
    *("", "RELU", "GELU", "BIAS", "RELU_BIAS", "GELU_BIAS", "RELU_AUX", "GELU_AUX", "RELU_AUX_BIAS", "GELU_AUX_BIAS"),
    *("DRELU", "DGELU", "DRELU_BGRAD", "DGELU_BGRAD", "BGRADA", "BGRADB", "bias_vector", "relu"),
)


def _for_tensor_cores() -> Iterator[Case]:
    """Extents and orders that tensor cores take: every dtype, both orders of D, biases along m and n, with and without TF32."""
    for dtype in DTYPES:
        narrow = dtype in NARROW
        layouts = ("row", "col") if narrow else ("row", "row")
        for order in ("row", "col"):
            for epilogue in EPILOGS if not dtype.startswith("complex") else ("",):
                for m, n, k in ((128, 64, 96), (272, 144, 320)):
                    case = Case("tensor cores", m, n, k, epilogue, dtype=dtype, order=order, layout_a=layouts[0], layout_b=layouts[1])
                    yield replace(case, d_dtype="bfloat16") if narrow else case
                    if dtype == "float32":
                        yield replace(case, compute="COMPUTE_32F_FAST_TF32")
                    if not epilogue and not narrow:
                        yield replace(case, layout_a="col", layout_b="col", c="mn", beta=0.5, alpha=2.0)


TABLE = tuple(dict.fromkeys((*_for_tensor_cores(), *(case for case in cases() if case.library == "numpy"))))


def _deviates(case: Case, engine: str) -> bool:
    """Whether a wrong special value is one that the plan's notes tell of."""
    if case.data != "special":
        return False
    copies = Copies()
    tensors = case.build(np.random.default_rng(0))
    inputs = {name: copies(one.array) for name, one in tensors.inputs.items()}
    with eg.Matmul(copies(tensors.a.array), copies(tensors.b[0].array), **conformance.keywords(case)) as product:
        product.plan(epilog=conformance.epilog_of(case), epilog_inputs=inputs or None, engine=engine)
        return "in the contract" in product.explain()


def _one(case: Case, engine: str, mode: str, library: str) -> tuple[str, str]:
    """("ran" | "refused" | "deviates" | "failed", what is to be said of it)."""
    copies = Copies(library, out=mode == "out")
    try:
        arithmetic = tensor_cores(case)
        verdict = conformance.run_case(case, engine, mode=mode, moved=copies, corrupt=copies.check, arithmetic=arithmetic)
    except AssertionError as error:
        return ("deviates", str(case)) if _deviates(case, engine) else ("failed", f"{case} [{mode}]: {error}")
    except Exception as error:
        return "failed", f"{case} [{mode}]: {type(error).__name__}: {error}"
    return ("refused", verdict.refusal) if verdict.refusal else ("ran", "")


def _run(chosen: list[tuple[Case, str]], engine: str, library: str, record, share: int) -> None:
    counts: Counter[str] = Counter()
    said: dict[str, list[str]] = {"refused": [], "deviates": [], "failed": []}
    end = time.monotonic() + SECONDS
    for case, mode in chosen:
        if time.monotonic() > end:
            counts["out of time"] += 1
            continue
        state, text = _one(case, engine, mode, library)
        counts[state] += 1
        if text:
            said[state].append(text)
    reasons = Counter(text.splitlines()[0][:160] for text in said["refused"])
    found = {"engine": engine, "library": library, "share": share, "counts": counts, "refused": dict(reasons.most_common(60))}
    record("conformance", {**found, "deviates": said["deviates"], "failed": said["failed"][:40]})
    assert not said["failed"], f"{dict(counts)}\n" + "\n".join(said["failed"][:12])
    assert counts["ran"] > 0, f"nothing ran: {dict(counts)}"


def _share(index: int, step: int = 1) -> list[Case]:
    return [case for case in TABLE[index::SHARES] if "negative" not in case.tags][::step]


@pytest.mark.parametrize("share", range(SHARES))
def test_cublaslt_on_torch_tensors(share, record):
    chosen = [(case, mode) for index, case in enumerate(_share(share)) for mode in ("stateless", ("out", "stateful")[index % 2])]
    _run(chosen, "cublaslt", "torch", record, share)


@pytest.mark.parametrize("share", range(0, SHARES, 3))
def test_cublaslt_on_cupy_arrays(share, record):
    pytest.importorskip("cupy")
    known = ("float16", "float32", "float64", "complex64", "complex128")
    one = [case for case in _share(share, 2) if {case.dtype, case.stored_dtype, case.b_dtype or case.dtype} <= set(known)]
    single = [case for case in one if not case.batch and case.dtype_of_c in ("", *known)]
    chosen = [(case, mode) for case in single for mode in ("stateless", "stateful")]
    _run([pair for pair in chosen if min(pair[0].shape) > 0], "cublaslt", "cupy", record, share)


@pytest.mark.parametrize("share", range(SHARES))
def test_the_chosen_engine_on_torch_tensors(share, record):
    _run([(case, "stateless") for case in _share(share, 8)], "auto", "torch", record, share)

"""Descriptors as the real library keeps them (no GPU needed), and the engine's answers without a library or a device."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest

from epigemm import errors, layouts
from epigemm.engines.cublaslt import algorithms, library
from epigemm.engines.cublaslt.descriptors import ATTRIBUTES, Descriptor, describe
from epigemm.engines.cublaslt.engine import ENGINE, _rounding_once, problem_key
from epigemm.engines.cublaslt.engine import describe as describe_fused
from epigemm.engines.cublaslt.epilogs import FUSIONS, deviations, reduction_schemes, rounds_once
from epigemm.engines.cublaslt.library import Preferences, Result, diagnose
from epigemm.engines.cuda import libraries
from epigemm.enums import MatmulEpilog
from epigemm.expression.check import check
from epigemm.expression.named import NAMED, named
from epigemm.expression.nodes import Expression, Output, acc
from epigemm.problem import Compute, Operand, Problem

core = pytest.importorskip("epigemm._native", reason="the compiled core is not built")
has_library = pytest.mark.skipif(libraries.find("cublasLt") is None, reason="cuBLASLt is not installed")

M, N, K = 24, 40, 16


def _identity(problem: Problem) -> Expression:
    return check(Expression((Output("d", acc()),)), problem)


def _named(epilog: MatmulEpilog) -> Problem:
    shapes = {
        "bias": Operand.dense("f16", (M, 1)),
        "relu_aux": Operand.dense("uint8", (layouts.mask_bytes(M), N), "col"),
        "gelu_aux": Operand.dense("f16", (M, N), "col"),
    }
    base = Problem.of("f16", m=M, n=N, k=K, order="col", device="cuda:0")
    return replace(base, inputs=tuple((name, shapes[name]) for name in NAMED[epilog].inputs))


@has_library
@pytest.mark.parametrize("epilog", list(NAMED), ids=lambda e: e.name)
def test_the_library_keeps_what_it_is_told(epilog):
    problem = _named(epilog)
    described = describe_fused(problem, check(named(epilog), problem))
    assert isinstance(described, Descriptor)
    held = library.create(described)
    for number, value in described.attributes:
        assert held.attribute(number, len(value)) == value
    for which, layout in enumerate(described.layouts):
        rows, columns, ld, count, stride = (
            struct.unpack(form, held.layout_attribute(which, number, struct.calcsize(form)))[0]
            for number, form in ((2, "=Q"), (3, "=Q"), (4, "=q"), (5, "=i"), (6, "=q"))
        )
        assert (rows, columns, ld, count, stride) == layout[1:]


@has_library
def test_a_broadcast_c_has_leading_dimension_0():
    problem = Problem.of("f16", m=M, n=N, k=K, order="col")
    problem = replace(problem, c=Operand.dense("f16", (M, 1)))
    library.create(describe(problem, "col", problem.d.dtype))


@has_library
def test_the_library_refuses_an_unknown_attribute_by_number():
    libraries.open_cublaslt()
    with pytest.raises(errors.LibraryError, match=r"CUBLAS_STATUS_INVALID_VALUE \(7\)[\s\S]*attribute 99"):
        core.LtMatmul(68, 0, [(99, b"\0\0\0\0")], [(2, 8, 8, 8, 1, 0)] * 4)


@has_library
def test_settings_travel_through_the_library():
    libraries.open_cublaslt()
    raw = algorithms.with_settings(bytes(64), {"tile": (128, 256), "stages": (64, 3), "cluster_shape": (2, 1, 1), "split_k": 4})
    found = algorithms.settings(raw)
    assert (found["tile"], found["stages"], found["cluster_shape"], found["split_k"]) == ((128, 256), (64, 3), (2, 1, 1), 4)
    candidate = algorithms.candidate(raw, 4096, 1.25)
    changed = replace(candidate, config=tuple((k, (64, 64) if k == "tile" else v) for k, v in candidate.config))
    assert algorithms.settings(algorithms.raw_of(changed))["tile"] == (64, 64)
    back = algorithms.decoded(json.loads(json.dumps(algorithms.encoded(changed))))
    assert (back["tile"], back.workspace_bytes) == ((64, 64), 4096)
    identity = replace(candidate, config=tuple((k, 99 if k == "algorithm_id" else v) for k, v in candidate.config))
    with pytest.raises(errors.AlgorithmError, match="algorithm_id of an algorithm cannot be changed"):
        algorithms.raw_of(identity)


def test_every_epilog_has_a_row():
    assert set(FUSIONS) == set(MatmulEpilog)
    for epilog, named_row in NAMED.items():
        row = FUSIONS[epilog]
        assert {row.vector, row.aux} - {""} == {*named_row.inputs, *named_row.aux_names}, epilog
        assert set(row.written) == set(named_row.aux_names), epilog


def test_deviations_are_told_and_refused_when_strict():
    f32, f16 = Operand.dense("f32", (1, 1)).dtype, Operand.dense("f16", (1, 1)).dtype
    assert deviations(MatmulEpilog.RELU, f32) == ()
    assert "gelu(-inf)" in deviations(MatmulEpilog.GELU_BIAS, f16)[0]
    assert "round the product to D's dtype before it" in deviations(MatmulEpilog.DGELU_BGRAD, f16)[0]
    assert deviations(MatmulEpilog.DGELU_BGRAD, f32) == ()
    assert deviations(MatmulEpilog.RELU_AUX, f16) == ()
    assert "mask bit of a NaN" in deviations(MatmulEpilog.RELU_AUX, f32)[0]
    problem = replace(_named(MatmulEpilog.GELU), compute=Compute(strict=True))
    assert str(ENGINE.supports(problem, check(named(MatmulEpilog.GELU), problem))) == (
        "strict=True, and gelu(-inf) is NaN in cuBLASLt and 0 in the contract."
    )


def _settings(algorithm_id=66, split_k=1, reduction_scheme=0):
    return {"algorithm_id": algorithm_id, "split_k": split_k, "reduction_scheme": reduction_scheme}


def test_which_algorithms_round_once():
    e, hopper = MatmulEpilog, (9, 0)
    assert rounds_once(e.DEFAULT, _settings(24, 8, 2), hopper)
    assert not rounds_once(e.DEFAULT, _settings(24, 8, 4), hopper)
    assert not rounds_once(e.RELU, _settings(24, 8, 4), hopper)
    assert rounds_once(e.BIAS, _settings(24), hopper)
    assert not rounds_once(e.BIAS, _settings(24, 8, 2), hopper)
    assert rounds_once(e.GELU_BIAS, _settings(66), hopper)
    assert not rounds_once(e.GELU_BIAS, _settings(56), hopper)
    assert rounds_once(e.GELU_BIAS, _settings(56), (8, 0))
    assert not rounds_once(e.GELU_BIAS, _settings(66, 4, 2), (8, 0))
    assert (reduction_schemes(e.DEFAULT), reduction_schemes(e.RELU), reduction_schemes(e.BIAS)) == (3, 3, 0)


def test_the_heuristic_is_asked_again_for_those(monkeypatch):
    """A library that offers a split k first, and without it one that fuses."""
    offers = {7: (Result(b"split", 0, 1.0), Result(b"xmma", 0, 1.0)), 0: (Result(b"nvjet", 0, 1.0),)}
    held = {b"split": _settings(24, 8, 2), b"xmma": _settings(56), b"nvjet": _settings(66)}
    monkeypatch.setattr(library, "capability", lambda device: (9, 0))
    monkeypatch.setattr(library, "heuristic", lambda d, device, limit, p: offers[p.reduction_scheme_mask])
    monkeypatch.setattr(algorithms, "settings", lambda raw: held[raw])
    kept = _rounding_once(_described(), MatmulEpilog.GELU_BIAS, "cuda:0", Preferences(), offers[7])
    assert kept == offers[0]
    held[b"nvjet"] = _settings(41)
    assert _rounding_once(_described(), MatmulEpilog.GELU_BIAS, "cuda:0", Preferences(), offers[7]) == ()
    offers[3] = (Result(b"output", 0, 1.0), Result(b"split", 0, 1.0))
    held |= {b"output": _settings(24, 8, 4), b"nvjet": _settings(66)}
    assert _rounding_once(_described(), MatmulEpilog.DGELU_BGRAD, "cuda:0", Preferences(), offers[7]) == offers[3][1:]


def test_operands_on_the_cpu_are_refused():
    problem = Problem.of("f16", m=M, n=N, k=K)
    assert str(ENGINE.supports(problem, _identity(problem))) == "cuBLASLt computes on CUDA devices, and the operands are on cpu."


@pytest.mark.skipif(libraries.find("cuda") is not None, reason="there is a driver here")
def test_without_cuda_the_refusal_says_what_to_install():
    problem = Problem.of("f16", m=M, n=N, k=K + 1, device="cuda:0")
    assert "is missing" in str(ENGINE.supports(problem, _identity(problem)))


# ---------------------------------------------------------------- diagnosis, with a library that is played


def _described(**changes) -> Descriptor:
    problem = replace(Problem.of("bf16", m=M, n=N, k=K, device="cuda:0"), **changes)
    return describe_fused(problem, _identity(problem))


def test_diagnosis_names_the_operand_whose_alignment_is_at_fault():
    described = replace(_described(), alignments=(2, 256, 256, 256))
    assert described.swapped
    why = diagnose(described, Preferences(), lambda d, p: d.alignments[0] == 256)
    assert why == "cuBLASLt has no algorithm for the alignment of B (2 bytes, leading dimension 40)"


def test_diagnosis_names_the_epilog_the_batch_and_the_workspace():
    described = replace(_described(), epilogue=int(MatmulEpilog.BGRADB))
    assert "for the epilog BGRADB" in diagnose(described, Preferences(), lambda d, p: d.epilogue == 1)
    batched = replace(described, d=replace(described.d, batch_count=70000, batch_stride=960))
    assert "the batch of 70000" in diagnose(batched, Preferences(), lambda d, p: d.d.batch_count == 1)
    assert "a workspace of 0 bytes" in diagnose(described, Preferences(workspace_bytes=0), lambda d, p: p.workspace_bytes > 0)
    assert "these plan preferences" in diagnose(described, Preferences(numerical_impl_mask=1), lambda d, p: p.numerical_impl_mask != 1)
    assert "this product of bfloat16 and bfloat16 into bfloat16" in diagnose(described, Preferences(), lambda d, p: False)


def test_the_problem_key_tells_apart_what_the_library_is_told():
    described = _described()
    others = [
        replace(described, alignments=(128, 256, 256, 256)),
        replace(described, sm_count_target=8),
        replace(described, epilogue=2),
        replace(described, compute_type=69),
        _described(a=Operand.dense("bf16", (M, K), "col")),
    ]
    keys = {problem_key(d) for d in (described, *others)}
    assert len(keys) == len(others) + 1
    assert {number for number, _ in ATTRIBUTES.values()} >= {number for number, _ in described.attributes}


def test_a_memory_limit_bounds_the_workspace():
    assert Preferences().limited(None).workspace_bytes == 32 << 20
    assert Preferences().limited(1 << 20).workspace_bytes == 1 << 20
    assert Preferences().limited(1 << 40).workspace_bytes == 32 << 20

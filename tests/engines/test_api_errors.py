"""Every row of the peer's table of exceptions, through the public API: the class that programs catch, the words that they match."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import epigemm as eg
from epigemm.linalg.advanced import MatmulEpilogPreferences, MatmulOptions, matrix_qualifiers_dtype

Epilog, ComputeType, Type = eg.MatmulEpilog, eg.MatmulComputeType, eg.CudaDataType


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def f16(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float16)


def f8(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, ml_dtypes.float8_e4m3fn)


def bits(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.uint8)


class DLPack:
    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def bias(x: Any) -> dict[str, Any]:
    return {"epilog": Epilog.BIAS, "epilog_inputs": {"bias": x}}


def qualifiers(index: int) -> np.ndarray[Any, Any]:
    q = np.zeros(3, matrix_qualifiers_dtype)
    q["is_conjugate"][index] = 1
    return q


def released() -> eg.Matmul:
    mm = eg.Matmul(f32(2, 3), f32(3, 4))
    mm.plan()
    mm.release_operands()
    return mm


def planned() -> eg.Matmul:
    mm = eg.Matmul(f32(2, 3), f32(3, 4))
    mm.plan()
    return mm


def freed() -> eg.Matmul:
    mm = planned()
    mm.free()
    mm.free()
    return mm


ONE = {"a": 1, "b": 1, "d": 1}

# id: (call, the peer's class, the peer's words)
ERRORS: dict[str, tuple[Any, type[BaseException], str]] = {
    "k": (lambda: eg.matmul(f32(2, 32), f32(64, 4)), ValueError, "K=32 in operand A is not equal to K=64 in operand B."),
    "0-D": (lambda: eg.matmul(np.array(1.0), f32(1, 2)), IndexError, "list index out of range"),
    "int8": (
        lambda: eg.matmul(np.ones((2, 2), np.int8), np.ones((2, 2), np.int8)),
        ValueError,
        "The dtype of operand A (int8) is not supported.",
    ),
    "f16 f32": (
        lambda: eg.matmul(f16(2, 2), f32(2, 2)),
        ValueError,
        "Unsupported combination of dtypes for operands A float16 and B float32.",
    ),
    "e5m2": (
        lambda: eg.matmul(*(np.ones((2, 2), ml_dtypes.float8_e5m2),) * 2, quantization_scales=ONE),
        ValueError,
        "Unsupported combination of dtypes",
    ),
    "scale and compute": (
        lambda: eg.matmul(f16(2, 2), f16(2, 2), options={"scale_type": Type.CUDA_R_64F, "compute_type": ComputeType.COMPUTE_32F}),
        ValueError,
        "are not supported for data types float16 (A) and float16 (B).",
    ),
    "fast tf32 on f16": (
        lambda: eg.matmul(f16(2, 2), f16(2, 2), options={"compute_type": ComputeType.COMPUTE_32F_FAST_TF32}),
        ValueError,
        "are not supported for data types",
    ),
    "32I": (lambda: eg.matmul(f32(2, 2), f32(2, 2), options={"compute_type": 72}), ValueError, "<ComputeType.COMPUTE_32I: 72>"),
    "unknown compute": (lambda: MatmulOptions(compute_type=99), ValueError, "99 is not a valid ComputeType"),
    "scale R_8I": (lambda: eg.matmul(f32(2, 2), f32(2, 2), options={"scale_type": 3}), ValueError, "Unsupported scale type. The data type"),
    "c without beta": (
        lambda: eg.matmul(f32(2, 2), f32(2, 2), f32(2, 2)),
        ValueError,
        "A value for beta must be provided if operand C is provided.",
    ),
    "c 1-D": (lambda: eg.matmul(f32(2, 2), f32(2, 2), f32(2), beta=1), ValueError, "`c` must be at least 2-D."),
    "c rows": (
        lambda: eg.matmul(f32(2, 2), f32(2, 2), f32(3, 2), beta=1),
        ValueError,
        "The M dimension of the C matrix (3) must match the M dimension of A.",
    ),
    "c columns": (lambda: eg.matmul(f32(2, 2), f32(2, 2), f32(2, 3), beta=1), ValueError, "The N dimension of the C matrix (3) must match"),
    "c batched": (
        lambda: eg.matmul(f32(2, 2), f32(2, 2), f32(3, 2, 2), beta=1),
        ValueError,
        "The batch dimension of operand C [3] must match with that of the other operands [].",
    ),
    "inplace without c": (
        lambda: eg.matmul(f32(2, 2), f32(2, 2), options={"inplace": True}),
        ValueError,
        "The operation cannot be inplace if operand C is not provided.",
    ),
    "inplace column": (
        lambda: eg.matmul(f32(2, 2), f32(2, 2), f32(2, 1), beta=1, options={"inplace": True}),
        ValueError,
        "The N dimension of the C matrix (1) must match the N dimension of B. This is required for inplace operations.",
    ),
    "batch": (lambda: eg.matmul(f32(2, 2, 2), f32(3, 2, 2)), ValueError, "The batch dimensions of operands A [2] and B [3] must match."),
    "list": (
        lambda: eg.matmul([[1.0]], f32(1, 1)),
        ValueError,
        "builtins not supported yet. Currently must be one of ['numpy', 'cupy', 'torch']",
    ),
    "options type": (
        lambda: eg.matmul(f32(2, 2), f32(2, 2), options="x"),
        TypeError,
        "The Matrix multiplication options must be provided as an object of type MatmulOptions or as a dict with valid",
    ),
    "option key": (lambda: eg.matmul(f32(2, 2), f32(2, 2), options={"x": 1}), TypeError, "unexpected keyword argument 'x'"),
    "blocking": (lambda: MatmulOptions(blocking=False), ValueError, "The value specified for blocking must be either True or 'auto'."),  # type: ignore[arg-type]
    "memory limit": (
        lambda: MatmulOptions(memory_limit="lots"),
        ValueError,
        "The memory limit must be specified in one of the following forms",
    ),
    "allocator": (lambda: MatmulOptions(allocator=3), TypeError, "fulfills the BaseCUDAMemoryManager protocol."),  # type: ignore[arg-type]
    "alpha": (
        lambda: eg.matmul(f32(2, 2), f32(2, 2), alpha=1 + 2j),
        ValueError,
        "The value provided for alpha (1+2j) is not convertible to dtype 'float32'.",
    ),
    "qualifiers list": (
        lambda: eg.matmul(f32(2, 2), f32(2, 2), qualifiers=[0, 0, 0]),
        AttributeError,
        "The qualifiers must be specified as a NumPy array of length 3",
    ),
    "qualifiers dtype": (
        lambda: eg.matmul(f32(2, 2), f32(2, 2), qualifiers=np.zeros(3)),
        ValueError,
        "The qualifiers must be specified as a NumPy array",
    ),
    "conjugate c": (
        lambda: eg.matmul(np.ones((2, 2), np.complex64), np.ones((2, 2), np.complex64), qualifiers=qualifiers(2)),
        ValueError,
        "The conjugate flag is currently not supported for operand C.",
    ),
    "bias length": (
        lambda: eg.matmul(f32(2, 3), f32(3, 4), **bias(f32(48))),
        ValueError,
        "The M dimension of the bias vector (48) must match the M dimension of A.",
    ),
    "bias missing": (
        lambda: eg.matmul(f32(2, 3), f32(3, 4), epilog=Epilog.BIAS),
        ValueError,
        "The epilog BIAS requires the following input tensors: {'bias'}. The provided tensor names are: dict_keys([",
    ),
    "bias renamed": (
        lambda: eg.matmul(f32(2, 3), f32(3, 4), epilog=Epilog.BIAS, epilog_inputs={"b": f32(2)}),
        ValueError,
        "dict_keys(['b'])",
    ),
    "bias list": (lambda: eg.matmul(f32(2, 3), f32(3, 4), **bias([1.0, 2.0])), ValueError, "builtins not supported yet."),
    "drelu dtype": (
        lambda: eg.matmul(f32(2, 3), f32(3, 4), epilog=Epilog.DRELU, epilog_inputs={"relu_aux": f32(16, 4)}),
        ValueError,
        "The dtype of the RELU auxiliary input for epilog DRELU must be 'uint8'.",
    ),
    "drelu shape": (
        lambda: eg.matmul(f32(65, 3), f32(3, 48), epilog=Epilog.DRELU, epilog_inputs={"relu_aux": bits(9, 48)}),
        ValueError,
        "The auxiliary epilog input for epilog DRELU must have the MM shape (..., 16, 48).",
    ),
    "drelu 1-D": (
        lambda: eg.matmul(f32(2, 3), f32(3, 4), epilog=Epilog.DRELU, epilog_inputs={"relu_aux": bits(16)}),
        ValueError,
        "must have the MM shape",
    ),
    "aux_type": (
        lambda: eg.matmul(
            f32(2, 3), f32(3, 4), epilog=Epilog.RELU_AUX, preferences={"epilog": MatmulEpilogPreferences(aux_type=Type.CUDA_R_16F)}
        ),
        ValueError,
        "Custom type for auxiliary outputs is not supported for RELU",
    ),
    "aux_amax": (
        lambda: eg.matmul(f32(2, 3), f32(3, 4), epilog=Epilog.GELU_AUX, preferences={"epilog": {"aux_amax": True}}),
        ValueError,
        "epilog.aux_amax=True is not supported when epilog output type is not FP8.",
    ),
    "DEFAULT": (lambda: eg.matmul(f32(2, 3), f32(3, 4), epilog=Epilog.DEFAULT), AssertionError, "Not supported."),
    "epilog int": (lambda: eg.matmul(f32(2, 3), f32(3, 4), epilog=4), AssertionError, "Not supported."),
    "before plan": (
        lambda: eg.Matmul(f32(2, 3), f32(3, 4)).execute(),
        RuntimeError,
        "Execution cannot be performed before plan() has been called.",
    ),
    "autotune before plan": (
        lambda: eg.Matmul(f32(2, 3), f32(3, 4)).autotune(),
        RuntimeError,
        "cannot be performed before plan() has been called.",
    ),
    "freed": (lambda: freed().execute(), eg.InvalidMatmulState, "The Matmul object cannot be used after resources are free'd"),
    "freed plan": (lambda: freed().plan(), eg.InvalidMatmulState, "The Matmul object cannot be used after resources are free'd"),
    "freed reset": (lambda: freed().reset_operands(a=f32(2, 3)), eg.InvalidMatmulState, "The Matmul object cannot be used"),
    "released": (lambda: released().execute(), RuntimeError, "Execution cannot be performed after the operands have been released."),
    "partial reset": (
        lambda: released().reset_operands(a=f32(2, 3)),
        ValueError,
        "After release_operands(), all required operands must be provided to reset_operands(). Required: a, b",
    ),
    "empty reset": (lambda: planned().reset_operands(), ValueError, "reset_operands()"),
    "limit 0": (
        lambda: eg.Matmul(f32(2, 3), f32(3, 4)).plan(preferences={"limit": 0}),
        RuntimeError,
        "Planning failed to find any suitable algorithm.",
    ),
    "foreign algorithm": (
        lambda: planned().execute(algorithm=eg.Matmul(f32(2, 3), f32(3, 4)).plan()[0]),
        ValueError,
        "Algorithm passed to execute() has to be included in the plan() algorithms",
    ),
    "algorithm type": (lambda: planned().plan(algorithms=[0]), AssertionError, "The algorithms passed to plan() are of wrong type."),  # type: ignore[list-item]
    "no algorithms": (lambda: planned().plan(algorithms=[]), IndexError, "index is out of bounds"),
    "reset extents": (
        lambda: planned().reset_operands(a=f32(2, 4)),
        ValueError,
        "The extents of the new operand must match the extents of the original operand.",
    ),
    "reset dtype": (
        lambda: planned().reset_operands(a=f16(2, 3)),
        ValueError,
        "The data type of the new operand must match the data type of the original operand.",
    ),
    "reset c": (lambda: planned().reset_operands(c=f32(2, 4)), ValueError, "does not include operand C, so it cannot be reset."),
    "reset input": (lambda: planned().reset_operands(epilog_inputs={"x": f32(2)}), KeyError, "x"),
    "fp8 without scales": (
        lambda: eg.matmul(f8(16, 16), f8(16, 16)),
        ValueError,
        "Scales are required for narrow-precision (FP8 and lower) operations.",
    ),
    "fp8 without d": (
        lambda: eg.matmul(f8(16, 16), f8(16, 16), quantization_scales={"a": 1, "b": 1}),
        ValueError,
        "Scale for D is not specified",
    ),
    "scale of wide d": (
        lambda: eg.matmul(f32(2, 2), f32(2, 2), quantization_scales={"d": 1}),
        ValueError,
        "Quantization scaling is not supported for D when it is not a narrow-precision (FP8 and lower) type.",
    ),
    "result_amax": (
        lambda: eg.matmul(f32(2, 2), f32(2, 2), options={"result_amax": True}),
        ValueError,
        "result_amax=True is allowed only for narrow-precision",
    ),
    "block scaling": (
        lambda: eg.matmul(f8(128, 128), f8(128, 128), quantization_scales=ONE, options={"block_scaling": True}),
        ValueError,
        "Blackwell",
    ),
    "iterations": (lambda: planned().autotune(iterations=0), ValueError, "iterations"),
    "c with several b": (
        lambda: eg.matmul(f32(2, 3), (f32(3, 4), f32(3, 4)), f32(2, 4), beta=1, epilog=lambda x, y: x * y),
        ValueError,
        "several B",
    ),
    "no b": (lambda: eg.matmul(f32(2, 3), ()), ValueError, "empty"),
    "unequal b": (lambda: eg.matmul(f32(2, 3), (f32(3, 4), f32(3, 5)), epilog=lambda x, y: x * y), ValueError, "one dtype and one shape"),
    "engine name": (lambda: eg.matmul(f32(2, 3), f32(3, 4), engine="gpu"), ValueError, "gpu"),
    "device_id": (lambda: eg.matmul(f32(2, 3), f32(3, 4), options={"device_id": 0}), RuntimeError, "device_id"),
    "out dtype": (lambda: eg.matmul(f32(2, 3), f32(3, 4), out=f16(2, 4)), ValueError, "out"),
    "out shape": (lambda: eg.matmul(f32(2, 3), f32(3, 4), out=f32(4, 2)), ValueError, "out"),
    "out broadcast": (lambda: eg.matmul(f32(2, 3), f32(3, 4), out=np.broadcast_to(f32(1, 4), (2, 4))), ValueError, "out"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_has_the_peers_class_and_words(name: str) -> None:
    call, kind, words = ERRORS[name]
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, eg.EpigemmError)
    assert words in str(caught.value)


def test_mixed_packages_and_devices_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="All tensors must be from the same library package"):
        eg.matmul(f32(2, 3), torch.ones(3, 4))
    with pytest.raises(TypeError, match="Library package mismatch"):
        eg.matmul(f32(2, 3), f32(3, 4), **bias(torch.ones(2)))
    with pytest.raises(TypeError, match="Library package mismatch"):
        planned().reset_operands(a=torch.ones(2, 3))
    with pytest.raises(ValueError, match="torch"):
        eg.matmul(torch.ones(2, 3, device="meta"), torch.ones(3, 4, device="meta"))
    with pytest.raises(ValueError, match="torch"):
        eg.matmul(torch.ones(2, 3).to_sparse(), torch.ones(3, 4))


def test_what_has_no_meaning_is_warned_of_and_ignored() -> None:
    plain = eg.matmul(f32(2, 3), f32(3, 4))
    with pytest.warns(eg.EpigemmWarning, match="beta=2 is ignored since operand C is not specified"):
        assert np.array_equal(eg.matmul(f32(2, 3), f32(3, 4), beta=2), plain)
    with pytest.warns(eg.EpigemmWarning, match="bias"):
        assert np.array_equal(eg.matmul(f32(2, 3), f32(3, 4), epilog_inputs={"bias": f32(2)}), plain)
    with pytest.warns(eg.EpigemmWarning, match="scale for A is ignored"):
        assert np.array_equal(eg.matmul(f32(2, 3), f32(3, 4), quantization_scales={"a": 7}), plain)


DEVIATIONS = tomllib.loads((Path(__file__).parents[1] / "deviations.toml").read_text())


@pytest.mark.parametrize("name", DEVIATIONS)
def test_every_deviation_gives_what_its_row_says(name: str) -> None:
    row = DEVIATIONS[name]
    assert row["reason"]
    assert row["peer"]
    assert str(eval(row["call"], globals())) == row["gives"]

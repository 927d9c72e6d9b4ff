"""Errors keep the peer's types and words (reference table 1.11), say which values, and then what to do."""

from __future__ import annotations

import ast
import inspect
import pickle

import pytest

from epigemm import errors as e

# One row per row of the peer's table that we refuse too: the error, the peer's class, the peer's words.
PEER = [
    (
        e.k_mismatch(32, 64),
        ValueError,
        "The 'K' extent must match for the operands: K=32 in operand A is not equal to K=64 in operand B.",
    ),
    (e.scalar_operand("A"), IndexError, "list index out of range"),
    (e.unsupported_dtype("A", "int8", ["float16"]), ValueError, "The dtype of operand A (int8) is not supported."),
    (
        e.unsupported_dtypes("float16", "float32"),
        ValueError,
        "Unsupported combination of dtypes for operands A float16 and B float32.",
    ),
    (
        e.unsupported_types("CUDA_R_16F", "COMPUTE_64F", "float32", "float32"),
        ValueError,
        "Selected scale_type=CUDA_R_16F compute_type=COMPUTE_64F are not supported for data types float32 (A) and float32 (B).",
    ),
    (
        e.unsupported_compute_type("<ComputeType.COMPUTE_32I: 72>"),
        ValueError,
        "Unsupported compute type. The compute type '<ComputeType.COMPUTE_32I: 72>' is currently not supported.",
    ),
    (e.unsupported_scale_type("CUDA_R_8I"), ValueError, "Unsupported scale type. The data type 'CUDA_R_8I' is currently not supported."),
    (e.c_without_beta(), ValueError, "A value for beta must be provided if operand C is provided."),
    (
        e.c_too_few_dimensions((4,)),
        ValueError,
        "In order to avoid broadcasting behavior ambiguity, `c` must be at least 2-D.",
    ),
    (e.c_extent_mismatch("M", 3, 4), ValueError, "The M dimension of the C matrix (3) must match the M dimension of A."),
    (e.c_extent_mismatch("N", 3, 4), ValueError, "The N dimension of the C matrix (3) must match the N dimension of B."),
    (
        e.c_batch_mismatch([3], []),
        ValueError,
        "The batch dimension of operand C [3] must match with that of the other operands [].",
    ),
    (e.inplace_without_c(), ValueError, "The operation cannot be inplace if operand C is not provided."),
    (
        e.c_extent_mismatch("N", 1, 4, inplace=True),
        ValueError,
        "The N dimension of the C matrix (1) must match the N dimension of B. This is required for inplace operations.",
    ),
    (e.batch_mismatch("A", [2], "B", [3]), ValueError, "The batch dimensions of operands A [2] and B [3] must match."),
    (e.batch_order_mismatch("A", (1, 0), "B", (0, 1)), ValueError, "The batch order of operands"),
    (e.batch_not_tileable("A", (2, 3), (5, 7)), ValueError, "The batch layout for A corresponding to shape = "),
    (e.batch_not_tileable("A", (2, 3), (5, 7)), ValueError, "is currently not supported because it is not tileable."),
    (e.unsupported_layout("A", (4, 4), (8, 2)), ValueError, "Unsupported layout."),
    (
        e.unsupported_package("builtins"),
        ValueError,
        "builtins not supported yet. Currently must be one of ['numpy', 'cupy', 'torch']",
    ),
    (
        e.mixed_packages({"torch", "numpy"}),
        TypeError,
        "All tensors must be from the same library package. Packages found = ['numpy', 'torch']",
    ),
    (e.mixed_devices(["cpu", 0]), ValueError, "All operands are not on the same device. Devices = "),
    (
        e.wrong_options_type("Matrix multiplication options", "MatmulOptions", "x"),
        TypeError,
        "must be provided as an object of type MatmulOptions or as a dict with valid Matrix multiplication options. The provided object is",
    ),
    (
        e.unknown_option("MatmulOptions", "x", ["inplace"]),
        TypeError,
        "MatmulOptions.__init__() got an unexpected keyword argument 'x'",
    ),
    (e.not_a_member(99, "ComputeType"), ValueError, "99 is not a valid ComputeType"),
    (e.wrong_blocking(False), ValueError, "The value specified for blocking must be either True or 'auto'."),
    (e.wrong_memory_limit("1 sack"), ValueError, "The memory limit must be specified in one of the following forms: "),
    (
        e.wrong_allocator(3),
        TypeError,
        "The allocator must be an object of type that fulfills the BaseCUDAMemoryManager protocol.",
    ),
    (
        e.not_convertible("alpha", 1 + 2j, "float32"),
        ValueError,
        "The value provided for alpha (1+2j) is not convertible to dtype 'float32'.",
    ),
    (e.not_convertible("beta", "x", "float32"), ValueError, "The value provided for beta (x) is not convertible to dtype 'float32'."),
    (e.qualifiers_not_an_array([]), AttributeError, "The qualifiers must be specified as a NumPy array of length 3"),
    (e.wrong_qualifiers((2,), "int32"), ValueError, "The qualifiers must be specified as a NumPy array of length 3"),
    (e.conjugate_c(), ValueError, "The conjugate flag is currently not supported for operand C."),
    (e.bias_extent("M", 48, 64), ValueError, "The M dimension of the bias vector (48) must match the M dimension of A."),
    (e.bias_extent("N", 2, 64), ValueError, "The N dimension of the bias vector (2) must be equal to 1."),
    (
        e.bias_stride(2),
        ValueError,
        "The stride of the bias [2] must be 1 along the dimension -1, which corresponds to the M dimension.",
    ),
    (e.bias_batch([2], [3]), ValueError, "The batch dimensions of the bias"),
    (e.bias_batch([2], [3]), ValueError, "must match with that of the matrix multiplication definition"),
    (e.bias_batch_order([1, 0], [0, 1]), ValueError, "The batch axis order of the bias"),
    (
        e.wrong_input_names("BIAS", {"bias"}, ["bais"]),
        ValueError,
        "The epilog BIAS requires the following input tensors: {'bias'}. The provided tensor names are: dict_keys(['bais'])",
    ),
    (e.package_mismatch("torch", "numpy", "epilog"), TypeError, "Library package mismatch for epilog: 'torch' => 'numpy'"),
    (
        e.epilog_input_device("bias", "cpu", "0"),
        ValueError,
        "The epilog inputs must be in the same memory space as the operands. Expected device 0",
    ),
    (
        e.aux_dtype("RELU", "DRELU", "int8", "uint8"),
        ValueError,
        "The dtype of the RELU auxiliary input for epilog DRELU must be 'uint8'.",
    ),
    (
        e.aux_shape("DRELU", (8, 48), (16, 48)),
        ValueError,
        "The auxiliary epilog input for epilog DRELU must have the MM shape (..., 16, 48).",
    ),
    (e.aux_shape("DRELU", (8,), (16, 48)), ValueError, "not enough values to unpack"),
    (
        e.aux_stride("RELU", (48, 1)),
        ValueError,
        "The stride of the RELU auxiliary input [48, 1] must be 1 along the dimension 0, which corresponds to the M dimension.",
    ),
    (e.k_is_one("DRELU"), ValueError, "K=1 is not supported for DRELU epilogs"),
    (e.aux_type_refused("RELU"), ValueError, "Custom type for auxiliary outputs is not supported for RELU epilogs."),
    (e.aux_amax_refused(), ValueError, "epilog.aux_amax=True is not supported when epilog output type is not FP8."),
    (
        e.needs_column_major("BGRADA"),
        ValueError,
        "The epilog BGRADA requires input matrix 'c' to be F-contiguous (column-major).",
    ),
    (e.not_planned(), RuntimeError, "Execution cannot be performed before plan() has been called."),
    (e.not_planned("Autotuning"), RuntimeError, "Autotuning cannot be performed before plan() has been called."),
    (e.freed(), e.InvalidMatmulState, "The Matmul object cannot be used after resources are free'd"),
    (e.operands_released(), RuntimeError, "Execution cannot be performed after the operands have been released. Use reset_operands() "),
    (
        e.partial_reset(["a", "b"]),
        ValueError,
        "After release_operands(), all required operands must be provided to reset_operands(). Required: a, b",
    ),
    (e.no_algorithm(["cpu: no"]), RuntimeError, "Planning failed to find any suitable algorithm."),
    (e.foreign_algorithm(), ValueError, "Algorithm passed to execute() has to be included in the plan() algorithms"),
    (e.not_algorithms(0), AssertionError, "The algorithms passed to plan() are of wrong type."),
    (e.no_algorithms(), IndexError, "index is out of bounds"),
    (
        e.reset_mismatch("extents", "A", (2, 3), (4, 3)),
        ValueError,
        "The extents of the new operand must match the extents of the original operand.",
    ),
    (
        e.reset_mismatch("strides", "A", (3, 1), (1, 4)),
        ValueError,
        "The strides of the new operand must match the strides of the original operand.",
    ),
    (
        e.reset_mismatch("data type", "A", "float32", "float16"),
        ValueError,
        "The data type of the new operand must match the data type of the original operand.",
    ),
    (e.reset_without_c(), ValueError, "does not include operand C, so it cannot be reset."),
    (
        e.device_mismatch("A", "cpu", "0"),
        ValueError,
        'The operand A is on device "cpu", but it should be on device "0" to match the original operand.',
    ),
    (e.package_mismatch("torch", "cupy"), TypeError, "Library package mismatch: 'torch' => 'cupy'"),
    (e.unknown_input("BIAS", "x", ["bias"]), KeyError, "x"),
    (
        e.scales_required(["a"]),
        ValueError,
        "Scales are required for narrow-precision (FP8 and lower) operations. Please set `quantization_scales` argument.",
    ),
    (e.scale_missing("D"), ValueError, "Scale for D is not specified"),
    (
        e.scale_refused("D"),
        ValueError,
        "Quantization scaling is not supported for D when it is not a narrow-precision (FP8 and lower) type.",
    ),
    (e.not_divisible_by_16(24, 48, 32), ValueError, "M=24 N=48 K=32 must be divisible by 16 for FP8 operations"),
    (e.misaligned("A", 16, 0x1004), ValueError, "operand A should be aligned to 16 bytes."),
    (e.result_amax_refused("float16"), ValueError, "result_amax=True is allowed only for narrow-precision"),
    (e.not_an_epilog("x"), AssertionError, "Not supported."),
]

# Ours alone: the error, a class that programs may catch, words of it.
OURS = [
    (e.needs_blackwell("block_scaling=True"), ValueError, "need a Blackwell GPU"),
    (e.unsupported_result_type("CUDA_R_8I", "float16"), ValueError, "'CUDA_R_8I' is not supported"),
    (e.out_mismatch("shape", (2, 2), (2, 3)), ValueError, "The shape of `out` ((2, 2)) must be that of the result ((2, 3))."),
    (e.out_dtype_mismatch("float32", "float16"), ValueError, "The dtype of `out` (float32)"),
    (e.out_overlaps("a"), ValueError, "`out` overlaps `a` in memory."),
    (e.self_overlap("out", (2, 2), (0, 1)), ValueError, "its strides are (0, 1)"),
    (e.wrong_value("iterations", 0, "an integer >= 1"), ValueError, "iterations (0) is not valid.\n  It must be an integer >= 1."),
    (e.strict_deviation("cublaslt: NaN mask bits"), ValueError, "strict=True refuses this plan: cublaslt"),
    (e.inputs_without_epilog(["bias"]), ValueError, "`epilog_inputs` (bias) are given without an epilog."),
    (e.input_length("bias", 64, 64, 48, along="n"), ValueError, "(64, 1) to lie along m, or (1, 48) to lie along n"),
    (e.input_length("bias", 48, 64, 48, along="m"), ValueError, "must have length 64: it lies along m (m=64, n=48)"),
    (e.input_shape("r", (2, 3), 4, 5), ValueError, "`r` of shape (2, 3) does not broadcast to (..., m=4, n=5)"),
    (e.nothing_reset(), ValueError, "use release_operands()"),
    (e.no_epilog_for_several(2), ValueError, "Pass one B, or epilog= an @epilogue function whose first 2 parameters are the accumulators."),
    (e.unknown_engine("cuda", ["cpu", "cublaslt"]), ValueError, "The engines are 'cpu' and 'cublaslt', or 'auto' to have one chosen."),
    (e.engine_unavailable("hopper", "no GPU was found"), RuntimeError, "engine 'hopper' is not available: no GPU was found"),
    (e.cannot_fuse("cublaslt", "`silu` (node 2)", "silu(acc)"), ValueError, "cublaslt cannot fuse `silu` (node 2) of silu(acc)."),
    (e.library_status("cublasLtMatmul", "CUBLAS_STATUS_NOT_SUPPORTED", 15), RuntimeError, "CUBLAS_STATUS_NOT_SUPPORTED (15)"),
    (e.wrong_scale("a", "(2,)"), ValueError, "not (2,)"),
    (e.wrong_variable("EPIGEMM_X", "y", "a whole number >= 0"), ValueError, "EPIGEMM_X is 'y'."),
]


@pytest.mark.parametrize(("error", "builtin", "words"), PEER + OURS, ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "")
def test_type_words_and_remedy(error, builtin, words):
    assert isinstance(error, e.EpigemmError)
    assert isinstance(error, builtin)
    text = str(error)
    assert words in text
    first, *remedies = text.split("\n")
    assert first
    assert remedies, "an error says what to do"
    assert all(line.startswith("  ") and line.strip() for line in remedies)


def test_every_word_of_the_peer_is_on_the_first_line():
    """So that a program that matches with `$` or reads one line finds it."""
    for error, _, words in PEER:
        assert words in str(error).split("\n")[0]


def types():
    return [value for value in vars(e).values() if isinstance(value, type) and issubclass(value, e.EpigemmError)]


@pytest.mark.parametrize("cls", types(), ids=lambda cls: cls.__name__)
def test_types_show_their_text_and_survive_pickling(cls):
    error = cls("first\n  second")
    assert str(error) == "first\n  second"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args) == (cls, error.args)
    assert inspect.getdoc(cls)


def functions():
    modules = (e.calls, e.environment, e.operands)
    return [f for m in modules for f in vars(m).values() if inspect.isfunction(f) and f.__module__ == m.__name__ and f.__name__[0] != "_"]


@pytest.mark.parametrize("function", functions(), ids=lambda f: f.__name__)
def test_every_wording_function_says_what_to_do(function):
    """Each returns a typed error made by `say(what, remedy, ...)`."""
    tree = ast.parse(inspect.getsource(function))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "say"]
    assert calls
    assert all(len(call.args) >= 2 for call in calls)


def test_listed():
    assert [e.listed(""), e.listed("a"), e.listed("ab"), e.listed("abc", "or")] == ["", "a", "a and b", "a, b or c"]


def test_say_leaves_out_empty_remedies():
    assert e.say("what", "", "do") == "what\n  do"
    assert e.say("what") == "what"

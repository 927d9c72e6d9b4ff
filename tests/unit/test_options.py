"""Options, preferences and enums: values, checks, the plan cache's key, qualifiers, and the peer's names."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import logging
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import epigemm
from epigemm import enums, errors, options
from epigemm.options import MatmulEpilogPreferences, MatmulOptions, MatmulPlanPreferences, MatmulQuantizationScales

WHAT = "Matrix multiplication options"

# ---------------------------------------------------------------- enums

# From cuBLASLt's headers, typed in apart from the module.
MEMBERS: dict[str, dict[str, int]] = {
    "MatmulEpilog": {
        "DEFAULT": 1, "RELU": 2, "RELU_AUX": 130, "BIAS": 4, "RELU_BIAS": 6, "RELU_AUX_BIAS": 134, "DRELU": 136, "DRELU_BGRAD": 152,
        "GELU": 32, "GELU_AUX": 160, "GELU_BIAS": 36, "GELU_AUX_BIAS": 164, "DGELU": 192, "DGELU_BGRAD": 208, "BGRADA": 256, "BGRADB": 512,
    },
    "MatmulComputeType": {
        "COMPUTE_16F": 64, "COMPUTE_16F_PEDANTIC": 65, "COMPUTE_32F": 68, "COMPUTE_32F_PEDANTIC": 69, "COMPUTE_64F": 70,
        "COMPUTE_64F_PEDANTIC": 71, "COMPUTE_32I": 72, "COMPUTE_32I_PEDANTIC": 73, "COMPUTE_32F_FAST_16F": 74, "COMPUTE_32F_FAST_16BF": 75,
        "COMPUTE_32F_FAST_TF32": 77, "COMPUTE_32F_EMULATED_16BFX9": 78, "COMPUTE_64F_EMULATED_FIXEDPOINT": 79,
    },
    "MatmulInnerShape": {"UNDEFINED": 0, "MMA884": 1, "MMA1684": 2, "MMA1688": 3, "MMA16816": 4},
    "MatmulReductionScheme": {"NONE": 0, "INPLACE": 1, "COMPUTE_TYPE": 2, "OUTPUT_TYPE": 4, "MASK": 7},
    "MatmulNumericalImplFlags": {
        "OP_TYPE_FMA": 0x1, "OP_TYPE_TENSOR_HMMA": 0x2, "OP_TYPE_TENSOR_IMMA": 0x4, "OP_TYPE_TENSOR_DMMA": 0x8, "OP_TYPE_TENSOR_MASK": 0xFE,
        "OP_TYPE_MASK": 0xFF, "ACCUMULATOR_16F": 0x100, "ACCUMULATOR_32F": 0x200, "ACCUMULATOR_64F": 0x400, "ACCUMULATOR_32I": 0x800,
        "ACCUMULATOR_TYPE_MASK": 0xFF00, "INPUT_TYPE_16F": 0x1_0000, "INPUT_TYPE_16BF": 0x2_0000, "INPUT_TYPE_TF32": 0x4_0000,
        "INPUT_TYPE_32F": 0x8_0000, "INPUT_TYPE_64F": 0x10_0000, "INPUT_TYPE_8I": 0x20_0000, "INPUT_TYPE_8F_E4M3": 0x40_0000,
        "INPUT_TYPE_8F_E5M2": 0x80_0000, "INPUT_TYPE_MASK": 0xFF_0000, "GAUSSIAN": 0x1_0000_0000, "ALL": 0xFFFF_FFFF_FFFF_FFFF,
    },
    "MatmulMatrixScale": {
        "SCALAR_32F": 0, "VEC16_UE4M3": 1, "VEC32_UE8M0": 2, "OUTER_VEC_32F": 3, "VEC128_32F": 4, "BLK128x128_32F": 5,
        "PER_BATCH_SCALAR_32F": 6,
    },
    "CudaDataType": {
        "CUDA_R_32F": 0, "CUDA_R_64F": 1, "CUDA_R_16F": 2, "CUDA_R_8I": 3, "CUDA_C_32F": 4, "CUDA_C_64F": 5, "CUDA_C_16F": 6,
        "CUDA_C_8I": 7, "CUDA_R_8U": 8, "CUDA_C_8U": 9,
        "CUDA_R_32I": 10, "CUDA_C_32I": 11, "CUDA_R_32U": 12, "CUDA_C_32U": 13, "CUDA_R_16BF": 14,
        "CUDA_C_16BF": 15, "CUDA_R_4I": 16, "CUDA_C_4I": 17, "CUDA_R_4U": 18, "CUDA_C_4U": 19, "CUDA_R_16I": 20, "CUDA_C_16I": 21,
        "CUDA_R_16U": 22, "CUDA_C_16U": 23, "CUDA_R_64I": 24, "CUDA_C_64I": 25, "CUDA_R_64U": 26, "CUDA_C_64U": 27, "CUDA_R_8F_E4M3": 28,
        "CUDA_R_8F_UE4M3": 28, "CUDA_R_8F_E5M2": 29, "CUDA_R_8F_UE8M0": 30, "CUDA_R_6F_E2M3": 31, "CUDA_R_6F_E3M2": 32,
        "CUDA_R_4F_E2M1": 33,
    },
    "Order": {"COL": 0, "ROW": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", MEMBERS)
def test_enum_members_are_cublaslts(name: str) -> None:
    cls = getattr(enums, name)
    assert {member: int(value) for member, value in cls.__members__.items()} == MEMBERS[name]


def test_numerical_flags_join() -> None:
    flags = enums.MatmulNumericalImplFlags
    joined = flags.OP_TYPE_TENSOR_HMMA | flags.ACCUMULATOR_32F
    assert isinstance(joined, flags)
    assert joined == 0x202


def test_epilog_values_are_made_of_bits() -> None:
    bits = {"RELU": 2, "BIAS": 4, "DRELU": 8, "BGRAD": 16, "GELU": 32, "DGELU": 64, "AUX": 128, "BGRADA": 256, "BGRADB": 512}
    for member in set(enums.MatmulEpilog) - {enums.MatmulEpilog.DEFAULT}:
        words = set(member.name.split("_"))
        aux = bits["AUX"] if words & {"DRELU", "DGELU"} else 0  # their mask or pre-activation is an aux input
        assert member == sum(bits[word] for word in words) | aux, member.name


# ---------------------------------------------------------------- MatmulOptions


def test_defaults() -> None:
    assert dataclasses.asdict(MatmulOptions()) == {
        "inplace": False, "compute_type": None, "scale_type": None, "result_type": None, "result_amax": False, "block_scaling": False,
        "sm_count_target": 0, "fast_accumulation": False, "device_id": None, "handle": None, "logger": None, "memory_limit": "80%",
        "blocking": "auto", "allocator": None, "rounding": "once", "strict": False, "result_order": None,
    }  # fmt: skip


def test_numbers_become_members_and_none_the_default() -> None:
    made = MatmulOptions(compute_type=77, scale_type=0, result_type=14, sm_count_target=None, fast_accumulation=None, memory_limit=None)
    assert made.compute_type is enums.MatmulComputeType.COMPUTE_32F_FAST_TF32
    assert made.scale_type is enums.CudaDataType.CUDA_R_32F
    assert made.result_type is enums.CudaDataType.CUDA_R_16BF
    assert (made.sm_count_target, made.fast_accumulation, made.memory_limit) == (0, False, "80%")


class _Allocator:
    def memalloc(self, size: int) -> Any:
        return options.MemoryPointer(0, size, None)


class _AsyncAllocator:
    def memalloc_async(self, size: int, stream: Any) -> Any:
        return options.MemoryPointer(0, size, None)


def test_both_allocator_protocols_are_accepted() -> None:
    for allocator in (_Allocator(), _AsyncAllocator()):
        assert MatmulOptions(allocator=allocator).allocator is allocator
    assert isinstance(_Allocator(), options.BaseCUDAMemoryManager)
    assert not isinstance(_Allocator(), options.BaseCUDAMemoryManagerAsync)


WRONG_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"compute_type": 99}, ValueError, "99 is not a valid ComputeType"),
    ({"compute_type": "COMPUTE_32F"}, ValueError, "'COMPUTE_32F' is not a valid ComputeType"),
    ({"scale_type": 99}, ValueError, "99 is not a valid CudaDataType"),
    ({"result_type": "float16"}, ValueError, "'float16' is not a valid CudaDataType"),
    ({"inplace": "yes"}, ValueError, r"The value provided for inplace \('yes'\) is not valid"),
    ({"result_amax": 2}, ValueError, "result_amax"),
    ({"sm_count_target": -1}, ValueError, "sm_count_target"),
    ({"sm_count_target": 1.5}, ValueError, "sm_count_target"),
    ({"device_id": -1}, ValueError, "device_id"),
    ({"device_id": True}, ValueError, "device_id"),
    ({"device_id": "cuda"}, ValueError, "device_id"),
    ({"blocking": False}, ValueError, "The value specified for blocking must be either True or 'auto'."),
    ({"blocking": 2}, ValueError, "blocking"),
    ({"blocking": np.ones(2)}, ValueError, "blocking"),
    ({"memory_limit": "a lot"}, ValueError, "The memory limit must be specified in one of the following forms: "),
    ({"memory_limit": -1}, ValueError, "The memory limit must be specified"),
    ({"allocator": object()}, TypeError, "The allocator must be an object of type that fulfills the BaseCUDAMemoryManager protocol."),
    ({"rounding": "never"}, ValueError, "rounding"),
    ({"strict": None}, ValueError, "strict"),
    ({"result_order": "C"}, ValueError, "It must be None, 'row' or 'col'"),
]


@pytest.mark.parametrize(("fields", "kind", "text"), WRONG_OPTIONS)
def test_wrong_options_are_refused_on_construction(fields: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        MatmulOptions(**fields)
    assert isinstance(caught.value, errors.EpigemmError)


def test_fields_set_later_are_checked_by_validated() -> None:
    changed = MatmulOptions()
    changed.blocking = False  # type: ignore[assignment]
    with pytest.raises(errors.OptionError, match="blocking"):
        changed.validated()


# ---------------------------------------------------------------- as_options


def test_as_options_takes_none_dict_and_object() -> None:
    assert options.as_options(MatmulOptions, None, WHAT) == MatmulOptions()
    assert options.as_options(MatmulOptions, {"compute_type": 68}, WHAT).compute_type is enums.MatmulComputeType.COMPUTE_32F
    given = MatmulOptions(strict=True)
    taken = options.as_options(MatmulOptions, given, WHAT)
    assert taken == given
    given.strict = False
    assert taken.strict, "a later change to the caller's object must change nothing"


@pytest.mark.parametrize("value", ["x", 3, ["inplace"], MatmulPlanPreferences()])
def test_as_options_refuses_other_types(value: Any) -> None:
    text = (
        "The Matrix multiplication options must be provided as an object of type MatmulOptions or as a dict with valid "
        "Matrix multiplication options. The provided object is "
    )
    with pytest.raises(TypeError) as caught:
        options.as_options(MatmulOptions, value, WHAT)
    assert str(caught.value).startswith(f"{text}{value!r}.")


def test_unknown_key() -> None:
    with pytest.raises(TypeError, match=r"MatmulOptions.__init__\(\) got an unexpected keyword argument 'x'"):
        options.as_options(MatmulOptions, {"x": 1}, WHAT)


# ---------------------------------------------------------------- preferences and scales


def test_plan_preferences() -> None:
    made = MatmulPlanPreferences(reduction_scheme_mask=None, max_waves_count=None, numerical_impl_mask=None, limit=None)
    assert made == MatmulPlanPreferences()
    assert made.reduction_scheme_mask is enums.MatmulReductionScheme.MASK
    assert made.numerical_impl_mask is enums.MatmulNumericalImplFlags.ALL
    assert (made.max_waves_count, made.limit, made.epilog) == (0.0, 8, MatmulEpilogPreferences())
    scheme = enums.MatmulReductionScheme
    assert MatmulPlanPreferences(reduction_scheme_mask=scheme.INPLACE | scheme.COMPUTE_TYPE).reduction_scheme_mask == 3
    assert MatmulPlanPreferences(epilog={"aux_type": 28}).epilog == MatmulEpilogPreferences(aux_type=enums.CudaDataType.CUDA_R_8F_E4M3)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"reduction_scheme_mask": 8}, "reduction_scheme_mask"),
        ({"max_waves_count": float("nan")}, "max_waves_count"),
        ({"max_waves_count": -1.0}, "max_waves_count"),
        ({"numerical_impl_mask": -1}, "numerical_impl_mask"),
        ({"numerical_impl_mask": 1 << 64}, "numerical_impl_mask"),
        ({"limit": -1}, "limit"),
        ({"limit": 2.0}, "limit"),
        ({"epilog": {"aux_type": 99}}, "99 is not a valid CudaDataType"),
        ({"epilog": {"aux_amax": "no"}}, "aux_amax"),
    ],
)
def test_wrong_preferences(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MatmulPlanPreferences(**fields)


def test_wrong_epilog_preferences_type() -> None:
    with pytest.raises(TypeError, match="The epilog preferences must be provided as an object of type MatmulEpilogPreferences or"):
        MatmulPlanPreferences(epilog="x")  # type: ignore[arg-type]


def test_validated_copies_nested_preferences() -> None:
    given = MatmulPlanPreferences(epilog={"aux_amax": True})
    copy = given.validated()
    assert copy == given
    assert copy.epilog is not given.epilog


@pytest.mark.parametrize("scale", ["1.0", 1j, [1.0], {}])
def test_wrong_scales(scale: Any) -> None:
    with pytest.raises(errors.OptionError, match="The quantization scale for B must be a scalar or a float32 tensor"):
        MatmulQuantizationScales(b=scale)


# ---------------------------------------------------------------- memory

TOTAL = 141_000_000_000


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("80%", 112_800_000_000),
        (" 26 % ", 36_660_000_000),
        ("100%", TOTAL),
        ("0.05 GiB", 53_687_091),
        ("50 MB", 50_000_000),
        ("50mb", 50_000_000),
        ("1 kB", 1_000),
        ("1KiB", 1_024),
        ("2M", 2_000_000),
        ("1.5e3 B", 1_500),
        (".5 GB", 500_000_000),
        (0, 0),
        (1, 1),
        (1.0, TOTAL),
        (0.5, 70_500_000_000),
        (50e6, 50_000_000),
        (4096, 4096),
        (np.int64(4096), 4096),
    ],
)
def test_memory_limit(limit: Any, expected: int) -> None:
    assert options.memory_limit_bytes(limit, TOTAL) == expected
    assert MatmulOptions(memory_limit=limit).memory_limit == limit


@pytest.mark.parametrize(
    "limit", ["", "80", "-1 MB", "101%", "0%", "5 XB", "1 iB", "80%%", "1 MBs", -1, -0.5, float("nan"), float("inf"), True, b"80%", [1]]
)
def test_wrong_memory_limit(limit: Any) -> None:
    with pytest.raises(ValueError, match="The memory limit must be specified in one of the following forms"):
        options.memory_limit_bytes(limit, TOTAL)


def test_memory_pointer_frees_once() -> None:
    freed: list[str] = []
    pointer = options.MemoryPointer(0x100, 16, lambda: freed.append("first"))
    assert (pointer.device_ptr, pointer.size) == (0x100, 16)
    pointer.free()
    with pytest.raises(RuntimeError, match="The buffer has already been freed"):
        pointer.free()
    dropped = options.MemoryPointer(0x200, 16, lambda: freed.append("second"))
    del dropped
    assert freed == ["first", "second"]
    options.MemoryPointer(0x300, 16, None).free()


# ---------------------------------------------------------------- frozen_key

# For each field another value than its default: every field must change the key.
OTHER_VALUES: dict[str, Any] = {
    "inplace": True, "compute_type": 68, "scale_type": 0, "result_type": 0, "result_amax": True, "block_scaling": True,
    "sm_count_target": 4,
    "fast_accumulation": True, "device_id": 0, "handle": 7, "logger": logging.getLogger("test_options"), "memory_limit": 1024,
    "blocking": True, "allocator": _Allocator(), "rounding": "eager", "strict": True, "result_order": "row",
}  # fmt: skip


def test_every_field_changes_the_key() -> None:
    assert set(OTHER_VALUES) == {field.name for field in dataclasses.fields(MatmulOptions)}
    keys = [options.frozen_key(MatmulOptions(**{name: value})) for name, value in OTHER_VALUES.items()]
    keys.append(options.frozen_key(MatmulOptions()))
    assert len(set(keys)) == len(OTHER_VALUES) + 1


def test_every_preference_changes_the_key() -> None:
    others = {"reduction_scheme_mask": 1, "max_waves_count": 1.0, "numerical_impl_mask": 2, "limit": 1, "epilog": {"aux_amax": True}}
    assert set(others) == {field.name for field in dataclasses.fields(MatmulPlanPreferences)}
    keys = {options.frozen_key(MatmulPlanPreferences(**{name: value})) for name, value in others.items()}  # type: ignore[arg-type]
    assert len(keys | {options.frozen_key(MatmulPlanPreferences()), options.frozen_key(MatmulEpilogPreferences())}) == len(others) + 2


def test_equal_options_have_equal_keys() -> None:
    for make in (MatmulOptions, MatmulPlanPreferences, MatmulEpilogPreferences, lambda: {"strict": True, "epilog": {"aux_amax": True}}):
        first, second = options.frozen_key(make()), options.frozen_key(make())
        assert first == second
        assert hash(first) == hash(second)
    assert options.frozen_key(None) is None


def test_numbers_of_different_types_have_different_keys() -> None:
    keys = [options.frozen_key({"memory_limit": value}) for value in (1, 1.0, True, "1", np.int64(1))]
    assert len(set(keys)) == len(keys)


def test_services_enter_by_identity_and_stay_alive() -> None:
    first, second = _Allocator(), _Allocator()
    assert options.frozen_key({"allocator": first}) == options.frozen_key({"allocator": first})
    assert options.frozen_key({"allocator": first}) != options.frozen_key({"allocator": second})
    # A key that held only an id() could meet the next object at the same address.
    keys = {options.frozen_key({"allocator": _Allocator()}) for _ in range(50)}
    assert len(keys) == 50


@pytest.mark.parametrize("value", [{"compute_type": [68]}, {"memory_limit": np.ones(3)}, {"epilog": object()}, object(), MatmulOptions])
def test_what_has_no_content_is_refused(value: Any) -> None:
    with pytest.raises(errors.StoreKeyError, match="cannot be cached"):
        options.frozen_key(value)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("x", TypeError, "must be provided as an object of type MatmulOptions"),
        ({"memory_limit": [1]}, ValueError, "The memory limit must be specified"),
        ({"compute_type": object()}, ValueError, "is not a valid ComputeType"),
        ({"x": []}, TypeError, "unexpected keyword argument 'x'"),
    ],
)
def test_options_key_raises_the_options_own_error(value: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        options.options_key(MatmulOptions, value, WHAT)


def test_options_key_of_what_is_valid() -> None:
    assert options.options_key(MatmulOptions, None, WHAT) is None
    theirs = enum.IntEnum("ComputeType", {"COMPUTE_32F": 68})  # another library's enum
    with pytest.raises(errors.StoreKeyError):
        options.frozen_key({"compute_type": theirs.COMPUTE_32F})
    key = options.options_key(MatmulOptions, {"compute_type": theirs.COMPUTE_32F}, WHAT)
    assert key == options.frozen_key(MatmulOptions(compute_type=68))


def test_scales_enter_by_form_and_hold_no_tensor() -> None:
    tensor = np.ones(1, np.float32)
    key = options.frozen_key(MatmulQuantizationScales(a=2.0, b=tensor))
    assert key == options.frozen_key(MatmulQuantizationScales(a=3, b=np.zeros(1, np.float32)))
    assert key != options.frozen_key(MatmulQuantizationScales(a=2.0))
    assert key != options.frozen_key(MatmulQuantizationScales(a=tensor, b=2.0))
    assert sys.getrefcount(tensor) == 2


# ---------------------------------------------------------------- qualifiers


def _qualifiers(a: int = 0, b: int = 0, c: int = 0) -> np.ndarray[Any, Any]:
    made = np.zeros(3, dtype=options.matrix_qualifiers_dtype)
    made["is_conjugate"] = a, b, c
    return made


def test_qualifiers_dtype_is_the_peers() -> None:
    assert options.matrix_qualifiers_dtype == np.dtype([("structure", object), ("is_conjugate", "<i4")])


@pytest.mark.parametrize(
    ("qualifiers", "lazy", "expected"),
    [
        (None, (False, False), (False, False)),
        (None, (True, False), (True, False)),
        (_qualifiers(1, 0), (False, False), (True, False)),
        (_qualifiers(0, 1), (False, False), (False, True)),
        (_qualifiers(2, 1), (True, False), (False, True)),
        (_qualifiers(1, 1), (True, True), (False, False)),
    ],
)
def test_conjugate_flags(qualifiers: Any, lazy: tuple[bool, bool], expected: tuple[bool, bool]) -> None:
    before = None if qualifiers is None else qualifiers.copy()
    assert options.conjugate_flags(qualifiers, lazy=lazy) == expected
    assert options.conjugate_flags(qualifiers, lazy=lazy, is_complex=False) == (False, False)
    assert qualifiers is None or (qualifiers == before).all(), "the caller's array must not be written to"


@pytest.mark.parametrize(
    ("qualifiers", "kind", "text"),
    [
        ([0, 0, 0], AttributeError, "must be specified as a NumPy array of length 3"),
        (np.zeros(3), ValueError, "The qualifiers must be specified as a NumPy array of length 3"),
        (_qualifiers()[:2], ValueError, "The qualifiers must be specified as a NumPy array of length 3"),
        (_qualifiers(c=1), ValueError, "The conjugate flag is currently not supported for operand C."),
    ],
)
def test_wrong_qualifiers(qualifiers: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        options.conjugate_flags(qualifiers)


# ---------------------------------------------------------------- the peer's names

PEER_NAMES = {
    "Algorithm", "Matmul", "MatmulComputeType", "MatmulEpilog", "MatmulEpilogPreferences", "MatmulInnerShape", "MatmulNumericalImplFlags",
    "MatmulOptions", "MatmulPlanPreferences", "MatmulQuantizationScales", "MatmulReductionScheme", "helpers", "matmul",
    "matrix_qualifiers_dtype",
}  # fmt: skip
OUR_ADDITIONS = {"BaseCUDAMemoryManager", "BaseCUDAMemoryManagerAsync", "CudaDataType", "InvalidMatmulState", "MemoryPointer"}
HELPERS = {
    "BlockScalingFormat", "apply_mxfp8_scale", "create_mxfp8_scale", "expand_block_scale", "get_block_scale_offset",
    "get_mxfp8_scale_offset", "invert_mxfp8_scale", "quantize_to_fp4", "to_block_scale", "unpack_fp4",
}  # fmt: skip


def test_advanced_exports_the_peers_names() -> None:
    advanced = epigemm.linalg.advanced
    assert set(advanced.__all__) == PEER_NAMES | OUR_ADDITIONS
    for name in advanced.__all__:
        value = getattr(advanced, name)
        assert name == "helpers" or value is getattr(importlib.import_module(advanced._MODULE_OF[name]), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        advanced.nothing  # noqa: B018


def test_advanced_names_are_the_top_levels() -> None:
    shared = set(epigemm.__all__) & set(epigemm.linalg.advanced.__all__)
    assert shared >= (PEER_NAMES | OUR_ADDITIONS) - {"helpers", "MemoryPointer"}
    for name in shared:
        assert getattr(epigemm, name) is getattr(epigemm.linalg.advanced, name)


def test_helpers_export_the_peers_names() -> None:
    matmul = epigemm.linalg.advanced.helpers.matmul
    assert set(matmul.__all__) == HELPERS
    assert importlib.import_module("epigemm.linalg.advanced.helpers.matmul") is matmul
    assert all(callable(getattr(matmul, name)) for name in HELPERS)


def test_invalid_state_is_where_the_peer_has_it() -> None:
    module = importlib.import_module("epigemm.linalg.advanced.matmulmod")
    assert module.InvalidMatmulState is errors.InvalidMatmulState


def test_options_and_helpers_load_no_optional_library() -> None:
    code = (
        "import sys; import epigemm as nvmath; nvmath.linalg.advanced.MatmulOptions(); nvmath.linalg.advanced.helpers.matmul;"
        "print(sorted({'torch', 'triton', 'cupy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

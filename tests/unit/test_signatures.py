"""The peer's signatures (its reference, 1.2 and 1.3): every parameter is here under its name, of its kind, with its default."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from epigemm.linalg import advanced

_RESET = "* a=None b=None c=None alpha=None beta=None quantization_scales=None epilog_inputs=None stream=None"

# The peer's parameters; after "|" what we add, which must have a default.
FUNCTIONS = {
    "matmul": """a b / c=None * alpha=None beta=None epilog=None epilog_inputs=None qualifiers=None quantization_scales=None options=None
        preferences=None algorithm=None stream=None | out=None engine='auto'""",
    "Matmul": "a b / c=None * alpha=None beta=None qualifiers=None quantization_scales=None options=None stream=None",
    "Matmul.plan": "* preferences=None algorithms=None epilog=None epilog_inputs=None stream=None | options=None engine='auto'",
    "Matmul.autotune": "iterations=10 prune=None release_workspace=False stream=None",
    "Matmul.execute": "* algorithm=None release_workspace=False stream=None | out=None",
    "Matmul.reset_operands": _RESET,
    "Matmul.reset_operands_unchecked": _RESET,
    "Matmul.release_operands": "",
    "Matmul.applicable_algorithm_ids": "limit=8",
    "Matmul.free": "",
}

# The peer's fields with their defaults; device_id differs: None computes CPU operands on the CPU, where the peer copies them to GPU 0.
FIELDS: dict[str, dict[str, Any]] = {
    "MatmulOptions": {
        "inplace": False, "compute_type": None, "scale_type": None, "result_type": None, "result_amax": False, "block_scaling": False,
        "sm_count_target": 0, "fast_accumulation": False, "device_id": None, "handle": None, "logger": None, "memory_limit": "80%",
        "blocking": "auto", "allocator": None,
    },
    "MatmulPlanPreferences": {
        "reduction_scheme_mask": 7, "max_waves_count": 0.0, "numerical_impl_mask": (1 << 64) - 1, "limit": 8, "epilog": None,
    },
    "MatmulEpilogPreferences": {"aux_type": None, "aux_amax": False},
    "MatmulQuantizationScales": {"a": None, "b": None, "c": None, "d": None},
}  # fmt: skip


def written(signature: inspect.Signature) -> list[str]:
    """The parameters as in FUNCTIONS, `self` left out."""
    words: list[str] = []
    kind = None
    for name, parameter in signature.parameters.items():
        if kind is inspect.Parameter.POSITIONAL_ONLY and parameter.kind is not kind:
            words.append("/")
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and kind is not parameter.kind:
            words.append("*")
        kind = parameter.kind
        words.append(name if parameter.default is parameter.empty else f"{name}={parameter.default!r}")
    return words


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_there(name: str) -> None:
    found: Any = advanced
    for part in name.split("."):
        found = getattr(found, part)
    signature = inspect.signature(found)
    if "." in name:
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    peers, _, ours = FUNCTIONS[name].partition("|")
    assert written(signature) == [*peers.split(), *ours.split()]


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_there_first_and_in_order(name: str) -> None:
    fields = dataclasses.fields(getattr(advanced, name))[: len(FIELDS[name])]
    assert {field.name: field.default for field in fields} == FIELDS[name]
    assert [field.name for field in fields] == list(FIELDS[name])

"""Which options have an effect on which engine: what `explain()` says of the others."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from epigemm.options import MatmulOptions, MatmulPlanPreferences

_PRODUCTS_BY_CUBLASLT = ("cublaslt", "unfused")


@dataclass(frozen=True, slots=True)
class _Effect:
    """Where an option has an effect, and why it has none on other engines."""

    engines: tuple[str, ...]
    why_not: str


_EFFECTS: dict[str, _Effect] = {
    "sm_count_target": _Effect(("cublaslt", "unfused", "triton", "hopper"), "it has no multiprocessors"),
    "handle": _Effect(_PRODUCTS_BY_CUBLASLT, "it calls no cuBLASLt"),
    "allocator": _Effect(_PRODUCTS_BY_CUBLASLT, "its workspace does not come from an allocator"),
    "reduction_scheme_mask": _Effect(_PRODUCTS_BY_CUBLASLT, "it chooses among none of cuBLASLt's algorithms"),
    "max_waves_count": _Effect(_PRODUCTS_BY_CUBLASLT, "it chooses among none of cuBLASLt's algorithms"),
    "numerical_impl_mask": _Effect(_PRODUCTS_BY_CUBLASLT, "it chooses among none of cuBLASLt's algorithms"),
}
_ON_CPU: dict[str, str] = {
    "blocking": "every call returns when it is done",
    "fast_accumulation": "8-bit operands accumulate in float32",
    "strict": "its special values are what strict means",
}


def notes(options: MatmulOptions, preferences: MatmulPlanPreferences, engine: str) -> tuple[str, ...]:
    """One sentence for each option that was given and does nothing on this engine."""
    given = _changed(options) | _changed(preferences)
    table = {name: effect.why_not for name, effect in _EFFECTS.items() if engine not in effect.engines}
    if engine == "cpu":
        table |= _ON_CPU
    return tuple(f"{name} does nothing on the engine {engine}: {why}" for name, why in table.items() if name in given)


def _changed(given: Any) -> set[str]:
    """The fields that are not as by default."""
    usual = type(given)()
    return {field.name for field in fields(given) if getattr(given, field.name) != getattr(usual, field.name)}

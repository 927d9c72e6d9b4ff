"""Candidates as plain data: what a stored one is valid for, and whether it is valid here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from epigemm import __version__, errors
from epigemm.engines.cuda import libraries
from epigemm.expression import format
from epigemm.expression.nodes import Expression
from epigemm.plans import Candidate
from epigemm.problem import Operand, Problem

SCHEMA = 1

# What of the options decides no kernel: where a launch goes and what it may be chosen from.
_UNDECIDING = ("handle", "memory_limit", "reduction_scheme_mask", "max_waves_count", "numerical_impl_mask", "strict")
# No access is wider, so that operands that are aligned better are the same.
_WIDEST_BYTES = 16


def problem_text(problem: Problem, expression: Expression) -> str:
    """All of a problem and its epilogue that decides what a candidate computes, as text."""
    named = (("a", problem.a), *(("b", b) for b in problem.b), *((("c", problem.c),) if problem.c else ()), ("d", problem.d))
    operands = [f"{name}={_operand_text(x)}" for name, x in (*named, *problem.inputs)]
    compute = [f"{name}={value}" for name, value in asdict(problem.compute).items() if name not in _UNDECIDING]
    return " ".join([f"batch={list(problem.batch)}", *operands, *compute]) + "; " + format.text(expression)


def _operand_text(x: Operand) -> str:
    conjugate = " conj" if x.conjugate else ""
    return f"{x.dtype.name}{list(x.shape)}{list(x.strides)}@{min(x.alignment_bytes, _WIDEST_BYTES)}{conjugate}"


def versions(device: str) -> dict[str, str]:
    """What a candidate of our own kernels is valid for: this library and the device by name."""
    if device == "cpu":
        return {"epigemm": __version__}
    return {"epigemm": __version__, "device": libraries.open_driver().device_name(int(device.partition(":")[2]))}


def encoded(candidate: Candidate) -> dict[str, Any]:
    """A candidate's settings as JSON's types."""
    return {"settings": dict(candidate.config), "workspace_bytes": candidate.workspace_bytes}


def decoded(engine: str, data: Mapping[str, Any]) -> Candidate:
    """The candidate that `encoded` wrote.

    Raises:
        errors.AlgorithmError: the data is damaged.
    """
    settings, workspace_bytes = data.get("settings"), data.get("workspace_bytes")
    if not isinstance(settings, Mapping) or not isinstance(workspace_bytes, int) or workspace_bytes < 0:
        raise errors.damaged_algorithm(f"settings={settings!r}, workspace_bytes={workspace_bytes!r}")
    config = {str(name): tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    return Candidate(engine, tuple(sorted(config.items())), workspace_bytes)


def check(data: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises unless stored data was written for what is expected.

    Raises:
        errors.AlgorithmError: it was written for another engine, problem, library or device; the message says which.
    """
    for name, value in expected.items():
        if data.get(name) != value:
            raise errors.stored_for_another(name, data.get(name), value)

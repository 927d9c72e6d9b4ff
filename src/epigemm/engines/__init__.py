"""The engines by name, each loaded when it is first asked."""

from __future__ import annotations

import importlib
from functools import cache

from epigemm import errors
from epigemm.engines.base import AbstractEngine

# name -> (module that holds ENGINE, kind of device that it computes on). The order is the order in which "auto" asks them.
ENGINES: dict[str, tuple[str, str]] = {
    "cpu": ("epigemm.engines.cpu.engine", "cpu"),
    "cublaslt": ("epigemm.engines.cublaslt.engine", "cuda"),
    "unfused": ("epigemm.engines.unfused.engine", "cuda"),
    "triton": ("epigemm.engines.triton.engine", "cuda"),
}
# Engines that also run their kernels on the CPU, slowly, for tests, where they are asked for by name.
EMULATED = ("triton",)


@cache
def get(name: str) -> AbstractEngine:
    """The engine of this name.

    Raises:
        errors.OptionError: there is none of this name.
    """
    if name not in ENGINES:
        raise errors.unknown_engine(name, ENGINES)
    engine: AbstractEngine = importlib.import_module(ENGINES[name][0]).ENGINE
    return engine


def for_device(device: str) -> tuple[str, ...]:
    """The names of the engines that compute on "cpu" or "cuda:<index>"."""
    return tuple(name for name, (_, kind) in ENGINES.items() if kind == device.partition(":")[0])


def named_for_device(device: str) -> tuple[str, ...]:
    """The names of the engines that may be asked for by name on "cpu" or "cuda:<index>"; each says itself whether it then runs."""
    return (*for_device(device), *(EMULATED if device == "cpu" else ()))

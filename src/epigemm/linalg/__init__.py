"""Linear algebra under the peer's path: `import epigemm as nvmath; nvmath.linalg.advanced.matmul(a, b)`."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["advanced"]


def __getattr__(name: str) -> Any:
    if name == "advanced":
        return importlib.import_module("epigemm.linalg.advanced")
    raise AttributeError(f"module 'epigemm.linalg' has no attribute {name!r}")

"""The peer's module of `Matmul`, for programs that catch its `InvalidMatmulState`."""

from __future__ import annotations

from epigemm.api import Matmul, matmul
from epigemm.errors import InvalidMatmulState

__all__ = ["InvalidMatmulState", "Matmul", "matmul"]

"""Helpers for narrow types, under the peer's path: `helpers.matmul`."""

from __future__ import annotations

from epigemm.linalg.advanced.helpers import matmul as matmul

__all__ = ["matmul"]

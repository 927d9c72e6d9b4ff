"""The names of `nvmath.linalg.advanced`, under its path: a program written for it runs with its import changed.

Each name is epigemm's own and is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epigemm.algorithms import Algorithm as Algorithm
    from epigemm.api import Matmul as Matmul
    from epigemm.api import matmul as matmul
    from epigemm.errors import InvalidMatmulState as InvalidMatmulState
    from epigemm.linalg.advanced import helpers as helpers
    from epigemm.options import BaseCUDAMemoryManager as BaseCUDAMemoryManager
    from epigemm.options import BaseCUDAMemoryManagerAsync as BaseCUDAMemoryManagerAsync
    from epigemm.options import CudaDataType as CudaDataType
    from epigemm.options import MatmulComputeType as MatmulComputeType
    from epigemm.options import MatmulEpilog as MatmulEpilog
    from epigemm.options import MatmulEpilogPreferences as MatmulEpilogPreferences
    from epigemm.options import MatmulInnerShape as MatmulInnerShape
    from epigemm.options import MatmulNumericalImplFlags as MatmulNumericalImplFlags
    from epigemm.options import MatmulOptions as MatmulOptions
    from epigemm.options import MatmulPlanPreferences as MatmulPlanPreferences
    from epigemm.options import MatmulQuantizationScales as MatmulQuantizationScales
    from epigemm.options import MatmulReductionScheme as MatmulReductionScheme
    from epigemm.options import MemoryPointer as MemoryPointer
    from epigemm.options import matrix_qualifiers_dtype as matrix_qualifiers_dtype

_NAMES_BY_MODULE = {
    "epigemm.algorithms": "Algorithm",
    "epigemm.api": "Matmul matmul",
    "epigemm.errors": "InvalidMatmulState",
    "epigemm.options": """BaseCUDAMemoryManager BaseCUDAMemoryManagerAsync CudaDataType MatmulComputeType MatmulEpilog
        MatmulEpilogPreferences MatmulInnerShape MatmulNumericalImplFlags MatmulOptions MatmulPlanPreferences
        MatmulQuantizationScales MatmulReductionScheme MemoryPointer matrix_qualifiers_dtype""",
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
_SUBMODULES = ("helpers", "matmulmod")

__all__ = sorted((*_MODULE_OF, "helpers"))


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"epigemm.linalg.advanced.{name}")
    else:
        raise AttributeError(f"module 'epigemm.linalg.advanced' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_SUBMODULES})

"""Matrix products whose epilogue runs inside the product's own kernel: D = epilogue(alpha * A @ B + beta * C).

Public names only, each loaded when it is first used: `import epigemm` loads neither NumPy, torch, triton nor CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from epigemm.algorithms import Algorithm as Algorithm
    from epigemm.api import Matmul as Matmul
    from epigemm.api import matmul as matmul
    from epigemm.errors import AlgorithmError as AlgorithmError
    from epigemm.errors import AlgorithmTypeError as AlgorithmTypeError
    from epigemm.errors import ConfigError as ConfigError
    from epigemm.errors import DeviceMismatchError as DeviceMismatchError
    from epigemm.errors import DTypeError as DTypeError
    from epigemm.errors import EngineUnavailable as EngineUnavailable
    from epigemm.errors import EpigemmError as EpigemmError
    from epigemm.errors import EpigemmWarning as EpigemmWarning
    from epigemm.errors import EpilogInputError as EpilogInputError
    from epigemm.errors import EpilogTypeError as EpilogTypeError
    from epigemm.errors import ExpressionError as ExpressionError
    from epigemm.errors import GradientError as GradientError
    from epigemm.errors import InvalidMatmulState as InvalidMatmulState
    from epigemm.errors import LayoutError as LayoutError
    from epigemm.errors import LibraryError as LibraryError
    from epigemm.errors import OperandTypeError as OperandTypeError
    from epigemm.errors import OptionError as OptionError
    from epigemm.errors import OptionTypeError as OptionTypeError
    from epigemm.errors import OverlapError as OverlapError
    from epigemm.errors import PackageMismatchError as PackageMismatchError
    from epigemm.errors import PlanningError as PlanningError
    from epigemm.errors import QualifiersTypeError as QualifiersTypeError
    from epigemm.errors import RankError as RankError
    from epigemm.errors import ShapeError as ShapeError
    from epigemm.errors import StateError as StateError
    from epigemm.errors import StoreError as StoreError
    from epigemm.errors import TraceError as TraceError
    from epigemm.errors import UnsupportedEpilogue as UnsupportedEpilogue
    from epigemm.errors import UnsupportedProblem as UnsupportedProblem
    from epigemm.expression import abs as abs
    from epigemm.expression import amax as amax
    from epigemm.expression import bitmask as bitmask
    from epigemm.expression import cast as cast
    from epigemm.expression import clamp as clamp
    from epigemm.expression import dropout as dropout
    from epigemm.expression import epilogue as epilogue
    from epigemm.expression import erf as erf
    from epigemm.expression import exp as exp
    from epigemm.expression import gelu as gelu
    from epigemm.expression import hardswish as hardswish
    from epigemm.expression import leaky_relu as leaky_relu
    from epigemm.expression import log as log
    from epigemm.expression import maximum as maximum
    from epigemm.expression import minimum as minimum
    from epigemm.expression import mish as mish
    from epigemm.expression import operand_sum as operand_sum
    from epigemm.expression import outputs as outputs
    from epigemm.expression import relu as relu
    from epigemm.expression import relu_aux as relu_aux
    from epigemm.expression import rsqrt as rsqrt
    from epigemm.expression import sigmoid as sigmoid
    from epigemm.expression import silu as silu
    from epigemm.expression import softplus as softplus
    from epigemm.expression import sqrt as sqrt
    from epigemm.expression import square as square
    from epigemm.expression import sum as sum
    from epigemm.expression import tanh as tanh
    from epigemm.expression import unbitmask as unbitmask
    from epigemm.expression import where as where
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

# The public names by the module that defines them. tests/unit/test_structure.py holds the imports above equal to it.
_NAMES_BY_MODULE = {
    "epigemm.algorithms": "Algorithm",
    "epigemm.api": "Matmul matmul",
    "epigemm.errors": """AlgorithmError AlgorithmTypeError ConfigError DTypeError DeviceMismatchError EngineUnavailable EpigemmError
        EpigemmWarning EpilogInputError EpilogTypeError ExpressionError GradientError InvalidMatmulState LayoutError LibraryError
        OperandTypeError OptionError OptionTypeError OverlapError PackageMismatchError PlanningError QualifiersTypeError RankError
        ShapeError StateError StoreError TraceError UnsupportedEpilogue UnsupportedProblem""",
    "epigemm.expression": """abs amax bitmask cast clamp dropout epilogue erf exp gelu hardswish leaky_relu log maximum minimum mish
        operand_sum outputs relu relu_aux rsqrt sigmoid silu softplus sqrt square sum tanh unbitmask where""",
    "epigemm.linalg.advanced": "helpers",
    "epigemm.options": """BaseCUDAMemoryManager BaseCUDAMemoryManagerAsync CudaDataType MatmulComputeType MatmulEpilog
        MatmulEpilogPreferences MatmulInnerShape MatmulNumericalImplFlags MatmulOptions MatmulPlanPreferences
        MatmulQuantizationScales MatmulReductionScheme MemoryPointer matrix_qualifiers_dtype""",
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
# `import epigemm as nvmath; nvmath.linalg.advanced.Matmul`: these need no import statement of their own.
_SUBMODULES = ("bench", "errors", "linalg", "pytorch", "testing")

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"epigemm.{name}")
    else:
        raise AttributeError(f"module 'epigemm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_SUBMODULES})

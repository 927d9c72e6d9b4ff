"""The one place where the layers call a product."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from epigemm.api import matmul
from epigemm.dtypes import DTYPES
from epigemm.enums import MatmulComputeType
from epigemm.expression.nodes import Expression
from epigemm.options import MatmulOptions

# The precision setting of torch 2.9 and later, which knows of the older flag too; None before.
_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


def product(
    a: Tensor,
    b: Sequence[Tensor],
    expression: Expression,
    inputs: dict[str, Any],
    c: Tensor | None = None,
    result: str = "",
    turned: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """D, row-major, and the expression's other outputs.

    Args:
        a: (m, k).
        b: one (k, n) for each accumulator.
        expression: unchecked.
        inputs: by name, of at most two dimensions.
        c: added to the product.
        result: dtype name of D, "" for a's.
        turned: `b` are weights (n, k), whose transposes are meant.
    """
    tf32 = a.dtype is torch.float32 and a.is_cuda and tf32_allowed()
    # D takes A's order unless told otherwise; a call without options is the one that costs least.
    default = c is None and not result and not tf32 and a.stride(1) == 1 and a.stride(0) >= a.shape[1]
    options = None if default else _options(result, tf32)
    beta = None if c is None else 1.0
    if turned:
        b = [weight.t() for weight in b]
    found = matmul(a, b[0] if len(b) == 1 else tuple(b), c, beta=beta, epilog=expression, epilog_inputs=inputs or None, options=options)
    return found if isinstance(found, tuple) else (found, {})


def tf32_allowed() -> bool:
    """Whether float32 products may use TF32: what `torch.backends.cuda.matmul` says."""
    if _precision is not None:
        return bool(_precision("cuda", "matmul") == "tf32")
    return bool(torch.backends.cuda.matmul.allow_tf32)


@cache
def _options(result: str, tf32: bool) -> MatmulOptions:
    return MatmulOptions(
        result_order="row",
        result_type=DTYPES[result].cuda_type if result else None,
        compute_type=MatmulComputeType.COMPUTE_32F_FAST_TF32 if tf32 else None,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The name that a torch dtype has in the dtype table."""
    return str(dtype).removeprefix("torch.")

"""A product in words, "m=4096 n=11008 k=4096 bf16 gelu_bias", and its plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from epigemm import dtypes, errors, layouts
from epigemm.api import Matmul
from epigemm.enums import MatmulEpilog
from epigemm.expression.named import NAMED
from epigemm.tuning.select import AUTO

EXAMPLE = "m=4096 n=11008 k=4096 bf16 gelu_bias"


def parse(text: str) -> tuple[dict[str, int], str, MatmulEpilog | None]:
    """Extents, dtype and epilog of a product in words, in any order; float32 and no epilog if none are named.

    Args:
        text: "m=4096 n=11008 k=4096 bf16 gelu_bias", a batch as "batch=8".

    Raises:
        errors.OptionError: a word is none of these, or an extent is missing.

    Example:
        >>> parse("m=4 n=8 k=16 f16 relu_bias")
        ({'m': 4, 'n': 8, 'k': 16}, 'float16', <MatmulEpilog.RELU_BIAS: 6>)
    """
    extents: dict[str, int] = {}
    dtype, epilog = "float32", None
    spellings = {spelling: row.name for row in dtypes.DTYPES.values() for spelling in (row.name, row.short)}
    epilogs = {member.name.lower(): member for member in NAMED}
    for word in text.split():
        name, equals, value = word.partition("=")
        if equals and name.lower() in ("m", "n", "k", "batch") and value.isdigit():
            extents[name.lower()] = int(value)
        elif word.lower() in spellings:
            dtype = spellings[word.lower()]
        elif word.lower() in epilogs:
            epilog = epilogs[word.lower()]
        else:
            raise _unknown(word, [row.short for row in dtypes.DTYPES.values()], list(epilogs))
    if missing := [name for name in "mnk" if name not in extents]:
        raise errors.OptionError(errors.say(f"The problem {text!r} lacks {errors.listed(missing)}.", f'Write it as in "{EXAMPLE}".'))
    return extents, dtype, epilog


def _unknown(word: str, known_dtypes: list[str], epilogs: list[str]) -> errors.OptionError:
    what = f"{word!r} is neither an extent (m=, n=, k=, batch=), a dtype nor a predefined epilog."
    remedies = (
        f'Write the problem as in "{EXAMPLE}".',
        f"The dtypes are {errors.listed(known_dtypes)}.",
        f"The epilogs are {errors.listed(epilogs)}.",
        "For an epilogue of yours: Matmul(a, b), plan(epilog=...), then explain() in Python.",
    )
    return errors.OptionError(errors.say(what, *remedies))


def explain(text: str, engine: str = AUTO) -> str:
    """The plan, as text, of a product in words, for row-major operands on the CPU. Nothing is computed, and no memory is touched."""
    extents, dtype, epilog = parse(text)
    m, n, k, batch = (extents.get(name, 1) for name in ("m", "n", "k", "batch"))
    lead = (batch,) if "batch" in extents else ()
    row = dtypes.of(dtype)
    a, b = np.empty((*lead, m, k), row.numpy), np.empty((*lead, k, n), row.numpy)
    scales = {"a": 1.0, "b": 1.0, "d": 1.0} if row.is_narrow else None
    with Matmul(a, b, quantization_scales=scales) as product:
        product.plan(epilog=epilog, epilog_inputs=inputs(epilog, lead, m, n, row), engine=engine)
        return product.explain()


def inputs(epilog: MatmulEpilog | None, lead: tuple[int, ...], m: int, n: int, row: dtypes.DType) -> dict[str, Any]:
    """Uninitialised inputs of the right form."""
    forms = {
        "bias": ((m, 1), row.numpy),
        "relu_aux": ((layouts.mask_bytes(m), n), np.dtype(np.uint8)),
        "gelu_aux": ((layouts.round_up(m, 8), n), row.numpy),
    }
    made = {}
    for name in NAMED[epilog].inputs if epilog is not None else ():
        (rows, columns), dtype = forms[name]
        made[name] = np.empty((*lead, columns, rows), dtype).swapaxes(-1, -2)
    return made

"""The error types, and the functions that word them.

Every error says what is wrong, with which values, and what to do, in the caller's own terms. Each type derives from
`EpigemmError` and from the builtin class that `nvmath.linalg.advanced` raises for the same mistake, and the first line
keeps that library's words, since programs catch the one and match the other. The remedy stands on the lines below.

To add an error, add a function that returns it to `operands.py`, `calls.py` or `environment.py`, and raise it where the
mistake is found: `raise k_mismatch(32, 64)`.
"""

from __future__ import annotations

from epigemm.errors.calls import *
from epigemm.errors.environment import *
from epigemm.errors.operands import *
from epigemm.errors.types import *

"""Every environment variable: name, type, default, meaning. Read when needed, so that a change takes effect at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from epigemm import errors

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One environment variable.

    Args:
        name: as it is spelled in the environment.
        parse: the value of a text; raises ValueError for a text that is none.
        form: what `parse` takes, in words: "a whole number >= 0".
        default: the value where the variable is not set, or set to nothing.
        meaning: one sentence.
    """

    name: str
    parse: Callable[[str], T]
    form: str
    default: T
    meaning: str

    def get(self) -> T:
        """The value now.

        Raises:
            ConfigError: the text that is set is not of the variable's form.
        """
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise errors.wrong_variable(self.name, text, self.form) from None


# Binary and decimal units, as in "1.5 GiB" and "200 MB".
_UNIT_BYTES = {"": 1, "B": 1} | {
    f"{letter}{i}B": base**power for power, letter in enumerate("KMGT", 1) for i, base in (("i", 1024), ("", 1000))
}


def parse_bytes(text: str) -> int:
    """The number of bytes that a text such as "512 MiB" means.

    Raises:
        ValueError: the text is not a number with a unit of bytes.

    Example:
        >>> parse_bytes("1.5 KiB"), parse_bytes("2 MB"), parse_bytes("7")
        (1536, 2000000, 7)
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([A-Za-z]*)", text.strip())
    units = {unit.lower(): factor for unit, factor in _UNIT_BYTES.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"not a size in bytes: {text!r}")
    return int(float(match[1]) * units[match[2].lower()])


def _count(text: str) -> int:
    if (value := int(text)) < 0:
        raise ValueError(text)
    return value


def _folder(text: str) -> Path | None:
    return Path(text).expanduser().absolute()


CACHE_DIR: Variable[Path | None] = Variable(
    "EPIGEMM_CACHE_DIR",
    _folder,
    "a folder",
    None,
    "Where generated code, compiled kernels and tuned results are kept; the user's cache folder if not set.",
)
CACHE_BYTES = Variable(
    "EPIGEMM_CACHE_BYTES",
    parse_bytes,
    "a size such as '512 MiB'",
    1 << 30,
    "How much that folder may hold; what was not used for longest goes first.",
)
PLAN_CACHE_SIZE = Variable(
    "EPIGEMM_PLAN_CACHE_SIZE",
    _count,
    "a whole number >= 0",
    1024,
    "How many plans the stateless `matmul()` keeps in a process; 0 plans every call anew.",
)

VARIABLES: tuple[Variable[Path | None] | Variable[int], ...] = (CACHE_DIR, CACHE_BYTES, PLAN_CACHE_SIZE)

"""The error types: each derives from `EpigemmError` and from the builtin class that programs catch."""

from __future__ import annotations

from collections.abc import Iterable


class EpigemmError(Exception):
    """What every error raised on purpose by epigemm derives from."""

    def __str__(self) -> str:
        # KeyError would show the repr of its message, on one line.
        return "\n".join(str(arg) for arg in self.args)


class ShapeError(EpigemmError, ValueError):
    """Extents that do not fit each other."""


class RankError(ShapeError, IndexError):
    """A tensor with too few dimensions."""


class DTypeError(EpigemmError, ValueError):
    """A data type, or a combination of them, that is not computed."""


class LayoutError(EpigemmError, ValueError):
    """Strides, order or alignment that cannot be used."""


class OverlapError(LayoutError):
    """An output whose memory overlaps an input or itself."""


class OptionError(EpigemmError, ValueError):
    """An option with a value that it cannot take."""


class OptionTypeError(EpigemmError, TypeError):
    """An option, or an options object, of the wrong type."""


class OperandTypeError(EpigemmError, ValueError, TypeError):
    """An operand that is not an array of a supported library."""


class PackageMismatchError(EpigemmError, TypeError):
    """Arrays of different libraries in one call."""


class DeviceMismatchError(EpigemmError, ValueError):
    """Arrays on different devices in one call."""


class EpilogInputError(EpigemmError, ValueError):
    """An epilogue input that is missing, unknown or of the wrong form."""


class UnknownInputError(EpilogInputError, KeyError):
    """An epilogue input whose name the plan does not have."""


class EpilogTypeError(EpigemmError, AssertionError, TypeError):
    """An `epilog=` that is neither an epilog, its name, nor an epilogue function."""


class QualifiersTypeError(EpigemmError, AttributeError, TypeError):
    """Qualifiers that are not a NumPy array."""


class AlgorithmError(EpigemmError, ValueError):
    """An algorithm that does not belong to the plan."""


class AlgorithmTypeError(EpigemmError, AssertionError, TypeError):
    """Something else where an `Algorithm` is expected."""


class NoAlgorithmsError(AlgorithmError, IndexError):
    """An empty sequence of algorithms."""


class TraceError(EpigemmError, TypeError):
    """An epilogue function that cannot be traced: data-dependent control flow, an unknown function, a bad signature."""


class ExpressionError(EpigemmError, ValueError):
    """An epilogue expression that the checker refuses; the message names the node."""


class GradientError(ExpressionError):
    """A gradient asked of an op that has none."""


class UnsupportedEpilogue(EpigemmError, ValueError):
    """An epilogue that the named engine cannot fuse; the message names the node."""


class UnsupportedProblem(EpigemmError, ValueError):
    """A product that the named engine cannot compute: its dtypes, shapes or layouts."""


class EngineUnavailable(EpigemmError, RuntimeError):
    """An engine whose library or device is missing; the message says what to install."""


class MissingPackageError(EpigemmError, ImportError):
    """An optional package that what was asked for needs; the message says how to install it."""


class LibraryError(EpigemmError, RuntimeError):
    """A status that a CUDA library returned."""


class PlanningError(EpigemmError, RuntimeError):
    """No algorithm was found for a problem."""


class StateError(EpigemmError, RuntimeError):
    """A method called before the one that it needs, or after its operands are gone."""


class InvalidMatmulState(EpigemmError):
    """A `Matmul` used after `free()`."""


class ConfigError(EpigemmError, ValueError):
    """An environment variable with a value that it cannot take."""


class StoreError(EpigemmError, RuntimeError):
    """The on-disk store cannot be used."""


class StorePermissionError(StoreError, PermissionError):
    """A cache folder that others own or can write to."""


class StoreKeyError(StoreError, TypeError):
    """A store key that cannot be fingerprinted."""


class EpigemmWarning(UserWarning):
    """What epigemm warns with."""


def say(what: str, *remedies: str) -> str:
    """The text of an error: what is wrong, then each remedy on an indented line of its own."""
    return "\n  ".join((what, *(remedy for remedy in remedies if remedy)))


def listed(names: Iterable[object], last: str = "and") -> str:
    """The names as English lists them: `a`, `a and b`, `a, b and c`."""
    words = [str(name) for name in names]
    return " ".join((", ".join(words[:-1]), last, words[-1])) if len(words) > 1 else "".join(words)

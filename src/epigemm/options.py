"""Options and preferences: the peer's dataclasses with their checks, and the key under which they enter the plan cache.

They are plain mutable dataclasses, as in the peer, and a dict of their fields is accepted wherever an object is. What
arrives is never kept: `as_options` returns a checked copy, so that a later change to the caller's object changes nothing.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from logging import Logger
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from epigemm import errors
from epigemm.enums import CudaDataType as CudaDataType
from epigemm.enums import MatmulComputeType as MatmulComputeType
from epigemm.enums import MatmulEpilog as MatmulEpilog
from epigemm.enums import MatmulInnerShape as MatmulInnerShape
from epigemm.enums import MatmulMatrixScale as MatmulMatrixScale
from epigemm.enums import MatmulNumericalImplFlags as MatmulNumericalImplFlags
from epigemm.enums import MatmulReductionScheme as MatmulReductionScheme
from epigemm.enums import Order as Order

matrix_qualifiers_dtype = np.dtype([("structure", object), ("is_conjugate", "<i4")])
"""dtype of `qualifiers`: an array of length 3 for A, B and C, of which `is_conjugate` of A and B is read."""

# ---------------------------------------------------------------- memory


class MemoryPointer:
    """A device buffer that frees itself.

    Args:
        device_ptr: address of the buffer.
        size: its size in bytes.
        finalizer: called without arguments when the buffer is freed, or None where another owns it.

    Example:
        >>> freed = []
        >>> pointer = MemoryPointer(0x1000, 256, lambda: freed.append("freed"))
        >>> pointer.free()
        >>> freed
        ['freed']
    """

    def __init__(self, device_ptr: int, size: int, finalizer: Callable[[], object] | None) -> None:
        self.device_ptr = device_ptr
        self.size = size
        self._finalizer = None if finalizer is None else weakref.finalize(self, finalizer)

    def free(self) -> None:
        """Frees the buffer now.

        Raises:
            errors.StateError: it has been freed before.
        """
        if self._finalizer is None:
            return
        if not self._finalizer.alive:
            raise errors.already_freed()
        self._finalizer()


@runtime_checkable
class BaseCUDAMemoryManager(Protocol):
    """What an `allocator` must offer: `memalloc(size)`, returning an object that owns `size` bytes of device memory.

    The address is read from the object's `device_ptr`, `device_pointer`, `ptr` or `pointer`; `MemoryPointer` is one such.
    """

    def memalloc(self, size: int) -> Any:
        """An owner of `size` bytes of device memory."""
        ...


@runtime_checkable
class BaseCUDAMemoryManagerAsync(Protocol):
    """As `BaseCUDAMemoryManager`, ordered by a stream: `memalloc_async(size, stream)`."""

    def memalloc_async(self, size: int, stream: Any) -> Any:
        """An owner of `size` bytes of device memory, usable from `stream` on."""
        ...


# A value followed by B, kB, MB, GB, TB (powers of 1000) or kiB, MiB, GiB, TiB (powers of 1024); the B may be left away.
_NUMBER = r"(?P<value>\+?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_PERCENTAGE = re.compile(rf"\s*{_NUMBER}\s*%\s*")
_SIZE = re.compile(rf"\s*{_NUMBER}\s*(?:(?P<prefix>[kmgt])(?P<binary>i)?b?|b)\s*", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def memory_limit_bytes(limit: int | float | str, total_bytes: int) -> int:
    """The bytes that a memory limit allows.

    Args:
        limit: bytes (an int, or a float above 1), a fraction of the total (a float of at most 1), a percentage
            ("80%"), or a size with its unit ("0.05 GiB", "50 MB").
        total_bytes: the device's memory.

    Raises:
        errors.OptionError: it has none of these forms, is negative, or is a percentage outside (0, 100].

    Example:
        >>> memory_limit_bytes("80%", 1000), memory_limit_bytes("0.5 KiB", 1000), memory_limit_bytes(0.25, 1000)
        (800, 512, 250)
    """
    if isinstance(limit, (int, float, np.integer, np.floating)) and not isinstance(limit, bool):
        return _number_bytes(limit, total_bytes)
    if not isinstance(limit, str):
        raise errors.wrong_memory_limit(limit)
    if match := _PERCENTAGE.fullmatch(limit):
        percentage = float(match["value"])
        if not 0 < percentage <= 100:
            raise errors.wrong_memory_limit(limit)
        return int(percentage * total_bytes / 100)
    if match := _SIZE.fullmatch(limit):
        base = 1024 if match["binary"] else 1000
        return int(float(match["value"]) * base ** _POWERS.get((match["prefix"] or "").lower(), 0))
    raise errors.wrong_memory_limit(limit)


def _number_bytes(limit: Any, total_bytes: int) -> int:
    if not 0 <= limit < float("inf"):
        raise errors.wrong_memory_limit(limit)
    if isinstance(limit, (float, np.floating)) and limit <= 1:
        return int(limit * total_bytes)
    return int(limit)


# ---------------------------------------------------------------- checks of single fields

_Enum = TypeVar("_Enum", bound=IntEnum)

# The names under which the peer's own errors speak of its enums.
_PEER_NAMES: dict[type[IntEnum], str] = {MatmulComputeType: "ComputeType", MatmulReductionScheme: "ReductionScheme"}


def _member(enum: type[_Enum], value: Any) -> _Enum | None:
    """The member with this value; None stays None."""
    if value is None:
        return None
    try:
        return enum(value)
    except ValueError:
        raise errors.not_a_member(value, _PEER_NAMES.get(enum, enum.__name__), enum.__members__) from None


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise errors.wrong_value(name, value, "True or False")


def _integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    allowed = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise errors.wrong_value(name, value, allowed)
    if value < least or (most is not None and value > most):
        raise errors.wrong_value(name, value, allowed)
    return int(value)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if isinstance(value, (str, type(None))) and value in allowed:
        return value
    raise errors.wrong_value(name, value, errors.listed(map(repr, allowed), "or"))


def _blocking(value: Any) -> Literal[True, "auto"]:
    if isinstance(value, str) and value == "auto":
        return "auto"
    if isinstance(value, (int, np.bool_)) and value == 1:  # True is 1
        return True
    raise errors.wrong_blocking(value)


# ---------------------------------------------------------------- options


@dataclass
class MatmulOptions:
    """Options of `Matmul` and `matmul`; a dict of these fields does as well.

    On the CPU `sm_count_target`, `fast_accumulation`, `handle`, `blocking`, `allocator` and `strict` change nothing: there are no
    multiprocessors, narrow types accumulate in float32, every call returns when it is done, no engine deviates. `explain()` names each
    option that was given and does nothing on the engine that was taken.

    Args:
        inplace: D is written into C.
        compute_type: a `MatmulComputeType`; by default the one of the operands' dtype (float32 means no TF32).
        scale_type: the `CudaDataType` of alpha and beta; by default that of the compute type.
        result_type: the `CudaDataType` of D; by default C's, else A's.
        result_amax: also return `aux["result_amax"]`, D's largest absolute value before its scale; for FP8 results.
        block_scaling: MXFP8 and NVFP4 scaling, which needs a Blackwell GPU; refused elsewhere.
        sm_count_target: number of multiprocessors that cuBLASLt uses; 0 is all.
        fast_accumulation: FP8 products accumulate in the tensor cores alone, without promotion to float32.
        device_id: the GPU on which to compute operands that lie on the CPU. None, the default, computes them where they
            lie, on the CPU engine (the peer copies them to GPU 0). Operands on a GPU are computed there in any case.
        handle: the cuBLASLt handle to launch with, as an int; by default one is kept for each device.
        logger: a `logging.Logger`, told of each phase at level INFO; by default the library's own, "epigemm".
        memory_limit: how much memory the workspace may take: see `memory_limit_bytes`. On the CPU, the panels; a fraction limits nothing.
        blocking: True waits for the result; "auto" waits only where operands lie on the CPU.
        allocator: where cuBLASLt's workspace comes from: a `BaseCUDAMemoryManager` or `BaseCUDAMemoryManagerAsync`, which frees in the
            order of the stream. `Matmul` keeps it until `free()` or `release_workspace=True`. Under capture, and for kernels of our
            own, workspace comes from the driver's stream-ordered pool.
        rounding: "once" rounds D when it is stored; "eager" rounds to D's dtype after every step that an unfused model
            would store.
        strict: refuse engines whose special values differ from the CPU engine's, instead of saying so in `explain()`.
        result_order: "row" or "col" fixes D's order; None leaves it to C, `out` or the epilog.

    Raises:
        errors.OptionError, errors.OptionTypeError: a field has a value that it cannot take; the message names it.

    Example:
        >>> MatmulOptions(compute_type=68).compute_type.name
        'COMPUTE_32F'
    """

    inplace: bool = False
    compute_type: int | None = None
    scale_type: int | None = None
    result_type: int | None = None
    result_amax: bool = False
    block_scaling: bool = False
    sm_count_target: int | None = 0
    fast_accumulation: bool | None = False
    device_id: int | None = None
    handle: int | None = None
    logger: Logger | None = None
    memory_limit: int | float | str | None = "80%"
    blocking: Literal[True, "auto"] = "auto"
    allocator: BaseCUDAMemoryManager | BaseCUDAMemoryManagerAsync | None = None
    rounding: Literal["once", "eager"] = "once"
    strict: bool = False
    result_order: Literal["row", "col"] | None = None

    def __post_init__(self) -> None:
        self.compute_type = _member(MatmulComputeType, self.compute_type)
        self.scale_type = _member(CudaDataType, self.scale_type)
        self.result_type = _member(CudaDataType, self.result_type)
        for name in ("inplace", "result_amax", "block_scaling", "strict"):
            setattr(self, name, _flag(name, getattr(self, name)))
        self.fast_accumulation = _flag("fast_accumulation", False if self.fast_accumulation is None else self.fast_accumulation)
        self.sm_count_target = _integer("sm_count_target", 0 if self.sm_count_target is None else self.sm_count_target, 0)
        if self.device_id is not None:
            self.device_id = _integer("device_id", self.device_id, 0)
        if self.handle is not None:
            self.handle = _integer("handle", self.handle, 0)
        self.memory_limit = "80%" if self.memory_limit is None else self.memory_limit
        memory_limit_bytes(self.memory_limit, 0)
        self.blocking = _blocking(self.blocking)
        if self.allocator is not None and not isinstance(self.allocator, (BaseCUDAMemoryManager, BaseCUDAMemoryManagerAsync)):
            raise errors.wrong_allocator(self.allocator)
        _one_of("rounding", self.rounding, ("once", "eager"))
        _one_of("result_order", self.result_order, (None, "row", "col"))

    def validated(self) -> MatmulOptions:
        """A checked copy: fields set after construction are checked too."""
        return dataclasses.replace(self)


@dataclass
class MatmulEpilogPreferences:
    """Preferences of an epilog's auxiliary output.

    Args:
        aux_type: the `CudaDataType` of `gelu_aux`; an FP8 type also needs the epilog input `aux_quantization_scale`.
        aux_amax: also return `aux["gelu_aux_amax"]`; for FP8 aux outputs.
    """

    aux_type: int | None = None
    aux_amax: bool = False

    def __post_init__(self) -> None:
        self.aux_type = _member(CudaDataType, self.aux_type)
        self.aux_amax = _flag("aux_amax", self.aux_amax)

    def validated(self) -> MatmulEpilogPreferences:
        """A checked copy."""
        return dataclasses.replace(self)


@dataclass
class MatmulPlanPreferences:
    """Preferences of `plan`: which of cuBLASLt's algorithms are considered, and the epilog's own preferences.

    The masks and `max_waves_count` hold for the engines cublaslt and unfused; on others they do nothing, as `explain()` says then.

    Args:
        reduction_scheme_mask: `MatmulReductionScheme` members joined by `|`.
        max_waves_count: algorithms that need more waves are left out; 0 is no limit.
        numerical_impl_mask: `MatmulNumericalImplFlags` members joined by `|`.
        limit: how many algorithms to consider.
        epilog: `MatmulEpilogPreferences`, or a dict of its fields.

    Example:
        >>> MatmulPlanPreferences(limit=4, epilog={"aux_amax": True}).epilog.aux_amax
        True
    """

    reduction_scheme_mask: int | None = MatmulReductionScheme.MASK
    max_waves_count: float | None = 0.0
    numerical_impl_mask: int | None = MatmulNumericalImplFlags.ALL
    limit: int | None = 8
    epilog: MatmulEpilogPreferences | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        mask = MatmulReductionScheme.MASK if self.reduction_scheme_mask is None else self.reduction_scheme_mask
        mask = _integer("reduction_scheme_mask", mask, 0, int(MatmulReductionScheme.MASK))
        # A sum of members has no name of its own and stays an int.
        self.reduction_scheme_mask = MatmulReductionScheme(mask) if mask in set(MatmulReductionScheme) else mask
        waves = 0.0 if self.max_waves_count is None else self.max_waves_count
        if not isinstance(waves, (int, float)) or not 0 <= waves < float("inf"):
            raise errors.wrong_value("max_waves_count", waves, "a finite number >= 0")
        self.max_waves_count = float(waves)
        flags = MatmulNumericalImplFlags.ALL if self.numerical_impl_mask is None else self.numerical_impl_mask
        self.numerical_impl_mask = MatmulNumericalImplFlags(_integer("numerical_impl_mask", flags, 0, (1 << 64) - 1))
        self.limit = _integer("limit", 8 if self.limit is None else self.limit, 0)
        self.epilog = as_options(MatmulEpilogPreferences, self.epilog, "epilog preferences")

    def validated(self) -> MatmulPlanPreferences:
        """A checked copy; its epilog preferences are copied too."""
        return dataclasses.replace(self)


@dataclass
class MatmulQuantizationScales:
    """Scales of FP8 operands: D = d * epilog(alpha * (a * A) @ (b * B) + beta * (c * C)).

    Args:
        a, b, c, d: a number, or a float32 tensor of shape () or (1,) of the operands' library, on their device. `a` and
            `b` are required for FP8 operands, `c` and `d` exactly where C and D are FP8.
    """

    a: Any = None
    b: Any = None
    c: Any = None
    d: Any = None

    def __post_init__(self) -> None:
        for name in ("a", "b", "c", "d"):
            scale = getattr(self, name)
            if isinstance(scale, (bool, int, float, np.bool_, np.integer, np.floating)):
                setattr(self, name, _scale_number(name, scale))
            elif scale is not None and (isinstance(scale, np.generic) or not hasattr(scale, "__dlpack__")):
                raise errors.wrong_scale(name.upper(), repr(scale))

    def validated(self) -> MatmulQuantizationScales:
        """A checked copy; tensors are not copied."""
        return dataclasses.replace(self)


def _scale_number(name: str, scale: Any) -> float:
    try:
        return float(scale)
    except OverflowError:  # an int beyond float64
        raise errors.wrong_scale(name.upper(), repr(scale)) from None


class _Options(Protocol):
    def validated(self) -> Any: ...


_OptionsClass = TypeVar("_OptionsClass", bound=_Options)


def as_options(cls: type[_OptionsClass], value: Any, what: str) -> _OptionsClass:
    """A checked copy of `value` as `cls`.

    Args:
        cls: one of the classes above.
        value: an object of `cls`, a dict of its fields, or None for the defaults.
        what: what the options are of, for errors: "Matrix multiplication options".

    Raises:
        errors.OptionTypeError: `value` is something else, or the dict has an unknown key.
        errors.OptionError: a field has a value that it cannot take.

    Example:
        >>> as_options(MatmulOptions, {"rounding": "eager"}, "Matrix multiplication options").rounding
        'eager'
    """
    if value is None:
        return cls()
    if isinstance(value, cls):
        copy: _OptionsClass = value.validated()
        return copy
    if not isinstance(value, Mapping):
        raise errors.wrong_options_type(what, cls.__name__, value)
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in value:
        if name not in known:
            raise errors.unknown_option(cls.__name__, name, known)
    return cls(**value)


# ---------------------------------------------------------------- the plan cache's key

# What may stand in a key as it is: immutable, compared by content.
_PLAIN = frozenset({type(None), bool, int, float, str, MatmulComputeType, CudaDataType, MatmulReductionScheme, MatmulNumericalImplFlags})

# Fields whose objects are compared by identity: they are services, not values.
_BY_IDENTITY = frozenset({"logger", "allocator"})


class _Identity:
    """An object as a key: equal to itself alone. Holding it keeps its address from being given to another."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def frozen_key(options: Any) -> Hashable:
    """The key under which options, preferences or scales enter the plan cache.

    Equal keys mean equal options. A dict is not checked for it, so that a hit costs no construction: it and the equal
    object have two keys. Of quantization scales only the form counts (absent, a number, a tensor): their values are
    read at each execution, and no key holds a tensor.

    Args:
        options: None, an options object, or a dict of one's fields.

    Raises:
        errors.StoreKeyError: a value in it has no content to compare by, so a plan for it must not be cached.

    Example:
        >>> frozen_key(MatmulOptions(strict=True)) == frozen_key(MatmulOptions(strict=True))
        True
        >>> frozen_key({"limit": 1}) == frozen_key({"limit": True})
        False
    """
    if options is None:
        return None
    if isinstance(options, MatmulQuantizationScales):
        return _scales_key(vars(options))
    if isinstance(options, Mapping):
        return _fields_key("dict", options)
    if dataclasses.is_dataclass(options) and not isinstance(options, type):
        return _fields_key(type(options).__qualname__, vars(options))
    raise errors.unfingerprintable("options", options)


def options_key(cls: type[_OptionsClass], value: Any, what: str) -> Hashable:
    """`frozen_key`, for what a caller passed: a wrong value raises its own error, a valid one always has a key.

    A value that is valid and yet has no key, such as a member of another library's enum, enters as what it is taken for.

    Args:
        cls, value, what: as in `as_options`.

    Raises:
        errors.OptionTypeError, errors.OptionError: as `as_options`.

    Example:
        >>> options_key(MatmulOptions, {"strict": True}, "options") == frozen_key({"strict": True})
        True
    """
    try:
        return frozen_key(value)
    except errors.StoreKeyError:
        return frozen_key(as_options(cls, value, what))


def _fields_key(kind: str, fields: Mapping[str, Any]) -> Hashable:
    values = tuple(fields.values())
    types = tuple(map(type, values))  # 1 == True == 1.0, and they are not the same option
    if not _PLAIN.issuperset(types):
        values = tuple(_frozen(name, value) for name, value in fields.items())
    return kind, tuple(fields), values, types


def _frozen(name: str, value: Any) -> Hashable:
    if type(value) in _PLAIN:
        return value  # type: ignore[no-any-return]
    if name in _BY_IDENTITY:
        return _Identity(value)
    if name == "epilog":
        return frozen_key(value)
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.dtype.str, value.item()
    raise errors.unfingerprintable(name, value)


def _scales_key(scales: Mapping[str, Any]) -> Hashable:
    return "scales", tuple((name, _scale_form(scale)) for name, scale in scales.items())


def _scale_form(scale: Any) -> str:
    if scale is None:
        return "absent"
    return "number" if isinstance(scale, (int, float, np.number)) else "tensor"


# ---------------------------------------------------------------- qualifiers


def conjugate_flags(qualifiers: Any, *, lazy: tuple[bool, bool] = (False, False), is_complex: bool = True) -> tuple[bool, bool]:
    """Whether A and B are conjugated.

    The caller's array is read and never written to (the peer folds torch's lazy bits into it).

    Args:
        qualifiers: None, or a NumPy array of length 3 and dtype `matrix_qualifiers_dtype`.
        lazy: whether A and B carry torch's lazy conjugate bit already; it cancels the qualifier.
        is_complex: whether the operands are complex; conjugating a real operand is nothing.

    Raises:
        errors.QualifiersTypeError: not a NumPy array.
        errors.OptionError: another shape or dtype, or C conjugated.

    Example:
        >>> qualifiers = np.zeros(3, dtype=matrix_qualifiers_dtype)
        >>> qualifiers["is_conjugate"][0] = 1
        >>> conjugate_flags(qualifiers), conjugate_flags(qualifiers, lazy=(True, False))
        ((True, False), (False, False))
    """
    flags = [False, False, False]
    if qualifiers is not None:
        if not isinstance(qualifiers, np.ndarray):
            raise errors.qualifiers_not_an_array(qualifiers)
        if qualifiers.shape != (3,) or qualifiers.dtype != matrix_qualifiers_dtype:
            raise errors.wrong_qualifiers(qualifiers.shape, qualifiers.dtype)
        flags = [bool(flag) for flag in qualifiers["is_conjugate"]]
    if flags[2]:
        raise errors.conjugate_c()
    if not is_complex:
        return False, False
    return flags[0] != lazy[0], flags[1] != lazy[1]

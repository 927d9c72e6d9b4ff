"""cuBLASLt itself: what it is asked with a descriptor, and why it has no answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from epigemm import errors, layouts
from epigemm.engines.cublaslt.descriptors import Descriptor, Matrix
from epigemm.engines.cuda import libraries
from epigemm.enums import MatmulEpilog
from epigemm.problem import Compute

# What a launch may take where no memory limit says less: NVIDIA's recommendation for Hopper.
DEFAULT_WORKSPACE_BYTES = 32 << 20

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True, slots=True)
class Preferences:
    """Which algorithms the heuristic may return: `MatmulPlanPreferences` as numbers.

    Args:
        workspace_bytes: at most.
        reduction_scheme_mask, max_waves_count, numerical_impl_mask: as the peer's preferences of these names.
    """

    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    reduction_scheme_mask: int = 7
    max_waves_count: float = 0.0
    numerical_impl_mask: int = (1 << 64) - 1

    @staticmethod
    def of(compute: Compute) -> Preferences:
        """What a problem's options say, the workspace limit among it."""
        found = Preferences(DEFAULT_WORKSPACE_BYTES, compute.reduction_scheme_mask, compute.max_waves_count, compute.numerical_impl_mask)
        return found.limited(compute.memory_limit)

    def limited(self, memory_limit: int | None) -> Preferences:
        """These with at most `memory_limit` bytes of workspace."""
        return self if memory_limit is None else replace(self, workspace_bytes=min(self.workspace_bytes, memory_limit))


@dataclass(frozen=True, slots=True)
class Result:
    """One answer of the heuristic."""

    raw: bytes
    workspace_bytes: int
    waves: float


def index(device: str) -> int:
    """The number in "cuda:<number>"."""
    return int(device.partition(":")[2] or 0)


def create(descriptor: Descriptor) -> Any:
    """The library's descriptor and layouts; no device is needed."""
    core = libraries.open_cublaslt()
    return core.LtMatmul(descriptor.compute_type, descriptor.scale_type, descriptor.attributes, descriptor.layouts)


def heuristic(descriptor: Descriptor, device: str, limit: int, preferences: Preferences) -> tuple[Result, ...]:
    """Up to `limit` algorithms for a product, the one expected to be fastest first; () where the library has none.

    Raises:
        errors.EngineUnavailable: no driver, no library or no device.
        errors.LibraryError: a status other than "not supported".
    """
    libraries.open_driver()
    wanted = descriptor.preference(
        preferences.workspace_bytes, preferences.reduction_scheme_mask, preferences.max_waves_count, preferences.numerical_impl_mask
    )
    try:
        found = create(descriptor).heuristic(index(device), wanted, limit)
    except errors.LibraryError as error:
        if any(status in str(error) for status in ("NOT_SUPPORTED", "INVALID_VALUE")):
            return ()
        raise
    return tuple(Result(raw, workspace_bytes, waves) for raw, workspace_bytes, _, waves in found)


def algorithm_ids(descriptor: Descriptor, device: str, limit: int) -> list[int]:
    """Numbers of the algorithms that the library has for the descriptor's types."""
    core = libraries.open_cublaslt()
    libraries.open_driver()
    found: list[int] = core.algorithm_ids(index(device), descriptor.types, limit)
    return found


def capability(device: str) -> tuple[int, int]:
    """The device's compute capability."""
    core = libraries.open_driver()
    number = index(device)
    return (
        core.device_attribute(number, _COMPUTE_CAPABILITY_MAJOR),
        core.device_attribute(number, _COMPUTE_CAPABILITY_MINOR),
    )


def versions(device: str) -> dict[str, str]:
    """What an algorithm is valid for: library, driver and device by name."""
    core = libraries.open_driver()
    libraries.open_cublaslt()
    major, minor = capability(device)
    return {
        "cublasLt": str(core.cublaslt_version()),
        "driver": str(core.driver_version()),
        "device": f"{core.device_name(index(device))} sm_{major}{minor}",
    }


# ---------------------------------------------------------------- why there is no algorithm

Ask = Callable[[Descriptor, Preferences], bool]


def _dense(matrix: Matrix) -> Matrix:
    return replace(matrix, leading_dimension=matrix.rows, batch_stride=matrix.rows * matrix.columns if matrix.batch_stride else 0)


def _single(matrix: Matrix) -> Matrix:
    return replace(matrix, batch_count=1, batch_stride=0)


def _each(descriptor: Descriptor, change: Callable[[Matrix], Matrix]) -> Descriptor:
    return replace(descriptor, a=change(descriptor.a), b=change(descriptor.b), c=change(descriptor.c), d=change(descriptor.d))


def _names(descriptor: Descriptor) -> dict[str, str]:
    """The caller's name of each of the library's matrices."""
    return {"a": "B" if descriptor.swapped else "A", "b": "A" if descriptor.swapped else "B", "c": "C", "d": "D"}


def _plain(descriptor: Descriptor) -> Descriptor:
    return replace(descriptor, epilogue=int(MatmulEpilog.DEFAULT), bias=None, aux=None)


def _relaxed(descriptor: Descriptor, preferences: Preferences) -> Iterator[tuple[str, Descriptor, Preferences]]:
    """The question with one obstacle less each time, and what that obstacle is; the likeliest first."""
    best = layouts.MAX_ALIGNMENT_BYTES
    for at, (letter, name) in enumerate(_names(descriptor).items()):
        if descriptor.alignments[at] < 16:
            aligned = (*descriptor.alignments[:at], best, *descriptor.alignments[at + 1 :])
            matrix = getattr(descriptor, letter)
            what = f"the alignment of {name} ({descriptor.alignments[at]} bytes, leading dimension {matrix.leading_dimension})"
            yield what, replace(descriptor, alignments=aligned), preferences  # type: ignore[arg-type]
    everything = (best, best, best, best)
    yield "the alignment of the operands", replace(descriptor, alignments=everything), preferences
    epilogue = MatmulEpilog(descriptor.epilogue).name
    yield f"the epilog {epilogue} with these types and layouts (the plain product has one)", _plain(descriptor), preferences
    if descriptor.d.batch_count > 1:
        yield f"the batch of {descriptor.d.batch_count}", _each(descriptor, _single), preferences
    yield "the leading dimensions", replace(_each(descriptor, _dense), alignments=everything), preferences
    yield f"a workspace of {preferences.workspace_bytes} bytes", descriptor, replace(preferences, workspace_bytes=1 << 30)
    loose = Preferences(workspace_bytes=preferences.workspace_bytes)
    yield "these plan preferences", descriptor, loose


def diagnose(descriptor: Descriptor, preferences: Preferences, ask: Ask) -> str:
    """What keeps the library from having an algorithm: the first obstacle without which it has one.

    Args:
        descriptor: one that the heuristic had no answer for.
        preferences: with which it was asked.
        ask: whether there is an algorithm for another descriptor.
    """
    for obstacle, easier, preferred in _relaxed(descriptor, preferences):
        if (easier, preferred) != (descriptor, preferences) and ask(easier, preferred):
            return f"cuBLASLt has no algorithm for {obstacle}"
    a, b, d = (getattr(descriptor, name).dtype.name for name in "abd")
    return f"cuBLASLt has no algorithm for this product of {a} and {b} into {d}"

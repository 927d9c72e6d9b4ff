"""A launch as data: which kernel, its arguments, its grid. On a GPU it is compiled once and launched by the native core; without one,
Triton's interpreter runs it over the same addresses."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton

from epigemm import errors
from epigemm.dtypes import DType
from epigemm.engines.cuda import libraries
from epigemm.engines.triton import kernels
from epigemm.engines.triton.configs import Machine

# Triton's spelling of a type in a signature.
_SIGNATURE = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
}
# What Triton's compiler knows of a value: that 16 divides it. A launch must not break it.
_DIVISOR = 16
# Steps within a tile are computed in 32 bits where a tile's reach surely fits.
_NARROW_STEP = 2**22

# Triton's number of a tensor map's type -> CUtensorMapDataType. Source: triton/backends/nvidia/driver.py.
_MAP_TYPES = {8: 10, 9: 8, 10: 9}


@dataclass(frozen=True, slots=True)
class Address:
    """The address that is value `slot` of the call; `alignment_bytes` divides it."""

    slot: int
    dtype: DType
    alignment_bytes: int


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the workspace, by its offset, as float32 or int32."""

    offset: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class Map:
    """A tensor map over the address that is value `slot`: extents, strides in elements and block, the fastest axis last."""

    slot: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that is value `slot` of the call: "i32" or "fp32" (its bits); whether 16 divides it."""

    slot: int
    kind: str
    divisible: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """What the kernel is compiled for."""

    value: Any


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with everything but the call's addresses.

    Args:
        kernel: its name in kernels.py.
        arguments: by parameter: an Address, Section, Map, Scalar, Constant, a plain integer, or a tuple of these.
        programs: how many.
        warps, stages: of a program.
    """

    kernel: str
    arguments: dict[str, Any]
    programs: int
    warps: int = 4
    stages: int = 1


def is_interpreted() -> bool:
    """Whether Triton was told, before it was imported, to interpret kernels."""
    return not isinstance(kernels.blocks, triton.JITFunction)


# ---------------------------------------------------------------- compiled


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code with what a launch needs to know of it."""

    code: bytes
    name: str
    shared_bytes: int
    warps: int
    stages: int
    maps: tuple[dict[str, Any], ...]


def _walk(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The leaves of a tuple of arguments with their paths."""
    if isinstance(value, tuple):
        for index, inner in enumerate(value):
            yield from _walk(inner, (*path, index))
    else:
        yield path, value


def _type(value: Any) -> Any:
    """An argument's type as Triton's signature has it."""
    if isinstance(value, tuple):
        return tuple(_type(inner) for inner in value)
    if isinstance(value, Constant) or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, int):
        return "i32" if abs(value) < _NARROW_STEP else "i64"
    if isinstance(value, Scalar):
        return value.kind
    if isinstance(value, Map):
        return f"tensordesc<{_SIGNATURE[value.dtype.name]}[{', '.join(map(str, value.block))}]>"
    return "*" + _SIGNATURE[value.dtype.name]


def _is_divisible(value: Any) -> bool:
    if isinstance(value, Address):
        return value.alignment_bytes % _DIVISOR == 0
    if isinstance(value, Scalar):
        return value.divisible
    return isinstance(value, Section) or (isinstance(value, int) and value % _DIVISOR == 0)


def source(launch: Launch) -> Any:
    """What Triton's compiler takes."""
    from triton.compiler import ASTSource

    function = getattr(kernels, launch.kernel)
    names = function.arg_names
    values = [launch.arguments[name] for name in names]
    leaves = [leaf for index, value in enumerate(values) for leaf in _walk(value, (index,))]
    constants = {path: v.value if isinstance(v, Constant) else v for path, v in leaves if _type(v) == "constexpr"}
    attributes = {path: [["tt.divisibility", _DIVISOR]] for path, v in leaves if _type(v) != "constexpr" and _is_divisible(v)}
    signature = {name: _type(value) for name, value in zip(names, values, strict=True)}
    return ASTSource(function, signature, constexprs=constants, attrs=attributes)


def compile_launch(launch: Launch, machine: Machine) -> Compiled:
    """The launch's kernel compiled for a machine, with fewer stages where those asked for take more shared memory than it has.

    Raises:
        UnsupportedProblem: with one stage, too, it takes more.
    """
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", machine.capability[0] * 10 + machine.capability[1], 32)
    for stages in range(launch.stages, 0, -1):
        options = {"num_warps": launch.warps, "num_stages": stages, "enable_fp_fusion": True}
        kernel = triton.compile(source(launch), target=target, options=options)
        found = kernel.metadata
        if found.global_scratch_size:
            raise errors.UnsupportedProblem(f"{launch.kernel} needs scratch memory that this engine does not give.")
        if found.shared <= machine.shared_bytes:
            maps = tuple(found.tensordesc_meta or ())
            return Compiled(kernel.asm["cubin"], found.name, found.shared, found.num_warps, stages, maps)
    what = f"{launch.kernel} takes {found.shared} bytes of shared memory, and the GPU has {machine.shared_bytes}."
    raise errors.UnsupportedProblem(errors.say(what, "Take another of plan()'s algorithms."))


def slots_of(core: Any, launch: Launch, compiled: Compiled, sections: dict[int, int] | None) -> list[Any]:
    """The kernel's parameters for the native core.

    Args:
        core: its module.
        launch, compiled: the launch and its kernel.
        sections: the slot of each part of the workspace, by its offset; None for a workspace of the launch's own.
    """
    maps = iter(compiled.maps)
    slots: list[Any] = []
    names = getattr(kernels, launch.kernel).arg_names
    for index, name in enumerate(names):
        for _, value in _walk(launch.arguments[name], (index,)):
            slots += _slot(core, value, maps, sections)
    # Triton's own two scratch pointers.
    return [*slots, core.Slot.fixed(bytes(8)), core.Slot.fixed(bytes(8))]


def _slot(core: Any, value: Any, maps: Iterator[dict[str, Any]], sections: dict[int, int] | None) -> list[Any]:
    kind = _type(value)
    if kind == "constexpr":
        return []
    if isinstance(value, int):
        return [core.Slot.fixed(struct.pack("<i" if kind == "i32" else "<q", value))]
    if isinstance(value, Scalar):
        return [core.Slot.value(value.slot, 4)]
    if isinstance(value, Section):
        return [core.Slot.workspace(value.offset) if sections is None else core.Slot.value(sections[value.offset])]
    if isinstance(value, Address):
        return [core.Slot.value(value.slot)]
    meta = next(maps)
    map_ = core.Slot.tensor_map(
        value.slot,
        _MAP_TYPES.get(meta["elem_type"], meta["elem_type"]),
        list(value.shape[::-1]),
        [s * value.dtype.bytes for s in value.strides[-2::-1]],
        list(meta["block_size"][::-1]),
        swizzle=meta["swizzle"],
    )
    # The kernel's parameters repeat a map's extents and strides.
    extents = [core.Slot.fixed(struct.pack("<i", extent)) for extent in value.shape]
    return [map_, *extents, *(core.Slot.fixed(struct.pack("<q", s)) for s in value.strides)]


class NativeLaunches:
    """Launches one after the other on a GPU: `run(stream, values)`.

    Args:
        launches: in order.
        machine: to compile for.
        device: its number.
        values: how many values a call brings.
        workspace_bytes: shared by the launches.
        zeroed_bytes: of it, from the start, that the launches expect to be 0.
    """

    def __init__(
        self, launches: Sequence[Launch], machine: Machine, device: int, values: int, workspace_bytes: int, zeroed_bytes: int
    ) -> None:
        self._core = libraries.open_driver()
        self._device, self._workspace_bytes, self._zeroed_bytes = device, workspace_bytes, zeroed_bytes
        # One launch takes the stream's kept workspace; several share an allocation, which lives until the last is enqueued.
        self._shared = workspace_bytes > 0 and len(launches) > 1
        offsets = sorted(
            {v.offset for launch in launches for _, v in _walk(tuple(launch.arguments.values()), ()) if isinstance(v, Section)}
        )
        self._offsets = offsets if self._shared else []
        sections = {offset: values + i for i, offset in enumerate(offsets)} if self._shared else None
        self._runs = [self._make(launch, machine, sections) for launch in launches]

    def _make(self, launch: Launch, machine: Machine, sections: dict[int, int] | None) -> tuple[Callable[..., None], int]:
        compiled = compile_launch(launch, machine)
        own = self._workspace_bytes if sections is None else 0
        made = self._core.KernelLaunch(
            _library(compiled.code),
            compiled.name,
            self._device,
            (launch.programs, 1, 1),
            (32 * compiled.warps, 1, 1),
            slots_of(self._core, launch, compiled, sections),
            shared_bytes=compiled.shared_bytes,
            workspace_bytes=own,
            zeroed_bytes=self._zeroed_bytes if own else 0,
        )
        return made.run, made.value_count

    def single(self) -> tuple[Callable[..., None], int] | None:
        """The run of the only launch, and how many values it takes; None where there are several."""
        return self._runs[0] if len(self._runs) == 1 else None

    def run(self, stream: int, values: list[int]) -> None:
        """Enqueue the launches."""
        if not self._shared:
            for run, count in self._runs:
                run(stream, *values[:count])
            return
        workspace = self._core.allocate(self._device, self._workspace_bytes, stream)
        try:
            if self._zeroed_bytes:
                self._core.fill(self._device, workspace, 0, self._zeroed_bytes, stream)
            values = [*values, *(workspace + offset for offset in self._offsets)]
            for run, count in self._runs:
                run(stream, *values[:count])
        finally:
            self._core.free(self._device, workspace, stream)


_libraries: dict[bytes, Any] = {}
_lock = threading.Lock()


def _library(code: bytes) -> Any:
    """Machine code is loaded once a process."""
    with _lock:
        if code not in _libraries:
            _libraries[code] = libraries.open_driver().KernelLibrary(code)
        return _libraries[code]


# ---------------------------------------------------------------- interpreted


@dataclass(frozen=True, slots=True)
class _Type:
    """A dtype as Triton's interpreter asks for it: its name and size."""

    name: str
    itemsize: int
    is_floating_point: bool = True

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class _Memory:
    """An address that Triton's interpreter takes for a tensor. It asks for a CPU copy of the storage: the memory itself is given."""

    address: int
    dtype: _Type

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> _Memory:
        return self

    def cpu(self) -> _Memory:
        return self

    def new_empty(self, *_: Any, **__: Any) -> _Memory:
        return self

    def set_(self, *_: Any) -> None: ...

    def copy_(self, _: Any) -> None: ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return ()

    def stride(self) -> tuple[int, ...]:
        return ()


def _memory(address: int, dtype: DType) -> _Memory:
    return _Memory(address, _Type(dtype.name, dtype.bytes))


def _interpreted(value: Any, values: Sequence[int], workspace: int) -> Any:
    """An argument as the interpreter takes it."""
    if isinstance(value, tuple):
        return tuple(_interpreted(inner, values, workspace) for inner in value)
    if isinstance(value, Constant):
        return value.value
    if isinstance(value, Section):
        return _memory(workspace + value.offset, value.dtype)
    if isinstance(value, Address):
        return _memory(values[value.slot], value.dtype)
    if isinstance(value, Scalar):
        bits = struct.pack("<I", values[value.slot])
        return struct.unpack("<f" if value.kind == "fp32" else "<i", bits)[0]
    if isinstance(value, Map):
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(_memory(values[value.slot], value.dtype), list(value.shape), list(value.strides), list(value.block))
    return value


class InterpretedLaunches:
    """The same launches under Triton's interpreter, over memory of the host.

    Args:
        launches: in order.
        workspace_bytes, zeroed_bytes: as for a GPU.
    """

    def __init__(self, launches: Sequence[Launch], workspace_bytes: int, zeroed_bytes: int) -> None:
        self._launches = tuple(replace(launch) for launch in launches)
        self._workspace_bytes, self._zeroed_bytes = workspace_bytes, zeroed_bytes

    def single(self) -> None:
        """None: nothing is enqueued."""

    def run(self, stream: int, values: list[int]) -> None:
        """Run the launches, one program after the other."""
        import numpy as np

        # What is not zeroed holds NaN: reading what nothing wrote would be seen.
        workspace = np.full(self._workspace_bytes, 0xFF, np.uint8)
        workspace[: self._zeroed_bytes] = 0
        with np.errstate(all="ignore"):
            for launch in self._launches:
                arguments = {name: _interpreted(v, values, workspace.ctypes.data) for name, v in launch.arguments.items()}
                getattr(kernels, launch.kernel)[(launch.programs,)](**arguments)

"""A layout's launches: the argument block of the kernel, field by field, and what runs before and after it.

`Params` of kernels/kernel_types.cuh is the kernel's only argument. Everything in it that does not change from call to call is written
here once; addresses, tensor maps, alpha and beta are left to the call. Sums over m or n go to partial sums in a workspace, which
`epigemm_finish` adds up in a fixed order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epigemm import layouts
from epigemm.engines.base import Call
from epigemm.engines.cuda import compiler, libraries
from epigemm.engines.hopper.bindings import Layout, operand_of
from epigemm.engines.hopper.configs import TILE_K, Config
from epigemm.engines.hopper.source import TYPES, kernel_source
from epigemm.expression.nodes import MATRIX, Expression
from epigemm.problem import Operand, Problem

ARCH = "sm_90a"
ENTRY, FINISH = "epigemm_hopper", "epigemm_finish"
NVRTC_OPTIONS = ("-diag-suppress=128,179,39", "-default-device")
THREADS, FINISH_BLOCK = 384, (32, 32, 1)
GROUP = 16
"""Rows of tiles that are walked together, for L2; a cluster's tiles count together."""

ALPHA, BETA = "alpha", "beta"

PARAMS_BYTES = 1792
OFFSETS = {
    "a": 0, "b": 128, "tiles_in": 384, "tiles_out": 896,
    "along_n": 1408, "along_m": 1472, "bits_in": 1536, "bits_out": 1552, "sums_m": 1568, "sums_n": 1600,
    "bits_in_stride": 1632, "bits_out_stride": 1648, "policy_a": 1664, "policy_b": 1672, "policy_in": 1680, "policy_out": 1688,
    "scalars": 1696, "m": 1728, "n": 1732, "k": 1736, "tiles_m": 1740, "tiles_n": 1744, "steps": 1748, "group": 1752,
}  # fmt: skip
"""Where each field of `Params` begins; of an array its first member."""

_MAP_BYTES, _ADDRESS_BYTES = 128, 8

# Words that createpolicy.fractional makes for a fraction of 1: keep as usual, drop first.
EVICT_NORMAL, EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000

# CUtensorMapDataType, CUtensorMapSwizzle by the bytes of a box's row, CUtensorMapL2promotion by bytes.
MAP_TYPES = {"f16": 6, "bf16": 9}
SWIZZLES = {64: 2, 128: 3}
PROMOTIONS = {128: 2, 256: 3}

_PADDED_BITS = 128  # a line of a mask is padded to so many


@dataclass(frozen=True, slots=True)
class Map:
    """A tensor map but for its address. Extents and box are (inner, outer).

    Args:
        element: "bf16" or "f16".
        extents: of the tensor.
        stride_bytes: from one line to the next.
        box: what one copy moves.
        swizzle_bytes: of a box's row in shared memory.
        promotion_bytes: what L2 fetches at least.
    """

    element: str
    extents: tuple[int, int]
    stride_bytes: int
    box: tuple[int, int]
    swizzle_bytes: int = 128
    promotion_bytes: int = 256

    def slot(self, core: Any, index: int) -> Any:
        """As a field over the call's value `index`."""
        return core.Slot.tensor_map(
            index,
            MAP_TYPES[self.element],
            list(self.extents),
            [self.stride_bytes],
            list(self.box),
            swizzle=SWIZZLES[self.swizzle_bytes],
            l2_promotion=PROMOTIONS[self.promotion_bytes],
        )


@dataclass(frozen=True, slots=True)
class Sum:
    """One sum: where its partial sums lie in the workspace, how many rows of how many values, and its type's number."""

    name: str
    offset: int
    rows: int
    length: int
    type: int


@dataclass(frozen=True, slots=True)
class Fields:
    """The argument block.

    Args:
        constants: (offset, bytes) of what no call changes.
        maps: (offset, map, name) of what is read or written by the copy engine: "a", "b0", "d", "c", an input or an output.
        addresses: (offset, name) of vectors and masks.
        scalars: (offset, name) of alpha and beta.
        sums: offset of each sum's address, and the sum.
        names: the values that a call brings, in order.
        workspace_bytes: of all partial sums.
    """

    constants: tuple[tuple[int, bytes], ...]
    maps: tuple[tuple[int, Map, str], ...]
    addresses: tuple[tuple[int, str], ...]
    scalars: tuple[tuple[int, str], ...]
    sums: tuple[tuple[int, Sum], ...]
    names: tuple[str, ...]
    workspace_bytes: int


def fields(problem: Problem, expression: Expression, layout: Layout, config: Config, *, scaled: bool) -> Fields:
    """The argument block of a layout under a fitted configuration.

    Args:
        problem, expression, scaled: those that the layout was made of.
        layout, config: the kernel.
    """
    maps = (*_operand_maps(problem, layout, config), *_tile_maps(problem, expression, layout, config))
    addresses = tuple(
        (OFFSETS[group] + _ADDRESS_BYTES * i, name)
        for group in ("along_n", "along_m", "bits_in", "bits_out")
        for i, name in enumerate(layout.places[group])
    )
    scalars = ((OFFSETS["scalars"], ALPHA), (OFFSETS["scalars"] + 4, BETA)) if scaled else ()
    sums, workspace_bytes = _sums(layout, config)
    names = (*(name for _, _, name in maps), *(name for _, name in addresses), *(name for _, name in scalars))
    return Fields(
        _constants(problem, expression, layout, config), maps, addresses, scalars, sums, tuple(dict.fromkeys(names)), workspace_bytes
    )


def _constants(problem: Problem, expression: Expression, layout: Layout, config: Config) -> tuple[tuple[int, bytes], ...]:
    tiles_m, tiles_n = tiles(layout, config)
    integers = {
        "m": layout.m, "n": layout.n, "k": layout.k, "tiles_m": tiles_m, "tiles_n": tiles_n,
        "steps": _ceil(layout.k, TILE_K), "group": max(1, GROUP // config.cluster),
    }  # fmt: skip
    policies = {"policy_a": EVICT_NORMAL, "policy_b": EVICT_NORMAL, "policy_in": EVICT_FIRST, "policy_out": EVICT_FIRST}
    strides = [
        (OFFSETS[f"{group}_stride"] + 8 * i, struct.pack("<Q", line_bytes(operand_of(problem, expression, name), layout)))
        for group in ("bits_in", "bits_out")
        for i, name in enumerate(layout.places[group])
    ]
    packed = [(OFFSETS[name], struct.pack("<i", value)) for name, value in integers.items()]
    return (*packed, *((OFFSETS[name], struct.pack("<Q", value)) for name, value in policies.items()), *strides)


def tiles(layout: Layout, config: Config) -> tuple[int, int]:
    """Tiles of D one below the other (a cluster's count as one), and side by side."""
    return _ceil(layout.m, config.tile_m * config.cluster), _ceil(layout.n, config.tile_n // layout.signature.weights)


def line_bytes(operand: Operand, layout: Layout) -> int:
    """Bytes from one line of the kernel's row-major D, or of what lies like it, to the next."""
    return operand.strides[-1 if layout.transposed else -2] * operand.dtype.bytes


def _operand_maps(problem: Problem, layout: Layout, config: Config) -> tuple[tuple[int, Map, str], ...]:
    signature, k = layout.signature, layout.k
    first: list[tuple[str, Operand]] = [("a", problem.a)]
    second = [(f"b{i}", b) for i, b in enumerate(problem.b)]
    if layout.transposed:
        first, second = [(name, b.transposed()) for name, b in second], [(name, a.transposed()) for name, a in first]
    share = config.tile_n // signature.weights // config.cluster
    a_box = (TILE_K, config.tile_m) if signature.a_k_major else (64, TILE_K)
    b_box = (TILE_K, share) if signature.b_k_major else (64, TILE_K // config.cluster)
    (name, a), found = first[0], []
    found.append((OFFSETS["a"], _matrix_map(signature.element, a, (layout.m, k), a_box, signature.a_k_major), name))
    for i, (name, b) in enumerate(second):
        made = _matrix_map(signature.element, b.transposed(), (layout.n, k), b_box, signature.b_k_major)
        found.append((OFFSETS["b"] + _MAP_BYTES * i, made, name))
    return tuple(found)


def _matrix_map(element: str, operand: Operand, extents: tuple[int, int], box: tuple[int, int], k_major: bool) -> Map:
    """Of an operand as [lines, k]."""
    lines, k = extents
    stride = operand.strides[-2] if k_major else operand.strides[-1]
    return Map(element, (k, lines) if k_major else (lines, k), stride * operand.dtype.bytes, box)


def _tile_maps(problem: Problem, expression: Expression, layout: Layout, config: Config) -> tuple[tuple[int, Map, str], ...]:
    # Inputs are fetched by 128 bytes: the next 128 would have left L2 before their turn. Lines are D's, also where a tensor is padded.
    rows = {"tiles_in": (64, layout.signature.tiles_in), "tiles_out": (16, layout.signature.tiles_out)}
    found = []
    for group, (height, types) in rows.items():
        for i, (name, element) in enumerate(zip(layout.places[group], types, strict=True)):
            stride = line_bytes(operand_of(problem, expression, name), layout)
            promotion = 128 if group == "tiles_in" else 256
            made = Map(element, (layout.n, layout.m), stride, (config.box_n, height), config.box_n * 2, promotion)
            found.append((OFFSETS[group] + _MAP_BYTES * i, made, name))
    return tuple(found)


def _sums(layout: Layout, config: Config) -> tuple[tuple[tuple[int, Sum], ...], int]:
    _, tiles_n = tiles(layout, config)
    shapes = {"sums_m": (4 * _ceil(layout.m, config.group_m), layout.n), "sums_n": (tiles_n, layout.m)}
    places = [(group, i, name) for group in shapes for i, name in enumerate(layout.places[group])]
    found, offset = [], 0
    for (group, i, name), kind in zip(places, layout.sum_types, strict=True):
        rows, length = shapes[group]
        found.append((OFFSETS[group] + _ADDRESS_BYTES * i, Sum(name, offset, rows, length, TYPES[kind])))
        offset = layouts.round_up(offset + 4 * rows * length, layouts.MAX_ALIGNMENT_BYTES)
    return tuple(found), offset


def cleared(problem: Problem, expression: Expression, layout: Layout) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of outputs whose padding the kernel does not write: they are set to 0 before it."""
    masks = layout.places["bits_out"] if layout.n % _PADDED_BITS else ()
    padded = [o.name for o in expression.extras if o.extent == MATRIX and operand_of(problem, expression, o.name).shape != problem.d.shape]
    return tuple((name, operand_of(problem, expression, name).bytes) for name in (*masks, *padded))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


# ---------------------------------------------------------------- compiled


def compile_kernel(layout: Layout, config: Config) -> compiler.Cubin:
    """The kernel's machine code, from the store where it is there."""
    shape = f"{config.tile_m}x{config.tile_n}"
    text = kernel_source(config, layout.signature, layout.epilogue)
    return compiler.compile_source(text, name=f"hopper-{layout.signature.element}-{shape}", arch=ARCH, options=NVRTC_OPTIONS)


class Launches:
    """The kernel of one layout on one device, and what belongs to it: `run(call)`.

    Args:
        problem, expression, scaled: those that the layout was made of.
        layout, config: the kernel.
        device: its number.
        multiprocessors: how many it may use.
    """

    def __init__(
        self,
        problem: Problem,
        expression: Expression,
        layout: Layout,
        config: Config,
        *,
        scaled: bool,
        device: int,
        multiprocessors: int,
    ) -> None:
        core = libraries.open_driver()
        made = fields(problem, expression, layout, config, scaled=scaled)
        self._core, self._device, self._fields = core, device, made
        self._cleared = cleared(problem, expression, layout)
        library = core.KernelLibrary(compile_kernel(layout, config).code)
        tiles_m, tiles_n = tiles(layout, config)
        grid = min(multiprocessors // config.cluster, tiles_m * tiles_n) * config.cluster
        self._main = core.KernelLaunch(
            library,
            ENTRY,
            device,
            (grid, 1, 1),
            (THREADS, 1, 1),
            _slots(core, made),
            shared_bytes=config.shared_bytes(layout.signature),
            overlaps_previous=True,
            block_bytes=PARAMS_BYTES,
        )
        self._finishers = [(s, _finisher(core, library, device, s)) for _, s in made.sums]

    def run(self, call: Call) -> None:
        """Enqueue everything on `call.stream`."""
        at = {"a": call.a, **{f"b{i}": b for i, b in enumerate(call.b)}, "c": call.c, "d": call.d, **call.inputs, **call.outputs}
        if self._fields.scalars:
            at[ALPHA], at[BETA] = struct.unpack("<II", struct.pack("<ff", call.alpha, call.beta))
        for name, size_bytes in self._cleared:
            self._core.fill(self._device, at[name], 0, size_bytes, call.stream)
        values = [at[name] for name in self._fields.names]
        if not self._finishers:
            self._main.run(call.stream, *values)
            return
        # From the stream, under capture as nodes of the graph: the two kernels share it, and each replay has its own.
        workspace = self._core.allocate(self._device, self._fields.workspace_bytes, call.stream)
        try:
            self._main.run(call.stream, *values, *(workspace + s.offset for s, _ in self._finishers))
            for s, finisher in self._finishers:
                finisher.run(call.stream, workspace + s.offset, at[s.name])
        finally:
            self._core.free(self._device, workspace, call.stream)

    def single(self) -> tuple[Callable[..., None], tuple[str, ...]] | None:
        """The only launch, `run(stream, *values)`, and the names of its values; None where there is more to a run."""
        if self._finishers or self._cleared or self._fields.scalars:
            return None
        return self._main.run, self._fields.names


def _slots(core: Any, made: Fields) -> list[Any]:
    index = {name: i for i, name in enumerate(made.names)}
    slots = [core.Slot.fixed(value).at(offset) for offset, value in made.constants]
    slots += [map_.slot(core, index[name]).at(offset) for offset, map_, name in made.maps]
    slots += [core.Slot.value(index[name]).at(offset) for offset, name in made.addresses]
    slots += [core.Slot.value(index[name], 4).at(offset) for offset, name in made.scalars]
    return slots + [core.Slot.value(len(index) + i).at(offset) for i, (offset, _) in enumerate(made.sums)]


def _finisher(core: Any, library: Any, device: int, s: Sum) -> Any:
    numbers = [core.Slot.fixed(struct.pack("<i", value)) for value in (s.rows, s.length, s.type)]
    slots = [core.Slot.value(0), core.Slot.value(1), *numbers]
    return core.KernelLaunch(library, FINISH, device, (_ceil(s.length, 32), 1, 1), FINISH_BLOCK, slots, overlaps_previous=True)

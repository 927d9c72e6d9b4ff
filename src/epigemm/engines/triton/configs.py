"""The kernels' settings as data: which tiles there are on which machine, and the first guess for a problem.

Measured on one H200 (driver 580, Triton 3.6.0), as ratios to cuBLASLt's bare product in the same run: one accumulator, 128x256x64, 8 warps,
3 stages, flattened tile loop, GROUP 8: 0.99 to 1.09 at k >= 4096. Two accumulators, 128x128x64 each, not flattened, GROUP 16: 1.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from epigemm.engines.triton.oriented import Oriented, Side
from epigemm.expression.nodes import BITS, MATRIX
from epigemm.plans import Candidate

PERSISTENT, BLOCKS = "persistent", "blocks"

# TMA: addresses and strides are multiples of 16 bytes, the fastest axis is contiguous.
# Source: CUDA driver API, cuTensorMapEncodeTiled.
MAP_BYTES = 16
MAP_MAX_STRIDE_BYTES = 2**40
_MAP_MAX_EXTENT = 2**31


@dataclass(frozen=True, slots=True)
class Machine:
    """What the first guess depends on.

    Args:
        capability: of the GPU: (9, 0).
        multiprocessors: how many.
        shared_bytes: of shared memory that a program may have.
        interpreted: whether kernels are interpreted on the CPU.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    interpreted: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run a problem.

    Args:
        kernel: PERSISTENT (tensor maps) or BLOCKS (pointers).
        block_m, block_n: a tile of D in the kernels' orientation.
        block_k_bytes: how much of a line of an operand one step takes.
        warps, stages: of a program.
        group: lines of tiles that are walked together.
        flatten: whether the next tile's loads start during this one's epilogue.
        splits: how many programs share a tile's k.
        store_mapped: whether matrix outputs are stored through tensor maps.
    """

    kernel: str
    block_m: int
    block_n: int
    block_k_bytes: int
    warps: int
    stages: int
    group: int = 8
    flatten: bool = False
    splits: int = 1
    store_mapped: bool = False

    def candidate(self, workspace_bytes: int) -> Candidate:
        return Candidate("triton", tuple(sorted(asdict(self).items())), workspace_bytes)

    @staticmethod
    def of(candidate: Candidate) -> Config:
        """The settings that a candidate holds."""
        settings: dict[str, Any] = dict(candidate.config)
        return Config(**settings)


# ---------------------------------------------------------------- the tables

_LARGE = {
    1: (
        Config(PERSISTENT, 128, 256, 128, 8, 3, 8, True, store_mapped=True),
        Config(PERSISTENT, 128, 256, 128, 8, 3, 8, True),
        Config(PERSISTENT, 128, 128, 128, 4, 4, 8, True, store_mapped=True),
        Config(PERSISTENT, 128, 128, 128, 8, 3, 8, False),
        Config(PERSISTENT, 64, 256, 128, 4, 3, 8, True, store_mapped=True),
        Config(PERSISTENT, 64, 128, 128, 4, 4, 8, True),
    ),
    2: (
        Config(PERSISTENT, 128, 128, 128, 8, 3, 16, False, store_mapped=True),
        Config(PERSISTENT, 128, 128, 128, 8, 3, 16, False),
        Config(PERSISTENT, 64, 128, 128, 4, 3, 8, False),
    ),
    4: (Config(PERSISTENT, 64, 64, 128, 4, 3, 8, False),),
}
_POINTERS = {
    1: (Config(BLOCKS, 128, 128, 64, 8, 3), Config(BLOCKS, 64, 64, 64, 4, 3), Config(BLOCKS, 128, 64, 64, 4, 3)),
    2: (Config(BLOCKS, 128, 64, 64, 8, 3), Config(BLOCKS, 64, 64, 64, 4, 3)),
    4: (Config(BLOCKS, 64, 32, 64, 4, 3),),
}
# float32 without TF32 runs on the FMA units, from registers: small tiles.
_SINGLE = (Config(BLOCKS, 64, 64, 64, 8, 3), Config(BLOCKS, 64, 32, 64, 4, 3), Config(BLOCKS, 128, 64, 64, 8, 3))
# Few lines on one side: the other side's bytes are what counts, so many programs with deep pipelines of narrow tiles.
_NARROW = (
    Config(BLOCKS, 16, 64, 256, 4, 4, 1),
    Config(BLOCKS, 16, 32, 512, 4, 4, 1),
    Config(BLOCKS, 16, 128, 128, 4, 5, 1),
)
# Tiles for the interpreter, which takes milliseconds for each operation of a program: more than one tile, but few.
_INTERPRETED = (
    Config(PERSISTENT, 32, 128, 256, 4, 1, 2, store_mapped=True),
    Config(PERSISTENT, 16, 64, 128, 4, 1, 1, flatten=True),
    Config(BLOCKS, 32, 128, 256, 4, 1, 2),
    Config(BLOCKS, 16, 32, 128, 4, 1, 1),
)
_INTERPRETED_LARGE = (Config(BLOCKS, 256, 256, 4096, 4, 1, 2), Config(PERSISTENT, 128, 256, 4096, 4, 1, 2, store_mapped=True))
_LARGE_ELEMENTS = 20_000

_MAX_SPLITS = 16
_STAGED_ELEMENTS = 128 * 128


def _row(table: dict[int, tuple[Config, ...]], accumulators: int) -> tuple[Config, ...]:
    return table[min(key for key in table if key >= accumulators)]


def candidates(oriented: Oriented, machine: Machine, precision: str) -> Iterator[Config]:
    """The settings for a problem, the one expected to be fastest first.

    Args:
        oriented: the problem.
        machine: where it runs.
        precision: "ieee" or "tf32", of float32 operands.
    """
    mapped = can_map(oriented, machine)
    if machine.interpreted:
        large = max(oriented.m * oriented.n * oriented.items, oriented.k) > _LARGE_ELEMENTS or oriented.k > 2000
        table = _INTERPRETED_LARGE if large else _INTERPRETED
        found = [c for c in table if mapped or c.kernel != PERSISTENT]
    else:
        found = list(_on_gpu(oriented, machine, precision, mapped))
    stored = bool(mapped_outputs(oriented))
    made = [_split(oriented, machine, replace(c, store_mapped=c.store_mapped and stored)) for c in found]
    # A large tile staged for its store, with another converted beside it, leaves too little shared memory for three stages.
    staged = [c for c in made if c.store_mapped and c.block_m * c.block_n > _STAGED_ELEMENTS and _converts_a_tile(oriented)]
    yield from dict.fromkeys((*(c for c in made if c not in staged), *staged))


def _on_gpu(oriented: Oriented, machine: Machine, precision: str, mapped: bool) -> Iterator[Config]:
    count = oriented.accumulators
    single = oriented.lefts[0].dtype.bytes == 4 and precision == "ieee"
    if min(oriented.m, oriented.n) <= 64 and not single and count <= 2:
        yield from (_narrowed(oriented, c) for c in _NARROW)
    if single:
        yield from _SINGLE
        return
    large = [c for c in _row(_LARGE, count) if mapped]
    tiles = [-(-oriented.m // c.block_m) * -(-oriented.n // c.block_n) * oriented.items for c in large]
    # A tile that fills the machine first; one that leaves most of it idle last.
    yield from (c for c, t in sorted(zip(large, tiles, strict=True), key=lambda pair: pair[1] < machine.multiprocessors))
    yield from _row(_POINTERS, count)


def _converts_a_tile(oriented: Oriented) -> bool:
    """Whether the epilogue reads a whole tile of something, or packs one to bits."""
    return any(t.extent in (MATRIX, BITS) and (t.role != "output" or t.extent == BITS) for t in oriented.tensors)


def _narrowed(oriented: Oriented, config: Config) -> Config:
    """A narrow tile turned so that its short side lies along D's, and as high as that."""
    short = 16 if min(oriented.m, oriented.n) <= 16 else 32 if min(oriented.m, oriented.n) <= 32 else 64
    if oriented.m <= oriented.n:
        return replace(config, block_m=short)
    return replace(config, block_m=config.block_n, block_n=short)


def _split(oriented: Oriented, machine: Machine, config: Config) -> Config:
    """As many parts of k as fill the machine twice, each with several steps."""
    if config.kernel != BLOCKS:
        return config
    tiles = -(-oriented.m // config.block_m) * -(-oriented.padded_n // config.block_n) * oriented.items
    steps = -(-oriented.k // block_k(config, oriented))
    wanted = 2 * machine.multiprocessors // max(tiles, 1)
    splits = max(1, min(wanted, steps // (2 if machine.interpreted else 4), _MAX_SPLITS))
    return replace(config, splits=splits)


def block_k(config: Config, oriented: Oriented) -> int:
    """Elements of k in one step."""
    return max(16, config.block_k_bytes // oriented.lefts[0].dtype.bytes)


# ---------------------------------------------------------------- what a tensor map can describe


def can_map(oriented: Oriented, machine: Machine) -> bool:
    """Whether every operand can be read through a tensor map."""
    sides = (*oriented.lefts, *oriented.rights)
    if machine.capability < (9, 0) or len(oriented.batch) > 1 or not oriented.k or not oriented.m or not oriented.n:
        return False
    alike = all(len({inner_is_k(s) for s in group}) == 1 for group in (oriented.lefts, oriented.rights))
    batches = all(len({s.batch == (0,) for s in group}) == 1 for group in (oriented.lefts, oriented.rights))
    return alike and batches and all(_can_map(s, oriented) for s in sides)


def inner_is_k(side: Side) -> bool:
    """Whether k is the operand's contiguous axis."""
    return side.k == 1 and side.lines != 1


def _can_map(side: Side, oriented: Oriented) -> bool:
    outer = side.lines if inner_is_k(side) else side.k
    inner = side.k if inner_is_k(side) else side.lines
    return inner == 1 and _steps_fit(side.alignment_bytes, (outer, *(s for s in side.batch if s)), side.dtype.bytes)


def _steps_fit(alignment_bytes: int, steps: tuple[int, ...], itemsize: int) -> bool:
    fit = all(s > 0 and s * itemsize % MAP_BYTES == 0 and s * itemsize < MAP_MAX_STRIDE_BYTES for s in steps)
    return fit and alignment_bytes % MAP_BYTES == 0


def mapped_outputs(oriented: Oriented) -> frozenset[str]:
    """The matrix outputs that can be stored through a tensor map."""
    found = set()
    for tensor in oriented.tensors:
        if tensor.role == "output" and tensor.extent == MATRIX and tensor.reduction is None and tensor.n == 1:
            steps = (tensor.m, *tensor.batch)
            if _steps_fit(tensor.alignment_bytes, steps, tensor.dtype.bytes) and tensor.dtype.bytes <= 4:
                found.add(tensor.name)
    return frozenset(found)

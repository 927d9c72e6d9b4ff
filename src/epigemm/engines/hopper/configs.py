"""What decides a kernel's text: the tile it works by (Config) and what its epilogue reads and writes (Signature)."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_LIMIT_BYTES = 232_448
"""Shared memory that one block can have on SM90: 227 KiB."""

TILE_K = 64
"""Values of k in a stage: 128 bytes of a 16-bit type, one row of the 128-byte swizzle."""


MIN_STAGES, MAX_STAGES = 3, 8


@dataclass(frozen=True)
class Signature:
    """What a kernel reads and writes, in the order of its arguments.

    Args:
        element: type of A and B, "bf16" or "f16".
        a_k_major, b_k_major: whether k is the contiguous dimension of A, of B.
        weights: products that share A; their accumulators meet in one thread.
        along_n, along_m: types of the vectors of shape (1, n) and (m, 1).
        tiles_in, tiles_out: types of the (m, n) inputs and outputs; the first output is D.
        bits_in, bits_out: how many packed masks.
        sums_m, sums_n: how many sums over m, of shape (1, n), and over n, of shape (m, 1).
        heavy: whether the epilogue's arithmetic takes many registers.
    """

    element: str = "bf16"
    a_k_major: bool = True
    b_k_major: bool = True
    weights: int = 1
    along_n: tuple[str, ...] = ()
    along_m: tuple[str, ...] = ()
    tiles_in: tuple[str, ...] = ()
    tiles_out: tuple[str, ...] = ("bf16",)
    bits_in: int = 0
    bits_out: int = 0
    sums_m: int = 0
    sums_n: int = 0
    heavy: bool = False

    @property
    def narrow(self) -> bool:
        """Whether the epilogue needs registers that 192 accumulators a thread do not leave."""
        sums = self.sums_m + self.sums_n > 0
        saved_beside_rows = len(self.along_m) > 0 and self.bits_out + len(self.tiles_out) > 1
        return (
            self.heavy
            or sums
            or saved_beside_rows
            or len(self.tiles_in) > 1
            or len(self.along_n) + len(self.tiles_in) + len(self.tiles_out) > 3
        )


@dataclass(frozen=True)
class Config:
    """How a kernel works: one row of the tuner's table.

    Args:
        tile_m, tile_n: rows and columns of accumulators in a tile (with two weights, tile_n holds both).
        pingpong: each consumer warpgroup takes whole tiles in turn; else both share one.
        cluster: blocks, one below the other, that share B through multicast: 1 or 2.
        box_n: columns of an epilogue sub-tile, 64 or 32.
        stages: operand stages; 0 for as many as fit.
        store_sets: staged sub-tiles of outputs for each warp.
        ring_slots: prefetched sub-tiles of epilogue inputs, for each consumer warpgroup.
    """

    tile_m: int = 128
    tile_n: int = 192
    pingpong: bool = True
    cluster: int = 2
    box_n: int = 64
    stages: int = 0
    store_sets: int = 2
    ring_slots: int = 2

    def fitted(self, signature: Signature) -> Config:
        """This configuration with the number of stages that shared memory leaves room for.

        Raises:
            ValueError: fewer than three stages fit.
        """
        stages = self.stages_that_fit(signature)
        if stages < MIN_STAGES:
            what = f"{self} leaves room for {stages} stages beside its epilogue and needs {MIN_STAGES}."
            raise ValueError(f"{what} Take a smaller tile, fewer ring slots or one store set.")
        return replace(self, stages=stages, ring_slots=self._slots(signature))

    def stages_that_fit(self, signature: Signature) -> int:
        """Operand stages that shared memory has room for, beside what the epilogue takes."""
        bare = replace(self, stages=0, ring_slots=self._slots(signature))
        room = SHARED_LIMIT_BYTES - bare.shared_bytes(signature)
        return min(self.stages or MAX_STAGES, room // (self.stage_bytes + 16))

    def _slots(self, signature: Signature) -> int:
        """A sub-tile of every input is fetched while the one before is read."""
        return max(self.ring_slots, 2 * len(signature.tiles_in)) if signature.tiles_in else 0

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * TILE_K * 2

    @property
    def group_m(self) -> int:
        """Rows that one consumer warpgroup takes."""
        return self.tile_m if self.pingpong else self.tile_m // 2

    def shared_bytes(self, signature: Signature) -> int:
        """Shared memory of a block; `kernels/kernel_types.cuh` adds up the same and asserts that it is equal."""
        out_n = self.tile_n // signature.weights
        ring = 2 * self.ring_slots * 64 * self.box_n * 2
        staging = 8 * self.store_sets * 16 * self.box_n * 2 * len(signature.tiles_out)
        vectors = 2 * len(signature.along_n) * out_n * 4
        bits = 2 * signature.bits_in * self.group_m * (-(-out_n // 64) * 8)
        barriers = 16 * self.stages + 32 * self.ring_slots + 16
        return self.stages * self.stage_bytes + ring + staging + vectors + bits + barriers

    def predicted_cycles(self, signature: Signature, m: int, n: int, k: int, multiprocessors: int) -> float:
        """Cycles of a launch by the products alone, which hide the epilogue: rounds of tiles, the slowest multiprocessor's."""
        tiles = _ceil(m, self.tile_m * self.cluster) * _ceil(n, self.tile_n // signature.weights)
        rounds = _ceil(tiles, multiprocessors // self.cluster)
        stage = self.tile_m * self.tile_n / _PRODUCTS_PER_CYCLE * (1.0 if self.tile_n > 128 else _NARROW_WGMMA)
        starved = 1.0 + _STARVED * max(0, 4 - self.stages_that_fit(signature))
        return rounds * (_ceil(k, TILE_K) * stage * starved + (0 if self.pingpong else _BARE_EPILOGUE)) + _LAUNCH


# One H200, 2026-12-01 (NOTES.md). A multiprocessor multiplies 2048 pairs a cycle, 64 of k a stage: 32 elements of D finish a stage.
_PRODUCTS_PER_CYCLE = 32
_NARROW_WGMMA = 1.03
"""128 columns an instruction read more of A for each product than 192: 2 to 5 % more time, by power."""
_BARE_EPILOGUE, _LAUNCH = 3500, 10_000
_STARVED = 0.1
"""What each stage short of four costs, as a share."""

TABLE = (
    Config(tile_m=128, tile_n=192),
    Config(tile_m=128, tile_n=128),
    Config(tile_m=192, tile_n=128),
    Config(tile_m=128, tile_n=256, pingpong=False),
    Config(tile_m=128, tile_n=128, cluster=1),
    Config(tile_m=128, tile_n=192, box_n=32),
    Config(tile_m=128, tile_n=128, store_sets=1),
)
"""What the tuner tries; the first of equals is preferred."""


def candidates(signature: Signature, m: int, n: int, k: int, multiprocessors: int = 132) -> tuple[Config, ...]:
    """Fitted configurations for a product, the one predicted fastest first.

    Args:
        signature: what the epilogue reads and writes.
        m, n, k: of the kernel's row-major D.
        multiprocessors: of the device.

    Example:
        >>> best = candidates(Signature(), m=4096, n=4096, k=4096)[0]
        >>> best.tile_m, best.tile_n, best.stages
        (128, 128, 6)
    """
    fitting = [c.fitted(signature) for c in TABLE if not misfit(c, signature)]
    return tuple(sorted(fitting, key=lambda c: c.predicted_cycles(signature, m, n, k, multiprocessors)))


def misfit(config: Config, signature: Signature) -> str:
    """Why a configuration makes no kernel, "" where it makes one.

    It covers the tile's columns in whole sub-tiles, leaves the epilogue registers, and has room for stages.
    """
    known = {(c.tile_m, c.tile_n, c.pingpong) for c in TABLE}
    if (config.tile_m, config.tile_n, config.pingpong) not in known or config.box_n not in (32, 64) or config.cluster not in (1, 2):
        return f"Tiles are {sorted(known)} as (tile_m, tile_n, pingpong), box_n is 32 or 64, cluster 1 or 2."
    out_n = config.tile_n // signature.weights
    parts = out_n // config.box_n * config.group_m // 64
    if config.store_sets < 1 or out_n % config.box_n or parts % config.store_sets or (not signature.b_k_major and out_n % 64):
        return f"A tile's {out_n} columns are no whole sub-tiles of {config.box_n} in {config.store_sets} sets."
    if config.pingpong and config.tile_m * config.tile_n > 128 * 128 and signature.narrow:
        return "This epilogue needs registers that tiles of more than 128 x 128 do not leave."
    stages = config.stages_that_fit(signature)
    return "" if stages >= MIN_STAGES else f"Shared memory has room for {stages} stages, and {MIN_STAGES} are needed."


def _ceil(a: int, b: int) -> int:
    return -(-a // b)

"""What decides a kernel's text: the tile it works by (Config) and what its epilogue reads and writes (Signature)."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_LIMIT_BYTES = 232_448
"""Shared memory that one block can have on SM90: 227 KiB."""

TILE_K = 64
"""Values of k in a stage: 128 bytes of a 16-bit type, one row of the 128-byte swizzle."""


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
        config = replace(self, ring_slots=max(self.ring_slots, 2 * len(signature.tiles_in)) if signature.tiles_in else 0)
        room = SHARED_LIMIT_BYTES - replace(config, stages=0).shared_bytes(signature)
        stages = min(self.stages or 8, room // (config.stage_bytes + 16))
        if stages < 3:
            raise ValueError(f"{self} leaves room for {stages} stages beside its epilogue; it needs 3: take fewer ring slots or a smaller tile")
        return replace(config, stages=stages)

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * TILE_K * 2

    def shared_bytes(self, signature: Signature) -> int:
        """Shared memory of a block; `kernels/kernel_types.cuh` adds up the same and asserts that it is equal."""
        out_n = self.tile_n // signature.weights
        ring = 2 * self.ring_slots * 64 * self.box_n * 2
        staging = 8 * self.store_sets * 16 * self.box_n * 2 * len(signature.tiles_out)
        vectors = 2 * len(signature.along_n) * out_n * 4
        group_m = self.tile_m if self.pingpong else self.tile_m // 2
        bits = 2 * signature.bits_in * group_m * (-(-out_n // 64) * 8)
        barriers = 16 * self.stages + 32 * self.ring_slots + 16
        return self.stages * self.stage_bytes + ring + staging + vectors + bits + barriers

"""cuBLASLt's algorithms: their settings by name, what they can do, and how one is kept as plain data.

An algorithm is 64 opaque bytes. A candidate of the engine holds them in base64 together with the settings that the library reads from
them; a setting that was changed is written back when the candidate is prepared, and the library checks the result.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from epigemm import errors
from epigemm.engines.cuda import libraries
from epigemm.plans import Candidate

ENGINE = "cublaslt"

AUTO, UNDEFINED = "AUTO", "UNDEFINED"

# ---------------------------------------------------------------- the library's numbering

# Source: cublasLtMatmulTile_t of cuBLASLt 13.1. 1 to 35 as they came over the years, then two regular series without those, then four.
_FIRST_TILES = """8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 64x256 128x128
256x64 64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 128x96 32x256 256x32"""
_LAST_TILES = "256x512 256x1024 512x512 512x1024"

# cublasLtMatmulStages_t: (k of a stage, stages); 29 and 30 are not used.
_STAGES = {1 + i: (k, stages) for i, (k, stages) in enumerate((k, s) for k in (16, 32, 64, 128) for s in range(1, 7))}
_STAGES |= {25: (32, 10), 26: (8, 4), 27: (16, 10), 28: (8, 5), 31: (8, 3)}
_AUTO_STAGES = {32 + i: (k, AUTO) for i, k in enumerate((8, 16, 32, 64, 128, 256, 768))}

# cublasLtClusterShape_t from 2 on; the third extent is always 1.
_CLUSTERS = """1x1 2x1 4x1 1x2 2x2 4x2 1x4 2x4 4x4 8x1 1x8 8x2 2x8 16x1 1x16 3x1 5x1 6x1 7x1 9x1 10x1 11x1 12x1 13x1 14x1 15x1 3x2 5x2 6x2
7x2 1x3 2x3 3x3 4x3 5x3 3x4 1x5 2x5 3x5 1x6 2x6 1x7 2x7 1x9 1x10 1x11 1x12 1x13 1x14 1x15"""


def _pair(text: str) -> tuple[int, int]:
    first, second = text.split("x")
    return int(first), int(second)


@cache
def tiles() -> dict[int, Any]:
    """Tile number -> (rows, columns), or "UNDEFINED"."""
    shapes = [_pair(text) for text in _FIRST_TILES.split()]
    seen = set(shapes)
    wide = [(r, c) for r in range(8, 769, 8) for c in range(64, 769, 64) if r * c <= 49152]
    tall = [(r, c) for r in range(64, 769, 64) for c in range(8, 769, 8) if r * c <= 65536]
    for shape in (*wide, *tall, *(_pair(text) for text in _LAST_TILES.split())):
        if shape not in seen:
            seen.add(shape)
            shapes.append(shape)
    return {0: UNDEFINED, **dict(enumerate(shapes, 1))}


@cache
def stages() -> dict[int, Any]:
    """Stages number -> (k of a stage, stages), or "UNDEFINED"."""
    return {0: UNDEFINED, **_STAGES, **_AUTO_STAGES}


@cache
def clusters() -> dict[int, Any]:
    """Cluster shape number -> (blocks along m, along n, 1), or "AUTO"."""
    return {0: AUTO, **{number: (*_pair(text), 1) for number, text in enumerate(_CLUSTERS.split(), 2)}}


# ---------------------------------------------------------------- settings


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of an algorithm.

    Args:
        attribute: number in cublasLtMatmulAlgoConfigAttributes_t.
        form: struct format of its value.
        names: number -> what it is called, where it has names.
        kind: how a plain number is shown.
    """

    attribute: int
    form: str
    names: Callable[[], Mapping[int, Any]] | None = None
    kind: Callable[[int], Hashable] = int

    def show(self, number: int) -> Hashable:
        """The value as a user sees it; a number without a name stays a number."""
        value: Hashable = self.kind(number) if self.names is None else self.names().get(number, number)
        return value

    def number(self, name: str, value: Any) -> int:
        """The library's number for a value.

        Raises:
            errors.AlgorithmError: there is none.
        """
        if self.names is not None:
            plain = tuple(value) if isinstance(value, list) else value
            for number, shown in self.names().items():
                if shown == plain:
                    return number
        if isinstance(value, int) and 0 <= int(value) < 1 << 8 * struct.calcsize("=" + self.form):
            return int(value)
        raise errors.AlgorithmError(
            errors.say(f"cuBLASLt knows no {name} {value!r}.", f"Take one of those that `capabilities` lists for {name}.")
        )


SETTINGS: dict[str, Setting] = {
    "algorithm_id": Setting(0, "i"),
    "tile": Setting(1, "I", tiles),
    "split_k": Setting(2, "i"),
    "reduction_scheme": Setting(3, "I"),
    "cta_swizzling": Setting(4, "I", kind=bool),
    "custom_option": Setting(5, "I"),
    "stages": Setting(6, "I", stages),
    "inner_shape": Setting(7, "H"),
    "cluster_shape": Setting(8, "H", clusters),
}

READ_ONLY = ("algorithm_id",)


def settings(raw: bytes) -> dict[str, Hashable]:
    """The settings that the library reads from an algorithm's bytes."""
    core = libraries.open_cublaslt()
    found: dict[str, Hashable] = {}
    for name, setting in SETTINGS.items():
        value = core.algorithm_config(raw, setting.attribute, struct.calcsize("=" + setting.form))
        found[name] = setting.show(struct.unpack("=" + setting.form, value)[0])
    return found


def with_settings(raw: bytes, wanted: Mapping[str, Any]) -> bytes:
    """The algorithm's bytes with the settings that differ from `wanted` changed.

    Raises:
        errors.AlgorithmError: a value has no number, or is of a setting that cannot be changed.
    """
    core = libraries.open_cublaslt()
    present = settings(raw)
    for name, value in wanted.items():
        plain = tuple(value) if isinstance(value, list) else value
        if plain == present[name]:
            continue
        if name in READ_ONLY:
            raise errors.read_only_setting(name)
        setting = SETTINGS[name]
        raw = core.algorithm_with(raw, setting.attribute, struct.pack("=" + setting.form, setting.number(name, value)))
    return raw


# ---------------------------------------------------------------- capabilities


@dataclass(frozen=True, slots=True)
class AlgorithmCapabilities:
    """What an algorithm can do; the names are the peer's. None where this version of the library does not say."""

    splitk_support: bool | None
    reduction_scheme_mask: int | None
    cta_swizzling_support: bool | None
    strided_batch_support: bool | None
    out_of_place_result_support: bool | None
    uplo_support: bool | None
    tile_ids: tuple[Any, ...] | None
    custom_option_max: int | None
    custom_memory_order: int | None
    pointer_mode_mask: int | None
    epilogue_mask: int | None
    stages_ids: tuple[Any, ...] | None
    ld_negative: bool | None
    numerical_impl_flags: int | None
    min_alignment_a_bytes: int | None
    min_alignment_b_bytes: int | None
    min_alignment_c_bytes: int | None
    min_alignment_d_bytes: int | None
    pointer_array_batch_support: bool | None
    floating_point_emulation_support: bool | None
    mathmode_impl: int | None
    gaussian_impl: int | None
    atomic_sync: bool | None


# name -> (number in cublasLtMatmulAlgoCapAttributes_t, struct format). The last three are gone from the header and may still answer.
_CAPABILITIES: dict[str, tuple[int, str]] = {
    "splitk_support": (0, "i"),
    "reduction_scheme_mask": (1, "I"),
    "cta_swizzling_support": (2, "I"),
    "strided_batch_support": (3, "i"),
    "out_of_place_result_support": (4, "i"),
    "uplo_support": (5, "i"),
    "custom_option_max": (7, "i"),
    "custom_memory_order": (10, "i"),
    "pointer_mode_mask": (11, "I"),
    "epilogue_mask": (12, "I"),
    "ld_negative": (14, "i"),
    "numerical_impl_flags": (15, "Q"),
    "min_alignment_a_bytes": (16, "I"),
    "min_alignment_b_bytes": (17, "I"),
    "min_alignment_c_bytes": (18, "I"),
    "min_alignment_d_bytes": (19, "I"),
    "pointer_array_batch_support": (21, "i"),
    "floating_point_emulation_support": (22, "i"),
    "mathmode_impl": (8, "i"),
    "gaussian_impl": (9, "i"),
    "atomic_sync": (20, "i"),
}
_LISTED: dict[str, tuple[int, Callable[[], Mapping[int, Any]]]] = {"tile_ids": (6, tiles), "stages_ids": (13, stages)}
_SUPPORTS = ("support", "ld_negative", "atomic_sync")


def capabilities(raw: bytes) -> AlgorithmCapabilities:
    """What the algorithm of these bytes can do, asked of the library."""
    core = libraries.open_cublaslt()
    found: dict[str, Any] = {}
    for name, (attribute, form) in _CAPABILITIES.items():
        try:
            value = struct.unpack("=" + form, core.algorithm_capability(raw, attribute, struct.calcsize("=" + form)))[0]
        except (errors.LibraryError, struct.error):
            found[name] = None
            continue
        found[name] = bool(value) if name.endswith(_SUPPORTS) else value
    for name, (attribute, names) in _LISTED.items():
        listed = core.algorithm_capability(raw, attribute, 0)
        numbers = struct.unpack(f"={len(listed) // 4}I", listed)
        found[name] = tuple(names().get(number, number) for number in numbers)
    assert {f.name for f in fields(AlgorithmCapabilities)} == set(found)
    return AlgorithmCapabilities(**found)


# ---------------------------------------------------------------- candidates


def candidate(raw: bytes, workspace_bytes: int, waves: float) -> Candidate:
    """The engine's candidate for a result of the heuristic."""
    config: dict[str, Hashable] = {**settings(raw), "data": base64.b64encode(raw).decode(), "waves": round(float(waves), 4)}
    return Candidate(ENGINE, tuple(sorted(config.items())), workspace_bytes)


def raw_of(chosen: Candidate) -> bytes:
    """A candidate's 64 bytes, its changed settings written into them.

    Raises:
        errors.AlgorithmError: a setting has a value that the library does not know.
    """
    config = dict(chosen.config)
    raw = base64.b64decode(str(config["data"]))
    return with_settings(raw, {name: config[name] for name in SETTINGS if name in config})


# ---------------------------------------------------------------- as plain data


def encoded(chosen: Candidate) -> dict[str, Any]:
    """A candidate of this engine as JSON's types."""
    return {"algorithm": base64.b64encode(raw_of(chosen)).decode(), "workspace_bytes": chosen.workspace_bytes}


def decoded(data: Mapping[str, Any]) -> Candidate:
    """The candidate that `encoded` wrote; the library still checks it when it is prepared.

    Raises:
        errors.AlgorithmError: the data is damaged.
    """
    try:
        raw = base64.b64decode(str(data["algorithm"]), validate=True)
        workspace_bytes = int(data["workspace_bytes"])
    except (KeyError, ValueError, TypeError) as error:
        raise errors.damaged_algorithm(str(error)) from error
    if len(raw) != 64 or workspace_bytes < 0:
        raise errors.damaged_algorithm(f"{len(raw)} bytes, not 64")
    return candidate(raw, workspace_bytes, 0.0)

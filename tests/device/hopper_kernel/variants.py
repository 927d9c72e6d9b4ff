"""Kernels to build and probe: a name is epilogue-element-layout-config, e.g. bias_relu-bf16-kk-p128x192c2."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import isolate  # noqa: F401  (before epigemm)

from epigemm.engines.hopper.configs import Config, Signature
from epigemm.engines.hopper.source import kernel_source
from epilogues import BY_NAME, as_element
from nvrtc import compile_cubin

BUILD = Path(__file__).parents[3] / "build" / "hopper"


def parse_config(text: str) -> Config:
    """`p128x192c2[b32][s1][r2]`: p or c for ping-pong or cooperative, tile, cluster, box_n, store_sets, ring_slots."""
    tile, rest = text[1:].split("c", 1)
    tile_m, tile_n = map(int, tile.split("x"))
    config = Config(tile_m=tile_m, tile_n=tile_n, pingpong=text[0] == "p", cluster=int(rest[0]))
    names = {"b": "box_n", "s": "store_sets", "r": "ring_slots", "g": "stages"}
    number = ""
    for c in reversed(rest[1:]):
        number = c + number if c.isdigit() else number
        if not c.isdigit():
            config, number = replace(config, **{names[c]: int(number)}), ""
    return config


def parse(name: str) -> tuple[str, Config, Signature]:
    epilogue, element, layout, config = name.split("-")
    signature = replace(as_element(BY_NAME[epilogue].signature, element), a_k_major=layout[0] == "k", b_k_major=layout[1] == "k")
    return epilogue, parse_config(config).fitted(signature), signature


def build(name: str) -> str:
    """Compiles one variant into the build folder; returns a line about it."""
    epilogue, config, signature = parse(name)
    source = kernel_source(config, signature, BY_NAME[epilogue].text)
    begin = time.time()
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / f"{name}.cu").write_text(source)
    try:
        cubin, _log = compile_cubin(source, f"{name}.cu")
    except (RuntimeError, ValueError) as error:
        return f"{name}: FAILED {error}"
    (BUILD / f"{name}.cubin").write_bytes(cubin)
    (BUILD / f"{name}.json").write_text(json.dumps({"config": asdict(config), "signature": asdict(signature)}))
    return f"{name}: {len(cubin)} bytes, {config.stages} stages, {time.time() - begin:.1f} s"


def main(names: list[str]) -> None:
    with ProcessPoolExecutor(2) as pool:
        for line in pool.map(build, names):
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or sys.stdin.read().split())

"""Kernels to build and probe: a name is epilogue-element-layout-config, e.g. bias_relu-bf16-kk-p128x192c2."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import isolate  # noqa: F401  (before epigemm)
from epilogues import BY_NAME, as_element
from nvrtc import compile_cubin

from epigemm.engines.hopper.configs import Config, Signature
from epigemm.engines.hopper.source import kernel_source

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
    epilogue, element, layout, config = name.removesuffix("clk").split("-")
    signature = replace(as_element(BY_NAME[epilogue].signature, element), a_k_major=layout[0] == "k", b_k_major=layout[1] == "k")
    return epilogue, parse_config(config).fitted(signature), signature


CLOCKS = (  # where the probe's clock reads go: turn, products, last wait, epilogue
    ("int sequence, int steps) {", "int sequence, int steps, u32 (&spent)[4]) {\n    const u32 begin = clock();"),
    ("    u32 previous = 0;\n", "    const u32 turn = clock();\n    u32 previous = 0;\n"),
    (
        "    if (config::pingpong && lane_index() == 0) barrier_arrive(turns",
        "    const u32 issued = clock();\n    if (config::pingpong && lane_index() == 0) barrier_arrive(turns",
    ),
    (
        "    wgmma_wait<0>();\n    release(previous);\n",
        """    wgmma_wait<0>();
    spent[0] += turn - begin, spent[1] += issued - turn, spent[2] += clock() - issued;
    release(previous);
""",
    ),
    ("    Accumulators acc;\n", "    Accumulators acc;\n    u32 spent[4] = {};\n"),
    ("sequence, p.steps);\n", "sequence, p.steps, spent);\n        const u32 epilogue_begin = clock();\n"),
    ("        finisher.finish_tile(acc);\n", "        finisher.finish_tile(acc);\n        spent[3] += clock() - epilogue_begin;\n"),
    (
        "    if (lane_index() == 0) stores_wait_read<0>();\n}",
        """    if (lane_index() == 0) stores_wait_read<0>();
    if (blockIdx.x == 0 && group == 0 && threadIdx.x % 128 == 0 && p.sums_n[3] != nullptr)
        for (int i = 0; i < 4; ++i) reinterpret_cast<u64*>(p.sums_n[3])[2 + i] = spent[i];
}""",
    ),
)


def with_clocks(source: str) -> str:
    """The kernel, but block 0 also writes its cycles and nanoseconds, and what a warpgroup spent, where `sums_n[3]` points, if it does."""
    begin = "    u64 clocks[2] = {clock64(), nanoseconds()};\n    extern __shared__"
    end = """    if (threadIdx.x == 0 && blockIdx.x == 0 && p.sums_n[3] != nullptr) {
        u64* to = reinterpret_cast<u64*>(p.sums_n[3]);
        to[0] = clock64() - clocks[0];
        to[1] = nanoseconds() - clocks[1];
    }
"""
    timer = 'DEVICE u64 nanoseconds() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }\n\n'
    source = source.replace("    extern __shared__", begin, 1).replace('extern "C" __global__', timer + 'extern "C" __global__', 1)
    last = "    if (config::cluster > 1) cluster_sync();  // a block's"
    for old, new in (*CLOCKS, (last, "    if (config::cluster > 1) cluster_sync();\n" + end + "    // a block's")):
        assert old in source, old
        source = source.replace(old, new, 1)
    return source


def build(name: str) -> str:
    """Compiles one variant into the build folder; returns a line about it."""
    epilogue, config, signature = parse(name)
    source = kernel_source(config, signature, BY_NAME[epilogue].text)
    if name.endswith("clk"):
        source = with_clocks(source)
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

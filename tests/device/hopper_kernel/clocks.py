"""Cycles and clock of kernels built with the suffix `clk`: does an epilogue cost cycles, or clock (power)?"""

from __future__ import annotations

import statistics
import sys

import torch
from probe import load, make_operands


def main(shape: str, names: list[str]) -> None:
    m, n, k = (int(x) for x in shape.split("x"))
    out = torch.zeros(6, dtype=torch.int64, device="cuda")
    bound = {}
    for name in names:
        kernel, _ = load(name.partition("@")[0])
        bound[name] = kernel.bind(
            make_operands(kernel.signature, m, n, k, 1)[0], 16, "n" if "@n" in name else "sb" if "@sb" in name else "s"
        )
        bound[name].params.sums_n[3] = out.data_ptr()
    for mode in ("burst", "sustained"):
        for name, call in bound.items():
            blocks = call.grid // call.kernel.config.cluster
            tiles = -(-call.params.tiles_m * call.params.tiles_n // blocks) / 2
            rows = []
            for _ in range(7):
                if mode == "burst":
                    torch.cuda._sleep(4_000_000)
                for _ in range(1 if mode == "burst" else 20):
                    call()
                torch.cuda.synchronize()
                rows.append(out.tolist())
            cycles, ns, *spent = (statistics.median(x) for x in zip(*rows))
            part = [int(x / tiles) for x in spent]
            speed = f"{cycles:10.0f} cycles {ns / 1e3:8.1f} us {cycles / ns * 1e3:6.0f} MHz"
            print(f"{mode:10} {name:44} {speed}   turn, products, last wait, epilogue a tile: {part}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

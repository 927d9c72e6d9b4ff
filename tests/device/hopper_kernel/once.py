"""Each named kernel, three launches, for a profiler: `ncu -k epigemm_hopper ... once.py 16384x4096x1024 NAMES`."""

from __future__ import annotations

import sys

import torch
from probe import load, make_operands

m, n, k = (int(x) for x in sys.argv[1].split("x"))
for name in sys.argv[2:]:
    kernel, _ = load(name)
    bound = kernel.bind(make_operands(kernel.signature, m, n, k, 1)[0], 16)
    bound()
    torch.cuda.synchronize()
    print(name, flush=True)

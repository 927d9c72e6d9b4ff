"""Every epilog's time fused and unfused, relative to the bare product.

Usage: python tests/device/unfused/bench.py RESULT.json [ROUNDS]
"""

from __future__ import annotations

import sys
from pathlib import Path

from epigemm.bench import epilogs

if __name__ == "__main__":
    epilogs.main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))

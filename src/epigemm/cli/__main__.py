"""`python -m epigemm.cli` is the command `epigemm`."""

from __future__ import annotations

import sys

from epigemm.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Import this first: lets the probe import `epigemm.engines.hopper` alone, without what the package's `__init__`s load."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).parents[3] / "src" / "epigemm"

for name, folder in (("epigemm", SOURCE), ("epigemm.engines", SOURCE / "engines")):
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules.setdefault(name, module)

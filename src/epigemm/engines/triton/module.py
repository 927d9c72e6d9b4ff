"""From a generated text to its functions: the text is a file of the store, imported from there."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType

from epigemm.store import Key, Store

# Readable, named files; `epigemm cache` lists them.
STORE = Store("triton", schema=1, suffix=".py", required=("sha256",))

_loaded: dict[str, ModuleType] = {}
_lock = threading.Lock()


def load(name: str, text: str) -> ModuleType:
    """The module of a generated text, imported once a process.

    Args:
        name: a readable stem: the epilogue's.
        text: the whole module; its digest is part of the file's and the module's name.
    """
    key = STORE.key(name or "epilogue", sha256=hashlib.sha256(text.encode()).hexdigest())
    with _lock:
        found = _loaded.get(key.name)
        if found is None:
            found = _loaded[key.name] = _imported(key, _file(key, text))
        return found


def _file(key: Key, text: str) -> Path:
    """The file that holds the text: the store's, or where that cannot be written a temporary one."""
    if STORE.get(key) == text.encode():
        return STORE.path(key)
    path = STORE.put(key, text.encode())
    if path is None:
        path = Path(tempfile.mkdtemp(prefix="epigemm-")) / f"{key.name}.py"
        path.write_text(text)
    return path


def _imported(key: Key, path: Path) -> ModuleType:
    name = f"epigemm_generated.{key.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Triton reads a function's source, which `inspect` finds by its module.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

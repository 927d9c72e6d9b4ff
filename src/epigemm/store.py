"""The on-disk store: generated code, compiled kernels, tuned results.

All of it is disposable: an entry that cannot be read is a miss, a folder that cannot be written is done without, and
removing the folder costs time only. What must hold is that a value is never taken for a key that it was not made for:
a key is the canonical JSON of everything that decides the value, an entry repeats it, and a part that has no stable
text is refused instead of being guessed at.

An entry is one file, `<folder>/<kind>/<stem>-<digest><suffix>`: the payload, then one line (a comment, in a source file)
with the key and the payload's SHA-256. It appears whole, by `os.replace`, so processes share a folder without locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epigemm import __version__, config, errors

# How the line that closes an entry is written, by the kind of file.
_COMMENT = {".jsonl": b"", ".cubin": b"", ".py": b"# ", ".cu": b"// ", ".cuh": b"// "}
_ENTRY_NAME = re.compile(r"[\w.-]*-[0-9a-f]{32}\.\w+")
_TEMPORARY_PREFIX = ".writing-"
_TEMPORARY_LIFE_S = 3600  # a temporary file this old was left by a process that died

_warned: set[str] = set()


def _warn_once(about: str, text: str) -> None:
    if about not in _warned:
        _warned.add(about)
        warnings.warn(text, errors.EpigemmWarning, stacklevel=4)


# ---------------------------------------------------------------- keys


def _plain(value: object, path: str) -> object:
    """The value built of JSON's own types; `path` is where it stands in the key."""
    if value is None or isinstance(value, (bool, str)):
        return value if not isinstance(value, str) else str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        if bad := [name for name in value if not isinstance(name, str)]:
            raise errors.not_fingerprintable(f"{path}.{bad[0]!r}", bad[0])
        return {str(name): _plain(item, f"{path}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    raise errors.not_fingerprintable(path, value)


def canonical(parts: Mapping[str, object]) -> str:
    """The one text of a key: equal for equal parts in any order, different for 1, 1.0, True and "1".

    Args:
        parts: None, bool, int, float, str, and lists, tuples and mappings of these.

    Raises:
        StoreKeyError: a part is something else; the message says where it stands.

    Example:
        >>> canonical({"m": 64, "alpha": 1.0, "strides": (64, 1)})
        '{"alpha":1.0,"m":64,"strides":[64,1]}'
    """
    plain = {name: _plain(value, name) for name, value in parts.items()}
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Key:
    """What an entry is found by: a readable stem, and the canonical text of everything that decides its value."""

    stem: str
    text: str

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        stem = re.sub(r"[^A-Za-z0-9_.]+", "_", self.stem)[:80].lstrip(".") or "entry"
        return f"{stem}-{hashlib.sha256(self.text.encode()).hexdigest()[:32]}"


# ---------------------------------------------------------------- the folder


def cache_folder() -> Path:
    """Where the store lies: EPIGEMM_CACHE_DIR, else the user's cache folder as the system has it."""
    chosen = config.CACHE_DIR.get()
    if chosen is not None:
        return chosen
    import platformdirs  # here, because most processes never touch the store

    return platformdirs.user_cache_path("epigemm")


def _check_private(folder: Path) -> None:
    """Raise unless the folder is this user's and no one else can write to it: what lies in it is run."""
    info = folder.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise errors.cache_not_a_folder(folder)
    if os.name != "posix":
        return
    if info.st_uid != os.geteuid():
        raise errors.cache_owned_by_another(folder, info.st_uid, os.geteuid())
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise errors.cache_writable_by_others(folder, stat.S_IMODE(info.st_mode))


def _make_private(folder: Path) -> None:
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    _check_private(folder)


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the store, as `epigemm cache` lists it."""

    kind: str
    path: Path
    size_bytes: int
    used_s: float  # time of last use, seconds since the epoch


def entries(folder: Path | None = None) -> list[Entry]:
    """All entries under the folder, the longest unused first. Files that the store did not name are not entries."""
    root = cache_folder() if folder is None else folder
    found = []
    for path, info in _files(root):
        if _ENTRY_NAME.fullmatch(path.name):
            found.append(Entry(path.parent.name, path, info.st_size, info.st_mtime))
    return sorted(found, key=lambda entry: (entry.used_s, entry.path))


def clear(kind: str | None = None, folder: Path | None = None) -> int:
    """Remove all entries, or those of one kind; the number removed."""
    return sum(_remove(entry.path) for entry in entries(folder) if kind in (None, entry.kind))


def _files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The files one folder down. Other processes add and remove some meanwhile: what is gone is passed over."""
    try:
        kinds = [Path(item.path) for item in os.scandir(root) if item.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for kind in kinds:
        try:
            names = os.listdir(kind)
        except OSError:
            continue
        for name in names:
            try:
                info = os.lstat(kind / name)
            except OSError:
                continue
            if stat.S_ISREG(info.st_mode):
                yield kind / name, info


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def evict(limit_bytes: int, keep: Path | None = None, folder: Path | None = None) -> int:
    """Remove the longest unused entries until the rest fits; the number removed. `keep` stays in any case."""
    root = cache_folder() if folder is None else folder
    for path, info in _files(root):
        if path.name.startswith(_TEMPORARY_PREFIX) and time.time() - info.st_mtime > _TEMPORARY_LIFE_S:
            _remove(path)
    found = entries(root)
    excess = sum(entry.size_bytes for entry in found) - limit_bytes
    removed = 0
    for entry in found:
        if excess <= 0:
            break
        if entry.path != keep and _remove(entry.path):
            excess -= entry.size_bytes
            removed += 1
    return removed


# ---------------------------------------------------------------- the store


@dataclass(frozen=True, slots=True)
class Store:
    """The entries of one kind.

    Args:
        kind: the name of its folder, as in "cubins".
        schema: raised whenever the meaning of the payload changes; part of every key.
        suffix: ".jsonl" for values, ".cubin" for binaries, ".py", ".cu" or ".cuh" for sources.
        required: the parts without which a key would be ambiguous. Absent or None, the key is refused.
        folder: the cache folder, found anew at each use if None.

    Example:
        >>> records = Store("records", schema=1, required=("problem", "device"))
        >>> key = records.key("relu_bias", problem="m=64 n=64 k=64", device="H200")
        >>> key.name
        'relu_bias-...'
    """

    kind: str
    schema: int
    suffix: str = ".jsonl"
    required: tuple[str, ...] = ()
    folder: Path | None = None

    def __post_init__(self) -> None:
        assert self.suffix in _COMMENT, self.suffix

    def key(self, stem: str, **parts: object) -> Key:
        """The key of a value that `parts` decide; `stem` is for the reader of the folder.

        Raises:
            StoreKeyError: a required part is absent or None, or a part has no stable text.
        """
        if missing := [name for name in self.required if parts.get(name) is None]:
            raise errors.key_incomplete(self.kind, missing)
        plain = {name: _plain(value, name) for name, value in parts.items()}
        whole = {"kind": self.kind, "schema": self.schema, "epigemm": __version__, "parts": plain}
        return Key(stem, canonical(whole))

    def path(self, key: Key) -> Path:
        """Where the entry of this key lies, if it is there."""
        return (self.folder or cache_folder()) / self.kind / f"{key.name}{self.suffix}"

    def get(self, key: Key) -> bytes | None:
        """The payload stored for the key, None on a miss. An entry that is not whole is a miss, with one warning.

        Raises:
            StorePermissionError: the folder belongs to another user, or others can write to it.
        """
        path = self.path(key)
        try:
            _check_private(path.parent.parent)
            _check_private(path.parent)
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except errors.StorePermissionError:
            raise
        except OSError as error:
            _warn_once(str(path), f"epigemm does without the stored {path}: {error}.")
            return None
        payload = self._payload(data, key)
        if payload is None:
            _warn_once(str(path), f"epigemm does without the stored {path}: it is damaged, and is made anew.")
            return None
        _touch(path)
        return payload

    def put(self, key: Key, payload: bytes) -> Path | None:
        """Store the payload; the path of its file, or None (with one warning) where the folder cannot be written.

        Raises:
            StorePermissionError: the folder belongs to another user, or others can write to it.
        """
        path = self.path(key)
        try:
            _make_private(path.parent.parent)
            _make_private(path.parent)
            _write_whole(path, payload + self._closing(payload, key))
        except errors.StorePermissionError:
            raise
        except OSError as error:
            _warn_once(str(path.parent), f"epigemm cannot store in {path.parent} and goes on without: {error}.")
            return None
        evict(config.CACHE_BYTES.get(), keep=path, folder=path.parent.parent)
        return path

    def get_value(self, key: Key) -> Any:
        """The value stored for the key by `put_value`, None on a miss."""
        payload = self.get(key)
        return None if payload is None else json.loads(payload)

    def put_value(self, key: Key, value: Mapping[str, object] | Sequence[object]) -> Path | None:
        """Store a value made of JSON's types."""
        return self.put(key, json.dumps(value).encode())

    def _closing(self, payload: bytes, key: Key) -> bytes:
        facts = {"sha256": hashlib.sha256(payload).hexdigest(), "key": key.text}
        return b"\n" + _COMMENT[self.suffix] + json.dumps(facts).encode() + b"\n"

    def _payload(self, data: bytes, key: Key) -> bytes | None:
        """What stands before the closing line, if that line is the one this payload and key have."""
        end = data.rfind(b"\n", 0, len(data) - 1)
        payload = data[: max(end, 0)]
        return payload if payload + self._closing(payload, key) == data else None


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(path)  # the time of last use, by which entries are evicted


def _write_whole(path: Path, data: bytes) -> None:
    """Write the file so that others see all of it or none. No fsync: a crash leaves a damaged entry, which is a miss."""
    handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY_PREFIX, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        _remove(Path(temporary))
        raise

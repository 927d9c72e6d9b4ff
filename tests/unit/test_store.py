"""The on-disk store: keys that fail closed, entries that are whole or a miss, a private folder, eviction, many processes."""

from __future__ import annotations

import enum
import json
import os
import stat
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest

from epigemm import errors, store
from epigemm.store import Store


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def records(folder):
    return Store("records", schema=1, folder=folder)


class Colour(enum.IntEnum):
    RED = 2


# ---------------------------------------------------------------- keys


def test_equal_parts_in_any_order_are_one_key(records):
    assert records.key("x", m=1, n=(2, 3)) == records.key("x", n=[2, 3], m=1)


DISTINCT = [None, True, False, 0, 1, 1.0, -0.0, 0.0, float("inf"), "1", "", "None", [], [1], [[1]], [1, 1], {}, {"a": 1}, {"a": [1]}]


def test_different_parts_are_different_keys(records):
    texts = {records.key("x", part=part).text for part in DISTINCT}
    assert len(texts) == len(DISTINCT)


def test_kind_schema_and_version_are_in_the_key(folder, monkeypatch):
    def text(kind, schema):
        return Store(kind, schema, folder=folder).key("x", m=1).text

    texts = {text("records", 1), text("records", 2), text("cubins", 1)}
    monkeypatch.setattr(store, "__version__", "99")
    texts.add(text("records", 1))
    assert len(texts) == 4


def test_enums_and_numpy_floats_are_what_they_equal(records):
    assert records.key("x", a=Colour.RED, b=np.float64(0.5)) == records.key("x", a=2, b=0.5)


@pytest.mark.parametrize(
    ("part", "where"),
    [
        (object(), "part"),
        (b"bytes", "part"),
        ({1, 2}, "part"),
        (np.zeros(2), "part"),
        (np.float32(1), "part"),
        (lambda: 0, "part"),
        ([1, object()], r"part\[1\]"),
        ({"a": {"b": (1j,)}}, r"part\.a\.b\[0\]"),
        ({1: "a"}, r"part\.1"),
    ],
)
def test_what_has_no_stable_text_is_refused_and_located(records, part, where):
    with pytest.raises(errors.StoreKeyError, match=f"`{where}` cannot be fingerprinted"):
        records.key("x", part=part)


@pytest.mark.parametrize("parts", [{}, {"driver": None}])
def test_a_required_part_must_be_known(folder, parts):
    with pytest.raises(errors.StoreKeyError, match="key of the store 'cubins' lacks driver"):
        Store("cubins", schema=1, required=("driver",), folder=folder).key("x", arch="sm_90a", **parts)


def test_the_file_name_is_readable_and_stays_in_the_folder(records, folder):
    assert records.path(records.key("relu_bias", m=1)).name.startswith("relu_bias-")
    for stem in ("../../etc/passwd", "a/b c", "", ".hidden", "ж" * 300, "x" * 300):
        path = records.path(records.key(stem, m=1))
        assert path.parent == folder / "records"
        assert len(path.name) < 130
        assert not path.name.startswith(".")
        assert store._ENTRY_NAME.fullmatch(path.name)


# ---------------------------------------------------------------- entries


@pytest.mark.parametrize("suffix", sorted(store._COMMENT))
@pytest.mark.parametrize("payload", [b"", b"x", b"\n", b"a\nb\n", b"\n\n", bytes(range(256)) * 9], ids=repr)
def test_a_payload_comes_back_as_it_was(folder, suffix, payload):
    cache = Store("things", schema=1, suffix=suffix, folder=folder)
    key = cache.key("x", m=1)
    assert cache.get(key) is None
    assert cache.put(key, payload) == cache.path(key)
    assert cache.get(key) == payload


def test_values(records):
    key = records.key("x", m=1)
    assert records.get_value(key) is None
    records.put_value(key, {"us": 1.5, "config": [["panel_rows", 256]]})
    assert records.get_value(key) == {"us": 1.5, "config": [["panel_rows", 256]]}
    records.put_value(key, {"us": 1.0})
    assert records.get_value(key) == {"us": 1.0}


def test_a_source_stays_a_source(folder):
    cache = Store("sources", schema=1, suffix=".py", folder=folder)
    path = cache.put(cache.key("double", note="coding: nothing"), b"def double(x):\n    return 2 * x\n")
    namespace: dict[str, object] = {}
    exec(compile(path.read_bytes(), str(path), "exec"), namespace)
    assert namespace["double"](21) == 42
    assert path.read_text().startswith("def double")


def test_the_entry_names_its_key(records):
    path = records.put_value(records.key("x", device="H200"), {"us": 1})
    facts = json.loads(path.read_text().splitlines()[-1])
    assert json.loads(facts["key"])["parts"] == {"device": "H200"}


def damage_truncate(data):
    return data[: len(data) // 2]


def damage_flip(data):
    return bytes([data[0] ^ 1]) + data[1:]


def damage_tail(data):
    return data + b"more\n"


def damage_last_byte(data):
    return data[:-1]


def damage_empty(data):
    return b""


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_tail, damage_last_byte, damage_empty])
def test_a_damaged_entry_is_a_miss_with_one_warning_and_is_made_anew(records, damage):
    key = records.key("x", m=1)
    path = records.put_value(key, {"us": 1.0, "note": "long enough to be cut"})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(errors.EpigemmWarning, match="it is damaged, and is made anew") as caught:
        assert records.get_value(key) is None
        assert records.get_value(key) is None
    assert len(caught) == 1
    records.put_value(key, {"us": 2.0})
    assert records.get_value(key) == {"us": 2.0}


def test_every_truncation_is_a_miss(records):
    key = records.key("x", m=1)
    path = records.put_value(key, {"us": 1.0})
    whole = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            assert records.get(key) is None, length


def test_an_entry_of_another_key_is_a_miss(records):
    here, there = records.key("x", m=1), records.key("x", m=2)
    records.put_value(there, {"us": 1.0})
    os.rename(records.path(there), records.path(here))
    with pytest.warns(errors.EpigemmWarning, match="damaged"):
        assert records.get(here) is None


# ---------------------------------------------------------------- the folder


def test_folders_are_private(records, folder):
    old = os.umask(0)
    try:
        path = records.put_value(records.key("x", m=1), {})
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("which", ["folder", "kind"])
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(records, folder, which, mode):
    key = records.key("x", m=1)
    records.put_value(key, {"us": 1})
    target = folder if which == "folder" else folder / "records"
    target.chmod(mode)
    for use in (lambda: records.get(key), lambda: records.put(key, b"")):
        with pytest.raises(errors.StorePermissionError, match=rf"Others can write .* \(mode {mode:04o}\)[\s\S]*chmod 700"):
            use()
    target.chmod(0o755)
    assert records.get_value(key) == {"us": 1}


def test_a_folder_of_another_user_is_refused(records, monkeypatch):
    key = records.key("x", m=1)
    records.put_value(key, {})
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(errors.StorePermissionError, match=rf"belongs to user {user}, not to user {user + 1}"):
        records.get(key)
    with pytest.raises(PermissionError, match="EPIGEMM_CACHE_DIR"):
        records.put(key, b"")


def test_a_file_in_place_of_the_folder_is_refused(records, folder):
    folder.write_text("")
    with pytest.raises(errors.StorePermissionError, match="is not a folder"):
        records.put(records.key("x", m=1), b"")


def test_where_nothing_can_be_written_it_goes_on_without(records, monkeypatch):
    key = records.key("x", m=1)
    records.put_value(key, {"us": 1})

    def refuse(*_args, **_kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(store.tempfile, "mkstemp", refuse)
    monkeypatch.setattr(store.os, "utime", refuse)
    with pytest.warns(errors.EpigemmWarning, match="goes on without: .*Read-only") as caught:
        assert records.put(key, b"") is None
        assert records.put(records.key("y", m=2), b"") is None
    assert len(caught) == 1
    assert records.get_value(key) == {"us": 1}


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Store("records", schema=1, folder=tmp_path / "file" / "cache")
    key = cache.key("x", m=1)
    assert cache.get(key) is None
    with pytest.warns(errors.EpigemmWarning, match="goes on without"):
        assert cache.put(key, b"") is None


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_read(records, folder):
    key = records.key("x", m=1)
    records.put_value(key, {"us": 1})
    (folder / "records").chmod(0o500)
    assert records.get_value(key) == {"us": 1}
    with pytest.warns(errors.EpigemmWarning, match="goes on without"):
        assert records.put(key, b"") is None
    (folder / "records").chmod(0o700)


def test_the_environment_chooses_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("EPIGEMM_CACHE_DIR", str(tmp_path / "mine"))
    assert store.cache_folder() == tmp_path / "mine"
    cache = Store("records", schema=1)
    path = cache.put_value(cache.key("x", m=1), {})
    assert path.parent == tmp_path / "mine" / "records"
    monkeypatch.delenv("EPIGEMM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert store.cache_folder() == tmp_path / "xdg" / "epigemm"


# ---------------------------------------------------------------- eviction


def fill(cache, count, size):
    """Entries of known age: the first is the oldest."""
    keys = [cache.key(f"e{i}", i=i) for i in range(count)]
    for age, key in enumerate(keys):
        path = cache.put(key, bytes(size))
        os.utime(path, (1000 + age, 1000 + age))
    return keys


def test_the_longest_unused_goes_first(records, folder):
    keys = fill(records, 4, 1000)
    assert records.get(keys[0]) is not None  # now the newest
    one = store.entries(folder)[0].size_bytes
    assert store.evict(2 * one + 50, folder=folder) == 2
    assert [records.get(key) is not None for key in keys] == [True, False, False, True]


def test_put_keeps_the_folder_within_its_limit_across_kinds(folder, monkeypatch):
    records, cubins = Store("records", schema=1, folder=folder), Store("cubins", schema=1, suffix=".cubin", folder=folder)
    fill(records, 3, 1000)
    monkeypatch.setenv("EPIGEMM_CACHE_BYTES", "3000")
    path = cubins.put(cubins.key("new", m=1), bytes(1000))
    left = store.entries(folder)
    assert sum(entry.size_bytes for entry in left) <= 3000
    assert path in [entry.path for entry in left]
    assert {entry.kind for entry in left} == {"records", "cubins"}


def test_what_was_just_stored_stays_even_if_it_alone_is_too_large(records, monkeypatch):
    monkeypatch.setenv("EPIGEMM_CACHE_BYTES", "10")
    key = records.key("x", m=1)
    records.put(key, bytes(1000))
    assert records.get(key) == bytes(1000)


def test_files_of_others_are_left_alone(records, folder):
    fill(records, 2, 10)
    (folder / "records" / "thesis.txt").write_text("mine")
    (folder / "thesis.txt").write_text("mine")
    assert store.evict(0, folder=folder) == 2
    assert (folder / "records" / "thesis.txt").exists()
    assert (folder / "thesis.txt").exists()


def test_remains_of_dead_writers_are_removed_and_those_of_living_ones_not(records, folder):
    fill(records, 1, 10)
    old, new = folder / "records" / ".writing-old", folder / "records" / ".writing-new"
    old.write_text("")
    new.write_text("")
    os.utime(old, (1, 1))
    store.evict(1 << 20, folder=folder)
    assert not old.exists()
    assert new.exists()


def test_entries_and_clear(folder):
    records, cubins = Store("records", schema=1, folder=folder), Store("cubins", schema=1, suffix=".cubin", folder=folder)
    fill(records, 3, 10)
    fill(cubins, 2, 10)
    assert [entry.kind for entry in store.entries(folder)].count("cubins") == 2
    assert store.clear("cubins", folder=folder) == 2
    assert store.clear(folder=folder) == 3
    assert store.entries(folder) == []
    assert store.entries(folder / "nowhere") == []


# ---------------------------------------------------------------- many processes

WORKER = """
    import sys
    from pathlib import Path
    from epigemm.store import Store
    cache = Store("records", schema=1, folder=Path(sys.argv[1]))
    me, hits = int(sys.argv[2]), 0
    for i in range(150):
        number = (i * 7 + me) % 5
        key = cache.key("shared", number=number)
        found = cache.get(key)
        if found is not None:
            hits += 1
            assert len(found) == 20_000 and set(found) == {number}, (number, len(found))
        if i % 3 == 0:
            assert cache.put(key, bytes([number]) * 20_000) is not None
    print(hits)
"""


@pytest.mark.parametrize("limit", ["1 GiB", "50 kB"])  # 50 kB: two entries fit, so that they evict each other's all the time
def test_processes_share_a_folder(folder, limit):
    source = str(Path(store.__file__).parents[1])
    environment = {**os.environ, "EPIGEMM_CACHE_BYTES": limit, "PYTHONPATH": source, "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(folder)]
    workers = [subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, text=True) for i in range(4)]
    hits = [int(worker.communicate(timeout=120)[0] or -1) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0, 0]
    assert min(hits) >= 0
    assert sum(hits) > 0
    assert not list(folder.rglob(".writing-*"))

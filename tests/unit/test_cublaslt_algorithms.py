from __future__ import annotations

import base64

import pytest

from epigemm import errors
from epigemm.engines import stored
from epigemm.engines.cublaslt import algorithms

VERSIONS = {"cublasLt": "130100", "driver": "13000", "device": "NVIDIA H200 sm_90"}


def test_tile_numbers():
    tiles = algorithms.tiles()
    assert len(tiles) == 635
    assert [tiles[i] for i in (0, 1, 20, 23, 35, 36, 311, 312, 630, 634)] == [
        "UNDEFINED",
        (8, 8),
        (128, 128),
        (128, 256),
        (256, 32),
        (8, 128),
        (768, 64),
        (64, 16),
        (768, 80),
        (512, 1024),
    ]
    assert len(set(tiles.values())) == 635


def test_stages_and_cluster_numbers():
    assert [algorithms.stages()[i] for i in (0, 1, 24, 25, 31, 35, 38)] == [
        "UNDEFINED",
        (16, 1),
        (128, 6),
        (32, 10),
        (8, 3),
        (64, "AUTO"),
        (768, "AUTO"),
    ]
    assert [algorithms.clusters()[i] for i in (0, 2, 3, 14, 28, 51)] == ["AUTO", (1, 1, 1), (2, 1, 1), (2, 8, 1), (3, 2, 1), (1, 15, 1)]
    assert 1 not in algorithms.clusters()


def test_a_setting_that_the_library_has_not():
    assert algorithms.SETTINGS["tile"].number("tile", [128, 256]) == 23
    assert algorithms.SETTINGS["cluster_shape"].number("cluster_shape", "AUTO") == 0
    with pytest.raises(errors.AlgorithmError, match=r"cuBLASLt knows no tile \(7, 7\)"):
        algorithms.SETTINGS["tile"].number("tile", (7, 7))
    with pytest.raises(errors.AlgorithmError, match="cuBLASLt knows no inner_shape 70000"):
        algorithms.SETTINGS["inner_shape"].number("inner_shape", 70000)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("problem", "other", "its problem is 'other'"),
        ("versions", {**VERSIONS, "device": "NVIDIA L4 sm_89"}, "L4"),
        ("schema", 0, "its schema is 0"),
        ("engine", "triton", "its engine is 'triton'"),
    ],
)
def test_a_stored_algorithm_for_something_else(field, value, words):
    data = {"schema": 1, "engine": "cublaslt", "problem": "p", "versions": VERSIONS, "algorithm": "", "workspace_bytes": 0}
    with pytest.raises(errors.AlgorithmError, match=words):
        stored.check({**data, field: value}, data)


@pytest.mark.parametrize("damage", [{"algorithm": "###"}, {"algorithm": base64.b64encode(b"short").decode()}, {"workspace_bytes": None}])
def test_a_damaged_stored_algorithm(damage):
    data = {"schema": 1, "engine": "cublaslt", "problem": "p", "versions": VERSIONS, "algorithm": "", "workspace_bytes": 0}
    with pytest.raises(errors.AlgorithmError, match="damaged"):
        algorithms.decoded({**data, **damage})

"""What a forward saves for its backward, in bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import epigemm.expression as eg
from epigemm.expression.cut import cheapest_cut
from epigemm.expression.nodes import Node, acc, walk

M, N = 512, 256
MATRIX = M * N * 2  # bytes in bf16
MASK = M * N // 8

SAVED = {
    "relu": (lambda acc, bias: eg.relu(acc + bias), 1, MASK, ["mask"]),
    "leaky_relu": (lambda acc, bias: eg.leaky_relu(acc + bias), 1, MASK, ["mask"]),
    "clamp": (lambda acc, bias: eg.clamp(acc + bias, 0.0, 6.0), 1, 2 * MASK, ["mask", "mask"]),
    "gelu": (lambda acc, bias: eg.gelu(acc + bias), 1, MATRIX, ["value"]),
    "gelu_tanh": (lambda acc, bias: eg.gelu(acc + bias, approximate="tanh"), 1, MATRIX, ["value"]),
    "silu": (lambda acc, bias: eg.silu(acc + bias), 1, MATRIX, ["value"]),
    "mish": (lambda acc, bias: eg.mish(acc + bias), 1, MATRIX, ["value"]),
    "softplus": (lambda acc, bias: eg.softplus(acc + bias), 1, MATRIX, ["value"]),
    "tanh": (lambda acc, bias: eg.tanh(acc + bias), 1, 0, ["result"]),
    "sigmoid": (lambda acc, bias: eg.sigmoid(acc + bias), 1, 0, ["result"]),
    "exp": (lambda acc, bias: eg.exp(acc + bias), 1, 0, ["result"]),
    "cast_tanh": (lambda acc, bias: eg.cast(eg.tanh(acc + bias), "bfloat16"), 1, 0, ["result"]),
    "cast_narrow": (lambda acc, bias: eg.cast(eg.tanh(acc + bias), "float8_e5m2"), 1, MATRIX, ["value"]),
    "linear": (lambda acc, bias: acc + bias, 1, 0, []),
    "scaled": (lambda acc, bias: 3.0 * (acc + bias) - 1.0, 1, 0, []),
    "residual": (lambda acc, bias, residual: acc + bias + residual, 1, 0, []),
    "gelu_residual": (lambda acc, bias, residual: eg.gelu(acc + bias) + residual, 1, MATRIX, ["value"]),
    "relu_residual": (lambda acc, bias, residual: eg.relu(acc + bias) + residual, 1, MASK, ["mask"]),
    "gated_by_input": (lambda acc, residual: acc * residual, 1, MATRIX, ["value", "input"]),
    "swiglu": (lambda gate, up: eg.silu(gate) * up, 2, 2 * MATRIX, ["value", "value"]),
    "geglu": (lambda gate, up: eg.gelu(gate) * up, 2, 2 * MATRIX, ["value", "value"]),
    "dropout": (lambda acc, bias, seed: eg.dropout(acc + bias, 0.1, seed), 1, 0, ["input"]),
    "relu_dropout": (lambda acc, bias, seed: eg.dropout(eg.relu(acc + bias), 0.1, seed), 1, MASK, ["mask", "input"]),
    "constant_seed": (lambda acc: eg.dropout(acc, 0.1, 7), 1, 0, []),
    "squared_relu": (lambda acc: eg.square(eg.relu(acc)), 1, MATRIX, ["value"]),
    "stored_anyway": (lambda acc, bias: eg.outputs(eg.gelu(acc + bias), pre=acc + bias), 1, 0, ["output"]),
    "mask_stored_anyway": (lambda acc: eg.outputs(eg.relu(acc), pos=eg.bitmask(~(acc <= 0))), 1, 0, ["output"]),
    "sum_of_squares": (lambda acc, bias: eg.outputs(acc + bias, s=eg.sum(eg.square(acc + bias), axis="n")), 1, 0, ["result"]),
}
PLACES = {"bias": "row", "residual": "matrix", "seed": "scalar"}


def derived(function, accumulators=1, dtype="bf16", m=M, n=N):
    from epigemm.expression.grad import gradient

    expression = eg.as_epilogue(function).expression(accumulators)
    return gradient(expression, {name: PLACES[name] for name in expression.input_names}, m=m, n=n, dtype=dtype)


@pytest.mark.parametrize("name", SAVED)
def test_saved_bytes(name):
    function, accumulators, bytes_, sources = SAVED[name]
    found = derived(function, accumulators)
    assert found.saved_bytes() == bytes_, str(found)
    assert sorted(s.source for s in found.saved) == sorted(sources), str(found)


def test_bytes_follow_size_type_and_padding():
    gelu, relu = derived(SAVED["gelu"][0]), derived(SAVED["relu"][0])
    assert gelu.saved_bytes(10, 20, "float32") == 800
    assert gelu.saved_bytes(10, 20, "float16") == 400
    # A row of 20 bits takes 16 bytes.
    assert relu.saved_bytes(10, 20) == 160
    assert relu.read_bytes(10, 20) == 160
    assert derived(SAVED["tanh"][0]).read_bytes(10, 20) == 400


def test_eight_bit_results_save_sixteen_bit_values():
    found = derived(SAVED["gelu"][0], dtype="float8_e4m3fn")
    assert [(s.source, s.dtype) for s in found.saved] == [("value", "bfloat16")]
    assert [(o.name, o.dtype) for o in found.forward.extras] == [("saved_0", "bfloat16")]
    # D in 8 bits is no substitute for tanh's value.
    assert [s.source for s in derived(SAVED["tanh"][0], dtype="float8_e4m3fn").saved] == ["value"]


def test_what_is_saved_is_described():
    lines = str(derived(SAVED["relu"][0], m=4096, n=4096)).splitlines()
    assert lines[-1] == "  saved_0: 1 bit/element mask of ~(acc + bias <= 0): 16777216 elements, 2 MiB"
    assert str(derived(SAVED["linear"][0])).splitlines()[-1] == "  nothing"
    assert str(derived(SAVED["tanh"][0])).splitlines()[-1] == "  result: D, stored anyway: tanh(acc + bias)"


def test_names_that_are_taken_are_avoided():
    found = eg.epilogue(lambda acc, saved_0, result: eg.tanh(eg.gelu(acc) + saved_0) + result).grad(saved_0="row", result="row")
    names = [s.name for s in found.saved]
    assert len(set(names)) == len(names)
    assert not {"saved_0", "result"} & {s.name for s in found.saved if s.source != "input"}


def computable(root, kept, free):
    return root in kept or root in free or (bool(root.args) and all(computable(a, kept, free) for a in root.args))


def test_the_cut_is_the_cheapest_of_all():
    """Against every subset of a small graph."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        nodes = [acc(0), acc(1), acc(2)]
        for _ in range(5):
            x, y = (nodes[int(i)] for i in rng.integers(0, len(nodes), 2))
            nodes.append(Node("add", x, y) if rng.random() < 0.6 else Node("tanh", x))
        needed = list(dict.fromkeys(nodes[-2:]))
        inside = list(walk(needed))
        free = [inside[0]] if rng.random() < 0.3 else []
        costs = {node: int(rng.integers(1, 9)) for node in inside}
        cut = cheapest_cut(needed, costs, free)
        assert all(computable(node, cut, free) for node in needed)
        subsets = itertools.chain.from_iterable(itertools.combinations(inside, size) for size in range(len(inside) + 1))
        best = min(sum(costs[x] for x in s) for s in subsets if all(computable(node, s, free) for node in needed))
        assert sum(costs[x] for x in cut) == best

"""The composite path's table of ops against the NumPy functions that say what each op means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from epigemm.expression import philox
from epigemm.expression.ops import OPS
from epigemm.pytorch.composite import TORCH, Evaluation, pack, uniform, unpack

PARAMS = {
    "leaky_relu": [{"slope": 0.2}],
    "gelu": [{"approximate": "none"}, {"approximate": "tanh"}],
    "power": [{"exponent": 3.0}, {"exponent": 0.5}, {"exponent": -1.0}],
    "cast": [{"dtype": "bfloat16"}, {"dtype": "float8_e4m3fn"}, {"dtype": "float16"}],
}
ROWS = [(op, params) for op in sorted(TORCH) for params in PARAMS.get(op, [{}])]


def test_every_op_is_there():
    elsewhere = {"acc", "input", "constant", "operand_sum", "sum", "amax", "uniform", "sum_like", "bitmask", "unbitmask"}
    assert set(TORCH) | elsewhere == set(OPS)


@pytest.mark.parametrize(("op", "params"), ROWS, ids=str)
def test_ops_mean_what_numpy_s_mean(op, params):
    random = np.random.default_rng(0)
    row = OPS[op]
    numbers = [random.standard_normal((5, 7)).astype(np.float32) for _ in range(3)]
    if op in ("log", "sqrt", "rsqrt", "power"):
        numbers = [np.abs(x) + 0.1 for x in numbers]
    flags = [x > 0 for x in numbers]
    args = [flags[0], *numbers[1:]] if op == "where" else (flags if row.domain == "bool" else numbers)[: row.arity]
    with np.errstate(all="ignore"):
        expected = row.numpy(*args, **params)
    got = TORCH[op](*map(torch.from_numpy, args), **params)
    torch.testing.assert_close(got, torch.from_numpy(np.asarray(expected)), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("seed", [0, 7, -3, 2**40 + 5, -(2**50)])
def test_random_numbers_are_philox_s(seed):
    rows, columns = np.arange(9)[:, None], np.arange(14)[None]
    expected = philox.uniform(seed, rows, columns)
    got = uniform(torch.tensor(seed), torch.from_numpy(rows), torch.from_numpy(columns))
    assert (got.numpy() == expected).all()


@pytest.mark.parametrize("length", [1, 8, 13, 128, 130])
def test_bits(length):
    condition = torch.rand(3, 2, length) > 0.5
    bits = pack(condition)
    assert bits.shape == (3, 2, (length + 127) // 128 * 16)
    expected = OPS["bitmask"].numpy(condition.numpy())
    assert (bits.numpy()[..., : expected.shape[-1]] == expected).all()
    assert not bits[..., expected.shape[-1] :].any()
    assert torch.equal(unpack(bits, length), condition)


def test_operand_sums_are_refused():
    from epigemm.expression.nodes import Node

    x = torch.ones(2, 2)
    with pytest.raises(NotImplementedError, match="operand_sum"):
        Evaluation([x], {}, (2, 2), x)(Node("operand_sum", operand="a"))

"""What D may be written into: `out` and an in-place C arrive in the user's object, or are refused before anything is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import epigemm as eg

torch = pytest.importorskip("torch")

A, B = np.ones((4, 3), np.float32), np.ones((3, 5), np.float32)


def read_only() -> Any:
    out = np.zeros((4, 5), np.float32)
    out.flags.writeable = False
    return out


def unaligned_field() -> Any:
    return np.zeros((4, 5), [("tag", np.uint8), ("value", np.float32)])["value"]


def lazily_negated() -> Any:
    return torch.zeros(4, 5, dtype=torch.complex64).conj().imag


def requires_grad() -> Any:
    return torch.zeros(4, 5, requires_grad=True)


@pytest.mark.parametrize("inplace", [False, True], ids=["out", "inplace"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (read_only, "is read-only"),
        (unaligned_field, "cannot be written in place"),
        (lazily_negated, "cannot be written in place"),
        (requires_grad, "requires grad"),
    ],
)
def test_what_cannot_be_written_is_refused(make: Any, words: str, inplace: bool) -> None:
    target = make()
    a, b = (A, B) if isinstance(target, np.ndarray) else (torch.from_numpy(A), torch.from_numpy(B))
    with pytest.raises(eg.errors.LayoutError, match=words):
        if inplace:
            eg.matmul(a, b, target, beta=1.0, options={"inplace": True})
        else:
            eg.matmul(a, b, out=target)
    assert not np.asarray(target.detach().resolve_neg() if hasattr(target, "detach") else target).any()


def test_a_lazily_conjugated_out_is_refused() -> None:
    a, b = torch.ones(4, 3, dtype=torch.complex64), torch.ones(3, 5, dtype=torch.complex64)
    with pytest.raises(eg.errors.LayoutError, match="lazily conjugated"):
        eg.matmul(a, b, out=torch.zeros(4, 5, dtype=torch.complex64).conj())


def test_an_aligned_field_of_a_structured_array_is_written() -> None:
    rows = np.zeros((4, 5), [("tag", np.int32), ("value", np.float32)])
    eg.matmul(A, B, out=rows["value"])
    assert (rows["value"] == 3).all() and not rows["tag"].any()


def test_a_parameter_is_written_where_nothing_is_recorded() -> None:
    out = torch.nn.Parameter(torch.zeros(4, 5))
    with torch.no_grad():
        assert eg.matmul(torch.from_numpy(A), torch.from_numpy(B), out=out) is out
    assert (out == 3).all()


def test_autograd_notices_that_a_saved_tensor_was_written() -> None:
    x = torch.ones(4, 5, requires_grad=True)
    y = x * 2
    loss = (y * y).sum()  # its backward reads y
    eg.matmul(torch.from_numpy(A), torch.from_numpy(B), out=y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cast_result_is_written_into_an_out_of_its_dtype(dtype: str) -> None:
    a, b = torch.from_numpy(A), torch.from_numpy(B)
    out = torch.zeros(4, 5, dtype=getattr(torch, dtype))
    assert eg.matmul(a, b, epilog=lambda acc: eg.cast(acc * 2, dtype), out=out) is out
    assert (out == 6).all()
    with pytest.raises(eg.errors.DTypeError, match=f"`out` .float32. must be that of the result .{dtype}"):
        eg.matmul(a, b, epilog=lambda acc: eg.cast(acc, dtype), out=torch.zeros(4, 5))


def test_a_masked_array_is_refused() -> None:
    with pytest.raises(eg.errors.OperandTypeError, match=r"numpy\.ma"):
        eg.matmul(np.ma.masked_array(A, mask=A > 0), B)


@pytest.mark.parametrize("first", [False, True])
def test_each_b_has_its_own_conjugate_bit(first: bool) -> None:
    a = torch.complex(torch.ones(4, 3), torch.ones(4, 3))
    plain, lazy = a.reshape(3, 4) * 2j, (a * 3j).T.conj()
    bs = (lazy, plain) if first else (plain, lazy)
    expected = a @ bs[0] + 2 * (a @ bs[1])
    torch.testing.assert_close(eg.matmul(a, bs, epilog=lambda p, q: p + 2 * q), expected)

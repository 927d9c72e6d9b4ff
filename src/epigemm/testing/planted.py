"""Planted errors: mistakes that engines make, each with a case on which the checks must find it.

A right result is made from the reference itself, so that what is tested here is the checks alone; then the mistake is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from epigemm.testing import bounded as b
from epigemm.testing.bounded import Bounded
from epigemm.testing.cases import Case, Tensors, numpy_dtype
from epigemm.testing.conformance import check, expected, reference_product, traced
from epigemm.testing.formats import Array, pack, rounded, unpack
from epigemm.testing.reference import Product, Result, evaluate, wide

Outputs = dict[str, Array]
Mistake = Callable[[Case, Tensors, Outputs], None]


@dataclass(frozen=True, slots=True)
class Planted:
    """One mistake.

    Args:
        name: what is wrong.
        case: where it must be found.
        make: makes it in the outputs, in place.
    """

    name: str
    case: Case
    make: Mistake


def correct(case: Case, tensors: Tensors) -> Outputs:
    """The outputs of a case as the reference has them, stored as an engine would store them."""
    return {result.name: stored(case, result) for result in expected(case, tensors)}


def stored(case: Case, result: Result) -> Array:
    """A result in its dtype, order and padded shape."""
    value = result.bounded.value
    if value.dtype == bool:
        return pack(value, case.result_order)
    if value.dtype.kind == "c":
        array = value.astype(numpy_dtype(result.dtype))
    else:
        with np.errstate(all="ignore"):
            array = rounded(value, result.dtype).astype(numpy_dtype(result.dtype))
    if result.pad > 1:
        extra = [(0, 0)] * array.ndim
        axis = -2 if case.result_order == "col" else -1
        extra[axis] = (0, -array.shape[axis] % result.pad)
        array = np.pad(array, extra)
    if case.is_predefined and "bgrad" in result.name and not case.batch:
        return array.reshape(-1)
    return np.swapaxes(np.swapaxes(array, -1, -2).copy(), -1, -2) if case.result_order == "col" else array.copy()


def found(planted: Planted) -> str:
    """The message with which the checks find a planted error.

    Raises:
        AssertionError: they find fault with the right result, or nothing wrong with the planted error.
    """
    tensors = planted.case.build(np.random.default_rng(7))
    outputs = correct(planted.case, tensors)
    check(planted.case, tensors, outputs)
    planted.make(planted.case, tensors, outputs)
    try:
        check(planted.case, tensors, outputs)
    except AssertionError as error:
        return str(error)
    raise AssertionError(f"planted error not found: {planted.name} in {planted.case}")


# ---------------------------------------------------------------- mistakes in the stored result


def _shifted_columns(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    outputs["d"][...] = np.roll(outputs["d"], 1, axis=-1)


def _flipped(name: str, index: tuple[int, ...], bit: int) -> Mistake:
    def make(case: Case, tensors: Tensors, outputs: Outputs) -> None:
        outputs[name][index] ^= np.uint8(1 << bit)

    return make


def _swapped_batch(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    outputs["d"][...] = outputs["d"][::-1].copy()


def _nan_swallowed(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    outputs["d"][np.isnan(outputs["d"])] = 0


def _unwritten(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    outputs["d"][..., -1, -1] = np.nan


def _infinity_clipped(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    d = outputs["d"]
    d[np.isposinf(d)] = np.finfo(d.dtype).max


def just_beyond(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    """One element moved to the first stored number outside its allowed range."""
    result = expected(case, tensors)[0]
    where = np.unravel_index(np.argmax(np.abs(result.bounded.value)), result.bounded.value.shape)
    high = rounded(result.bounded.value + result.bounded.error, result.dtype)[where]
    outputs["d"][where] = _next_above(high, result.dtype)


def _next_above(value: float, dtype: str) -> Any:
    """The next larger number of a format, found through its bits."""
    one = np.array([value], numpy_dtype(dtype))
    bits = one.view(f"i{one.itemsize}")
    bits += 1 if value >= 0 else -1
    return one[0]


def _truncated(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    """bfloat16 stored by dropping bits instead of rounding."""
    value = expected(case, tensors)[0].bounded.value.astype(np.float32)
    outputs["d"][...] = (value.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(outputs["d"].dtype)


def _row_order(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    outputs["d"] = np.ascontiguousarray(outputs["d"])


def _float32(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    outputs["d"] = outputs["d"].astype(np.float32)


def _missing_output(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    del outputs["relu_aux"]


def _row_left_out(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    """A sum over n that misses the last column."""
    d = expected(case, tensors)[0].bounded.value[..., :-1]
    outputs["drelu_bgrad"][...] = d.sum(-1).astype(outputs["drelu_bgrad"].dtype)


def _narrow_accumulation(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    """A bias gradient summed in its stored dtype."""
    running = np.zeros(case.m, outputs["drelu_bgrad"].dtype)
    for column in np.moveaxis(outputs["d"], -1, 0):
        running = running + column
    outputs["drelu_bgrad"][...] = running


def _aux_after_activation(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    outputs["gelu_aux"][..., : case.m, :] = outputs["d"]


def _padding_value(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    outputs["relu_aux"][-1, 0] |= np.uint8(0x80)


# ---------------------------------------------------------------- mistakes in the meaning: the reference of another product


def _meaning(change: Callable[[Product], Product], epilogue: str | None = None) -> Mistake:
    """The outputs of a changed product, or of another predefined epilog."""

    def make(case: Case, tensors: Tensors, outputs: Outputs) -> None:
        for result in evaluate(change(reference_product(case, tensors)), epilogue or traced(case)):
            if result.name in outputs:
                outputs[result.name][...] = stored(case, result).reshape(outputs[result.name].shape)

    return make


def _same(product: Product) -> Product:
    return product


def _without_tail(product: Product) -> Product:
    return replace(product, a=product.a[..., :-1], b=tuple(one[..., :-1, :] for one in product.b))


def _turned_bias(product: Product) -> Product:
    turned = {name: np.swapaxes(value, -1, -2) for name, value in product.inputs.items()}
    return replace(product, inputs=turned)


def _inputs_times(factor: float) -> Callable[[Product], Product]:
    def change(product: Product) -> Product:
        return replace(product, inputs={name: wide(value) * factor for name, value in product.inputs.items()})

    return change


def _shifted_mask(product: Product) -> Product:
    mask = unpack(product.inputs["mask"], product.order, product.m if product.order == "col" else product.n)
    return replace(product, inputs={"mask": pack(np.roll(mask, 1, axis=-1), product.order)})


def _first_batch(product: Product) -> Product:
    return replace(product, b=(np.broadcast_to(product.b[0][:1], product.b[0].shape),))


def _exchanged(product: Product) -> Product:
    return replace(product, b=product.b[::-1])


def _erf_form(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    product = reference_product(case, tensors)
    plain = evaluate(product, "bias")[0].bounded
    outputs["d"][...] = b.gelu_erf(plain.value).astype(outputs["d"].dtype)


def _mask_times_value(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    """A mask that multiplies instead of selecting: 0 * inf is NaN."""
    product = reference_product(case, tensors)
    with np.errstate(all="ignore"):
        plain = evaluate(product, None)[0].bounded.value
        mask = unpack(product.inputs["relu_aux"], product.order, product.m)
        outputs["d"][...] = (plain * mask).astype(outputs["d"].dtype)


def _c_read(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    assert tensors.c is not None
    with np.errstate(all="ignore"):
        outputs["d"][...] += np.float32(0) * tensors.c.array


def _other_lane(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    """Dropout whose four words of a block are taken in reverse."""
    product = reference_product(case, tensors)
    plain = evaluate(product, None)[0].bounded
    from epigemm.testing.formats import uniform

    numbers = uniform(int(product.inputs["seed"]), 1, case.m, case.n)[0]
    numbers = numbers.reshape(case.m, -1, 4)[..., ::-1].reshape(case.m, case.n)
    kept = Bounded(np.where(numbers >= 0.3, plain.value / 0.7, 0.0), plain.error)
    outputs["d"][...] = kept.value.astype(outputs["d"].dtype)


_SIZE: dict[str, Any] = {"m": 21, "n": 12, "k": 16}

PLANTED: tuple[Planted, ...] = (
    Planted("columns off by one", Case("planted", **_SIZE), _shifted_columns),
    Planted("columns off by one, broadcast rows", Case("planted", **_SIZE, epilogue="bias_vector"), _shifted_columns),
    Planted("an element never written", Case("planted", **_SIZE, epilogue="RELU"), _unwritten),
    Planted("just beyond the tolerance, f16", Case("planted", **_SIZE, dtype="float16"), just_beyond),
    Planted("just beyond the tolerance, bf16", Case("planted", **_SIZE, dtype="bfloat16"), just_beyond),
    Planted("just beyond the tolerance, f32", Case("planted", **_SIZE), just_beyond),
    Planted("just beyond the tolerance, f64", Case("planted", **_SIZE, dtype="float64"), just_beyond),
    Planted("just beyond the tolerance, gelu", Case("planted", **_SIZE, epilogue="gelu"), just_beyond),
    Planted("just beyond the tolerance, e4m3", Case("planted", **_SIZE, dtype="float8_e4m3fn"), just_beyond),
    Planted("one ulp where the result is exact", Case("planted", **_SIZE, data="integers"), just_beyond),
    Planted("truncated instead of rounded", Case("planted", **_SIZE, dtype="bfloat16"), _truncated),
    Planted("row order where column order is due", Case("planted", **_SIZE, epilogue="BIAS"), _row_order),
    Planted("another dtype", Case("planted", **_SIZE, dtype="float16"), _float32),
    Planted("bias missing", Case("planted", **_SIZE, epilogue="RELU_BIAS"), _meaning(_same, "relu")),
    Planted("bias twice", Case("planted", **_SIZE, epilogue="BIAS"), _meaning(_inputs_times(2.0))),
    Planted("bias along n instead of m", Case("planted", m=13, n=13, k=5, epilogue="BIAS"), _meaning(_turned_bias)),
    Planted("bias along m instead of n", Case("planted", m=13, n=13, k=5, epilogue="bias_vector"), _meaning(_turned_bias)),
    Planted("activation missing", Case("planted", **_SIZE, epilogue="RELU_BIAS"), _meaning(_same, "bias")),
    Planted("last of k left out", Case("planted", m=21, n=12, k=129), _meaning(_without_tail)),
    Planted("last of k left out, bf16", Case("planted", m=21, n=12, k=129, dtype="bfloat16"), _meaning(_without_tail)),
    Planted("C read where beta is 0", Case("planted", **_SIZE, c="mn", beta=0.0, data="special", alpha=0.0), _c_read),
    Planted("beta taken for 1", Case("planted", **_SIZE, c="mn", beta=0.5), _meaning(lambda p: replace(p, beta=1.0))),
    Planted("alpha left out", Case("planted", **_SIZE, alpha=0.5), _meaning(lambda p: replace(p, alpha=1.0))),
    Planted("alpha on C too", Case("planted", **_SIZE, c="mn", beta=0.5, alpha=2.0), _meaning(lambda p: replace(p, beta=1.0))),
    Planted("batch in reverse", Case("planted", **_SIZE, batch_a=(3,), batch_b=(3,)), _swapped_batch),
    Planted("first batch everywhere", Case("planted", **_SIZE, batch_b=(3,)), _meaning(_first_batch)),
    Planted("NaN swallowed by relu", Case("planted", **_SIZE, epilogue="RELU", data="special"), _nan_swallowed),
    Planted("infinity clipped", Case("planted", **_SIZE, data="special"), _infinity_clipped),
    Planted("erf for tanh", Case("planted", **_SIZE, epilogue="GELU_BIAS", data="small"), _erf_form),
    Planted("mask bit wrong", Case("planted", **_SIZE, epilogue="RELU_AUX_BIAS"), _flipped("relu_aux", (1, 3), 4)),
    Planted(
        "mask of zero wrong", Case("planted", m=21, n=12, k=3, epilogue="RELU_AUX", data="integers"), lambda c, t, o: _zero_bits(c, t, o)
    ),
    Planted("padding bit set", Case("planted", **_SIZE, epilogue="RELU_AUX_BIAS"), _padding_value),
    Planted("mask output missing", Case("planted", **_SIZE, epilogue="RELU_AUX_BIAS"), _missing_output),
    Planted("mask multiplied", Case("planted", **_SIZE, epilogue="DRELU", data="special"), _mask_times_value),
    Planted("mask read one column on", Case("planted", **_SIZE, epilogue="masked"), _meaning(_shifted_mask)),
    Planted("sum without its last term", Case("planted", **_SIZE, epilogue="DRELU_BGRAD"), _row_left_out),
    Planted("sum in bf16", Case("planted", m=5, n=400, k=3, epilogue="DRELU_BGRAD", dtype="bfloat16"), _narrow_accumulation),
    Planted("gelu_aux after the activation", Case("planted", **_SIZE, epilogue="GELU_AUX"), _aux_after_activation),
    Planted("gate and up exchanged", Case("planted", **_SIZE, epilogue="swiglu"), _meaning(_exchanged)),
    Planted("conjugate left out", Case("planted", **_SIZE, dtype="complex64", conjugate="a"), _meaning(lambda p: replace(p, a=p.a.conj()))),
    Planted("dropout by another lane", Case("planted", **_SIZE, epilogue="dropped"), _other_lane),
    Planted("scale of D left out", Case("planted", **_SIZE, dtype="float8_e4m3fn"), _meaning(lambda p: replace(p, scale_d=1.0))),
    Planted(
        "operand sum of the other operand", Case("planted", m=12, n=12, k=16, epilogue="operand_sums"), lambda c, t, o: _other_sum(c, t, o)
    ),
)
"""Every planted error."""


def _zero_bits(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    """x > 0 where the peer's mask says x >= 0."""
    x = evaluate(reference_product(case, tensors), None)[0].bounded.value
    outputs["relu_aux"][...] = pack(x > 0, case.result_order)


def _other_sum(case: Case, tensors: Tensors, outputs: Outputs) -> None:
    outputs["of_a"], outputs["of_b"] = np.swapaxes(outputs["of_b"], -1, -2), np.swapaxes(outputs["of_a"], -1, -2)

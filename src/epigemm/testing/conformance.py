"""One case through the public API on one engine, everything about its result checked.

Checked of each run: dtype, shape and order of every output; every element within what the reference allows; that no byte around the
operands or the outputs was written and no operand changed. What an engine does not run it must refuse, with its reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import epigemm as eg
from epigemm.errors import EngineUnavailable, UnsupportedEpilogue, UnsupportedProblem
from epigemm.options import CudaDataType, MatmulComputeType, MatmulEpilog, matrix_qualifiers_dtype
from epigemm.testing import numeric
from epigemm.testing.bounded import Arithmetic
from epigemm.testing.cases import NARROW, Case, Tensors, numpy_dtype
from epigemm.testing.formats import Array
from epigemm.testing.numeric import Guarded, guarded
from epigemm.testing.placing import numpy_view, strides, torch_view
from epigemm.testing.reference import Product, Result, evaluate

REFUSALS = (UnsupportedEpilogue, UnsupportedProblem)

# What an engine may round where: by compute type, the relative error of a product and of an addition.
PRODUCT_UNITS = {"COMPUTE_32F_FAST_TF32": 2.0**-9, "COMPUTE_32F_FAST_16F": 2.0**-9, "COMPUTE_32F_FAST_16BF": 2.0**-7}
SUM_UNITS = {"COMPUTE_16F": 2.0**-11, "COMPUTE_16F_PEDANTIC": 2.0**-11}

# Tensor-wide scales of 8-bit operands and results in the table's cases.
SCALES = {"a": 0.5, "b": 2.0, "c": 0.25, "d": 0.125}

_CUDA_TYPES = {
    "float16": CudaDataType.CUDA_R_16F,
    "bfloat16": CudaDataType.CUDA_R_16BF,
    "float32": CudaDataType.CUDA_R_32F,
    "float64": CudaDataType.CUDA_R_64F,
    "complex64": CudaDataType.CUDA_C_32F,
    "complex128": CudaDataType.CUDA_C_64F,
    "float8_e4m3fn": CudaDataType.CUDA_R_8F_E4M3,
    "float8_e5m2": CudaDataType.CUDA_R_8F_E5M2,
}

Corruption = Callable[[dict[str, Array]], None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a case.

    Args:
        case: the case.
        refusal: the sentence of an engine that does not run it, "" if it ran and was right.
        elements: how many elements of its outputs there are.
        undecided: how many of them the reference leaves undecided.
    """

    case: Case
    refusal: str = ""
    elements: int = 0
    undecided: int = 0


def run_case(
    case: Case,
    engine: str,
    *,
    mode: str = "stateless",
    seed: int = 0,
    undecided: float = numeric.UNDECIDED_SHARE,
    arithmetic: Arithmetic | None = None,
    moved: Callable[[Any], Any] | None = None,
    corrupt: Corruption | None = None,
) -> Verdict:
    """Runs a case and asserts that its result is right.

    Args:
        case: a row of the table.
        engine: the engine's name.
        mode: "stateless" (`matmul`), "out" (with `out=` in poisoned memory) or "stateful" (`Matmul`, executed twice).
        seed: of the case's data.
        undecided: the share of each output that the reference may leave undecided.
        arithmetic: the engine's, where it is not the CPU's (`arithmetic_of`).
        moved: makes the engine's own tensor of a NumPy array (a copy on its device), for engines that do not compute on the CPU.
        corrupt: changes the outputs, by name, before they are checked: a planted error.

    Raises:
        AssertionError: the result is wrong, or memory was touched that should not be.
    """
    tensors = case.build(np.random.default_rng(seed))
    before = {name: np.array(one.array) for name, one in tensors.all().items()}
    out = _out(case) if mode == "out" else None
    try:
        outputs = _call(case, tensors, engine, mode, out, moved or _mover(case))
    except REFUSALS as refusal:
        return Verdict(case, str(refusal))
    if corrupt is not None:
        corrupt(outputs)
    results = check(case, tensors, outputs, undecided=undecided, arithmetic=arithmetic)
    what = f"{case} [{engine}, {mode}]"
    for name, one in tensors.all().items():
        one.assert_intact(f"{name} of {what}")
        numeric.assert_equal(np.array(one.array), before[name], f"{name} of {what} was changed")
    if out is not None:
        out.assert_intact(f"out of {what}")
    doubt = [result.bounded.undecided for result in results]
    return Verdict(case, elements=sum(one.size for one in doubt), undecided=sum(int(one.sum()) for one in doubt))


def _mover(case: Case) -> Callable[[Any], Any]:
    return torch_view if case.library == "torch" else lambda array: array


def _out(case: Case) -> Guarded:
    """An `out` in the order that D must have, with gaps between its lines, full of NaN."""
    kind = "padded" if case.result_order == "row" else "padded_col"
    return guarded(case.shape, strides(kind, case.shape), numpy_dtype(case.stored_dtype))


# ---------------------------------------------------------------- the call


def epilog_of(case: Case) -> Any:
    """What is passed as `epilog=`."""
    if case.row:
        return case.row.function
    return MatmulEpilog[case.epilogue] if case.epilogue else None


def keywords(case: Case) -> dict[str, Any]:
    """The keyword arguments of the call besides its tensors."""
    options: dict[str, Any] = {}
    if case.order:
        options["result_order"] = case.order
    if case.d_dtype:
        options["result_type"] = _CUDA_TYPES[case.d_dtype]
    if case.compute:
        options["compute_type"] = MatmulComputeType[case.compute]
    found: dict[str, Any] = {"alpha": case.alpha, "beta": case.beta, "options": options}
    if case.conjugate:
        qualifiers = np.zeros(3, dtype=matrix_qualifiers_dtype)
        qualifiers["is_conjugate"] = ["a" in case.conjugate, "b" in case.conjugate, False]
        found["qualifiers"] = qualifiers
    scales = {name: SCALES[name] for name in _scaled(case)}
    return {**found, "quantization_scales": scales} if scales else found


def _scaled(case: Case) -> str:
    return (
        ("ab" if case.dtype in NARROW else "") + ("c" if case.dtype_of_c in NARROW else "") + ("d" if case.stored_dtype in NARROW else "")
    )


def _call(case: Case, tensors: Tensors, engine: str, mode: str, out: Guarded | None, move: Callable[[Any], Any]) -> dict[str, Array]:
    """D and the extra outputs by name, as NumPy arrays."""
    a, c = move(tensors.a.array), None if tensors.c is None else move(tensors.c.array)
    b = tuple(move(one.array) for one in tensors.b)
    inputs = {name: move(one.array) for name, one in tensors.inputs.items()} or None
    several = b if len(b) > 1 else b[0]
    epilog, more = epilog_of(case), keywords(case)
    if mode == "stateful":
        with eg.Matmul(a, several, c, **more) as product:
            product.plan(epilog=epilog, epilog_inputs=inputs, engine=engine)
            result = product.execute()
            _assert_same_bits(_named(result), _named(product.execute()), str(case))
    else:
        target = None if out is None else move(out.array)
        result = eg.matmul(a, several, c, epilog=epilog, epilog_inputs=inputs, engine=engine, out=target, **more)
        if out is not None:
            d = result[0] if isinstance(result, tuple) else result
            if d is not target:
                raise AssertionError(f"{case}: the result is not the `out` that was passed")
    return _named(result)


def _named(result: Any) -> dict[str, Array]:
    d, extras = result if isinstance(result, tuple) else (result, {})
    return {"d": _host(d), **{name: _host(one) for name, one in extras.items()}}


def _host(tensor: Any) -> Array:
    if hasattr(tensor, "get"):
        return np.asarray(tensor.get(order="A"))
    return numpy_view(tensor.cpu() if hasattr(tensor, "cpu") else tensor)


def _assert_same_bits(first: dict[str, Array], second: dict[str, Array], what: str) -> None:
    for name, one in first.items():
        numeric.assert_equal(second[name], one, f"{name} of the second execution of {what}")


# ---------------------------------------------------------------- the checks


def arithmetic_of(case: Case) -> Arithmetic:
    """The arithmetic that a case's compute type allows an engine on the CPU."""
    return Arithmetic(case.accumulator, product_unit=PRODUCT_UNITS.get(case.compute, 0.0), sum_unit=SUM_UNITS.get(case.compute))


def reference_product(case: Case, tensors: Tensors, arithmetic: Arithmetic | None = None) -> Product:
    """The reference's view of the case's tensors."""
    a, b = tensors.a.array, tuple(one.array for one in tensors.b)
    a = a.conj() if "a" in case.conjugate else a
    b = tuple(one.conj() if "b" in case.conjugate else one for one in b)
    scaled = _scaled(case)
    inputs = {name: _placed(case, one.array, name) for name, one in tensors.inputs.items()}
    return Product(
        a,
        b,
        None if tensors.c is None else tensors.c.array,
        1.0 if case.alpha is None else case.alpha,
        0.0 if case.beta is None or tensors.c is None else case.beta,
        scale_ab=SCALES["a"] * SCALES["b"] if "a" in scaled else 1.0,
        scale_c=SCALES["c"] if "c" in scaled else 1.0,
        scale_d=SCALES["d"] if "d" in scaled else 1.0,
        inputs=inputs,
        order=case.result_order,
        d_dtype=case.stored_dtype,
        aux_dtype=case.aux_dtype,
        arithmetic=arithmetic or arithmetic_of(case),
    )


def _placed(case: Case, array: Array, name: str) -> Array:
    """An input with two dimensions: a 1-D one lies along m in a predefined epilog, along n in a user's."""
    if array.ndim == 1:
        return array[:, None] if case.is_predefined else array[None, :]
    if array.ndim == 0 and case.inputs[name].extent != "seed":
        return array.reshape(1, 1)
    return array


def expected(case: Case, tensors: Tensors, arithmetic: Arithmetic | None = None) -> tuple[Result, ...]:
    """What the reference allows for each output of the case."""
    return evaluate(reference_product(case, tensors, arithmetic), traced(case))


def traced(case: Case) -> Any:
    """The case's epilogue as the reference takes it: an expression, a predefined epilog's name, or None."""
    if case.row:
        return eg.epilogue(case.row.function).expression(case.accumulators)
    return case.epilogue.lower() or None


def check(
    case: Case,
    tensors: Tensors,
    outputs: dict[str, Array],
    *,
    undecided: float = numeric.UNDECIDED_SHARE,
    arithmetic: Arithmetic | None = None,
) -> tuple[Result, ...]:
    """Asserts that outputs, by name, are those of the case, and returns the reference's.

    Args:
        undecided: the share of each output that the reference may leave undecided.
        arithmetic: the engine's; None is `arithmetic_of(case)`.

    Raises:
        AssertionError: a name, dtype, shape, order or value is not what it should be.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        results = expected(case, tensors, arithmetic)
    names = [result.name for result in results]
    if sorted(outputs) != sorted(names):
        raise AssertionError(f"{case}: the outputs are {sorted(outputs)}, they should be {sorted(names)}")
    _check_order(case, outputs["d"])
    for result in results:
        _check_output(case, result, outputs[result.name], undecided)
    return results


def _check_order(case: Case, d: Array) -> None:
    if d.size and min(d.shape[-2:]) > 1:
        order = "row" if abs(d.strides[-1]) < abs(d.strides[-2]) else "col"
        if order != case.result_order:
            raise AssertionError(f"{case}: D is in {order} order (strides {d.strides} bytes), it should be in {case.result_order} order")


def _check_output(case: Case, result: Result, actual: Array, undecided: float) -> None:
    what = f"{result.name} of {case}"
    numeric.check_decided(result.bounded.undecided, what, undecided)
    if result.bounded.value.dtype == bool:
        numeric.assert_mask(actual, result.bounded, case.result_order, what)
        return
    if result.pad > 1:
        actual = _unpadded(case, result, actual, what)
    if case.is_predefined and result.name.endswith(("bgrad", "bgrada", "bgradb")) and not case.batch:
        bounded = result.bounded
        result = replace(result, bounded=type(bounded)(bounded.value.reshape(-1), bounded.error.reshape(-1)))
    numeric.assert_close(actual, result.bounded, result.dtype, what)


def _unpadded(case: Case, result: Result, actual: Array, what: str) -> Array:
    """A padded output cut to D's extents, its padded shape checked."""
    axis = -2 if case.result_order == "col" else -1
    shape = list(case.shape)
    shape[axis] = -(-shape[axis] // result.pad) * result.pad
    if actual.shape != tuple(shape):
        raise AssertionError(f"{what}: the shape is {actual.shape}, it should be {tuple(shape)}, padded to a multiple of {result.pad}")
    return actual[..., : case.m, : case.n]


def refused(case: Case, engine: str) -> str:
    """Why an engine does not run a case, "" if it does: `run_case` without the comparison, to list what an engine refuses."""
    tensors = case.build(np.random.default_rng(0))
    try:
        _call(case, tensors, engine, "stateless", None, _mover(case))
    except (*REFUSALS, EngineUnavailable) as refusal:
        return str(refusal)
    return ""

"""From `epilog=` and its inputs to a checked expression, and from an expression's outputs to what the user gets.

A predefined epilog follows the peer's rules (1-D along m, padded masks and pre-activations, gradients as vectors),
a user's epilogue NumPy's.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from epigemm import dtypes, errors, layouts
from epigemm.enums import MatmulEpilog
from epigemm.expression import check, simplify
from epigemm.expression.named import NAMED, named
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, Expression, Node, Output, input_
from epigemm.expression.trace import as_epilogue
from epigemm.options import CudaDataType, MatmulEpilogPreferences
from epigemm.problem import Problem
from epigemm.specification import Product
from epigemm.tensors import Tensor

PEER, NUMPY = "peer", "numpy"

D_SCALE, AUX_SCALE = "quantization_scale_d", "aux_quantization_scale"
RESULT_AMAX, AUX_AMAX = "result_amax", "gelu_aux_amax"


@dataclass(frozen=True, slots=True)
class Epilog:
    """What `epilog=` meant.

    Args:
        expression: unchecked.
        convention: "peer" or "numpy": how 1-D inputs lie and what shapes outputs have.
        member: the predefined epilog, or None.
        order: the order of D that it asks for ("row", "col"), or None.
    """

    expression: Expression
    convention: str
    member: MatmulEpilog | None = None
    order: str | None = None

    @property
    def label(self) -> str:
        return self.member.name if self.member is not None else self.expression.name or "epilogue"


def key(epilog: Any, accumulators: int) -> Hashable:
    """What of `epilog=` enters the plan cache's key: a predefined one by value, a function by the expression that it is traced to."""
    if epilog is None or isinstance(epilog, (MatmulEpilog, str, Expression)):
        return epilog
    if callable(epilog):
        return as_epilogue(epilog).expression(accumulators)
    raise errors.not_an_epilog(epilog, _names())


def resolve(epilog: Any, accumulators: int, preferences: MatmulEpilogPreferences) -> Epilog:
    """The expression and the conventions that `epilog=` stands for.

    Args:
        epilog: None, a MatmulEpilog, its name in any case ("relu_bias"), an epilogue function, or an expression (a derived one).
        accumulators: how many products feed it.
        preferences: dtype and amax of `gelu_aux`.

    Raises:
        errors.EpilogTypeError: it is none of these, or DEFAULT.
        errors.EpilogInputError: a predefined epilog, or none, for several accumulators.
        errors.OptionError: the preferences do not fit it.
        errors.TraceError: the function cannot be traced.
    """
    if epilog is None:
        if accumulators != 1:
            raise errors.no_epilog_for_several(accumulators)
        return Epilog(as_epilogue(_identity).expression(accumulators), NUMPY)
    if isinstance(epilog, Expression):
        return Epilog(epilog, NUMPY)
    if isinstance(epilog, str):
        member = MatmulEpilog.__members__.get(epilog.upper())
        if member is None:
            raise errors.not_an_epilog(epilog, _names())
        epilog = member
    if isinstance(epilog, MatmulEpilog):
        return _predefined(epilog, accumulators, preferences)
    if not callable(epilog):
        raise errors.not_an_epilog(epilog, _names())
    if preferences.aux_type is not None or preferences.aux_amax:
        raise errors.aux_type_refused("user")
    return Epilog(as_epilogue(epilog).expression(accumulators), NUMPY)


def _identity(acc: Any) -> Any:
    return acc


def _names() -> tuple[str, ...]:
    return tuple(member.name.lower() for member in NAMED)


def _predefined(member: MatmulEpilog, accumulators: int, preferences: MatmulEpilogPreferences) -> Epilog:
    if member not in NAMED:
        raise errors.not_an_epilog(member, _names())
    if accumulators != 1:
        raise errors.several_accumulators(member.name, accumulators)
    aux_type = preferences.aux_type
    if (aux_type is not None or preferences.aux_amax) and "gelu_aux" not in NAMED[member].aux_names:
        raise errors.aux_type_refused(member.name)
    aux = dtypes.from_cuda(CudaDataType(aux_type)) if aux_type is not None else None
    if aux_type is not None and aux is None:
        raise errors.aux_type_refused(f"{CudaDataType(aux_type).name} in {member.name}")
    expression = named(member, aux_dtype=aux.name if aux is not None else "")
    order = NAMED[member].order
    return Epilog(expression, PEER, member, None if order == "any" else order)


# ---------------------------------------------------------------- narrow results


def with_narrow_outputs(epilog: Epilog, product: Product, result_amax: bool, preferences: MatmulEpilogPreferences) -> Epilog:
    """The epilog with the scales and maxima of 8-bit outputs as steps of its expression.

    D = scale_d * d, amax before the scale; the same for an 8-bit gelu_aux. Where D has 8 bits, a gelu_aux without a dtype of its own
    has C's.
    """
    d_narrow = product.problem.d.dtype.is_narrow
    if result_amax and not d_narrow:
        raise errors.result_amax_refused(product.problem.d.dtype.name)
    outputs = list(epilog.expression.outputs)
    names = list(epilog.expression.input_names)
    for index, output in enumerate(epilog.expression.outputs):
        dtype = output.dtype
        if output.name == "gelu_aux" and epilog.member is not None:
            dtype = dtype or (product.c_dtype.name if d_narrow else "")
            outputs[index] = replace(output, dtype=dtype)
        is_d, narrow = index == 0, dtypes.of(dtype).is_narrow if dtype not in ("", check.AS_D) else index == 0 and d_narrow
        amax = result_amax if is_d else preferences.aux_amax and output.name == "gelu_aux"
        if amax and not narrow:
            raise errors.aux_amax_refused()
        stored_by_cast = output.node.op == "cast"  # the epilogue itself says how: no scale
        if narrow and not stored_by_cast and (is_d or epilog.member is not None):
            scale = D_SCALE if is_d else AUX_SCALE
            names.append(scale)
            outputs[index] = replace(outputs[index], node=Node("mul", output.node, input_(scale)))
        if amax:
            largest = Node("amax", Node("abs", output.node), axis="mn")
            outputs.append(Output(RESULT_AMAX if is_d else AUX_AMAX, largest, "float32"))
    return replace(epilog, expression=replace(epilog.expression, outputs=tuple(outputs), input_names=tuple(names)))


# ---------------------------------------------------------------- inputs


def place(epilog: Epilog, product: Product, order: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs as tensors of at least two dimensions, as the expression reads them.

    Raises:
        errors.EpilogInputError: names are missing or unknown.
        errors.ShapeError, errors.DTypeError: one does not fit D.
    """
    expected = epilog.expression.input_names
    if not expected and inputs:
        message = str(errors.inputs_without_epilog(inputs))
        warnings.warn(message, errors.EpigemmWarning, stacklevel=5)
        return {}
    if set(expected) != set(inputs):
        raise errors.wrong_input_names(epilog.label, expected, inputs)
    return {name: _placed(epilog, product, order, name, inputs[name]) for name in expected}


def _placed(epilog: Epilog, product: Product, order: str, name: str, tensor: Tensor) -> Tensor:
    problem = product.problem
    convention = NUMPY if name in (D_SCALE, AUX_SCALE) else epilog.convention
    if epilog.member is not None and name in ("relu_aux", "gelu_aux"):
        tensor = _aux(epilog, product, order, name, tensor)
    elif tensor.shape == (1,) and name in (D_SCALE, AUX_SCALE):
        tensor = tensor.view((), ())
    shape = check.place_input(name, tensor.shape, m=problem.m, n=problem.n, convention=convention)
    if shape != tensor.shape:
        strides = (0, 0) if not tensor.shape else (0, *tensor.strides) if convention == NUMPY else (*tensor.strides, 0)
        tensor = tensor.view(shape, strides)
    if layouts.broadcast_batches(problem.batch, tensor.shape[:-2]) != problem.batch:
        raise errors.bias_batch(tensor.shape[:-2], problem.batch, name)
    return tensor


def _aux(epilog: Epilog, product: Product, order: str, name: str, tensor: Tensor) -> Tensor:
    """relu_aux or gelu_aux of a predefined epilog: its dtype and padded shape checked, gelu_aux cut to D's rows."""
    problem, label = product.problem, epilog.label
    lines, length = (problem.n, problem.m) if order == layouts.COL else (problem.m, problem.n)
    kind, dtype = ("RELU", "uint8") if name == "relu_aux" else ("GELU", problem.d.dtype.name)
    if name == "gelu_aux" and problem.d.dtype.is_narrow:
        dtype = product.c_dtype.name
    if tensor.dtype.name != dtype:
        raise errors.aux_dtype(kind, label, tensor.dtype.name, dtype)
    padded = layouts.mask_bytes(length) if name == "relu_aux" else layouts.round_up(length, 8)
    sizes = {padded} if name == "relu_aux" else {padded, length}
    shapes = {(size, lines) if order == layouts.COL else (lines, size) for size in sizes}
    if len(tensor.shape) < 2 or tensor.shape[-2:] not in shapes:
        raise errors.aux_shape(label, tensor.shape, (padded, lines) if order == layouts.COL else (lines, padded))
    if name == "gelu_aux":
        return tensor.view((*tensor.shape[:-2], problem.m, problem.n), tensor.strides)
    return tensor


# ---------------------------------------------------------------- expression


def checked(expression: Expression, problem: Problem) -> Expression:
    """The expression as an engine gets it: simplified, rounded as the options ask, every node and output typed."""
    found = check.check(simplify.simplify(expression), problem, written=expression)
    # After the check: which addition is a bias is told by its extent.
    return simplify.eager(found, problem.d.dtype.name) if problem.compute.rounding == "eager" else found


# ---------------------------------------------------------------- outputs


def presented(epilog: Epilog, output: Output, problem: Problem, tensor: Tensor) -> Any:
    """An extra output as the user gets it.

    A user epilogue's is as computed; of the predefined ones a gradient is (m,) or (n,), batched (*batch, m, 1) or (*batch, n, 1).
    An amax is (1,).
    """
    if output.name in (RESULT_AMAX, AUX_AMAX):
        return _overall(tensor)
    form = presented_form(epilog, output, problem, tensor.shape, tensor.strides)
    return tensor.array if form == (tensor.shape, tensor.strides) else tensor.view(*form).array


Form = tuple[tuple[int, ...], tuple[int, ...]]


def presented_form(epilog: Epilog, output: Output, problem: Problem, shape: tuple[int, ...], strides: tuple[int, ...]) -> Form:
    """The shape and strides under which the user gets an extra output that was computed with these."""
    if epilog.member is None or output.extent in (MATRIX, BITS) or output.name in (RESULT_AMAX, AUX_AMAX):
        return shape, strides
    length = problem.m if output.extent == COLUMN else problem.n
    along = strides[-2] if output.extent == COLUMN else strides[-1]
    if not problem.batch:
        return (length,), (along,)
    return (*problem.batch, length, 1), (*strides[:-2], along, length)


def _overall(tensor: Tensor) -> Any:
    """The maximum over the batch of per-matrix maxima, shape (1,); 0 of an empty batch."""
    size = 1
    for extent in tensor.shape:
        size *= extent
    flat = tensor.view((size,), (1,)).array
    if size == 0:
        return flat.sum().reshape(1)
    return flat if size == 1 else flat.max().reshape(1)

"""The fusion table: what cuBLASLt does for each predefined epilog, and where its results differ from ours.

A row says which pointers the library needs and in which orientation it applies. "along" is always the library's rows: with a
row-major D (the swapped product) these are n.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from epigemm.compute_types import CUBLASLT_SUPPORTED
from epigemm.dtypes import DTYPES, DType, of
from epigemm.engines.cublaslt.descriptors import BITS, Auxiliary, Batch, Descriptor, Unsuitable, Vector, describe, readings
from epigemm.engines.outputs import operand as output_operand
from epigemm.enums import CudaDataType, MatmulComputeType, MatmulEpilog, MatmulReductionScheme
from epigemm.expression.format import text
from epigemm.expression.named import Recognised, recognise
from epigemm.expression.nodes import COLUMN, ROW, Expression, Node, Output
from epigemm.layouts import COL
from epigemm.problem import Operand, Problem

_E = MatmulEpilog


@dataclass(frozen=True, slots=True)
class Fusion:
    """One epilog in cuBLASLt.

    Args:
        vector: the peer's name of the vector along the library's rows, "" where there is none.
        aux: the peer's name of the mask or pre-activation.
        aux_bits: whether that is a mask.
        written: which of the two are outputs.
        swapped: the epilogue that the library is told for a swapped product, where it is another: A and B exchange their roles.
    """

    vector: str = ""
    aux: str = ""
    aux_bits: bool = False
    written: tuple[str, ...] = ()
    swapped: MatmulEpilog | None = None


FUSIONS: dict[MatmulEpilog, Fusion] = {
    _E.DEFAULT: Fusion(),
    _E.RELU: Fusion(),
    _E.GELU: Fusion(),
    _E.BIAS: Fusion(vector="bias"),
    _E.RELU_BIAS: Fusion(vector="bias"),
    _E.GELU_BIAS: Fusion(vector="bias"),
    _E.RELU_AUX: Fusion(aux="relu_aux", aux_bits=True, written=("relu_aux",)),
    _E.RELU_AUX_BIAS: Fusion(vector="bias", aux="relu_aux", aux_bits=True, written=("relu_aux",)),
    _E.GELU_AUX: Fusion(aux="gelu_aux", written=("gelu_aux",)),
    _E.GELU_AUX_BIAS: Fusion(vector="bias", aux="gelu_aux", written=("gelu_aux",)),
    _E.DRELU: Fusion(aux="relu_aux", aux_bits=True),
    _E.DGELU: Fusion(aux="gelu_aux"),
    _E.DRELU_BGRAD: Fusion(vector="drelu_bgrad", aux="relu_aux", aux_bits=True, written=("drelu_bgrad",)),
    _E.DGELU_BGRAD: Fusion(vector="dgelu_bgrad", aux="gelu_aux", written=("dgelu_bgrad",)),
    _E.BGRADA: Fusion(vector="bgrada", written=("bgrada",), swapped=_E.BGRADB),
    _E.BGRADB: Fusion(vector="bgradb", written=("bgradb",), swapped=_E.BGRADA),
}
"""The plain product and the fifteen epilogs."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Where cuBLASLt's values are not the contract's.

    Args:
        epilogs: those concerned.
        dtypes: D's dtypes concerned, () for all.
        sentence: what differs. Measured on an H200 with cuBLASLt 13.1, see results/.
    """

    epilogs: tuple[MatmulEpilog, ...]
    dtypes: tuple[str, ...]
    sentence: str


DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        (_E.DGELU, _E.DGELU_BGRAD),
        ("float16", "bfloat16"),
        "cuBLASLt may run the epilog as a kernel of its own and round the product to D's dtype before it",
    ),
    Deviation((_E.GELU, _E.GELU_BIAS, _E.GELU_AUX, _E.GELU_AUX_BIAS), (), "gelu(-inf) is NaN in cuBLASLt and 0 in the contract"),
    Deviation(
        (_E.RELU_AUX, _E.RELU_AUX_BIAS),
        ("float32",),
        "the mask bit of a NaN is 1 in cuBLASLt with float32 and 0 in the contract (NaN >= 0 is false)",
    ),
)

# The library's own refusal of these with k = 1 comes late or not at all.
_NOT_FOR_K_1 = (_E.DRELU, _E.DRELU_BGRAD, _E.DGELU, _E.DGELU_BGRAD)

# FP8: input or output of the expression -> the attribute that holds its address. A's, B's and C's scale come with the call.
D_SCALE, AUX_SCALE, RESULT_AMAX, AUX_AMAX = "quantization_scale_d", "aux_quantization_scale", "result_amax", "gelu_aux_amax"
OPERAND_SCALES = (("a_scale_pointer", "quantization_scale_a"), ("b_scale_pointer", "quantization_scale_b"))


# ---------------------------------------------------------------- which algorithms round once

# The algorithms of cuBLASLt 13.1 on sm_90 that apply an epilogue to the float32 sum when D has 16 bits; others store D in between. Found
# by comparing D with the exact value rounded once, for every candidate of 126 problems on an H200: those named gave 0.99 and more of D
# (GELU: within its approximation), the rest 0.40 to 0.87. See results/cublaslt/. None: any that does not split k.
_GELU_ALGORITHMS = frozenset({66})
FUSING_ALGORITHMS: dict[MatmulEpilog, frozenset[int] | None] = {
    _E.BIAS: None,
    _E.RELU_BIAS: None,
    _E.RELU_AUX_BIAS: frozenset({66}),
    _E.GELU: _GELU_ALGORITHMS,
    _E.GELU_BIAS: _GELU_ALGORITHMS,
    _E.GELU_AUX: _GELU_ALGORITHMS,
    _E.GELU_AUX_BIAS: _GELU_ALGORITHMS,
    _E.DGELU: frozenset({21, 39, 41}),
    _E.DGELU_BGRAD: frozenset({21, 39, 41}),
}
FUSING_CAPABILITY = (9, 0)  # where those numbers hold

# Of these a second rounding is told (DEVIATIONS), not refused: they multiply, so it costs one more unit in the last place.
TOLERATED = (_E.DGELU, _E.DGELU_BGRAD)


def rounds_once(epilog: MatmulEpilog, settings: Mapping[str, Hashable], capability: tuple[int, int]) -> bool:
    """Whether an algorithm is known to round a 16-bit D once, after the epilogue.

    Partial sums are never to be kept in D's type (OUTPUT_TYPE); relu and masks commute with rounding, so only the partial sums count.

    Args:
        epilog: with DEFAULT for the plain product.
        settings: the algorithm's.
        capability: the device's; on another than `FUSING_CAPABILITY` the numbers say nothing, and all that do not split k pass.
    """
    split = int(str(settings["split_k"])) > 1
    if split and settings["reduction_scheme"] == MatmulReductionScheme.OUTPUT_TYPE:
        return False
    if epilog not in FUSING_ALGORITHMS:
        return True
    numbers = FUSING_ALGORITHMS[epilog]
    return not split and (numbers is None or capability != FUSING_CAPABILITY or settings["algorithm_id"] in numbers)


def reduction_schemes(epilog: MatmulEpilog) -> int:
    """The mask of split-k reductions with which a 16-bit D can be rounded once."""
    none, all_ = MatmulReductionScheme.NONE, MatmulReductionScheme.MASK
    return int(none) if epilog in FUSING_ALGORITHMS else int(all_ & ~MatmulReductionScheme.OUTPUT_TYPE)


def deviations(epilog: MatmulEpilog, d: DType) -> tuple[str, ...]:
    """The sentences on how cuBLASLt's special values differ for this epilog and D's dtype."""
    return tuple(row.sentence for row in DEVIATIONS if epilog in row.epilogs and d.name in (row.dtypes or (d.name,)))


# ---------------------------------------------------------------- FP8 scales in the expression


@dataclass(frozen=True, slots=True)
class Scaled:
    """An expression without the steps that cuBLASLt does itself for 8-bit outputs, and the (attribute, name) of each such step."""

    expression: Expression
    scales: tuple[tuple[str, str], ...]


def without_scales(expression: Expression) -> Scaled:
    """D = y * quantization_scale_d, its maximum before the scale, and the same for gelu_aux, taken out of the expression."""
    scales: list[tuple[str, str]] = []
    plain: dict[str, Node] = {}
    kept: list[Output] = []
    for output in expression.outputs:
        node, name = _unscaled(_uncast(output))
        if name in (D_SCALE, AUX_SCALE):
            scales.append(("d_scale_pointer" if name == D_SCALE else "aux_scale_pointer", name))
            output = replace(output, node=node)
        plain[output.name] = node
        measured = _measured(node) if output.name in (RESULT_AMAX, AUX_AMAX) else None
        source = plain.get("gelu_aux" if output.name == AUX_AMAX else expression.d.name)
        if measured is not None and measured is source:
            scales.append(("aux_amax_pointer" if output.name == AUX_AMAX else "amax_d_pointer", output.name))
        else:
            kept.append(output)
    names = tuple(name for name in expression.input_names if name not in {scale for _, scale in scales})
    return Scaled(replace(expression, outputs=tuple(kept), input_names=names), tuple(scales))


def _uncast(output: Output) -> Node:
    node = output.node
    return node.args[0] if node.op == "cast" and node.param("dtype") == output.dtype else node


def _unscaled(node: Node) -> tuple[Node, str]:
    """x and "scale" of x * scale, where the scale is one of the library's; else the node and ""."""
    if node.op == "mul":
        for x, scale in (node.args, node.args[::-1]):
            if scale.op == "input" and scale.param("name") in (D_SCALE, AUX_SCALE):
                return x, str(scale.param("name"))
    return node, ""


def _measured(node: Node) -> Node | None:
    """x of amax(abs(x)) over the whole matrix."""
    whole = node.op == "amax" and node.param("axis") == "mn" and node.args[0].op == "abs"
    return node.args[0].args[0] if whole else None


# ---------------------------------------------------------------- fusing


def fused(problem: Problem, expression: Expression) -> tuple[Recognised, Descriptor]:
    """The epilog that the expression is, and everything that cuBLASLt is told of it.

    Args:
        problem: what is computed.
        expression: checked.

    Raises:
        Unsuitable: cuBLASLt does not fuse the expression, or cannot read or write an operand in place; the text says which.
    """
    if len(problem.b) != 1:
        raise Unsuitable(f"cuBLASLt computes one product at a time, and this epilogue takes {len(problem.b)}")
    scaled = without_scales(expression)
    found = recognise(scaled.expression)
    if found is None:
        raise Unsuitable(f"cuBLASLt cannot fuse `{text(expression.d.node)}`; it fuses relu, tanh gelu, bias, their masks and gradients")
    _check_types(problem, found)
    if found.epilog in _NOT_FOR_K_1 and problem.k == 1:
        raise Unsuitable(f"cuBLASLt does not compute {found.epilog.name} with k = 1")
    order = _order(problem, found)
    plain = describe(problem, order, _absent_c(problem, found))
    return found, _with_epilogue(problem, scaled, found, plain)


def _order(problem: Problem, found: Recognised) -> str:
    """The order in which D is read: a vector along m needs column-major, one along n row-major, a mask D's own."""
    orders = readings(problem.d)
    needed = {COLUMN: "col", ROW: "row", "n": "col", "m": "row"}
    vector = needed.get(found.bias_extent) or needed.get(found.sum_axis)
    order = problem.order if FUSIONS[found.epilog].aux or vector is None else vector
    if orders and (order not in orders or vector not in (None, order)):
        along = "m" if vector == "col" else "n"
        what = "a bias" if found.bias_extent else "a gradient of a bias"
        raise Unsuitable(f"cuBLASLt has {what} along {along} only with a {vector}-major D, and D is {problem.order}-major")
    return order


def _check_types(problem: Problem, found: Recognised) -> None:
    """Refuses what the library does not document for these types."""
    row = _types(problem, found)
    names = ", ".join(f"{name}={value}" for name, value in zip("abcd", row[2:], strict=True))
    if row not in CUBLASLT_SUPPORTED:
        raise Unsuitable(f"cuBLASLt does not compute {names} with {row[0].name} and scale type {row[1].name}")
    bias = CUBLASLT_SUPPORTED[row]
    if found.epilog != _E.DEFAULT and not bias:
        raise Unsuitable(f"cuBLASLt has no epilogs for {problem.d.dtype.name}")
    given = dict(found.inputs).get("bias")
    if given is not None and problem.input(given).dtype.name != bias:
        raise Unsuitable(f"cuBLASLt reads a bias of {bias} with these operands, and `{given}` is {problem.input(given).dtype.name}")


def _types(problem: Problem, found: Recognised) -> tuple[MatmulComputeType, CudaDataType, str, str, str, str]:
    compute = MatmulComputeType(problem.compute.compute_type)
    scale = CudaDataType(of(problem.compute.scale_type).cuda_type)
    c = problem.c.dtype if problem.c is not None else _absent_c(problem, found)
    return compute, scale, problem.a.dtype.name, problem.b[0].dtype.name, c.name, problem.d.dtype.name


def _absent_c(problem: Problem, found: Recognised) -> DType:
    """What C counts as where there is none: D's dtype; of an 8-bit D the bias's, else float16."""
    if not problem.d.dtype.is_narrow:
        return problem.d.dtype
    bias = dict(found.inputs).get("bias")
    name = problem.input(bias).dtype.name if bias is not None else "float16"
    return DTYPES[name if name in ("float16", "bfloat16") else "float16"]


def _with_epilogue(problem: Problem, scaled: Scaled, found: Recognised, plain: Descriptor) -> Descriptor:
    fusion = FUSIONS[found.epilog]
    epilogue = fusion.swapped if plain.swapped and fusion.swapped is not None else found.epilog
    names = dict(found.inputs) | dict(found.outputs)
    batch = Batch.of(problem)
    bias = aux = None
    if fusion.vector:
        bias = _vector(problem, scaled.expression, names[fusion.vector], fusion.vector in fusion.written, batch)
        if bias.is_output and bias.dtype != plain.d.dtype:
            raise Unsuitable(f"cuBLASLt writes `{bias.name}` in D's dtype {plain.d.dtype.name}, and it is asked for as {bias.dtype.name}")
    if fusion.aux:
        aux = _auxiliary(problem, scaled.expression, names[fusion.aux], fusion, batch)
        _check_auxiliary(aux, plain)
    if any("amax" in attribute for attribute, _ in scaled.scales) and batch.count > 1:
        raise Unsuitable("cuBLASLt finds one largest value for a whole batch")
    return replace(plain, epilogue=int(epilogue), bias=bias, aux=aux, scales=scaled.scales)


def _found_operand(problem: Problem, expression: Expression, name: str, is_output: bool) -> Operand:
    if not is_output:
        return problem.input(name)
    return output_operand(problem, next(o for o in expression.outputs if o.name == name))


def _vector(problem: Problem, expression: Expression, name: str, is_output: bool, batch: Batch) -> Vector:
    operand = _found_operand(problem, expression, name, is_output)
    along = -2 if operand.shape[-1] == 1 else -1
    if operand.shape[along] > 1 and operand.strides[along] != 1:
        raise Unsuitable(f"`{name}` must be contiguous for cuBLASLt; its stride is {operand.strides[along]}")
    return Vector(name, is_output, operand.dtype, batch.stride(name, operand), operand.alignment_bytes)


def _auxiliary(problem: Problem, expression: Expression, name: str, fusion: Fusion, batch: Batch) -> Auxiliary:
    is_output = fusion.aux in fusion.written
    operand = _found_operand(problem, expression, name, is_output)
    if problem.order not in readings(operand):
        raise Unsuitable(f"`{name}` must be {problem.order}-major as D is, for cuBLASLt; its strides are {operand.strides}")
    across = operand.strides[-1 if problem.order == COL else -2]
    lines = operand.shape[-1 if problem.order == COL else -2]
    length = operand.shape[-2 if problem.order == COL else -1]
    unit = 8 if fusion.aux_bits else 1  # of a mask, strides count bits
    ld = (across if lines > 1 else length) * unit
    dtype = BITS if fusion.aux_bits else operand.dtype.name
    rows = problem.m if problem.order == COL else problem.n
    zeroed_bytes = operand.bytes if is_output and length * unit != rows else 0
    return Auxiliary(name, is_output, dtype, ld, batch.stride(name, operand) * unit, operand.alignment_bytes, zeroed_bytes)


def _check_auxiliary(aux: Auxiliary, plain: Descriptor) -> None:
    """Source: CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD and _BATCH_STRIDE in the cuBLAS manual."""
    step, unit = (128, "bits") if aux.dtype == BITS else (8, "elements")
    for what, value in (("leading dimension", aux.leading_dimension), ("batch stride", aux.batch_stride)):
        if value % step:
            raise Unsuitable(f"the {what} of `{aux.name}` ({value} {unit}) must be a multiple of {step} for cuBLASLt")
    if aux.dtype != BITS and aux.dtype != plain.d.dtype.name and not plain.d.dtype.is_narrow and not aux.is_output:
        raise Unsuitable(f"cuBLASLt reads `{aux.name}` in D's dtype {plain.d.dtype.name}, and it is {aux.dtype}")

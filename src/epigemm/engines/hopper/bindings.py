"""From a problem and its checked expression to what the kernel is made of: its Signature, its epilogue's text, and who is who.

The kernel stores D row-major. A column-major D is the transposed problem, Dᵀ = Bᵀ Aᵀ: rows and columns change places, and with
them the vectors and the axes of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epigemm import layouts
from epigemm.engines import outputs
from epigemm.engines.cuda import codegen
from epigemm.engines.hopper.configs import Signature
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, Expression, Output, walk
from epigemm.problem import Operand, Problem

SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
"""dtype name to the kernel's: elements of operands and tiles are the first two, of vectors all three."""

MAX_TILES, MAX_VECTORS, MAX_MASKS, MAX_SUMS = 4, 8, 2, 4
"""Room in `Params` (kernels/kernel_types.cuh) for tiles, vectors along one axis, masks and sums over one axis, each way."""

TMA_ALIGNMENT_BYTES = 16
"""What divides the address and the row stride of whatever the copy engine moves."""

PRELUDE = ("prelude.cuh", "storage.cuh")


@dataclass(frozen=True)
class Layout:
    """The kernel that computes a problem.

    Args:
        m, n, k: of the kernel's row-major D: exchanged where `transposed`.
        transposed: whether D is column-major, so that the kernel's A is Bᵀ and its B is Aᵀ.
        signature: what it reads and writes.
        epilogue: the text of its device function, with what that calls.
        places: names by group of `Params`, in its order: "along_n", "along_m", "tiles_in", "bits_in" hold inputs ("c" is C),
            "tiles_out", "bits_out", "sums_m", "sums_n" outputs ("d" is D).
        sum_types: the kernel's name for the dtype of each sum, those over m before those over n.
    """

    m: int
    n: int
    k: int
    transposed: bool
    signature: Signature
    epilogue: str
    places: dict[str, tuple[str, ...]] = field(hash=False)
    sum_types: tuple[str, ...] = ()


def refusal(problem: Problem, expression: Expression) -> str | None:
    """None where the kernel computes this problem, else the sentence that says why not."""
    return _refused_problem(problem) or _refused_expression(problem, expression)


def layout(problem: Problem, expression: Expression, scaled: bool = False) -> Layout:
    """The kernel for a problem that `refusal` lets through.

    Args:
        problem: gives shapes, strides and dtypes.
        expression: checked for this problem.
        scaled: whether the accumulator is alpha * acc (+ beta * C), with alpha and beta the first two of `Params.scalars`.
    """
    transposed = problem.order == layouts.COL
    places = _places(problem, expression, transposed, scaled and problem.c is not None)
    binding = _binding(problem, expression, places, scaled)
    heading = "DEVICE void epilogue(const Inputs& in, Outputs& out)"
    text = "\n".join([*map(codegen.library_text, PRELUDE), codegen.function(expression, problem.acc_dtype.name, binding, heading), ""])
    a, b = (problem.b[0].transposed(), (problem.a.transposed(),)) if transposed else (problem.a, problem.b)
    sums = [*places["sums_m"], *places["sums_n"]]
    return Layout(
        m=problem.n if transposed else problem.m,
        n=problem.m if transposed else problem.n,
        k=problem.k,
        transposed=transposed,
        signature=Signature(
            element=SHORT[problem.a.dtype.name],
            a_k_major=a.strides[-1] == 1,
            b_k_major=all(operand.strides[-2] == 1 for operand in b),
            weights=len(b),
            bits_in=len(places["bits_in"]),
            bits_out=len(places["bits_out"]),
            sums_m=len(places["sums_m"]),
            sums_n=len(places["sums_n"]),
            heavy=_is_heavy(expression, len(places["tiles_in"]) + len(places["tiles_out"])),
            **{group: _types(problem, expression, places[group]) for group in ("along_n", "along_m", "tiles_in", "tiles_out")},
        ),
        epilogue=text.replace("#pragma once\n", ""),
        places=places,
        sum_types=_types(problem, expression, tuple(sums)),
    )


# ---------------------------------------------------------------- who is who


def _places(problem: Problem, expression: Expression, transposed: bool, with_c: bool) -> dict[str, tuple[str, ...]]:
    groups: dict[str, list[str]] = {
        name: [] for name in ("along_n", "along_m", "tiles_in", "bits_in", "tiles_out", "bits_out", "sums_m", "sums_n")
    }
    row, column = ("along_m", "along_n") if transposed else ("along_n", "along_m")
    of_input = {MATRIX: "tiles_in", BITS: "bits_in", ROW: row, COLUMN: column}
    if with_c:
        groups["tiles_in"].append("c")
    for name, extent in _used_inputs(problem, expression).items():
        groups[of_input[extent]].append(name)
    for output in expression.outputs:
        groups[_output_group(output, transposed)].append(output.name)
    return {name: tuple(members) for name, members in groups.items()}


def _is_heavy(expression: Expression, tiles: int) -> bool:
    """Whether ptxas was seen to spill in tiles of more than 128 x 128: random numbers, and the error function beside a second tensor."""
    ops = {"erf" if node.op == "gelu" and node.param("approximate") == "none" else node.op for node in expression.nodes()}
    return "uniform" in ops or ("erf" in ops and tiles > 1)


def _used_inputs(problem: Problem, expression: Expression) -> dict[str, str]:
    """Extents of the inputs that the outputs read, by name, in the problem's order."""
    nodes = walk(codegen.term(o.node) for o in expression.outputs)
    read = {str(n.param("name")): str(n.param("extent")) for n in nodes if n.op == "input"}
    return {name: read[name] for name, _ in problem.inputs if name in read}


def _output_group(output: Output, transposed: bool) -> str:
    reduction = codegen.reduction(output.node)
    if reduction is None:
        return "bits_out" if output.extent == BITS else "tiles_out"
    return "sums_m" if (reduction.param("axis") == "m") != transposed else "sums_n"


def _binding(problem: Problem, expression: Expression, places: dict[str, tuple[str, ...]], scaled: bool) -> codegen.Binding:
    members = {"along_n": "in.along_n", "along_m": "in.along_m", "tiles_in": "in.tile", "bits_in": "in.bit"}
    stored = {"tiles_out": "out.tile", "bits_out": "out.bit", "sums_m": "out.sum_m", "sums_n": "out.sum_n"}
    inputs = {name: f"{member}[{i}]" for group, member in members.items() for i, name in enumerate(places[group])}
    accumulators = [f"in.acc[{i}]" for i in range(expression.accumulators)]
    if scaled:
        accumulators = [f"in.scalar[0] * {text}" for text in accumulators]
        if "c" in inputs:
            accumulators[0] = f"fmaf(in.scalar[1], {inputs['c']}, {accumulators[0]})"
    row, column = ("in.col", "in.row") if problem.order == layouts.COL else ("in.row", "in.col")
    return codegen.Binding(
        accumulators=tuple(accumulators),
        inputs=inputs,
        outputs={name: f"{member}[{i}]" for group, member in stored.items() for i, name in enumerate(places[group])},
        row=row,
        column=column,
        batch="0",
    )


def operand_of(problem: Problem, expression: Expression, name: str) -> Operand:
    """The operand of an input, of C ("c"), of D ("d") or of another output, by its name in `Layout.places`."""
    if name == "d":
        return problem.d
    if name == "c" and problem.c is not None:
        return problem.c
    named = {o.name: o for o in expression.outputs}
    return outputs.operand(problem, named[name]) if name in named else problem.input(name)


def _types(problem: Problem, expression: Expression, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(SHORT[operand_of(problem, expression, name).dtype.name] for name in names)


# ---------------------------------------------------------------- what it refuses


def _refused_problem(problem: Problem) -> str | None:
    element = problem.a.dtype.name
    if element not in ("bfloat16", "float16"):
        return f"The hopper kernel multiplies bfloat16 and float16, not {element}."
    if any(b.dtype != problem.a.dtype for b in problem.b):
        return "The hopper kernel takes operands of one dtype."
    if any(extent != 1 for extent in problem.batch):
        return f"The hopper kernel has no batch, and this problem has {problem.batch}."
    if 0 in (problem.m, problem.n, problem.k):
        return f"The hopper kernel computes no empty product (m={problem.m} n={problem.n} k={problem.k})."
    if len(problem.b) > 2 or (len(problem.b) > 1 and problem.order == layouts.COL):
        return "The hopper kernel takes two weights at most, and two only with a row-major D."
    if len({b.strides[-2] == 1 for b in problem.b}) > 1:
        return "The hopper kernel takes two weights of one layout."
    for name, operand in (("A", problem.a), *(("B", b) for b in problem.b)):
        if (sentence := _unreadable(name, operand)) is not None:
            return sentence
    return None


def _unreadable(name: str, operand: Operand) -> str | None:
    """Why the copy engine cannot read a matrix in place: one stride is 1, the other and the address are multiples of 16 bytes."""
    rows, columns = operand.strides[-2:]
    other = columns if rows == 1 and columns != 1 else rows
    if 1 not in (rows, columns) or other * operand.dtype.bytes % TMA_ALIGNMENT_BYTES or other <= 0:
        return f"{name} has strides {(rows, columns)}: one has to be 1, the other a positive multiple of {TMA_ALIGNMENT_BYTES} bytes."
    if operand.alignment_bytes % TMA_ALIGNMENT_BYTES:
        return f"{name} is aligned to {operand.alignment_bytes} bytes; the copy engine needs {TMA_ALIGNMENT_BYTES}."
    return None


def _refused_expression(problem: Problem, expression: Expression) -> str | None:
    for node in expression.nodes():
        if node.op == "operand_sum":
            return "The hopper kernel does not sum an operand over k."
        if node.op == "uniform" and node.args[0].op == "input":
            return "The hopper kernel draws random numbers from a constant seed alone."
    extents = _used_inputs(problem, expression)
    unread = [name for name, extent in extents.items() if extent not in (MATRIX, BITS, ROW, COLUMN)]
    if unread:
        return f"The hopper kernel reads vectors, matrices and masks; `{unread[0]}` is a {extents[unread[0]]}."
    for output in expression.outputs:
        if (sentence := _refused_output(output)) is not None:
            return sentence
    return _refused_tensors(problem, expression)


def _refused_output(output: Output) -> str | None:
    reduction = codegen.reduction(output.node)
    if reduction is None:
        return None if output.extent in (MATRIX, BITS) or output.name == "d" else f"`{output.name}` does not vary over D."
    if reduction.op != "sum" or reduction.param("axis") not in ("m", "n"):
        return f"The hopper kernel sums over m or over n; `{output.name}` is {reduction.op} over {reduction.param('axis')}."
    return None


def _refused_tensors(problem: Problem, expression: Expression) -> str | None:
    places = _places(problem, expression, problem.order == layouts.COL, with_c=problem.c is not None)
    limits = {"tiles": MAX_TILES, "along": MAX_VECTORS, "bits": MAX_MASKS, "sums": MAX_SUMS}
    for group, names in places.items():
        if len(names) > limits[group.split("_")[0]]:
            return f"The hopper kernel has room for {limits[group.split('_')[0]]} of {group}, and this epilogue has {len(names)}."
        for name in names:
            operand = operand_of(problem, expression, name)
            if (sentence := _refused_tensor(group, name, operand, problem.order)) is not None:
                return sentence
    return None


def _refused_mask(name: str, operand: Operand, order: str) -> str | None:
    """Masks are read by 4 or 8 bytes, a line padded to 16."""
    line, step = operand.strides[-2:] if order == layouts.ROW else operand.strides[:-3:-1]
    if step != 1 or line % TMA_ALIGNMENT_BYTES or operand.alignment_bytes % 8:
        what = f"The mask `{name}` has strides {operand.strides[-2:]}"
        return f"{what}: it has to lie along D's contiguous axis, in lines of a multiple of 16 bytes."
    return None


def _refused_tensor(group: str, name: str, operand: Operand, order: str) -> str | None:
    if group.startswith("bits"):
        return _refused_mask(name, operand, order)
    allowed = ("bfloat16", "float16") if group.startswith("tiles") else tuple(SHORT)
    if operand.dtype.name not in allowed:
        return f"`{name}` is {operand.dtype.name}; the hopper kernel takes {' and '.join(allowed)} there."
    if not group.startswith("tiles"):
        length, step = (operand.columns, operand.strides[-1]) if operand.columns > 1 else (operand.rows, operand.strides[-2])
        return None if step == 1 or length == 1 else f"The vector `{name}` has a stride of {step}; the hopper kernel reads neighbours."
    if (operand.strides[-2] if order == layouts.COL else operand.strides[-1]) != 1:
        return f"`{name}` is not contiguous along D's contiguous axis."
    return _unreadable(f"`{name}`", operand)

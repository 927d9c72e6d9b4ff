"""What an unfused run does, step by step, as values: copies, products, sums of operands, and the pass that finishes D.

Decided from shapes, strides and dtypes alone, without a GPU. Tensors of the workspace have places in it; everything else is the call's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from epigemm import dtypes, layouts
from epigemm.dtypes import DType
from epigemm.engines import outputs
from epigemm.engines.cublaslt.descriptors import Batch, Unsuitable, describe, readings
from epigemm.engines.cuda import pointwise
from epigemm.engines.cuda.pointwise import Pointwise
from epigemm.engines.unfused.rounding import EXACT, accumulator_types
from epigemm.expression.check import input_extent
from epigemm.expression.nodes import MATRIX, SCALAR, Expression, Node, Output, acc
from epigemm.layouts import COL, ROW
from epigemm.problem import Compute, Operand, Problem

# Names of the finishing pass's own inputs; no parameter of a function can be called so.
C_INPUT, BETA_INPUT = "c*", "beta*"
A_SCALE, B_SCALE = "quantization_scale_a", "quantization_scale_b"

_LINE_BYTES = 16  # lines of what is copied or stored in the workspace begin at multiples of it
_PLACE_BYTES = 256
_NARROW_STEP = 16  # 8-bit products want m, n and k to be multiples of it


@dataclass(frozen=True, slots=True)
class Pass:
    """One launch of the pointwise kernel, as what it is made of.

    Args:
        problem, expression, accumulators, skip: as `pointwise` takes them.
    """

    problem: Problem
    expression: Expression
    accumulators: tuple[Operand, ...]
    skip: tuple[str, ...] = ()

    @property
    def kernel(self) -> Pointwise:
        return pointwise.pointwise(self.problem, self.expression, self.accumulators, self.skip)


@dataclass(frozen=True, slots=True)
class OperandSum:
    """One launch of the kernel that sums an operand over k.

    Args:
        problem: as `operand_sum` takes it.
        operand: "a", "b", "b1", ...
    """

    problem: Problem
    operand: str

    @property
    def kernel(self) -> Pointwise:
        return pointwise.operand_sum(self.problem, self.operand)


@dataclass(frozen=True, slots=True)
class Copy:
    """An operand that cuBLASLt cannot read where it lies.

    Args:
        name: "a", "b0", "b1", ...
        source, target: as it lies, and as it is written into the workspace.
        why: what is wrong with it, for people.
    """

    name: str
    source: Operand
    target: Operand
    why: str

    @property
    def step(self) -> Pass:
        target = self.target
        batch, (rows, columns) = target.batch, target.shape[-2:]
        own = self.source.shape[-len(target.shape) :], self.source.strides[-len(target.shape) :]  # without a batch where nothing varies
        strides = layouts.broadcast_strides(*own, target.shape)
        problem = Problem(batch, rows, columns, 1, target, (target,), None, target, compute=Compute(scale_type=target.dtype.accumulator))
        whole = replace(self.source, shape=target.shape, strides=strides, conjugate=False)
        return Pass(problem, Expression((Output("d", acc(), target.dtype.name, MATRIX),), name="copy"), (whole,))


@dataclass(frozen=True, slots=True)
class Recipe:
    """All of one run.

    Args:
        way: `EXACT` or `IN_PLACE`.
        problem, expression: what is computed.
        copies: before the products.
        products: one plain product an accumulator, as cuBLASLt is told them; () where nothing is multiplied.
        in_d: whether the first accumulator is stored in D's memory.
        sums: operands that are summed over k, "a", "b", "b1", ...
        finish: the last pass, None where the product is D.
        c_read_by: "product", "pass" or "" where C is not read.
        places: name -> (offset, bytes) in the workspace.
        padded: outputs whose padding is zeroed, with their bytes.
    """

    way: str
    problem: Problem
    expression: Expression
    copies: tuple[Copy, ...]
    products: tuple[Problem, ...]
    in_d: bool
    sums: tuple[OperandSum, ...]
    finish: Pass | None
    c_read_by: str
    places: tuple[tuple[str, tuple[int, int]], ...]
    padded: tuple[tuple[str, int], ...]

    @property
    def scratch_bytes(self) -> int:
        """Of the workspace that the steps share, besides each launch's own."""
        return sum(size for _, (_, size) in self.places)

    @property
    def widened(self) -> bool:
        """Whether 8-bit operands are multiplied as float16, their scales applied by the pass."""
        return self.problem.a.dtype.is_narrow and any(not p.a.dtype.is_narrow for p in self.products)

    @property
    def twice_rounded(self) -> str:
        """The dtype to which the product is rounded before the epilogue, "" where it is not."""
        return "" if self.way == EXACT or not self.products else self.products[0].d.dtype.name


def plain(product: Problem) -> Expression:
    """The expression of a product that is only stored."""
    return Expression((Output("d", acc(), product.d.dtype.name, MATRIX),))


def empty(problem: Problem) -> bool:
    """Whether there is nothing to multiply."""
    return 0 in (problem.m, problem.n, problem.k, prod(problem.batch))


def ways(problem: Problem, expression: Expression, aligned: bool = False) -> tuple[str, ...]:
    """The ways in which the products may be stored, `EXACT` first."""
    return tuple(_types(_operands(problem, problem.order, aligned)[0], problem, expression, aligned))


def _types(read: Problem, problem: Problem, expression: Expression, aligned: bool) -> dict[str, DType]:
    if problem.a.dtype.is_narrow and not read.a.dtype.is_narrow:  # widened: the product lacks its scales
        return {EXACT: problem.acc_dtype}
    types = accumulator_types(read, expression)
    if problem.c is None or _reads_c(_product(read, problem, types[EXACT]), problem, aligned):
        return types
    return accumulator_types(read, _plus_c(problem, expression)[1])


def _product(read: Problem, problem: Problem, dtype: DType) -> Problem:
    """The plain product of the first B, stored in `dtype` in the workspace."""
    return replace(read, b=read.b[:1], c=None, d=_stored(problem, dtype, False)[0], inputs=())


def recipe(
    problem: Problem,
    expression: Expression,
    way: str = EXACT,
    *,
    aligned: bool = False,
    product: bool = True,
    reads_c: bool = True,
    apart: bool = False,
) -> Recipe:
    """The steps of a run.

    Args:
        problem: what is computed.
        expression: checked.
        way: one of `ways`.
        aligned: copy A and B also where cuBLASLt might read them but found no algorithm, 8-bit ones as float16.
        product: False for alpha = 0: neither A nor B is multiplied.
        reads_c: False for beta = 0.
        apart: never store an accumulator in D's memory: it is an input's too.
    """
    multiplies = product and not empty(problem)
    read, copies = _operands(problem, problem.order, aligned and multiplies)
    dtype = _types(read, problem, expression, aligned)[way]
    widened = problem.a.dtype.is_narrow and not read.a.dtype.is_narrow
    d_is_aligned = not aligned or problem.d.alignment_bytes >= _LINE_BYTES
    in_d = multiplies and not apart and dtype == problem.d.dtype and _writable(problem) and d_is_aligned
    stored = _stored(problem, dtype, in_d) if multiplies else _zeros(problem)
    with_c = problem.c is not None and reads_c
    products = tuple(replace(read, b=(b,), d=d, c=None, inputs=()) for b, d in zip(read.b, stored, strict=True)) if multiplies else ()
    c_in_product = with_c and multiplies and not widened and _reads_c(products[0], problem, aligned)
    if c_in_product:
        products = tuple(replace(p, c=problem.c) for p in products)
    whole = _widened(problem, expression) if multiplies and widened else (problem, expression)
    whole = _plus_c(*whole) if with_c and not c_in_product else whole
    sums = tuple(dict.fromkeys(str(n.param("operand")) for n in expression.nodes() if n.op == "operand_sum"))
    finish = _finish(*whole, stored, in_d)
    regions = dict(_regions(problem, copies if multiplies else (), stored, in_d, multiplies, sums, with_c and not c_in_product))
    return Recipe(
        way=way,
        problem=problem,
        expression=expression,
        copies=copies if multiplies else (),
        products=products,
        in_d=in_d,
        sums=tuple(OperandSum(problem, name) for name in sums),
        finish=finish,
        c_read_by="product" if c_in_product else "pass" if with_c else "",
        places=tuple(_placed(regions)),
        padded=tuple(_padded(problem, expression)),
    )


def shares_memory(problem: Problem) -> tuple[str, ...]:
    """The inputs, and "c", whose memory D may be: an `out` may be exactly one of them."""

    def same(x: Operand) -> bool:
        return (x.dtype, x.shape, x.strides) == (problem.d.dtype, problem.d.shape, problem.d.strides)

    found = [name for name, x in problem.inputs if same(x)]
    return (*found, "c") if problem.c is not None and same(problem.c) else tuple(found)


# ---------------------------------------------------------------- operands


def _operands(problem: Problem, order: str, aligned: bool) -> tuple[Problem, tuple[Copy, ...]]:
    """The problem with A and B as cuBLASLt can read them, and the copies that make it so."""
    swapped = order == ROW
    batch = Batch.of(problem) if _writable(problem) else Batch(problem.batch, tuple(i for i, e in enumerate(problem.batch) if e != 1))
    given = {"a": problem.a, **{f"b{i}": b for i, b in enumerate(problem.b)}}
    wrong = {name: _unreadable(problem, name, x, swapped, batch) for name, x in given.items()}
    narrow = problem.a.dtype.is_narrow
    if aligned or (narrow and any(wrong.values())):
        why = "no algorithm reads 8-bit numbers that lie so" if narrow else "no algorithm reads it where it lies"
        suspects = {name for name, x in given.items() if narrow or wrong[name] or x.alignment_bytes < _LINE_BYTES}
        wrong = {name: wrong[name] or why for name in given if name in suspects}
    copies = []
    for name, why in wrong.items():
        if why:
            x = given[name]
            target = _dense(x, problem, batch, dtypes.of("float16") if x.dtype.is_narrow else x.dtype, _copy_order(x, swapped))
            copies.append(Copy(name, x, target, why))
            given[name] = target
    return replace(problem, a=given.pop("a"), b=tuple(given.values())), tuple(copies)


def _unreadable(problem: Problem, name: str, x: Operand, swapped: bool, batch: Batch) -> str:
    """Why cuBLASLt cannot read A or B in place, "" where it can."""
    orders = readings(x)
    if not orders:
        return f"its strides {x.strides} are those of no matrix with a leading dimension"
    if x.conjugate and (COL if swapped else ROW) not in orders:
        return "cuBLASLt conjugates only what it also transposes"
    if x.dtype.is_narrow:
        if (ROW if name == "a" else COL) not in orders:
            return "an 8-bit operand must have k contiguous"
        if any(extent % _NARROW_STEP for extent in (problem.m, problem.n, problem.k)):
            return f"an 8-bit product needs m, n and k that are multiples of {_NARROW_STEP}"
    try:
        batch.stride(name, x)
    except Unsuitable:
        return f"its batch {x.batch} with strides {x.strides[:-2]} has no single stride"
    return ""


def _copy_order(x: Operand, swapped: bool) -> str:
    """The order of a copy: the one that a conjugate must have, else the one in which the source is nearest to contiguous."""
    if x.conjugate:
        return COL if swapped else ROW
    return ROW if (abs(x.strides[-1]) or 1 << 62) <= (abs(x.strides[-2]) or 1 << 62) else COL


def _dense(x: Operand, problem: Problem, batch: Batch, dtype: DType, order: str) -> Operand:
    """A new tensor for a copy: unbatched where nothing varies over the batch."""
    varies = any(s != 0 and e != 1 for s, e in zip(x.strides[:-2], x.batch, strict=True))
    shape = ((*problem.batch, *x.shape[-2:])) if varies else x.shape[-2:]
    axes = layouts.batch_axes(problem.d.strides, problem.d.shape) if varies and _writable(problem) else None
    return replace(_lined(dtype, shape, order, axes), conjugate=x.conjugate)


def _lined(dtype: DType, shape: tuple[int, ...], order: str, axes: tuple[int, ...] | None = None) -> Operand:
    """A dense operand whose lines begin at multiples of `_LINE_BYTES`."""
    step = max(1, _LINE_BYTES // dtype.bytes)
    along = -1 if order == ROW else -2
    padded = list(shape)
    padded[along] = layouts.round_up(max(shape[along], 1), step)
    strides = layouts.dense_strides(tuple(padded), order, axes)
    return Operand(dtype, shape, strides, layouts.alignment_bytes(0, shape, strides, dtype.bytes))


def _writable(problem: Problem) -> bool:
    """Whether cuBLASLt can write D where it lies."""
    if problem.order not in readings(problem.d):
        return False
    try:
        Batch.of(problem).stride("D", problem.d)
    except Unsuitable:
        return False
    return problem.d.alignment_bytes >= problem.d.dtype.bytes


def _stored(problem: Problem, dtype: DType, in_d: bool) -> tuple[Operand, ...]:
    """Where each product is stored: all of one form, so that the batch of one is the batch of all."""
    axes = layouts.batch_axes(problem.d.strides, problem.d.shape) if _writable(problem) else None
    new = _lined(dtype, problem.d.shape, problem.order, axes)
    return (problem.d if in_d else new, *([new] * (len(problem.b) - 1)))


def _zeros(problem: Problem) -> tuple[Operand, ...]:
    """A single zero, read as every accumulator: of products that are not computed."""
    return (Operand(problem.acc_dtype, problem.d.shape, (0,) * len(problem.d.shape)),) * len(problem.b)


# ---------------------------------------------------------------- C and scales


def _reads_c(product: Problem, problem: Problem, aligned: bool) -> bool:
    """Whether cuBLASLt reads C beside this product."""
    c = problem.c
    if c is None or c.dtype != product.d.dtype or (aligned and c.alignment_bytes < _LINE_BYTES):
        return False
    try:
        describe(replace(product, c=c), problem.order, product.d.dtype)
    except Unsuitable:
        return False
    return True


def _plus_c(problem: Problem, expression: Expression) -> tuple[Problem, Expression]:
    """The problem and the expression with acc + beta * C in place of acc."""
    assert problem.c is not None
    c, beta = problem.c, Operand.dense(problem.acc_dtype, (1, 1))
    extent = input_extent("C", c.shape, problem.m, problem.n)
    term = Node("mul", _input(BETA_INPUT, SCALAR, beta.dtype), _input(C_INPUT, extent, c.dtype))
    changed = expression.map(lambda node: Node("add", node, term) if node.op == "acc" else None)
    return _with_inputs(problem, {C_INPUT: c, BETA_INPUT: beta}), changed


def _widened(problem: Problem, expression: Expression) -> tuple[Problem, Expression]:
    """The problem and the expression with the operands' scales applied to acc."""
    scale = Operand.dense("float32", (1, 1))
    both = Node("mul", _input(A_SCALE, SCALAR, scale.dtype), _input(B_SCALE, SCALAR, scale.dtype))
    changed = expression.map(lambda node: Node("mul", node, both) if node.op == "acc" else None)
    return _with_inputs(problem, {A_SCALE: scale, B_SCALE: scale}), changed


def _input(name: str, extent: str, dtype: DType) -> Node:
    return Node("input", name=name, extent=extent, dtype=dtype.name)


def _with_inputs(problem: Problem, more: dict[str, Operand]) -> Problem:
    return replace(problem, inputs=(*problem.inputs, *more.items()))


# ---------------------------------------------------------------- the last pass


def _finish(problem: Problem, expression: Expression, stored: tuple[Operand, ...], in_d: bool) -> Pass | None:
    """The pass over D; without D where the product is D already, None where nothing is left."""
    root = expression.d.node
    while root.op == "cast" and root.param("dtype") == expression.d.dtype:
        root = root.args[0]
    done = in_d and root is acc(0)
    if done and not expression.extras:
        return None
    return Pass(problem, expression, stored, (expression.d.name,) if done else ())


# ---------------------------------------------------------------- the workspace


def _regions(
    problem: Problem,
    copies: tuple[Copy, ...],
    stored: tuple[Operand, ...],
    in_d: bool,
    multiplies: bool,
    sums: tuple[str, ...],
    beta: bool,
) -> Iterator[tuple[str, int]]:
    """What lies in the workspace, by name, and how many bytes it takes."""
    for copy in copies:
        yield copy.name, _span(copy.target)
    for i, operand in enumerate(stored):
        if multiplies and not (in_d and i == 0):
            yield f"acc{i}", _span(operand)
    if not multiplies:
        yield "zero", problem.acc_dtype.bytes
    for name in sums:
        yield f"sum_{name}", prod(problem.batch) * (problem.m if name == "a" else problem.n) * problem.acc_dtype.bytes
    if beta:
        yield BETA_INPUT, problem.acc_dtype.bytes


def _span(operand: Operand) -> int:
    return layouts.extent_bytes(operand.shape, operand.strides, operand.dtype.bytes)[1]


def _placed(regions: dict[str, int]) -> Iterator[tuple[str, tuple[int, int]]]:
    offset = 0
    for name, size in regions.items():
        whole = layouts.round_up(size, _PLACE_BYTES)
        yield name, (offset, whole)
        offset += whole


def _padded(problem: Problem, expression: Expression) -> Iterator[tuple[str, int]]:
    """Outputs with padding lines: they are zeroed as a whole, since the pass writes only what is D's."""
    for output in expression.extras:
        if output.extent == MATRIX and output.pad > 1:
            operand = outputs.operand(problem, output)
            if operand.shape[-2:] != (problem.m, problem.n):
                yield output.name, operand.bytes

"""The derivative of an epilogue: the expression of its backward pass, and the cheapest set of tensors that its forward saves for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

from epigemm import dtypes, layouts
from epigemm.errors import GradientError
from epigemm.errors.types import listed, say
from epigemm.expression.check import AS_D, SUMMED, extent, input_extent, input_usage
from epigemm.expression.cut import cheapest_cut
from epigemm.expression.format import text
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, SCALAR, Expression, Node, Output, acc, constant, input_, transform, walk
from epigemm.expression.ops import OPS
from epigemm.expression.rules import BOOL, MASK, VALUE, kind
from epigemm.expression.simplify import fold, identity
from epigemm.problem import Problem

# D as an input of the backward pass.
RESULT = "result"

# D's cotangent while the backward is built; in the finished expression it is acc(0).
_COTANGENT = Node("input", name="<cotangent of d>")
_ZERO = constant(0.0)

Extents = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that the backward reads besides the cotangents.

    Args:
        name: the backward's input that it is.
        source: "mask" or "value" (an output that the forward writes for it, of the same name), "result" (D), "output" (another
            output) or "input" (an input of the forward).
        origin: the name of that output or input in the forward.
        node: its value, in the forward's nodes.
        dtype: in which it is stored, "" for D's.
        extent: "bits", "matrix", "column", "row" or "scalar".
    """

    name: str
    source: str
    origin: str
    node: Node
    dtype: str
    extent: str

    @property
    def is_extra(self) -> bool:
        """Whether the forward writes it for the backward alone."""
        return self.source in ("mask", "value")

    def elements(self, m: int, n: int) -> int:
        """How many values it has."""
        return {SCALAR: 1, COLUMN: m, ROW: n}.get(self.extent, m * n)

    def bytes(self, m: int, n: int, dtype: str, order: str = layouts.ROW) -> int:
        """Bytes of it for a D of (m, n) in `dtype`; masks are padded along D's contiguous axis to 16 bytes."""
        if self.extent == BITS:
            return layouts.mask_bytes(m) * n if order == layouts.COL else m * layouts.mask_bytes(n)
        return self.elements(m, n) * dtypes.of(self.dtype or dtype).bytes

    def describe(self, m: int, n: int, dtype: str) -> str:
        """One line for people."""
        if not self.is_extra:
            where = {"result": "D, stored anyway", "output": f"the output {self.origin}, stored anyway", "input": "the input"}[self.source]
            return f"{self.name}: {where}: {text(self.node)}"
        what = "1 bit/element mask of" if self.extent == BITS else f"{self.dtype or dtypes.of(dtype).name} of"
        size = f"{self.elements(m, n)} elements, {_size(self.bytes(m, n, dtype))}"
        return f"{self.name}: {what} {text(self.node)}: {size}"


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} bytes"


@dataclass(frozen=True, slots=True)
class Gradient:
    """An epilogue's derivative.

    Args:
        forward: the epilogue with the extra outputs that the backward needs.
        backward: over acc(0), which is the cotangent of D: with K = 0 and beta * C it is a pointwise pass, with a product it is
            that product's epilogue. Its first output "d" is the gradient of accumulator 0, then "d_acc1", ... of the others, then
            "d_<input>" of each input. A gradient whose formula varies less than its input has that smaller extent, to be broadcast.
        saved: what the backward reads besides cotangents: extras, stored outputs, the forward's inputs.
        cotangents: (the backward's input, the forward's output) of the outputs besides D through which a gradient flows.
        results: (the backward's output, "acc0" or the input's name) of each gradient.
        m, n, dtype: the size for which the cheapest set was chosen.
    """

    forward: Expression
    backward: Expression
    saved: tuple[Saved, ...]
    cotangents: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]
    m: int
    n: int
    dtype: str

    def saved_bytes(self, m: int | None = None, n: int | None = None, dtype: str | None = None) -> int:
        """Bytes that the forward writes for the backward alone."""
        m, n = m or self.m, n or self.n
        return sum(s.bytes(m, n, dtype or self.dtype) for s in self.saved if s.is_extra)

    def read_bytes(self, m: int | None = None, n: int | None = None, dtype: str | None = None) -> int:
        """Bytes that the backward reads besides cotangents."""
        m, n = m or self.m, n or self.n
        return sum(s.bytes(m, n, dtype or self.dtype) for s in self.saved)

    def __str__(self) -> str:
        indent = "\n  "
        saved = [s.describe(self.m, self.n, self.dtype) for s in self.saved] or ["nothing"]
        parts = [
            "forward" + indent + text(self.forward).replace("\n", indent),
            "backward, where acc is the gradient of D" + indent + text(self.backward).replace("\n", indent),
            f"saved, for m={self.m} n={self.n}" + indent + indent.join(saved),
        ]
        return "\n".join(parts)


def gradient(
    expression: Expression,
    where: Problem | Extents | None = None,
    *,
    wrt: Collection[str] | None = None,
    cotangents: Collection[str] | None = None,
    m: int = 4096,
    n: int = 4096,
    dtype: str = "bfloat16",
) -> Gradient:
    """The derivative of an epilogue by its accumulators and inputs.

    Args:
        expression: traced, named or checked.
        where: the forward's problem, or the extent of each input by name. An input whose extent is not given has its gradient as
            `sum_like(...)`, which prints but does not run.
        wrt: the inputs whose gradient is wanted; None is all that are read as numbers.
        cotangents: the outputs besides D through which a gradient flows; None is all matrices and sums. Masks and maxima have none.
        m, n, dtype: of D, where no problem says so: the cheapest set depends on them.

    Raises:
        GradientError: an op on the way has no derivative, or the epilogue is complex; the message names the node.

    Example:
        >>> from epigemm.expression import epilogue, relu
        >>> print(epilogue(lambda acc, bias: relu(acc + bias)).grad(bias="row"))
        forward
          t0 = acc + bias
          d = relu(t0)
          saved_0 = bitmask(~(t0 <= 0))
        backward, where acc is the gradient of D
          d = where(unbitmask(saved_0), acc, 0)
          d_bias = sum(d, axis=m)
        saved, for m=4096 n=4096
          saved_0: 1 bit/element mask of ~(acc + bias <= 0): 16777216 elements, 2 MiB
    """
    size = _size_of(expression, where, m, n, dtype)
    plain = expression.map(lambda node: input_(str(node.param("name"))) if node.op == "input" else None)
    flowing = _cotangents(plain, cotangents)
    flows = _flows(plain, flowing)
    wanted = _wanted(plain, wrt)
    grads = [flows.get(acc(index), _ZERO) for index in range(plain.accumulators)]
    grads += [flows.get(input_(name), _ZERO) for name in wanted]
    roots = [_tidy(g) for g in grads]
    saved = _saved(plain, roots, size)
    names = ["d", *(f"d_acc{i}" for i in range(1, plain.accumulators)), *(f"d_{name}" for name in wanted)]
    memo = _substitutions(saved)
    nodes = [transform(root, _to_backward, memo) for root in roots]
    nodes[plain.accumulators :] = [_reduced(x, name, size) for x, name in zip(nodes[plain.accumulators :], wanted, strict=True)]
    backward = tuple(Output(name, node) for name, node in zip(names, nodes, strict=True))
    inputs = tuple(dict.fromkeys(str(x.param("name")) for x in walk(nodes) if x.op == "input"))
    extras = tuple(Output(s.name, Node("bitmask", s.node) if s.extent == BITS else s.node, s.dtype) for s in saved if s.is_extra)
    return Gradient(
        forward=replace(expression, outputs=(*plain.outputs, *extras)),
        backward=Expression(backward, 1, inputs, f"{expression.name}_backward" if expression.name else ""),
        saved=tuple(s for s in saved if s.name in inputs),
        cotangents=tuple((name, output) for name, output in flowing.items() if name in inputs),
        results=tuple(zip(names, [*(f"acc{i}" for i in range(plain.accumulators)), *wanted], strict=True)),
        m=size.m,
        n=size.n,
        dtype=size.dtype,
    )


@dataclass(frozen=True, slots=True)
class _SizeOf:
    """What bytes are counted from."""

    m: int
    n: int
    batch: int
    dtype: str
    extents: Extents
    input_bytes: Mapping[str, int]

    @property
    def saved_dtype(self) -> str:
        """In which values are saved: D's, but 8 bits are too few: bfloat16, as the peer keeps gelu_aux in C's type then."""
        return "bfloat16" if dtypes.of(self.dtype).is_narrow else ""

    def bytes(self, place: str) -> int:
        """Of a value with this extent, in the dtype that values are saved in; of packed bits."""
        if place == BITS:
            return max(self.batch * self.m * self.n // 8, 1)
        count = {SCALAR: 1, COLUMN: self.m, ROW: self.n}.get(place, self.m * self.n)
        return self.batch * count * dtypes.of(self.saved_dtype or self.dtype).bytes


def _size_of(expression: Expression, where: Problem | Extents | None, m: int, n: int, dtype: str) -> _SizeOf:
    if isinstance(where, Problem):
        if where.acc_dtype.is_complex:
            what = f"`{text(expression.d.node)}` is computed in {where.acc_dtype.name}, for which no gradient is derived."
            raise GradientError(say(what, "Take it apart into real and imaginary products."))
        usage = input_usage(expression)
        places = {name: input_extent(name, x.shape, where.m, where.n, usage.get(name) == BITS, where.order) for name, x in where.inputs}
        read = {name: x.bytes for name, x in where.inputs}
        return _SizeOf(where.m, where.n, prod(where.batch), where.d.dtype.name, places, read)
    given = dict(where or {})
    for name, place in given.items():
        if name not in expression.input_names or place not in (SCALAR, COLUMN, ROW, MATRIX, BITS):
            what = f"{name}={place!r} is not the extent of an input; the inputs are {listed(expression.input_names) or 'none'}."
            raise GradientError(say(what, "An extent is scalar, column, row, matrix or bits: grad(bias='row', residual='matrix')."))
    return _SizeOf(m, n, 1, dtypes.of(dtype).name, given, {})


# ---------------------------------------------------------------- reverse mode


def _cotangents(expression: Expression, asked: Collection[str] | None) -> dict[str, str]:
    """The backward's cotangent inputs besides D's: {"d_sumsq": "sumsq"}."""
    kinds = {o.name: kind(o.node) for o in expression.extras}
    maxima = {o.name for o in expression.extras if any(x.op == "amax" for x in _under_casts(o.node))}
    flowing = [name for name, what in kinds.items() if what != MASK and name not in maxima]
    for name in asked or ():
        if name not in flowing:
            output = next((o for o in expression.extras if o.name == name), None)
            what = f"No gradient flows through the output `{name}`" + (f" = `{text(output.node)}`." if output else ": there is none.")
            raise GradientError(say(what, f"Those with one: {listed(flowing) or 'D alone'}."))
    return {f"d_{name}": name for name in flowing if asked is None or name in asked}


def _under_casts(node: Node) -> list[Node]:
    chain = [node]
    while chain[-1].op == "cast":
        chain.append(chain[-1].args[0])
    return chain


def _wanted(expression: Expression, wrt: Collection[str] | None) -> list[str]:
    usage = input_usage(expression)
    numbers = [name for name in expression.input_names if usage.get(name, VALUE) == VALUE]
    for name in wrt or ():
        if name not in numbers:
            what = f"There is no gradient by `{name}`: " + (f"it is read as {usage[name]}." if name in usage else "it is not an input.")
            raise GradientError(say(what, f"Those with one: {listed(numbers) or 'none'}."))
    return [name for name in numbers if wrt is None or name in wrt]


def _flows(expression: Expression, cotangents: Mapping[str, str]) -> dict[Node, Node]:
    """The cotangent of every node that one reaches, outputs first."""
    outputs = {o.name: o.node for o in expression.outputs}
    flows: dict[Node, Node] = {expression.d.node: _COTANGENT}
    for name, output in cotangents.items():
        _accumulate(flows, outputs[output], input_(name))
    for node in reversed(list(walk([expression.d.node, *(outputs[name] for name in cotangents.values())]))):
        d = flows.get(node)
        if d is None:
            continue
        for argument, flow in zip(node.args, _derivative(node, d), strict=True):
            if flow is not None and argument.op != "constant":
                _accumulate(flows, argument, flow)
        if node.op == "operand_sum":
            _derivative(node, d)
    return flows


def _accumulate(flows: dict[Node, Node], node: Node, flow: Node) -> None:
    flows[node] = Node("add", flows[node], flow) if node in flows else flow


def _derivative(node: Node, d: Node) -> tuple[Node | None, ...]:
    rule = OPS[node.op].derivative
    if rule is None:
        what = f"`{node.op}` has no derivative, in `{text(node)}`."
        remedy = "Give a gradient to the other outputs alone: gradient(..., cotangents=(...))." if node.op == "operand_sum" else ""
        raise GradientError(say(what, remedy))
    return rule(node, d)


def _tidy(root: Node) -> Node:
    """Constants folded and factors of 1 dropped; selections stay as they are, so that masks keep their sense."""
    return transform(root, lambda node: fold(node) or identity(node))


def _to_backward(node: Node) -> Node | None:
    return acc(0) if node is _COTANGENT else None


def _reduced(x: Node, name: str, size: _SizeOf) -> Node:
    place = size.extents.get(name)
    if place is None:
        return Node("sum_like", x, name=name)
    return x if place == MATRIX else Node("sum", x, axis=SUMMED[place])


# ---------------------------------------------------------------- what is saved


def _saved(expression: Expression, roots: list[Node], size: _SizeOf) -> list[Saved]:
    """The cheapest tensors from which the backward computes what it needs of the forward."""
    order = list(walk(roots))
    reached: set[Node] = set()  # what depends on a cotangent
    needed: dict[Node, None] = {}
    forward = set(expression.nodes())
    for node in order:
        if _is_cotangent(node, forward) or any(a in reached for a in node.args):
            reached.add(node)
            needed.update((a, None) for a in node.args if a not in reached and a.op != "constant")
    needed.update((root, None) for root in roots if root not in reached and root.op != "constant")
    needed = {node: None for node in needed if not _is_cotangent(node, forward)}
    stored = _stored(expression, size)
    inside = list(walk(needed))
    costs = {node: _cost(node, node in needed, node in stored, size) for node in inside}
    free = [node for node in inside if node.op == "constant"]
    kept = set(cheapest_cut(needed, costs, free))
    # In the forward's order, so that names do not depend on how the backward is written.
    in_order = [node for node in walk([*(o.node for o in expression.outputs), *inside]) if node in kept]
    return _as_saved(expression, in_order, stored, size)


def _is_cotangent(node: Node, forward: set[Node]) -> bool:
    return node is _COTANGENT or (node.op == "input" and node not in forward)


def _stored(expression: Expression, size: _SizeOf) -> dict[Node, Output]:
    """What the forward stores anyway, in no fewer bits than a saved value would have."""
    result: dict[Node, Output] = {}
    for output in expression.outputs:
        cast = output.node.param("dtype") if output.node.op == "cast" else None
        stored = str(cast) if cast else output.dtype if output.dtype not in ("", AS_D) else size.dtype
        if kind(output.node) == VALUE and dtypes.of(stored).bytes >= dtypes.of(size.saved_dtype or size.dtype).bytes:
            # A cast at the root is the rounding of storing: the value below it has the same bits once stored.
            for node in _under_casts(output.node)[:2]:
                result.setdefault(node, output)
        elif output.node.op == "bitmask":
            result.setdefault(output.node.args[0], output)
    return result


# Costs are counted in units small enough to prefer one cut of equal bytes to another.
_UNITS_PER_BYTE = 64


def _cost(node: Node, is_needed: bool, is_stored: bool, size: _SizeOf) -> int | None:
    """Bytes written and read, in units; of equal masks the one that the backward selects by is preferred."""
    if node.op == "constant":
        return None
    if node.op == "input":
        return _UNITS_PER_BYTE * size.input_bytes.get(str(node.param("name")), size.bytes(size.extents.get(str(node.param("name")), ROW)))
    if kind(node) == BOOL:
        # A mask is stored whole, whatever its extent.
        bits = _UNITS_PER_BYTE * size.bytes(BITS)
        return bits + (0 if is_stored else bits) + (0 if is_needed else 1)
    place = extent(transform(node, lambda x: _with_extent(x, size)))
    written = _UNITS_PER_BYTE * size.bytes(place)
    return written + (0 if is_stored else written)


def _with_extent(node: Node, size: _SizeOf) -> Node | None:
    if node.op != "input":
        return None
    return Node("input", name=node.param("name"), extent=size.extents.get(str(node.param("name")), ROW))


def _as_saved(expression: Expression, cut: list[Node], stored: Mapping[Node, Output], size: _SizeOf) -> list[Saved]:
    taken = {*expression.input_names, *(o.name for o in expression.outputs), *(f"d_{o.name}" for o in expression.outputs)}
    result: list[Saved] = []

    def free(name: str) -> str:
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    for node in cut:
        place = BITS if kind(node) == BOOL else extent(transform(node, lambda x: _with_extent(x, size)))
        if node.op == "input":
            name = str(node.param("name"))
            result.append(Saved(name, "input", name, node, "", place))
        elif node in stored:
            output = stored[node]
            is_d = output is expression.d
            name = free(RESULT) if is_d else free(f"{output.name}_value")
            result.append(Saved(name, "result" if is_d else "output", output.name, node, output.dtype, place))
        else:
            name = free(f"saved_{sum(s.is_extra for s in result)}")
            result.append(Saved(name, "mask" if place == BITS else "value", name, node, "" if place == BITS else size.saved_dtype, place))
    return result


def _substitutions(saved: list[Saved]) -> dict[Node, Node]:
    """Each kept node as the backward reads it."""
    return {s.node: Node("unbitmask", input_(s.name)) if s.extent == BITS else input_(s.name) for s in saved if s.source != "input"}

"""Expression -> C++: the statements that compute an epilogue for one element, and the texts they call.

The statements are the same in every kernel; where a kernel keeps an element's inputs and puts its outputs is its own
business, and is told by a `Binding`. Every node becomes one named constant, in float or double (float2 or double2 where
the product is complex), so the text reads like the expression it was made of.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from epigemm import dtypes, errors
from epigemm.expression import format as formatting
from epigemm.expression.nodes import Expression, Node, walk
from epigemm.expression.ops import COMPLEX_OPS, OPS, REDUCTIONS

_FOLDER = Path(__file__).parent

# The C++ type of a value, by the accumulator's dtype.
VALUE_TYPES = {"float32": "float", "float64": "double", "complex64": "float2", "complex128": "double2"}
# The C++ type in which reductions are summed.
REAL_TYPES = {"float32": "float", "float64": "double", "complex64": "float", "complex128": "double"}

# dtypes that a value can be rounded to; `epi_round_<short>` in storage.cuh
CASTS = frozenset(("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"))

# Words that a C++ program cannot use as a name, besides Python's own (which `keyword` knows).
_RESERVED = frozenset(
    """alignas alignof asm auto bool break case catch char class const constexpr continue decltype default delete do double else
    enum explicit export extern false float for friend goto if inline int long mutable namespace new noexcept nullptr operator
    private protected public register short signed sizeof static struct float2 double2 switch template this throw true try typedef typeid
    typename union unsigned using virtual void volatile wchar_t while and or not xor in out row column batch""".split()
)


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a kernel keeps one element, as C++ expressions.

    Args:
        accumulators: the value of each accumulator.
        inputs: the value of each input by name: a number, or for packed bits the element's bool.
        integers: the same as an integer, for inputs that are seeds.
        outputs: what each output is assigned to: a number, a bool for a mask, and for a reduction the element's term.
        sums: the values of `operand_sum`, by operand.
        row, column, batch: D's logical coordinates, which random numbers are made of.
    """

    accumulators: tuple[str, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    integers: Mapping[str, str] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)
    row: str = "row"
    column: str = "column"
    batch: str = "batch"


@cache
def library_text(name: str) -> str:
    """A device text of this folder, "prelude.cuh" or "storage.cuh", with its name as a heading."""
    return f"// ======== {name} ========\n{(_FOLDER / name).read_text()}"


def identifier(name: str) -> str:
    """`name` as a C++ name: what C++ lacks is spelled in hexadecimal, its reserved words get an underscore.

    Example:
        >>> identifier("bias"), identifier("new"), identifier("β")
        ('bias', 'new_', 'u3b2')
    """
    plain = re.sub(r"[^A-Za-z0-9_]", lambda match: f"u{ord(match[0]):x}", name)
    own = plain.startswith("epi_") or re.fullmatch(r"_.*|t\d+|\d.*", plain)
    return plain + "_" if plain in _RESERVED or keyword.iskeyword(plain) or own else plain


def term(node: Node) -> Node:
    """What an output stores of one element: the root without its reduction and its casts, which come after the sum, or its bitmask."""
    root = node
    while root.op == "cast" and root.args[0].op in ("cast", *REDUCTIONS):
        root = root.args[0]
    if root.op in REDUCTIONS or root.op == "bitmask":
        return root.args[0]
    return node


def reduction(node: Node) -> Node | None:
    """The reduction at the root of an output, under its casts, or None."""
    while node.op == "cast":
        node = node.args[0]
    return node if node.op in REDUCTIONS else None


def literal(value: Any, accumulator: str) -> str:
    """A number as C++ text of the accumulator's type, exact.

    Example:
        >>> literal(0.1, "float32"), literal(-2, "float64"), literal(True, "float32"), literal(1, "complex64")
        ('0.1f', '(-2.0)', 'true', 'float2{1.0f, 0.0f}')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if accumulator.startswith("complex"):
        z = complex(value)
        real = "float32" if accumulator == "complex64" else "float64"
        return f"{VALUE_TYPES[accumulator]}{{{literal(z.real, real)}, {literal(z.imag, real)}}}"
    return _real_literal(float(value), accumulator == "float32")


def _real_literal(value: float, single: bool) -> str:
    import numpy as np

    number = float(np.float32(value)) if single else value
    if not math.isfinite(number):
        sign = 1 if math.copysign(1.0, number) < 0 else 0
        if single:
            bits = sign << 31 | 0x7F800000 | (0x400000 if math.isnan(number) else 0)
            return f"epi_bits_float({bits:#x}u)"
        bits = sign << 63 | 0x7FF << 52 | (1 << 51 if math.isnan(number) else 0)
        return f"epi_bits_double({bits:#x}ull)"
    text = (str(np.float32(value)) + "f") if single else repr(number)
    return f"({text})" if text.startswith("-") else text


@dataclass(slots=True)
class _Writer:
    """The statements of one epilogue as they come to be."""

    accumulator: str
    binding: Binding
    expression: Expression
    lines: list[str] = field(default_factory=list)
    spelled: dict[Node, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def spell(self, node: Node) -> str:
        """The C++ name or literal of a node whose arguments are spelled."""
        if node not in self.spelled:
            self.spelled[node] = self._spell(node)
        return self.spelled[node]

    def _spell(self, node: Node) -> str:
        if node.op == "constant":
            return literal(node.param("value"), self.accumulator)
        if node.op == "acc":
            index = int(str(node.param("index")))
            name = "acc" if self.expression.accumulators == 1 else f"acc{index}"
            return self._define(name, self.binding.accumulators[index])
        if node.op == "operand_sum":
            operand = str(node.param("operand"))
            return self._define(f"sum_{operand}", self.binding.sums[operand])
        if node.op == "input":
            name = str(node.param("name"))
            return self._define(identifier(name), self.binding.inputs[name])
        if node.op == "unbitmask":
            name = str(node.args[0].param("name"))
            return self._define(identifier(name), self.binding.inputs[name], "bool")
        text = self._uniform(node) if node.op == "uniform" else self._operation(node)
        kind = "bool" if OPS[node.op].result == "bool" else None
        return self._define(f"t{len(self.lines)}", text, kind)

    def _operation(self, node: Node) -> str:
        arguments = [self.spell(a) for a in node.args]
        if node.op == "cast":
            return f"epi_round_{self._cast_target(node)}({arguments[0]})"
        if self.accumulator.startswith("complex") and node.op not in COMPLEX_OPS:
            raise self._refusal(node, "its value is complex")
        if not OPS[node.op].cuda:
            raise self._refusal(node, "it has no spelling in CUDA C++")
        params = {k: v if isinstance(v, str) else literal(v, self.accumulator) for k, v in node.params}
        return OPS[node.op].cuda.format(*arguments, **params)

    def _cast_target(self, node: Node) -> str:
        dtype = str(node.param("dtype"))
        complex_value = self.accumulator.startswith("complex")
        if dtype not in CASTS or dtypes.of(dtype).is_complex != complex_value:
            raise self._refusal(node, f"a {self.accumulator} value cannot be rounded to {dtype}")
        return dtypes.of(dtype).short

    def _uniform(self, node: Node) -> str:
        seed = node.args[0]
        if seed.op == "constant":
            number = int(str(seed.param("value"))) & (1 << 64) - 1
            key = f"static_cast<long long>({number:#x}ull)"
        else:
            key = self.binding.integers[str(seed.param("name"))]
        at = self.binding
        text = f"epi_uniform({key}, {at.row}, {at.column}, {at.batch})"
        return text if self.accumulator == "float32" else f"static_cast<{VALUE_TYPES[self.accumulator]}>({text})"

    def _refusal(self, node: Node, why: str) -> errors.UnsupportedEpilogue:
        return errors.cannot_fuse("cuda", f"`{formatting.text(node)}`", formatting.text(self.expression), f"{why[0].upper()}{why[1:]}.")

    def _define(self, name: str, text: str, kind: str | None = None) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        self.lines.append(f"const {kind or VALUE_TYPES[self.accumulator]} {name} = {text};")
        return name


# Nodes whose arguments are not values of their own: packed bits and seeds.
_READ_INSIDE = ("unbitmask", "uniform")


def statements(expression: Expression, accumulator: str, binding: Binding) -> list[str]:
    """The statements that compute one element: each input it uses is read once, each node is one constant, then the outputs.

    An input that is used is read through `binding`; one that no output needs is not.

    Args:
        expression: a checked expression.
        accumulator: dtype name of the products' accumulator: "float32", "float64", "complex64" or "complex128".
        binding: where the kernel keeps things; outputs it does not name are left out.

    Raises:
        UnsupportedEpilogue: a node has no C++; the message names it.
    """
    writer = _Writer(accumulator, binding, expression)
    outputs = [o for o in expression.outputs if o.name in binding.outputs]
    roots = [term(o.node) for o in outputs]
    skipped = {a for node in walk(roots) if node.op in _READ_INSIDE for a in node.args}
    for node in walk(roots):
        if node not in skipped or any(node in n.args for n in walk(roots) if n.op not in _READ_INSIDE):
            writer.spell(node)
    stores = [f"{binding.outputs[o.name]} = {writer.spell(root)};" for o, root in zip(outputs, roots, strict=True)]
    return [*writer.lines, *stores]


def function(expression: Expression, accumulator: str, binding: Binding, signature: str) -> str:
    """The definition of a device function with the given signature, the expression above it as a comment.

    Example:
        >>> from epigemm.expression.nodes import Node, Output, acc
        >>> d = Output("d", Node("relu", acc()))
        >>> at = Binding(accumulators=("in.acc[0]",), inputs={}, outputs={"d": "out.d"})
        >>> print(function(Expression((d,)), "float32", at, "EPI_DEVICE void epilogue(const In& in, Out& out)"))
        // d = relu(acc)
        EPI_DEVICE void epilogue(const In& in, Out& out) {
            const float acc = in.acc[0];
            const float t1 = epi_relu(acc);
            out.d = t1;
        }
    """
    comment = [f"// {line}" for line in formatting.text(expression).splitlines()]
    body = [f"    {line}" for line in statements(expression, accumulator, binding)]
    return "\n".join([*comment, signature + " {", *body, "}"])

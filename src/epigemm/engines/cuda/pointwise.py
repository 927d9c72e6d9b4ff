"""The pointwise-and-reduction kernel: one pass over D that finishes it in place, whatever the expression.

A plain product leaves its accumulator in memory; this kernel reads it with the epilogue's inputs and writes all outputs. So
every expression runs on every GPU, several accumulators included. `pointwise.cuh` is the kernel; here it is told, as
constants, what its tensors are, and as one packed argument, how large they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from epigemm import dtypes, errors, layouts
from epigemm.dtypes import DType
from epigemm.engines import outputs
from epigemm.engines.base import Call
from epigemm.engines.cuda import codegen, compiler, libraries
from epigemm.engines.cuda.codegen import Binding
from epigemm.expression import format as formatting
from epigemm.expression.nodes import BITS, COLUMN, MATRIX, ROW, SCALAR, Expression, Node, Output, acc, walk
from epigemm.problem import Operand, Problem

THREADS = 256
VECTOR_BYTES = 16
MAX_VECTOR = 8
LANES = 32
MIN_LANES = 8
MASK_BITS = 128  # a mask's lines are padded to 16 bytes, and the padding is written

# Bytes of lines that are on their way to a thread while it computes one: what keeps the memory busy.
_BYTES_AHEAD = 32
_MAX_AHEAD = 2
# Blocks of THREADS that a multiprocessor should hold: at 4 a thread has 64 registers, which kernels with many tensors exceed.
_RESIDENT, _RESIDENT_LARGE, _LARGE = 4, 2, 4
# About so many blocks: several waves on the largest GPU. More lines a block mean fewer partial sums.
_BLOCKS = 4096
_MAX_ROWS, _MAX_ROWS_SUMMED = 16, 128

_MAX_EXTENT = 2**31 - 2**16  # room for the last tile


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the kernel, as seen along D's axes.

    Args:
        role, name: what it is: ("acc", "0"), ("sum", "a"), ("input", "bias"), ("output", "d").
        dtype: of its elements; uint8 for packed bits.
        along: "nothing", "slow", "fast", "both" or "bits" (see pointwise_types.cuh).
        slow, fast: strides in elements; of packed bits in bytes.
        batch: strides over the batch.
        alignment_bytes: what divides the address of each of its lines.
        reduction: the node that sums it, None where it is stored element by element.
    """

    role: str
    name: str
    dtype: DType
    along: str
    slow: int
    fast: int
    batch: tuple[int, ...]
    alignment_bytes: int
    reduction: Node | None = None

    def is_vector(self, vector: int) -> bool:
        """Whether `vector` neighbours can be read or written at once."""
        wide = min(VECTOR_BYTES, vector * self.dtype.bytes)
        return self.along in ("both", "fast") and self.fast == 1 and self.alignment_bytes % wide == 0


@dataclass(frozen=True, slots=True)
class Pointwise:
    """A generated kernel with its one launch.

    Args:
        name: a readable stem.
        text: its whole CUDA C++ text; the entry is ENTRY.
        tensors: whose addresses it takes, in this order, before the workspace's.
        blocks: the grid, along x; of THREADS threads each.
        extents: the last argument, packed.
        workspace_bytes: for partial sums; 0 where there are none.
        zeroed_bytes: how many of them, from the first, must be 0 before each launch.
        moved_bytes: what it reads and writes at least.
    """

    name: str
    text: str
    tensors: tuple[Tensor, ...]
    blocks: int
    extents: bytes
    workspace_bytes: int
    zeroed_bytes: int
    moved_bytes: int

    def compile(self, arch: str) -> compiler.Cubin:
        """Its machine code, from the store where it is there."""
        return compiler.compile_source(self.text, name=self.name, arch=arch)

    def launch(self, arch: str, device: int = 0) -> Any:
        """The compiled core's launch object: `run(stream, *addresses)`, the addresses in the order of `tensors`.

        It takes its workspace from the core's own.
        """
        core = libraries.open_driver()
        slots = [core.Slot.value(i) for i in range(len(self.tensors))]
        slots.append(core.Slot.workspace(0) if self.workspace_bytes else core.Slot.fixed(bytes(8)))
        slots.append(core.Slot.fixed(self.extents))
        return core.KernelLaunch(
            core.KernelLibrary(self.compile(arch).code),
            ENTRY,
            device,
            (self.blocks, 1, 1),
            (THREADS, 1, 1),
            slots,
            workspace_bytes=self.workspace_bytes,
            zeroed_bytes=self.zeroed_bytes,
        )

    def addresses(self, call: Call, accumulators: tuple[int, ...], sums: Mapping[str, int] | None = None) -> list[int]:
        """What one run passes: the address of each tensor.

        Args:
            call: a run of the problem; its inputs and outputs are addresses.
            accumulators: where each product was left.
            sums: where `operand_sum` left what the expression reads, by operand.
        """
        places = {("acc", str(i)): address for i, address in enumerate(accumulators)}
        places |= {("sum", name): address for name, address in (sums or {}).items()}
        places |= {("input", name): address for name, address in call.inputs.items()}
        places |= {("output", name): address for name, address in call.outputs.items()} | {("output", "d"): call.d}
        return [places[tensor.role, tensor.name] for tensor in self.tensors]


ENTRY = "pointwise"


def pointwise(problem: Problem, expression: Expression, accumulators: tuple[Operand, ...], skip: tuple[str, ...] = ()) -> Pointwise:
    """The kernel that computes an expression from accumulators that lie in memory.

    Args:
        problem: gives m, n, batch, D and the inputs; a, b and c are not read.
        expression: checked for this problem.
        accumulators: one (*batch, m, n) each, of any strides, float dtype; one may be D itself, or D's memory.
        skip: outputs that are not wanted.

    Raises:
        UnsupportedEpilogue: a node has no C++.
        UnsupportedProblem: m, n or the number of blocks does not fit 31 bits.
    """
    sources = _sources(problem, expression, accumulators, skip)
    stored = [_target(problem, o) for o in expression.outputs if o.name not in skip]
    targets = tuple(t for t in stored if t.reduction is None)
    results = tuple(t for t in stored if t.reduction is not None)
    tensors = (*sources, *targets, *results)
    batch, tensors = _collapsed(problem.batch, tensors)
    shape = _Shape.of(problem, batch, tensors, sources=len(sources), results=len(results))
    text = _text(problem, expression, shape, tensors, skip)
    partials, zeroed = _workspace(problem, shape, tensors[shape.results_from :])
    return Pointwise(
        name=f"pointwise_{expression.name or 'epilogue'}",
        text=text,
        tensors=tensors,
        blocks=shape.blocks,
        extents=shape.packed(tensors, partials[:-1]),
        workspace_bytes=partials[-1] if results else 0,
        zeroed_bytes=zeroed if results else 0,
        moved_bytes=_moved_bytes(problem, tensors),
    )


def operand_sum(problem: Problem, operand: str) -> Pointwise:
    """The kernel that sums an operand over k: of "a" a column (*batch, m, 1), of "b" or "b1" a row (*batch, 1, n), dense.

    It takes two addresses: the operand's and the sum's.
    """
    by_m = operand == "a"
    source = problem.a if by_m else problem.b[int(operand[1:] or 0)]
    m, n = (problem.m, problem.k) if by_m else (problem.k, problem.n)
    accumulator = problem.acc_dtype.name
    strides = layouts.broadcast_strides(source.shape, source.strides, (*problem.batch, m, n))
    whole = replace(source, shape=(*problem.batch, m, n), strides=strides)
    term = Node("sum", acc(), axis="n" if by_m else "m")
    expression = Expression((Output("d", acc(), source.dtype.name, MATRIX), Output("sum", term, accumulator, COLUMN if by_m else ROW)))
    return pointwise(replace(problem, m=m, n=n, d=whole, inputs=()), replace(expression, name=f"sum_{operand}"), (whole,), skip=("d",))


# ---------------------------------------------------------------- tensors


def _tensor(problem: Problem, role: str, name: str, operand: Operand, extent: str, reduction: Node | None = None) -> Tensor:
    row_major = problem.order == layouts.ROW
    varies_m, varies_n = extent in (COLUMN, MATRIX, BITS), extent in (ROW, MATRIX, BITS)
    rows, columns = (operand.strides[-2] if varies_m else 0), (operand.strides[-1] if varies_n else 0)
    along = {SCALAR: "nothing", MATRIX: "both", BITS: "bits"}.get(extent) or ("fast" if (extent == ROW) == row_major else "slow")
    batch = layouts.broadcast_strides(operand.batch, operand.strides[:-2], problem.batch)
    slow, fast = (rows, columns) if row_major else (columns, rows)
    slow = slow if (problem.m if row_major else problem.n) > 1 else 0
    return Tensor(role, name, operand.dtype, along, slow, fast, batch, _alignment(operand, slow, batch), reduction)


def _alignment(operand: Operand, slow: int, batch: tuple[int, ...]) -> int:
    """What divides the address of every line along fast. A slow stride of 1 counts too: lines may overlap."""
    step = gcd(operand.alignment_bytes, *(abs(stride) * operand.dtype.bytes for stride in (slow, *batch)))
    return step & -step


def _sources(problem: Problem, expression: Expression, accumulators: tuple[Operand, ...], skip: tuple[str, ...]) -> tuple[Tensor, ...]:
    """What the wanted outputs read: accumulators, sums of operands, inputs."""
    used = tuple(walk(codegen.term(o.node) for o in expression.outputs if o.name not in skip))
    found = [_tensor(problem, "acc", str(i), operand, MATRIX) for i, operand in enumerate(accumulators) if acc(i) in used]
    for node in used:
        if node.op == "operand_sum":
            name = str(node.param("operand"))
            shape = (problem.m, 1) if name == "a" else (1, problem.n)
            dense = Operand.dense(problem.acc_dtype, (*problem.batch, *shape))
            found.append(_tensor(problem, "sum", name, dense, COLUMN if name == "a" else ROW))
    inputs = {str(node.param("name")): node for node in used if node.op == "input"}
    for name, operand in problem.inputs:
        if name in inputs:
            found.append(_tensor(problem, "input", name, operand, str(inputs[name].param("extent"))))
    return tuple(found)


def _target(problem: Problem, output: Output) -> Tensor:
    operand = problem.d if output.name == "d" else outputs.operand(problem, output)
    extent = MATRIX if output.name == "d" else output.extent
    return _tensor(problem, "output", output.name, operand, extent, codegen.reduction(output.node))


def _collapsed(batch: tuple[int, ...], tensors: Iterable[Tensor]) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """The batch with as few axes as all tensors allow: extents of 1 dropped, axes merged that every tensor walks as one."""
    tensors = tuple(tensors)
    axes: list[tuple[int, tuple[int, ...]]] = []
    for i, extent in enumerate(batch):
        strides = tuple(t.batch[i] for t in tensors)
        if extent == 1:
            continue
        if axes and all(slow == fast * extent for slow, fast in zip(axes[-1][1], strides, strict=True)):
            axes[-1] = (axes[-1][0] * extent, strides)
        else:
            axes.append((extent, strides))
    kept = tuple(replace(t, batch=tuple(strides[i] for _, strides in axes)) for i, t in enumerate(tensors))
    return tuple(extent for extent, _ in axes), kept


def _moved_bytes(problem: Problem, tensors: tuple[Tensor, ...]) -> int:
    sizes = {"nothing": 1, "both": problem.m * problem.n, "bits": problem.m * problem.n / 8}
    fast, slow = (problem.n, problem.m) if problem.order == layouts.ROW else (problem.m, problem.n)
    sizes |= {"fast": fast, "slow": slow}
    return int(prod(problem.batch) * sum(sizes[t.along] * t.dtype.bytes for t in tensors))


# ---------------------------------------------------------------- the shape of the launch


def _power_of_two(at_least: int) -> int:
    return 1 << max(at_least - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class _Shape:
    """How the kernel covers D."""

    slow: int
    fast: int
    padded_fast: int
    batch: tuple[int, ...]
    vector: int
    lanes: int
    ahead: int
    rows: int
    sources: int
    targets: int
    results: int

    @staticmethod
    def of(problem: Problem, batch: tuple[int, ...], tensors: tuple[Tensor, ...], sources: int, results: int) -> _Shape:
        fast, slow = (problem.n, problem.m) if problem.order == layouts.ROW else (problem.m, problem.n)
        targets = len(tensors) - sources - results
        masked = any(t.along == "bits" for t in tensors[sources : sources + targets])
        padded = layouts.round_up(fast, MASK_BITS) if masked else fast
        vector = _vector(tensors[: sources + targets])
        lanes = min(LANES, max(MIN_LANES, _power_of_two(-(-padded // vector))))
        bytes_ahead = sum(vector * t.dtype.bytes for t in tensors[:sources] if t.along == "both")
        ahead = max(1, min(_MAX_AHEAD, _BYTES_AHEAD // max(bytes_ahead, 1)))
        blocks = -(-slow // (THREADS // lanes)) * -(-padded // (lanes * vector)) * prod(batch)
        rows = max(1, min(blocks // _BLOCKS, _MAX_ROWS_SUMMED if results else _MAX_ROWS))
        shape = _Shape(slow, fast, padded, batch, vector, lanes, ahead, rows, sources, targets, results)
        if max(problem.m, problem.n, shape.blocks) > _MAX_EXTENT:
            what = f"The pointwise kernel counts in 31 bits, and m={problem.m} n={problem.n} batch={problem.batch} needs more."
            raise errors.UnsupportedProblem(errors.say(what, "Split the batch."))
        return shape

    @property
    def results_from(self) -> int:
        return self.sources + self.targets

    @property
    def batches(self) -> int:
        return prod(self.batch)

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles along slow and along fast."""
        return -(-self.slow // (THREADS // self.lanes * self.rows)), -(-self.padded_fast // (self.lanes * self.vector))

    @property
    def blocks(self) -> int:
        """One a tile; where D is empty one alone, which stores the sums of nothing."""
        return prod(self.tiles) * self.batches or (1 if self.batches else 0)

    def packed(self, tensors: tuple[Tensor, ...], partials: tuple[int, ...]) -> bytes:
        """`Extents` of pointwise.cuh."""
        batch = self.batch or (1,)
        ints = (self.slow, self.fast, self.padded_fast, *self.tiles, self.rows, *batch, self.batches)
        longs = [v for t in tensors for v in (t.slow, t.fast, *(t.batch or (0,)))]
        longs += partials or (0,)
        return struct.pack(f"@{len(ints)}i0q{len(longs)}q", *ints, *longs)


def _vector(tensors: tuple[Tensor, ...]) -> int:
    """Neighbours that a thread takes: 16 bytes of the widest matrix that is written (else read), or what its alignment allows."""
    matrices = [t for t in tensors if t.along == "both"]
    written = [t for t in matrices if t.role == "output"] or matrices
    if not written or any(t.fast != 1 for t in written[:1]):
        return 1
    lead = written[0]
    vector = min(MAX_VECTOR, max(1, VECTOR_BYTES // lead.dtype.bytes))
    while vector > 1 and not lead.is_vector(vector):
        vector //= 2
    return vector


def _workspace(problem: Problem, shape: _Shape, results: tuple[Tensor, ...]) -> tuple[tuple[int, ...], int]:
    """Where the partials of each reduction begin, then where all end; and the bytes of counters before them."""
    tiles_slow, tiles_fast = shape.tiles
    zeroed = layouts.round_up(4 * shape.batches * (tiles_slow + tiles_fast + 1), 256)
    real = dtypes.of("float64").bytes if problem.acc_dtype.name in ("float64", "complex128") else 4
    counts = {"slow": tiles_slow * shape.fast, "fast": tiles_fast * shape.slow, "both": tiles_slow * tiles_fast}
    places = [zeroed]
    for tensor in results:
        places.append(layouts.round_up(places[-1] + real * shape.batches * counts[_over(problem, tensor)], 256))
    return tuple(places), zeroed


def _over(problem: Problem, result: Tensor) -> str:
    """What a reduction sums over, by D's axes."""
    assert result.reduction is not None
    axis = result.reduction.param("axis")
    if axis == "mn":
        return "both"
    return "fast" if (axis == "n") == (problem.order == layouts.ROW) else "slow"


# ---------------------------------------------------------------- the text


def _text(problem: Problem, expression: Expression, shape: _Shape, tensors: tuple[Tensor, ...], skip: tuple[str, ...]) -> str:
    accumulator = problem.acc_dtype.name
    heading = ["// Generated by epigemm: one pass over D, which computes", *(f"//   {x}" for x in formatting.text(expression).splitlines())]
    epilogue = codegen.function(
        expression,
        accumulator,
        _binding(expression, shape, tensors),
        "EPI_DEVICE void epilogue(const In& in, Out& out, int row, int column, int batch)",
    )
    parts = [
        "\n".join(heading),
        codegen.library_text("prelude.cuh").replace("#pragma once\n", ""),
        codegen.library_text("storage.cuh"),
        codegen.library_text("pointwise_types.cuh"),
        _config(problem, shape, tensors),
        codegen.library_text("pointwise.cuh"),
        epilogue,
        _entry(tensors),
    ]
    return "\n\n".join(parts) + "\n"


def _binding(expression: Expression, shape: _Shape, tensors: tuple[Tensor, ...]) -> Binding:
    sources = tensors[: shape.sources]
    targets = tensors[shape.sources : shape.results_from]
    results = tensors[shape.results_from :]
    value = {(t.role, t.name): f"in.{'bit' if t.along == 'bits' else 'value'}[{i}]" for i, t in enumerate(sources)}
    stored = {t.name: f"out.{'bit' if t.along == 'bits' else 'value'}[{i}]" for i, t in enumerate(targets)}
    return Binding(
        accumulators=tuple(value.get(("acc", str(i)), "") for i in range(expression.accumulators)),
        inputs={name: text for (role, name), text in value.items() if role == "input"},
        outputs=stored | {t.name: f"out.term[{i}]" for i, t in enumerate(results)},
        integers={t.name: f"in.integer[{i}]" for i, t in enumerate(sources) if t.role == "input"},
        sums={name: text for (role, name), text in value.items() if role == "sum"},
    )


def _config(problem: Problem, shape: _Shape, tensors: tuple[Tensor, ...]) -> str:
    accumulator = problem.acc_dtype.name
    ints = {
        "threads": THREADS,
        "resident": _RESIDENT if shape.targets + 2 * shape.results < _LARGE else _RESIDENT_LARGE,
        "lanes": shape.lanes,
        "vector": shape.vector,
        "ahead": shape.ahead,
        "batch_axes": len(shape.batch),
        "sources": shape.sources,
        "targets": shape.targets,
        "reductions": shape.results,
        "tensors": len(tensors),
        "extents_bytes": len(shape.packed(tensors, (0,) * shape.results)),
    }
    sources, targets = tensors[: shape.sources], tensors[shape.sources : shape.results_from]
    lines = [
        "namespace config {",
        f"using Value = {codegen.VALUE_TYPES[accumulator]};",
        f"using Real = {codegen.REAL_TYPES[accumulator]};",
        *(f"constexpr int {name} = {value};" for name, value in ints.items()),
        f"constexpr bool whole = {str(shape.fast % shape.vector == 0).lower()};",
        f"constexpr bool row_major = {str(problem.order == layouts.ROW).lower()};",
        *_table("Source", "source", [_row(t, shape.vector) for t in sources]),
        *_table("Target", "target", [_row(t, shape.vector) for t in targets]),
        *_table("Reduction", "reduction", [_reduction_row(problem, t) for t in tensors[shape.results_from :]]),
        "}  // namespace config",
    ]
    return "\n".join(lines)


def _row(tensor: Tensor, vector: int) -> tuple[str, str]:
    flag = str(tensor.is_vector(vector)).lower()
    return f"{{EpiType::{tensor.dtype.short}, Along::{tensor.along}, {flag}}}", f"{tensor.role} {tensor.name}"


def _reduction_row(problem: Problem, tensor: Tensor) -> tuple[str, str]:
    assert tensor.reduction is not None
    over = _over(problem, tensor)
    return f"{{EpiType::{tensor.dtype.short}, Over::{over}, Combine::{tensor.reduction.op}}}", f"{tensor.role} {tensor.name}"


def _table(kind: str, name: str, rows: list[tuple[str, str]]) -> list[str]:
    """A constant table as a function of the index, which folds where the index is a constant."""
    rows = rows or [("{}", "none")]
    inside = [f"        {row},  // {comment}" for row, comment in rows]
    head = f"EPI_DEVICE constexpr {kind} {name}(int i) {{"
    return [head, f"    constexpr {kind} all[] = {{", *inside, "    };", "    return all[i];", "}"]


def _entry(tensors: tuple[Tensor, ...]) -> str:
    """The kernel's entry: one address a tensor, the workspace, the extents."""
    names = [codegen.identifier(f"{t.role}_{t.name}") for t in tensors]
    return "\n".join(
        [
            f'extern "C" __global__ void __launch_bounds__(config::threads, config::resident) {ENTRY}(',
            *(f"    epi_u8* {name}," for name in names),
            "    epi_u8* workspace, const __grid_constant__ Extents extents) {",
            f"    const Addresses addresses = {{{{{', '.join(names)}}}, workspace}};",
            "    pass(addresses, extents);",
            "}",
        ]
    )

"""From a problem and a configuration to launches: sums of operands, the product with its epilogue, the ends of reductions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epigemm import dtypes, layouts
from epigemm.engines.triton import codegen, configs, module
from epigemm.engines.triton.configs import PERSISTENT, Config, Machine
from epigemm.engines.triton.oriented import Oriented, Side, Tensor
from epigemm.expression.nodes import Expression
from epigemm.problem import Problem

_SECTION_BYTES = 256  # sections of the workspace begin at multiples of this

# fp8 wgmma keeps about 13 mantissa bits while it accumulates: sums go on in float32 every so many k.
_PROMOTED_K = 128

# operand_sum and finish: lines and steps of a program.
_SUM_BLOCKS = {True: (16, 128), False: (32, 32)}
_FINISH_BLOCKS = {True: (1024, 1), False: (16, 64)}


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the parts of the workspace begin: counters first, which are zeroed; then each part by its key.

    Args:
        zeroed: bytes of counters.
        offsets: ("split",), ("sum", operand) or ("partials", output) -> offset.
        bytes: of all.
    """

    zeroed: int
    offsets: dict[tuple[str, ...], int]
    bytes: int


@dataclass(frozen=True, slots=True)
class Planned:
    """Launches, and in which order a call brings its values: alpha, beta, k, a, b..., c, d, inputs, outputs.

    Args:
        launches: of `launch.Launch`, in order.
        inputs, outputs: names whose addresses follow d's.
        values: how many values there are.
        workspace_bytes, zeroed_bytes: of the workspace; counters stand first.
    """

    launches: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    values: int
    workspace_bytes: int
    zeroed_bytes: int


def tiles(oriented: Oriented, config: Config) -> tuple[int, int]:
    """Tiles along m and n: one at least, which stores what varies along the other axis only."""
    return max(1, -(-oriented.m // config.block_m)), max(1, -(-oriented.padded_n // config.block_n))


def workspace(oriented: Oriented, config: Config) -> Workspace:
    """What the configuration needs besides the outputs."""
    tiles_m, tiles_n = tiles(oriented, config)
    count = tiles_m * tiles_n * oriented.items
    sizes: dict[tuple[str, ...], int] = {}
    if config.splits > 1:
        sizes["counters",] = 4 * count
        sizes["split",] = 4 * count * config.splits * oriented.accumulators * config.block_m * config.block_n
    for tensor in oriented.tensors:
        if tensor.role == "sum":
            sizes["sum", tensor.name] = 4 * oriented.items * oriented.operand(tensor.name)[1]
    for tensor in oriented.reductions:
        parts, length = _parts(oriented, tensor, tiles_m, tiles_n)
        sizes["partials", tensor.name] = 4 * oriented.items * parts * length
    offsets, end = {}, 0
    for key, size in sizes.items():
        offsets[key] = end
        end += layouts.round_up(size, _SECTION_BYTES)
    return Workspace(sizes.get(("counters",), 0), offsets, end)


def _parts(oriented: Oriented, tensor: Tensor, tiles_m: int, tiles_n: int) -> tuple[int, int]:
    """How many parts a reduction has, and how long each is."""
    assert tensor.reduction is not None
    axis = tensor.reduction.param("axis")
    return {"m": (tiles_m, oriented.n), "n": (tiles_n, oriented.m)}.get(str(axis), (tiles_m * tiles_n, 1))


def plan(problem: Problem, expression: Expression, oriented: Oriented, config: Config, machine: Machine, precision: str) -> Planned:
    """The launches of one configuration, the generated module loaded."""
    builder = _Builder(problem, expression, oriented, config, machine, precision)
    launches = (*builder.operand_sums(), builder.product(), *builder.finishes())
    space = builder.space
    return Planned(launches, builder.inputs, builder.outputs, builder.values, space.bytes, space.zeroed)


class _Builder:
    """Puts the arguments of each kernel together."""

    def __init__(
        self, problem: Problem, expression: Expression, oriented: Oriented, config: Config, machine: Machine, precision: str
    ) -> None:
        from epigemm.engines.triton import launch

        self.make = launch
        self.problem, self.expression, self.oriented = problem, expression, oriented
        self.config, self.machine, self.precision = config, machine, precision
        self.inputs = tuple(name for name, _ in problem.inputs)
        self.outputs = tuple(o.name for o in expression.extras)
        names = ["alpha", "beta", "k", "a", *(f"b{i}" for i in range(len(problem.b))), "c", "d"]
        names += [f"input {name}" for name in self.inputs] + [f"output {name}" for name in self.outputs]
        self.slot = {name: index for index, name in enumerate(names)} | {"output d": names.index("d")}
        self.values = len(names)
        self.space = workspace(oriented, config)
        self.tiles_m, self.tiles_n = tiles(oriented, config)
        self.mapped = configs.mapped_outputs(oriented) if config.store_mapped else frozenset()
        self.module = module.load(expression.name, codegen.text(expression, oriented, self.mapped))

    # ------------------------------------------------------------ arguments

    def section(self, *key: str, dtype: str = "float32") -> Any:
        return self.make.Section(self.space.offsets[key], dtypes.of(dtype))

    def address(self, side: Side) -> Any:
        return self.make.Address(self.slot[side.name], side.dtype, side.alignment_bytes)

    def map_of_side(self, side: Side, lines: int, block: int) -> Any:
        block_k = configs.block_k(self.config, self.oriented)
        by_k = configs.inner_is_k(side)
        shape = (lines, self.oriented.k) if by_k else (self.oriented.k, lines)
        return self._map(side.name, side, shape, side.lines if by_k else side.k, (block, block_k) if by_k else (block_k, block))

    def _map(self, name: str, tensor: Side | Tensor, shape: tuple[int, int], step: int, block: tuple[int, int]) -> Any:
        strides: tuple[int, ...] = (step, 1)
        if self.oriented.batch:
            # What the batch shares is one matrix, which is always taken.
            items = self.oriented.items if tensor.batch[0] else 1
            whole, strides, blocks = (items, *shape), (tensor.batch[0] or step * shape[0], *strides), (1, *block)
            return self.make.Map(self.slot[name], tensor.dtype, whole, strides, blocks)
        return self.make.Map(self.slot[name], tensor.dtype, shape, strides, block)

    def tensors(self) -> tuple[Any, ...]:
        found: list[Any] = []
        for argument in codegen.arguments(self.oriented, self.mapped):
            tensor = argument.tensor
            if argument.kind == "step":
                found.append(argument.value)
            elif argument.kind == "partials":
                found.append(self.section("partials", tensor.name))
            elif argument.kind == "map":
                block = (self.config.block_m, self.config.block_n)
                found.append(self._map(f"output {tensor.name}", tensor, (self.oriented.m, self.oriented.n), tensor.m, block))
            elif tensor.role == "sum":
                found.append(self.section("sum", tensor.name))
            else:
                name = "c" if tensor.role == "c" else f"{tensor.role} {tensor.name}"
                found.append(self.make.Address(self.slot[name], tensor.dtype, tensor.alignment_bytes))
        return tuple(found)

    # ------------------------------------------------------------ launches

    def product(self) -> Any:
        config, oriented, constant = self.config, self.oriented, self.make.Constant
        promoted = oriented.lefts[0].dtype.is_narrow and not self.problem.compute.fast_accumulation and not self.machine.interpreted
        block_k = configs.block_k(config, oriented)
        arguments = {
            "tensors": self.tensors(),
            "m": oriented.m,
            "n": oriented.n,
            "k": self.make.Scalar(self.slot["k"], "i32", oriented.k % 16 == 0),
            "tiles_m": self.tiles_m,
            "tiles_n": self.tiles_n,
            "alpha": self.make.Scalar(self.slot["alpha"], "fp32"),
            "beta": self.make.Scalar(self.slot["beta"], "fp32"),
            "EPILOGUE": constant(self.module.epilogue),
            "COUNT": constant(oriented.accumulators),
            "BLOCK_M": constant(config.block_m),
            "BLOCK_N": constant(config.block_n),
            "BLOCK_K": constant(block_k),
            "GROUP": constant(config.group),
            "PRECISION": constant(self.precision),
            "PROMOTE": constant(min(_PROMOTED_K, block_k) if promoted else 0),
            # The interpreter multiplies the bits of types that NumPy lacks.
            "WIDEN": constant(self.machine.interpreted and oriented.lefts[0].dtype.name != "float32"),
        }
        count = self.tiles_m * self.tiles_n * oriented.items
        if config.kernel == PERSISTENT:
            programs = min(count, self.problem.compute.sm_count_target or self.machine.multiprocessors)
            arguments |= self._persistent(programs)
        else:
            programs = count * config.splits
            arguments |= self._blocks(block_k)
        return self.make.Launch(config.kernel, arguments, programs, config.warps, config.stages)

    def _persistent(self, programs: int) -> dict[str, Any]:
        oriented, constant = self.oriented, self.make.Constant
        lefts, rights = oriented.lefts, oriented.rights
        return {
            "lefts": tuple(self.map_of_side(s, oriented.m, self.config.block_m) for s in lefts),
            "rights": tuple(self.map_of_side(s, oriented.n, self.config.block_n) for s in rights),
            "items": oriented.items,
            "LEFT_TURNED": constant(not configs.inner_is_k(lefts[0])),
            "RIGHT_TURNED": constant(configs.inner_is_k(rights[0])),
            "BATCHED": constant(bool(oriented.batch)),
            "LEFT_SHARED": constant(bool(oriented.batch) and not lefts[0].batch[0]),
            "RIGHT_SHARED": constant(bool(oriented.batch) and not rights[0].batch[0]),
            "PROGRAMS": constant(programs),
            "FLATTEN": constant(self.config.flatten),
        }

    def _blocks(self, block_k: int) -> dict[str, Any]:
        oriented, config = self.oriented, self.config
        split, steps = config.splits > 1, -(-oriented.k // block_k)
        found: dict[str, Any] = {
            "extents": oriented.batch,
            "partials": self.section("split") if split else self.make.Constant(None),
            "counters": self.section("counters", dtype="int32") if split else self.make.Constant(None),
            "steps": -(-steps // config.splits),
            "SPLITS": self.make.Constant(config.splits),
        }
        for name, sides in (("left", oriented.lefts), ("right", oriented.rights)):
            found[f"{name}s"] = tuple(self.address(s) for s in sides)
            found[f"{name}_lines"] = tuple(s.lines for s in sides)
            found[f"{name}_k"] = tuple(s.k for s in sides)
            found[f"{name}_items"] = tuple(s.batch for s in sides)
        return found

    def operand_sums(self) -> list[Any]:
        constant, found = self.make.Constant, []
        for tensor in self.oriented.tensors:
            if tensor.role != "sum":
                continue
            side, lines = self.oriented.operand(tensor.name)
            block, block_k = _SUM_BLOCKS[side.k == 1]
            arguments = {
                "operand": self.address(side),
                "total": self.section("sum", tensor.name),
                "lines_step": side.lines,
                "k_step": side.k,
                "items_step": side.batch,
                "extents": self.oriented.batch,
                "lines": lines,
                "k": self.oriented.k,
                "BLOCK": constant(block),
                "BLOCK_K": constant(block_k),
            }
            programs = -(-lines // block) * self.oriented.items
            found += [self.make.Launch("operand_sum", arguments, programs)] if programs else []
        return found

    def finishes(self) -> list[Any]:
        constant, found = self.make.Constant, []
        for tensor in self.oriented.reductions:
            assert tensor.reduction is not None
            parts, length = _parts(self.oriented, tensor, self.tiles_m, self.tiles_n)
            block_count, block = _FINISH_BLOCKS[length == 1]
            arguments = {
                "partials": self.section("partials", tensor.name),
                "out": self.make.Address(self.slot[f"output {tensor.name}"], tensor.dtype, tensor.alignment_bytes),
                "count": parts,
                "length": length,
                "empty": int(0 in (self.oriented.m, self.oriented.n)),
                "out_step": tensor.m + tensor.n,
                "out_items": tensor.batch,
                "extents": self.oriented.batch,
                "AFTER": constant(getattr(self.module, codegen.finish_name(tensor.name))),
                "AMAX": constant(tensor.reduction.op == "amax"),
                "BLOCK_COUNT": constant(block_count),
                "BLOCK": constant(block),
            }
            programs = -(-length // block) * self.oriented.items
            found += [self.make.Launch("finish", arguments, programs)] if programs else []
        return found

"""The direct path: a planned product on a GPU called with the least host time.

`Prepared.execute` serves every case; this serves the plain ones (one launch, tensors of exactly the planned form, no scales) and answers
`MISS` for all others, which then take the other way. On an H200 a launch costs 7 us of host time, so each further microsecond shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

from epigemm import binding, dtypes, layouts, tensors
from epigemm.arguments import Arguments
from epigemm.execution import Prepared
from epigemm.plans import Candidate
from epigemm.problem import Operand, Problem

MISS = object()

# (a, b, inputs, out) -> D, (D, {name: tensor}), or MISS
Call = Callable[[Any, Any, Mapping[str, Any], Any], Any]


@dataclass(frozen=True, slots=True)
class Reader:
    """How one package's tensors are read with the least time.

    Args:
        form: tensor -> a hashable value of all that decides a plan but the address.
        pointer: tensor -> address.
        stream: device index -> raw handle of the current stream.
        empty: (tensor, shape, strides in elements, dtype name) -> a new tensor on its device.
        written: tells autograd that a tensor was written.
        writable: whether a tensor may be; where not, the other way says why, or what more there is to do.
    """

    form: Callable[[Any], Any]
    pointer: Callable[[Any], int]
    stream: Callable[[int], int]
    empty: Callable[..., Any]
    written: Callable[[Any], None]
    writable: Callable[[Any], bool]


def _torch_form(x: Any) -> Any:
    return x.dtype, x.shape, x.stride(), x.get_device(), x.is_neg()


def _torch_pointer(x: Any) -> int:
    return x.data_ptr()  # type: ignore[no-any-return]


def _torch_empty(like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
    wanted = tensors.torch_dtype(dtype)
    return like.new_empty_strided(shape, strides) if like.dtype is wanted else like.new_empty_strided(shape, strides, dtype=wanted)


def _torch_writable(x: Any) -> bool:
    return not (x.requires_grad or x.is_inference())


def _torch_written(x: Any) -> None:
    sys.modules["torch"].autograd.graph.increment_version(x)


def _always(x: Any) -> bool:
    return True


def _nothing(x: Any) -> None:
    return None


def _cupy_form(x: Any) -> Any:
    return x.dtype, x.shape, x.strides, x.data.device_id


def _cupy_pointer(x: Any) -> int:
    return x.data.ptr  # type: ignore[no-any-return]


def _cupy_stream(index: int) -> int:
    return sys.modules["cupy"].cuda.get_current_stream().ptr  # type: ignore[no-any-return]


def _cupy_empty(like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
    return tensors.LIBRARIES["cupy"].empty(shape, strides, dtypes.of(dtype), f"cuda:{like.data.device_id}")


def _reader(cls: Any) -> Reader | None:
    package = cls.__module__.partition(".")[0]
    if package == "torch":
        torch = sys.modules["torch"]
        plain = cls in (torch.Tensor, torch.nn.Parameter) and torch.cuda.is_available()
        return (
            Reader(_torch_form, _torch_pointer, torch._C._cuda_getCurrentRawStream, _torch_empty, _torch_written, _torch_writable)
            if plain
            else None
        )
    if package == "cupy" and cls is sys.modules["cupy"].ndarray:
        return Reader(_cupy_form, _cupy_pointer, _cupy_stream, _cupy_empty, _nothing, _always)
    return None


reader: Callable[[Any], Reader | None] = cache(_reader)
"""How tensors of exactly this class are read; None for classes that take the other way."""


def key(read: Reader, a: Any, b: Any, inputs: Mapping[str, Any] | None, out: Any) -> Any:
    """The forms of all tensors of a call; MISS where one is not read like A."""
    form = read.form
    cls = type(a)
    given = inputs or {}
    for x in (b, *given.values()) if out is None else (b, out, *given.values()):
        if type(x) is not cls and reader(type(x)) is not read:
            return MISS
    return form(a), form(b), tuple([(name, form(x)) for name, x in given.items()]), None if out is None else form(out)


@dataclass(frozen=True, slots=True)
class _Span:
    """How a tensor of a call must lie, and which bytes it covers: offsets from its address."""

    mask: int
    low: int
    high: int

    @staticmethod
    def of(operand: Operand) -> _Span:
        low, high = layouts.extent_bytes(operand.shape, operand.strides, operand.dtype.bytes)
        return _Span(operand.alignment_bytes - 1, low, high)


def call(prepared: Prepared, candidate: Candidate) -> Call | None:
    """A function that runs the plan on tensors of its form; None where the plan has no direct launch.

    Args:
        prepared: a plan without C, not in place.
        candidate: one of its plan's.
    """
    problem = prepared.plan.problem
    if not _suits(prepared):
        return None
    launch = prepared.executable(candidate).direct()
    if launch is None:
        return None
    inputs = tuple(name for name, _ in problem.inputs)
    extras = _shown(prepared)
    places = {"": 0, "a": 1, "b": 2, "d": 3, **{name: 4 + i for i, name in enumerate((*inputs, *(row[0] for row in extras)))}}
    pick = itemgetter(*(places[name] for name in launch.names))
    spans = [_Span.of(x) for x in (problem.a, problem.b[0], *(x for _, x in problem.inputs))]
    return _caller(launch.run, pick, inputs, extras, spans, problem)


def bound(prepared: Prepared, candidate: Candidate, arguments: Arguments, result: Any) -> Callable[[Any], Any] | None:
    """A function of `out` alone that runs the plan on these operands; None where the plan has no direct launch.

    Args:
        prepared, candidate: as in `call`.
        arguments: the operands, held by the caller as long as the function.
        result: what the other way returned: D's form is read from it.
    """
    read = reader(type(arguments.a.array))
    scaled = arguments.alpha is not None and arguments.alpha != 1
    function = None if read is None or scaled else call(prepared, candidate)
    if read is None or function is None:
        return None
    a, b = arguments.a.array, arguments.b[0].array
    inputs = {name: tensor.array for name, tensor in arguments.inputs.items()}
    form, d_form = read.form, read.form(result[0] if isinstance(result, tuple) else result)
    cls = type(a)

    def run(out: Any) -> Any:
        if out is not None and (type(out) is not cls or form(out) != d_form):
            return MISS
        return function(a, b, inputs, out)

    return run


def _suits(prepared: Prepared) -> bool:
    problem = prepared.plan.problem
    empty = 0 in (problem.m, problem.n, problem.k, *problem.batch)
    odd = prepared.inplace or prepared.product.squeeze or problem.c is not None or len(problem.b) > 1
    return problem.device != tensors.CPU and not (empty or odd or problem.a.dtype.is_complex)


def _caller(
    run: Callable[..., None],
    pick: Callable[[list[int]], tuple[int, ...]],
    names: tuple[str, ...],
    extras: list[tuple[str, tuple[int, ...], tuple[int, ...], str]],
    spans: list[_Span],
    problem: Problem,
) -> Call:
    index = int(problem.device.partition(":")[2])
    shape, strides, dtype = problem.d.shape, problem.d.strides, problem.d.dtype.name
    masks, d_span = [s.mask for s in spans], _Span.of(problem.d)

    def direct(a: Any, b: Any, inputs: Mapping[str, Any], out: Any) -> Any:
        read = reader(type(a))
        if read is None:
            return MISS
        pointer, new = read.pointer, read.empty
        reads = [pointer(a), pointer(b), *[pointer(inputs[name]) for name in names]]
        for address, mask in zip(reads, masks, strict=True):
            if address & mask:
                return MISS
        d = new(a, shape, strides, dtype) if out is None else out
        start = pointer(d)
        if out is not None and (start & d_span.mask or _overlaps(start, d_span, reads, spans) or not read.writable(out)):
            return MISS
        if not extras:
            run(*pick([0, *reads[:2], start, *reads[2:]]), read.stream(index))
            if out is not None:
                read.written(out)
            return d
        saved = {name: new(a, *form) for name, *form in extras}
        run(*pick([0, *reads[:2], start, *reads[2:], *map(pointer, saved.values())]), read.stream(index))
        if out is not None:
            read.written(out)
        return d, saved

    return direct


def _overlaps(start: int, d: _Span, reads: list[int], spans: list[_Span]) -> bool:
    low, high = start + d.low, start + d.high
    return any(low < at + s.high and at + s.low < high for at, s in zip(reads, spans, strict=True))


def _shown(prepared: Prepared) -> list[tuple[str, tuple[int, ...], tuple[int, ...], str]]:
    """Name, shape, strides in elements and dtype of each extra output as the user gets it."""
    problem = prepared.plan.problem
    return [
        (output.name, *binding.presented_form(prepared.epilog, output, problem, x.shape, x.strides), x.dtype.name)
        for output, x in prepared.extras
    ]

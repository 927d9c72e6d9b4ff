"""The direct path: a planned product on a GPU called with the least host time.

`Prepared.execute` serves every case; this serves the plain ones (one launch, tensors of exactly the planned form, no scales) and answers
`MISS` for all others, which then take the other way. On an H200 a launch costs 7 us of host time, so each further microsecond shows.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from operator import and_, itemgetter
from typing import Any

from epigemm import binding, dtypes, layouts, tensors
from epigemm.arguments import Arguments
from epigemm.engines.base import DirectLaunch
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
        package: its name.
        form: tensor -> a hashable value of all that decides a plan but the address.
        pointer: tensor -> address.
        stream: device index -> raw handle of the current stream.
        empty: (tensor, shape, strides in elements, dtype name) -> a new tensor on its device.
        written: tells autograd that a tensor was written.
        writable: whether a tensor may be; where not, the other way says why, or what more there is to do.
    """

    package: str
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
            Reader("torch", _torch_form, _torch_pointer, torch._C._cuda_getCurrentRawStream, _torch_empty, _torch_written, _torch_writable)
            if plain
            else None
        )
    if package == "cupy" and cls is sys.modules["cupy"].ndarray:
        return Reader("cupy", _cupy_form, _cupy_pointer, _cupy_stream, _cupy_empty, _nothing, _always)
    return None


reader: Callable[[Any], Reader | None] = cache(_reader)
"""How tensors of exactly this class are read; None for classes that take the other way."""


def key(read: Reader, a: Any, b: Any, inputs: Mapping[str, Any] | None, out: Any) -> Any:
    """The forms of all tensors of a call; MISS where one is not read like A."""
    form = read.form
    cls = type(a)
    if type(b) is not cls and reader(type(b)) is not read:
        return MISS
    if not inputs and out is None:
        return form(a), form(b)
    found = [form(a), form(b), None if out is None else form(out)]
    for name, x in (inputs or {}).items():
        if type(x) is not cls and reader(type(x)) is not read:
            return MISS
        found.append((name, form(x)))
    if out is not None and type(out) is not cls and reader(type(out)) is not read:
        return MISS
    return tuple(found)


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
    if len(inputs) < 2 and not extras and problem.d.dtype == problem.a.dtype:
        return _short(launch, inputs, spans, problem, _caller(launch.run, pick, inputs, extras, spans, problem))
    return _caller(launch.run, pick, inputs, extras, spans, problem)


def _short(launch: DirectLaunch, inputs: tuple[str, ...], spans: list[_Span], problem: Problem, general: Call) -> Call:
    """`_caller` for PyTorch's tensors, at most one input and a new D: a function call and a loop less for each tensor."""
    index = int(problem.device.partition(":")[2])
    shape, strides = problem.d.shape, problem.d.strides
    mask_a, mask_b, mask_x = (*(s.mask for s in spans), 0)[:3]
    name = inputs[0] if inputs else ""
    pick = itemgetter(*({"": 0, "a": 1, "b": 2, "d": 3, name: 4}[n] if n else 0 for n in launch.names))
    run = launch.run

    def short(a: Any, b: Any, given: Mapping[str, Any], out: Any) -> Any:
        read = reader(type(a))
        if out is not None or read is None or read.package != "torch":
            return general(a, b, given, out)
        at_a, at_b, at_x = a.data_ptr(), b.data_ptr(), given[name].data_ptr() if name else 0
        if at_a & mask_a or at_b & mask_b or at_x & mask_x:
            return MISS
        d = a.new_empty_strided(shape, strides)
        run(*pick((0, at_a, at_b, d.data_ptr(), at_x)), read.stream(index))
        return d

    return short


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
    d = result[0] if isinstance(result, tuple) else result
    form, d_form, cls = read.form, read.form(d), type(a)
    del d, result

    def general(out: Any) -> Any:
        if out is not None and (type(out) is not cls or form(out) != d_form):
            return MISS
        return function(a, b, inputs, out)

    if read.package != "torch" or prepared.extras:
        return general
    return _bound_torch(prepared, candidate, a, [a, b, *(inputs[name] for name, _ in prepared.plan.problem.inputs)], general)


def _bound_torch(prepared: Prepared, candidate: Candidate, a: Any, reads: list[Any], general: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same for PyTorch's tensors and D alone, with what does not change between calls taken out of them.

    The operands' addresses are read once: their data may change, their memory is not to be exchanged (`resize_`, `set_`) without
    `reset_operands`. An `out` is checked when it is first seen, and again when its version says that others changed it since.
    """
    torch = sys.modules["torch"]
    problem = prepared.plan.problem
    launch = prepared.executable(candidate).direct()
    assert launch is not None  # or `call` would have found none
    names = ("a", "b", *(name for name, _ in problem.inputs))
    at = {"": 0, **{name: x.data_ptr() for name, x in zip(names, reads, strict=True)}}
    before = tuple(at[name] for name in launch.names[: launch.names.index("d")])
    after = tuple(at[name] for name in launch.names[launch.names.index("d") + 1 :])
    run, stream, index = launch.run, torch._C._cuda_getCurrentRawStream, int(problem.device.partition(":")[2])
    shape, strides, dtype = problem.d.shape, problem.d.strides, tensors.torch_dtype(problem.d.dtype.name)
    empty = a.new_empty_strided if a.dtype is dtype else partial(a.new_empty_strided, dtype=dtype)
    written = torch.autograd.graph.increment_version
    seen: tuple[Any, int, int] = (None, 0, 0)  # a weak reference to the last out, its address and its version after our write

    def bound(out: Any) -> Any:
        nonlocal seen
        if out is None:
            d = empty(shape, strides)
            run(*before, d.data_ptr(), *after, stream(index))
            return d
        last, address, version = seen
        if last is not None and last() is out and out._version == version and out.data_ptr() == address:
            run(*before, address, *after, stream(index))
            written(out)
            seen = last, address, version + 1
            return out
        result = general(out)
        if result is out and not out.is_inference():
            seen = weakref.ref(out), out.data_ptr(), out._version
        return result

    return bound


def _suits(prepared: Prepared) -> bool:
    problem = prepared.plan.problem
    empty = 0 in (problem.m, problem.n, problem.k, *problem.batch)
    odd = prepared.inplace or prepared.blocking or prepared.product.squeeze or problem.c is not None or len(problem.b) > 1
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
        if any(map(and_, reads, masks)):
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

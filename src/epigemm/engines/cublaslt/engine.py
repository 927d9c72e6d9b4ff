"""The engine `cublaslt`: NVIDIA's library with the epilogs that it fuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from epigemm import errors
from epigemm.engines import costs, stored
from epigemm.engines.base import AbstractEngine, AbstractExecutable, Call, DirectLaunch, Refusal
from epigemm.engines.cublaslt import algorithms, library
from epigemm.engines.cublaslt.algorithms import AlgorithmCapabilities
from epigemm.engines.cublaslt.descriptors import ATTRIBUTES, Auxiliary, Descriptor, Unsuitable, Vector, without_product
from epigemm.engines.cublaslt.epilogs import OPERAND_SCALES, TOLERATED, deviations, fused, reduction_schemes, rounds_once
from epigemm.engines.cublaslt.library import Preferences, Result
from epigemm.engines.cuda import libraries
from epigemm.enums import MatmulEpilog
from epigemm.expression.nodes import Expression
from epigemm.plans import Candidate, PlanCache
from epigemm.problem import Problem

# How many results of the heuristic are asked for at once; "bare product" means the fastest of these.
HEURISTIC_LIMIT = 16
_REMEMBERED = 512

# These sum A's or B's elements, whatever alpha is.
_READ_OPERANDS = (MatmulEpilog.BGRADA, MatmulEpilog.BGRADB)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the library answered for a problem: `refusal` where it is no candidate for it."""

    refusal: Refusal | None = None
    descriptor: Descriptor | None = None
    epilog: MatmulEpilog = MatmulEpilog.DEFAULT
    results: tuple[Result, ...] = ()


def describe(problem: Problem, expression: Expression) -> Descriptor | Refusal:
    """What cuBLASLt would be told, or why it cannot be: decided without the library.

    Args:
        problem: what is computed.
        expression: checked.
    """
    try:
        return fused(problem, expression)[1]
    except Unsuitable as why:
        return Refusal(f"{why}.")


def problem_key(descriptor: Descriptor) -> str:
    """The text of everything that the library is told, names of inputs and outputs aside."""
    bias, aux = descriptor.bias, descriptor.aux
    parts = [f"{descriptor.transa}{descriptor.transb}", *(f"{m.dtype}:{m.layout[1:]}" for m in _matrices(descriptor))]
    parts += [f"epilogue={descriptor.epilogue}", f"compute={descriptor.compute_type}", f"scale={descriptor.scale_type}"]
    parts += [f"bias={bias.dtype}:{bias.batch_stride}:{bias.alignment_bytes}"] if bias is not None else []
    parts += [f"aux={aux.dtype}:{aux.leading_dimension}:{aux.batch_stride}:{aux.alignment_bytes}"] if aux is not None else []
    parts += [f"scales={','.join(attribute for attribute, _ in descriptor.scales)}"] if descriptor.scales else []
    parts += [f"fast={int(descriptor.fast_accumulation)}", f"sms={descriptor.sm_count_target}", f"alignments={descriptor.alignments}"]
    return " ".join(parts)


def _matrices(descriptor: Descriptor) -> tuple[Any, ...]:
    return descriptor.a, descriptor.b, descriptor.c, descriptor.d


class CublasLtExecutable(AbstractExecutable):
    """A product with its algorithm: a call changes pointers and launches.

    Attributes:
        launch: the compiled core's `run(a, b, c, d, bias, aux, stream, scalars=None, workspace=0)`: addresses as integers, 0 for what
            there is not. Without `scalars`, alpha = 1 and beta = 0. Only where `scales` is empty and alpha is not 0.
        bias, aux: the name of the epilogue's input or output whose address goes there, "" where there is none.
        scales: (attribute number, name) of FP8 scales and maxima.
        workspace_bytes: what a launch takes, on the stream it goes to.
    """

    __slots__ = (
        "_core",
        "_device",
        "_handle",
        "_last",
        "_native",
        "_what",
        "_zero",
        "aux",
        "bias",
        "descriptor",
        "launch",
        "scales",
        "workspace_bytes",
    )

    def __init__(self, descriptor: Descriptor, device: str, raw: bytes, what: str, handle: int = 0) -> None:
        self._core, self._device, self._what, self._handle = libraries.open_cublaslt(), library.index(device), what, handle
        matmul = library.create(descriptor)
        try:
            _, self.workspace_bytes, _, _ = matmul.check(self._device, raw, handle)
        except errors.LibraryError as error:
            reason = "cuBLASLt does not run this algorithm for this product"
            raise errors.AlgorithmError(errors.say(reason, *str(error).splitlines()[:1], "Take one of plan()'s algorithms.")) from error
        self.descriptor = descriptor
        self.bias = descriptor.bias.name if descriptor.bias is not None else ""
        self.aux = descriptor.aux.name if descriptor.aux is not None else ""
        operand_scales = OPERAND_SCALES if descriptor.a.dtype.is_narrow else ()
        named = (*descriptor.scales, *_placed(operand_scales, descriptor))
        self.scales = tuple((ATTRIBUTES[attribute][0], name) for attribute, name in named)
        plain = self._core.Scalars(descriptor.scale_type, 1.0, 0.0)
        self._last: tuple[Any, Any, Any] = (1.0, 0.0, plain)
        self._zero: tuple[CublasLtExecutable, int] | None = None
        # An address of D under another dtype than D's is refused by the library, also where nothing of C is read.
        c_is_d = descriptor.c.dtype == descriptor.d.dtype
        zeroed_bytes = descriptor.aux.zeroed_bytes if descriptor.aux is not None else 0
        flags = (descriptor.swapped, c_is_d, bool(self.bias), bool(self.aux), zeroed_bytes)
        self._native = self._core.LtLaunch(matmul, self._device, raw, self.workspace_bytes, plain, *flags, handle, what)
        self.launch = self._native.run

    def run(self, call: Call) -> None:
        """Launch on `call.stream`; A, B, C, D, inputs and outputs are addresses on the plan's device."""
        if call.alpha == 0 and self.descriptor.epilogue not in _READ_OPERANDS:
            self._run_without_product(call)
        else:
            self._run(call, call.a, call.b[0])

    def _run(self, call: Call, a: int, b: int) -> None:
        bias = _address(call, self.descriptor.bias) if self.bias else 0
        aux = _address(call, self.descriptor.aux) if self.aux else 0
        scalars = self.scalars(call.alpha, call.beta)
        workspace = call.workspace(self.workspace_bytes) if call.workspace is not None and self.workspace_bytes else 0
        if not self.scales:
            self.launch(a, b, call.c or 0, call.d, bias, aux, call.stream, scalars, workspace)
            return
        pointers = [(number, _scale_address(call, name)) for number, name in self.scales]
        pointers += [(ATTRIBUTES["bias_pointer"][0], bias)] if self.bias else []
        pointers += [(ATTRIBUTES["aux_pointer"][0], aux)] if self.aux else []
        self._native.run_with(pointers, a, b, call.c or 0, call.d, call.stream, scalars, workspace)

    def _run_without_product(self, call: Call) -> None:
        """alpha = 0 reads neither A nor B: zeros stand for them. Rare, so it is prepared when it is first asked for."""
        if self._zero is None:
            zero, zero_bytes = without_product(self.descriptor)
            raw = library.heuristic(zero, f"cuda:{self._device}", 1, Preferences())[0].raw
            self._zero = CublasLtExecutable(zero, f"cuda:{self._device}", raw, self._what, self._handle), zero_bytes
        executable, size_bytes = self._zero
        zeros = self._core.allocate(self._device, size_bytes, call.stream)
        try:
            self._core.fill(self._device, zeros, 0, size_bytes, call.stream)
            executable._run(call, zeros, zeros)
        finally:
            self._core.free(self._device, zeros, call.stream)

    def direct(self) -> DirectLaunch | None:
        """The core's launch, with alpha = 1 and beta = 0; None with FP8 scales."""
        return None if self.scales else DirectLaunch(self.launch, ("a", "b", "", "d", self.bias, self.aux))

    def scalars(self, alpha: complex | float, beta: complex | float) -> Any:
        """alpha and beta as `launch` takes them; the last pair is kept."""
        last = self._last
        if last[0] == alpha and last[1] == beta:
            return last[2]
        made = self._core.Scalars(self.descriptor.scale_type, alpha, beta)
        self._last = (alpha, beta, made)
        return made


def _address(call: Call, what: Vector | Auxiliary | None) -> int:
    assert what is not None
    address: int = call.outputs[what.name] if what.is_output else call.inputs[what.name]
    return address


def _scale_address(call: Call, name: str) -> int:
    """The address of a scale or of a largest value; 0, which means a scale of 1, for what the call does not bring."""
    address: int = call.outputs.get(name, call.inputs.get(name, 0))
    return address


def _placed(scales: tuple[tuple[str, str], ...], descriptor: Descriptor) -> tuple[tuple[str, str], ...]:
    """A's and B's scales, exchanged where the operands are."""
    if not descriptor.swapped:
        return scales
    return tuple(zip((attribute for attribute, _ in scales), (name for _, name in reversed(scales)), strict=True))


class CublasLtEngine(AbstractEngine):
    """cuBLASLt: plain products and the fifteen predefined epilogs, however their expression was written."""

    name = algorithms.ENGINE

    def __init__(self) -> None:
        self._asked: PlanCache[_Asked] = PlanCache(_REMEMBERED)

    def supports(self, problem: Problem, expression: Expression) -> Refusal | None:
        """None, or the sentence that names what cuBLASLt cannot do; the library itself is asked too."""
        return self._ask(problem, expression).refusal

    def candidates(
        self, problem: Problem, expression: Expression, limit: int, preferences: Preferences | None = None
    ) -> tuple[Candidate, ...]:
        """The heuristic's algorithms, at most 16, the one it expects to be fastest first.

        Args:
            problem, expression: accepted by `supports`.
            limit: how many.
            preferences: which algorithms may be returned; by default as `problem.compute` says, whose memory_limit holds in any case.
        """
        asked = self._ask(problem, expression, preferences)
        predicted_us = costs.fused_us(problem, asked.epilog)
        found = (algorithms.candidate(r.raw, r.workspace_bytes, r.waves) for r in asked.results[:limit])
        return tuple(replace(c, predicted_us=predicted_us) for c in found)

    def notes(self, problem: Problem, expression: Expression) -> tuple[str, ...]:
        """Where cuBLASLt's special values differ, and that a row-major D is computed transposed."""
        asked = self._ask(problem, expression)
        if asked.descriptor is None:
            return ()
        swapped = ("D is row-major: computed as its transpose, with A and B exchanged",) if asked.descriptor.swapped else ()
        return (*swapped, *deviations(asked.epilog, problem.d.dtype))

    def prepare(self, problem: Problem, expression: Expression, candidate: Candidate) -> CublasLtExecutable:
        """The candidate ready to run, its changed settings checked by the library.

        Raises:
            errors.AlgorithmError: the library does not run it for this product, or it needs more workspace than memory_limit allows.
        """
        descriptor = self._descriptor(problem, expression)
        libraries.open_driver()
        made = CublasLtExecutable(descriptor, problem.device, algorithms.raw_of(candidate), str(problem), problem.compute.handle)
        limit = problem.compute.memory_limit
        if limit is not None and made.workspace_bytes > limit:
            raise errors.too_much_workspace(made.workspace_bytes, limit)
        return made

    # ------------------------------------------------------------ algorithms

    def capabilities(self, candidate: Candidate) -> AlgorithmCapabilities:
        """What a candidate's algorithm can do, asked of the library."""
        return algorithms.capabilities(algorithms.raw_of(candidate))

    def applicable_algorithm_ids(self, problem: Problem, expression: Expression, limit: int = 8) -> list[int]:
        """Numbers of the algorithms that the library has for the problem's types."""
        return library.algorithm_ids(self._descriptor(problem, expression), problem.device, limit)

    def stored_for(self, problem: Problem, expression: Expression) -> dict[str, Any]:
        """The problem as the library is told of it, and the library, the driver and the device by name."""
        key, versions = problem_key(self._descriptor(problem, expression)), library.versions(problem.device)
        return {"schema": stored.SCHEMA, "engine": self.name, "problem": key, "versions": versions}

    def encoded(self, candidate: Candidate) -> dict[str, Any]:
        """The algorithm's 64 bytes, its changed settings written into them."""
        return algorithms.encoded(candidate)

    def decoded(self, data: Mapping[str, Any]) -> Candidate:
        """The candidate of these bytes, its settings read by the library."""
        return algorithms.decoded(data)

    # ------------------------------------------------------------ asking

    def _descriptor(self, problem: Problem, expression: Expression) -> Descriptor:
        described = describe(problem, expression)
        if isinstance(described, Refusal):
            raise errors.all_refuse([(self.name, str(described))], str(problem))
        return described

    def _ask(self, problem: Problem, expression: Expression, preferences: Preferences | None = None) -> _Asked:
        compute = problem.compute
        limited = Preferences.of(compute) if preferences is None else preferences.limited(compute.memory_limit)
        try:
            return self._asked.get((problem, expression, limited), lambda: _asked(problem, expression, limited))
        except (errors.EngineUnavailable, errors.LibraryError) as why:
            return _Asked(Refusal(str(why)))  # not remembered: it may pass


def _asked(problem: Problem, expression: Expression, preferences: Preferences) -> _Asked:
    if not problem.device.startswith("cuda"):
        return _Asked(Refusal(f"cuBLASLt computes on CUDA devices, and the operands are on {problem.device}."))
    try:
        found, descriptor = fused(problem, expression)
    except Unsuitable as why:
        return _Asked(Refusal(f"{why}."))
    differs = deviations(found.epilog, problem.d.dtype)
    if problem.compute.strict and differs:
        return _Asked(Refusal(f"strict=True, and {differs[0]}."))
    libraries.open_cublaslt()
    results = library.heuristic(descriptor, problem.device, HEURISTIC_LIMIT, preferences)
    if not results:
        why_not = library.diagnose(descriptor, preferences, lambda d, p: bool(library.heuristic(d, problem.device, 1, p)))
        return _Asked(Refusal(f"{why_not}."))
    if problem.d.dtype.bytes == 2 and not problem.a.dtype.is_narrow:
        results = _rounding_once(descriptor, found.epilog, problem.device, preferences, results)
    if not results:
        dtype, epilog = problem.d.dtype.name, found.epilog.name
        return _Asked(Refusal(f"cuBLASLt has only algorithms that round the product to {dtype} before {epilog} here (alignment, sizes)."))
    return _Asked(None, descriptor, found.epilog, results)


def _rounding_once(
    descriptor: Descriptor, epilog: MatmulEpilog, device: str, preferences: Preferences, results: tuple[Result, ...]
) -> tuple[Result, ...]:
    """The results that round a 16-bit D once; the heuristic is asked again for such where it offered others."""
    capability = library.capability(device)

    def kept(offered: tuple[Result, ...], rule: MatmulEpilog) -> tuple[Result, ...]:
        return tuple(r for r in offered if rounds_once(rule, algorithms.settings(r.raw), capability))

    def asked_for(rule: MatmulEpilog) -> tuple[Result, ...]:
        mask = preferences.reduction_scheme_mask & reduction_schemes(rule)
        again = library.heuristic(descriptor, device, HEURISTIC_LIMIT, replace(preferences, reduction_scheme_mask=mask))
        return kept(again, rule)

    good = kept(results, epilog)
    if len(good) < len(results):
        good = asked_for(epilog) or good
    if not good and epilog in TOLERATED:  # a second rounding of D, but no rounded partial sums
        good = asked_for(MatmulEpilog.DEFAULT)
    return good


ENGINE = CublasLtEngine()

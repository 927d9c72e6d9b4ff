"""matmul() and Matmul: the place where all stages meet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from epigemm import arguments as args
from epigemm import binding, config, direct, engines, errors, execution, mirrors, specification
from epigemm.algorithms import Algorithm
from epigemm.arguments import Arguments, Form, Replacement, replaced
from epigemm.execution import Prepared
from epigemm.options import (
    MatmulOptions,
    MatmulPlanPreferences,
    MatmulQuantizationScales,
    as_options,
    frozen_key,
    matrix_qualifiers_dtype,
    options_key,
)
from epigemm.plans import Candidate, PlanCache
from epigemm.problem import Problem
from epigemm.tensors import CPU
from epigemm.tuning.measure import medians_us
from epigemm.tuning.select import AUTO
from epigemm.workspace import Workspace

_OPTIONS = "Matrix multiplication options"
_PREFERENCES = "matrix multiplication plan preferences"
_SCALES = "matrix multiplication quantization scales"

_logger = logging.getLogger("epigemm")
_plans: PlanCache[Prepared] = PlanCache(config.PLAN_CACHE_SIZE.get())


def matmul(
    a: Any,
    b: Any,
    /,
    c: Any = None,
    *,
    alpha: Any = None,
    beta: Any = None,
    epilog: Any = None,
    epilog_inputs: Mapping[str, Any] | None = None,
    qualifiers: Any = None,
    quantization_scales: Any = None,
    options: Any = None,
    preferences: Any = None,
    algorithm: Algorithm | None = None,
    stream: Any = None,
    out: Any = None,
    engine: str = AUTO,
) -> Any:
    """D = epilog(alpha * a @ b + beta * c), computed where the operands lie. No gradient is recorded: `epigemm.pytorch` does that.

    Plans are kept in a bounded in-process cache, keyed by all that decides them, so that a second call with operands of the same form
    costs what `Matmul.execute` costs.

    Args:
        a: (*batch, m, k), or (k,). A NumPy, PyTorch, CuPy or DLPack array of float16, bfloat16, float32, float64, complex64, complex128,
            float8_e4m3fn or float8_e5m2. Any strides. Batches broadcast as in `numpy.matmul`.
        b: (*batch, k, n), or (k,). A tuple of several gives the epilogue one accumulator each and reads `a` once.
        c: (*batch, m | 1, n | 1), with `beta`.
        alpha, beta: host scalars; 1 and 0 if not given. alpha = 0 never reads `a` or `b`, beta = 0 never reads `c`.
        epilog: None, a MatmulEpilog, its name ("relu_bias"), or an `epilogue` function.
        epilog_inputs: the epilog's inputs by name: scalars, (m, 1), (1, n), (m, n), or packed mask bits, each with leading batch dimensions
            that broadcast. A 1-D input lies along n in a user epilogue and along m in a predefined epilog.
        qualifiers: NumPy array of length 3 and dtype `matrix_qualifiers_dtype`: which operands are conjugated.
        quantization_scales: MatmulQuantizationScales or dict, for 8-bit operands.
        options: MatmulOptions or dict.
        preferences: MatmulPlanPreferences or dict.
        algorithm: one that `Matmul.plan` returned for such a problem.
        stream: for operands on a GPU: the stream to use, an address or the package's object; by default the current one.
        out: where to write D: shape (*batch, m, n), D's dtype, any strides. It may be exactly `c` or a full (m, n) epilogue input.
        engine: "auto", or the engine to use: it runs, or its refusal is raised.

    Returns:
        D, (*batch, m, n) without the axes that a 1-D operand added; with further outputs (D, {name: tensor}).

    Raises:
        errors.EpigemmError: each derives from the builtin class that `nvmath.linalg.advanced.matmul` raises for the same mistake.

    Example:
        >>> import numpy as np, epigemm as eg
        >>> x, w = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
        >>> eg.matmul(x, w, epilog="relu_bias", epilog_inputs={"bias": np.array([-4, 1], np.float32)})
        array([[0., 0., 0., 0.],
               [4., 4., 4., 4.]], dtype=float32)
    """
    _check_engine(engine)
    direct_key: Any = direct.MISS
    plain = c is None and alpha is None and beta is None and qualifiers is None and quantization_scales is None and options is None
    if plain and preferences is None and algorithm is None and stream is None:
        direct_key = _direct_key(a, b, epilog, epilog_inputs, out, engine)
    if direct_key is not direct.MISS and direct_key in _direct_calls:
        result = _direct_calls[direct_key](a, b, epilog_inputs or {}, out)
        if result is not direct.MISS:
            return result
    arguments = _arguments(a, b, c, out, alpha, beta, quantization_scales, epilog_inputs)
    placed = _placed(arguments, options)
    chosen = None if algorithm is None else _algorithm(algorithm).candidate

    def make() -> Prepared:
        wanted = as_options(MatmulPlanPreferences, preferences, _PREFERENCES)
        found = execution.prepare(placed, epilog, as_options(MatmulOptions, options, _OPTIONS), replace(wanted, limit=1), qualifiers, name)
        _logger_of(options).info("= PLANNING PHASE = %s", found.plan)
        return found

    name = engine if chosen is None else chosen.engine
    key = (placed.signature, binding.key(epilog, len(placed.b)), *_options_key(options, preferences, qualifiers, placed), name)
    prepared = _plans.get(key, make)
    if algorithm is not None:
        algorithm.check(prepared.plan.problem, prepared.plan.expression)
    handle = stream_handle(stream)
    result = prepared.execute(specification.matrices(placed), chosen or prepared.plan.candidates[0], stream=handle)
    if direct_key is not direct.MISS and not arguments.copied:
        _keep_direct(direct_key, direct.call(prepared, prepared.plan.candidates[0]))
    _logger_of(options).info("= EXECUTION PHASE = %s", chosen or prepared.plan.candidates[0])
    return result if placed is arguments else mirrors.to_host(result, arguments, inplace=prepared.inplace, stream=handle or 0)


def _logger_of(options: Any) -> logging.Logger:
    given = options.get("logger") if isinstance(options, Mapping) else getattr(options, "logger", None)
    return given or _logger


_direct_calls: dict[Any, direct.Call] = {}


def _direct_key(a: Any, b: Any, epilog: Any, inputs: Mapping[str, Any] | None, out: Any, engine: str) -> Any:
    """The key of a call that may take the direct path; MISS for any other."""
    read = direct.reader(type(a))
    if read is None:
        return direct.MISS
    form = direct.key(read, a, b, inputs, out)
    return form if form is direct.MISS else (form, binding.key(epilog, 1), engine)


def _keep_direct(key: Any, found: direct.Call | None) -> None:
    if found is not None and _plans.capacity:
        if len(_direct_calls) >= _plans.capacity:
            _direct_calls.clear()
        _direct_calls[key] = found


def _options_key(options: Any, preferences: Any, qualifiers: Any, arguments: Arguments) -> tuple[Any, ...]:
    """What of the options, preferences, qualifiers and scales decides a plan."""
    return (
        options_key(MatmulOptions, options, _OPTIONS),
        options_key(MatmulPlanPreferences, preferences, _PREFERENCES),
        None if qualifiers is None else _qualifiers_key(qualifiers),
        frozen_key(arguments.scales),
    )


def _qualifiers_key(qualifiers: Any) -> Any:
    """Qualifiers by content; what are none is refused when the plan is made."""
    if not isinstance(qualifiers, np.ndarray) or qualifiers.dtype != matrix_qualifiers_dtype:
        return type(qualifiers)
    return qualifiers.shape, tuple(map(bool, qualifiers["is_conjugate"].flat))


def _check_engine(engine: Any) -> None:
    if not isinstance(engine, str):
        raise errors.wrong_value("engine", engine, f"{AUTO!r} or an engine's name")


def _arguments(a: Any, b: Any, c: Any, out: Any, alpha: Any, beta: Any, scales: Any, inputs: Mapping[str, Any] | None) -> Arguments:
    arguments = args.collect(a, b, c, out)
    if beta is not None and c is None:
        args.warn_beta_ignored(beta, stacklevel=4)
        beta = None
    scales = as_options(MatmulQuantizationScales, scales, _SCALES)
    arguments.alpha, arguments.beta, arguments.scales = args.host_scalar(alpha), args.host_scalar(beta), scales
    arguments.inputs = args.collect_inputs(arguments, inputs)
    return arguments


def _placed(arguments: Arguments, options: Any) -> Arguments:
    """The arguments where they are computed: on the GPU that `device_id` names, copied there from the CPU; else where they lie."""
    index = options.get("device_id") if isinstance(options, Mapping) else getattr(options, "device_id", None)
    if index is None or arguments.a.device != CPU:
        return arguments
    try:
        return mirrors.to_device(arguments, index)
    except errors.EngineUnavailable as error:
        raise errors.no_device(index, str(error)) from error


def stream_handle(stream: Any) -> int | None:
    """The raw handle of a user's stream: an integer, or an object of CuPy (`ptr`), PyTorch (`cuda_stream`) or cuda.core (`handle`).

    Raises:
        errors.OptionTypeError: it is none of these.
    """
    if stream is None or isinstance(stream, int):
        return stream
    for name in ("ptr", "cuda_stream", "handle"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    raise errors.wrong_stream(stream)


def _algorithm(value: Any) -> Algorithm:
    if not isinstance(value, Algorithm):
        raise errors.not_algorithms(value)
    return value


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a plan is made of besides the operands."""

    epilog: Any
    options: MatmulOptions
    preferences: MatmulPlanPreferences
    engine: str


class Matmul:
    """A product that is planned once and executed many times: D = epilog(alpha * a @ b + beta * c).

    The arguments are those of `matmul`. An object belongs to one thread at a time; the plans behind it are shared.

    Example:
        >>> import numpy as np, epigemm as eg
        >>> x, w = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
        >>> with eg.Matmul(x, w) as mm:
        ...     _ = mm.plan(epilog="relu")
        ...     mm.execute()
        array([[3., 3., 3., 3.],
               [3., 3., 3., 3.]], dtype=float32)
    """

    def __init__(
        self,
        a: Any,
        b: Any,
        /,
        c: Any = None,
        *,
        alpha: Any = None,
        beta: Any = None,
        qualifiers: Any = None,
        quantization_scales: Any = None,
        options: Any = None,
        stream: Any = None,
    ) -> None:
        self._wanted = _Wanted(None, as_options(MatmulOptions, options, _OPTIONS), MatmulPlanPreferences(), AUTO)
        self._log = _logger_of(self._wanted.options)
        self._arguments: Arguments | None = _arguments(a, b, c, None, alpha, beta, quantization_scales, None)
        self._qualifiers = qualifiers
        self._form = Form.of(self._arguments)
        self._prepared: Prepared | None = None
        self._variants: dict[Any, Prepared] = {}
        self._direct: Callable[[Any], Any] | None = None
        self._direct_of: Candidate | None = None  # a setting of the algorithm that was changed since makes another candidate
        self._signature: Any = None
        self._problem: Problem | None = None
        self._algorithms: tuple[Algorithm, ...] | None = None
        self._input_names: tuple[str, ...] = ()
        self._workspace: Workspace | None = None  # of the user's allocator
        self._freed = False
        # What is wrong with the operands alone is said here, not in plan().
        product = execution.product(_placed(self._arguments, self._wanted.options), self._wanted.options, qualifiers)
        self._log.info("= SPECIFICATION PHASE = %s", product.problem)

    # ------------------------------------------------------------ planning

    def plan(
        self,
        *,
        preferences: Any = None,
        algorithms: Sequence[Algorithm] | None = None,
        epilog: Any = None,
        epilog_inputs: Mapping[str, Any] | None = None,
        stream: Any = None,
        options: Any = None,
        engine: str = AUTO,
    ) -> tuple[Algorithm, ...]:
        """Chooses how to compute; planning again replaces the epilog and all that belonged to it. After an error all is as before.

        Args:
            preferences: MatmulPlanPreferences or dict.
            algorithms: take these instead of choosing, each checked by its engine.
            epilog, epilog_inputs, stream, engine: as in `matmul`.
            options: replaces the options given at construction.

        Returns:
            The algorithms, best first; `execute` takes the first unless told otherwise.

        Raises:
            errors.InvalidMatmulState: after `free()`.
            errors.PlanningError: no algorithm was found, or `limit` is 0.
            errors.AlgorithmError: one of `algorithms` does not run this product, or was stored for another.
        """
        arguments = self._live("Planning")
        _check_engine(engine)
        stream_handle(stream)
        chosen = _chosen(algorithms)
        wanted = _Wanted(
            epilog,
            self._wanted.options if options is None else as_options(MatmulOptions, options, _OPTIONS),
            as_options(MatmulPlanPreferences, preferences, _PREFERENCES),
            chosen[0].engine if chosen else engine,
        )
        arguments = replace(arguments, inputs=args.collect_inputs(arguments, epilog_inputs))
        prepared = self._prepare(arguments, wanted)
        if chosen:
            for x in chosen:
                x.check(prepared.plan.problem, prepared.plan.expression)
                prepared.executable(x.candidate)  # the engine checks its settings
            prepared.plan = replace(prepared.plan, candidates=tuple(x.candidate for x in chosen), reason="algorithms= were given")
        # Nothing fails from here on.
        self._wanted, self._arguments, self._prepared, self._direct = wanted, arguments, prepared, None
        self._log = _logger_of(wanted.options)
        self._workspace = None if prepared.allocator is None else Workspace(prepared.allocator)
        self._variants.clear()
        self._signature, self._form, self._problem = arguments.signature, Form.of(arguments), _form(prepared.plan.problem)
        self._input_names = prepared.epilog.expression.input_names
        self._algorithms = chosen or tuple(
            Algorithm(x, (prepared.plan.problem, prepared.plan.expression)) for x in prepared.plan.candidates
        )
        self._log.info("= PLANNING PHASE = %s", prepared.plan)
        return self._algorithms

    def _prepare(self, arguments: Arguments, wanted: _Wanted) -> Prepared:
        placed = _placed(arguments, wanted.options)
        return execution.prepare(placed, wanted.epilog, wanted.options, wanted.preferences, self._qualifiers, wanted.engine)

    @property
    def algorithms(self) -> tuple[Algorithm, ...] | None:
        """The planned algorithms, best first; None before `plan`."""
        return self._algorithms

    def applicable_algorithm_ids(self, limit: int = 8) -> list[int]:
        """Numbers of up to `limit` algorithms that could run this product: cuBLASLt's own, on other engines positions in their lists."""
        self._live("Planning")
        if not isinstance(limit, int) or limit < 0:
            raise errors.wrong_value("limit", limit, "an integer >= 0")
        plan = self._planned("The ids of algorithms").plan
        return engines.get(plan.candidates[0].engine).applicable_algorithm_ids(plan.problem, plan.expression, limit)

    def autotune(self, iterations: int = 10, prune: int | None = None, release_workspace: bool = False, stream: Any = None) -> None:
        """Times the planned algorithms, interleaved, and orders them by their median.

        Nothing of the user's is written: `c` and `out` keep their values.

        Args:
            iterations: how often each is timed, at least 1.
            prune: keep this many.
            release_workspace, stream: as in `execute`.
        """
        arguments, prepared = self._live("Autotuning"), self._planned("Autotuning")
        if not isinstance(iterations, int) or iterations < 1:
            raise errors.wrong_value("iterations", iterations, "an integer >= 1")
        if prune is not None and (not isinstance(prune, int) or prune < 1):
            raise errors.wrong_value("prune", prune, "None or an integer >= 1")
        algorithms = self._algorithms or ()
        matrices = specification.matrices(_placed(arguments, self._wanted.options))
        handle = execution.stream_of(matrices.a, stream_handle(stream))
        runs = [
            partial(prepared.execute, matrices, x.candidate, scratch=True, stream=handle, workspace=self._workspace) for x in algorithms
        ]
        for run in runs:
            run()
        medians = medians_us(runs, iterations, prepared.plan.problem.device, handle)
        if release_workspace:
            self._release_workspace(prepared)
        ranked = sorted(zip(medians, range(len(algorithms)), strict=True))[:prune]
        self._algorithms, self._direct = tuple(algorithms[i] for _, i in ranked), None
        reason = (
            f"{self._algorithms[0].candidate} took {ranked[0][0]:.0f} us, the least of {len(medians)} in autotune(iterations={iterations})"
        )
        prepared.plan = replace(prepared.plan, candidates=tuple(x.candidate for x in self._algorithms), reason=reason)
        self._log.info("= AUTOTUNING PHASE = %s", reason)

    def explain(self) -> str:
        """The plan as text: problem, expression, what each engine answered, what is taken and why.

        Raises:
            errors.StateError: before `plan`.
        """
        self._live("Explaining")
        return self._planned("Explaining").plan.explain()

    # ------------------------------------------------------------ execution

    def execute(self, *, algorithm: Algorithm | None = None, release_workspace: bool = False, stream: Any = None, out: Any = None) -> Any:
        """D, or (D, {name: tensor}), for the present operands.

        Args:
            algorithm: one of `algorithms`; by default the first.
            release_workspace: give the workspaces that are kept for streams back afterwards, which waits for the GPU.
            stream: as in `matmul`.
            out: as in `matmul`; D keeps the planned dtype and takes `out`'s strides.

        Raises:
            errors.StateError: before `plan`, or after `release_operands`.
            errors.AlgorithmError: the algorithm is none of the plan's.
        """
        algorithms = self._algorithms or ()
        plain = algorithm is None and stream is None and not release_workspace
        if self._direct is not None and plain and self._direct_of is algorithms[0].candidate:
            result = self._direct(out)
            if result is not direct.MISS:
                return result
        arguments, prepared = self._live(), self._planned("Execution")
        if algorithm is not None and not any(algorithm is known for known in algorithms):
            raise errors.foreign_algorithm()
        if out is not None:
            arguments = replace(arguments, out=args.collect(arguments.a.array, arguments.b[0].array, None, out).out)
            prepared = self._variant(arguments)
        candidate: Candidate = (algorithm or algorithms[0]).candidate
        if algorithm is None and _form(prepared.plan.problem) != self._problem:
            candidate = prepared.plan.candidates[0]  # another order or alignment than the algorithms were chosen for
        placed = _placed(arguments, self._wanted.options)
        handle = stream_handle(stream)
        result = prepared.execute(specification.matrices(placed), candidate, stream=handle, workspace=self._workspace)
        if release_workspace:
            self._release_workspace(prepared)
        self._log.info("= EXECUTION PHASE = %s", candidate)
        if placed is not arguments:
            return mirrors.to_host(result, arguments, inplace=prepared.inplace, stream=handle or 0)
        usual = out is None and candidate is algorithms[0].candidate and not prepared.blocking and prepared.allocator is None
        if usual and not self._log.isEnabledFor(logging.INFO):
            self._direct, self._direct_of = direct.bound(prepared, candidate, arguments, result), candidate
        return result

    def _release_workspace(self, prepared: Prepared) -> None:
        if self._workspace is not None:
            self._workspace.release()
        execution.release_workspaces(prepared.plan.problem.device)

    def _variant(self, arguments: Arguments) -> Prepared:
        """The plan for a given `out`, kept for its form."""
        key = arguments.signature
        if key not in self._variants:
            self._variants[key] = self._prepare(arguments, self._wanted)
        return self._variants[key]

    # ------------------------------------------------------------ operands

    def reset_operands(
        self,
        *,
        a: Any = None,
        b: Any = None,
        c: Any = None,
        alpha: Any = None,
        beta: Any = None,
        quantization_scales: Any = None,
        epilog_inputs: Mapping[str, Any] | None = None,
        stream: Any = None,
    ) -> None:
        """Replaces operands by others of the same form; what is None stays. After an error all are as before.

        Raises:
            errors.ShapeError, errors.DTypeError, errors.LayoutError: a new operand has another shape, dtype or, on a GPU, strides.
            errors.OptionError: nothing is given, C is given to a product without one, or not all that is needed after `release_operands`.
        """
        new = Replacement(a, b, c, alpha, beta, quantization_scales, epilog_inputs)
        self._reset(new, checked=True)

    def reset_operands_unchecked(
        self,
        *,
        a: Any = None,
        b: Any = None,
        c: Any = None,
        alpha: Any = None,
        beta: Any = None,
        quantization_scales: Any = None,
        epilog_inputs: Mapping[str, Any] | None = None,
        stream: Any = None,
    ) -> None:
        """As `reset_operands`, trusting that the new operands have the form of the old ones."""
        self._reset(Replacement(a, b, c, alpha, beta, quantization_scales, epilog_inputs), checked=False)

    def _reset(self, new: Replacement, checked: bool) -> None:
        if self._freed:
            raise errors.freed()
        arguments, prepared = replaced(self._arguments, self._form, new, self._input_names, checked=checked), self._prepared
        if prepared is not None:
            if arguments.signature != self._signature:
                prepared = self._variant(arguments)
            execution.scalars(prepared.product, arguments)
        self._arguments, self._prepared, self._signature, self._direct = arguments, prepared, arguments.signature, None

    def release_operands(self) -> None:
        """Drops every reference to the user's tensors and keeps the plan; `reset_operands` with all of them makes it usable again."""
        if self._freed:
            raise errors.freed()
        self._arguments = self._direct = None

    def free(self) -> None:
        """Drops the operands and the plan. The object cannot be used afterwards; freeing it again is nothing."""
        self._freed = True
        self._arguments = self._prepared = self._algorithms = self._direct = self._workspace = None
        self._variants.clear()

    def __enter__(self) -> Matmul:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.free()

    def __repr__(self) -> str:
        state = "freed" if self._freed else "not planned" if self._prepared is None else str(self._prepared.plan)
        return f"Matmul({state})"

    def _live(self, what: str = "Execution") -> Arguments:
        if self._freed:
            raise errors.freed()
        if self._arguments is None:
            raise errors.operands_released(what)
        return self._arguments

    def _planned(self, what: str) -> Prepared:
        if self._prepared is None:
            raise errors.not_planned(what)
        return self._prepared


def _form(problem: Problem) -> Problem:
    """The problem as algorithms depend on it: no access is wider than 16 bytes, so that a D of ours is aligned no better than an `out`."""
    return replace(problem, d=replace(problem.d, alignment_bytes=min(problem.d.alignment_bytes, 16)))


def _chosen(algorithms: Iterable[Algorithm] | None) -> tuple[Algorithm, ...]:
    """The algorithms given to `plan`; none given is ()."""
    if algorithms is None:
        return ()
    chosen = tuple(_algorithm(x) for x in algorithms)
    if not chosen:
        raise errors.no_algorithms()
    return chosen

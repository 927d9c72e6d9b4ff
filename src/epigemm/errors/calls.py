"""Errors about a call: options, epilog and its inputs, state, planning, FP8 scales."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from epigemm.errors.types import (
    AlgorithmError,
    AlgorithmTypeError,
    DTypeError,
    EngineUnavailable,
    EpigemmError,
    EpilogInputError,
    EpilogTypeError,
    InvalidMatmulState,
    LayoutError,
    LibraryError,
    NoAlgorithmsError,
    OptionError,
    OptionTypeError,
    PlanningError,
    QualifiersTypeError,
    ShapeError,
    StateError,
    StoreKeyError,
    UnknownInputError,
    UnsupportedEpilogue,
    UnsupportedProblem,
    listed,
    say,
)

# ---------------------------------------------------------------- options


def wrong_options_type(description: str, cls: str, value: object) -> OptionTypeError:
    """`description` is what the options are of, as in "Matrix multiplication options"."""
    what = f"The {description} must be provided as an object of type {cls} or as a dict with valid {description}."
    return OptionTypeError(say(f"{what} The provided object is {value!r}.", f"Pass {cls}(...), or a dict of its fields."))


def unknown_option(cls: str, name: str, known: Iterable[str]) -> OptionTypeError:
    return OptionTypeError(say(f"{cls}.__init__() got an unexpected keyword argument '{name}'", f"Its fields are {listed(known)}."))


def wrong_blocking(value: object) -> OptionError:
    what = "The value specified for blocking must be either True or 'auto'."
    return OptionError(say(what, f"It is {value!r}; with 'auto', calls on GPU operands do not block, and calls on CPU operands do."))


def wrong_memory_limit(value: object) -> OptionError:
    what = "The memory limit must be specified in one of the following forms: a number of bytes, a fraction of the total (0 < x <= 1), "
    return OptionError(say(f"{what}a percentage ('80%'), or a size with its unit ('0.5 GiB', '50 MB').", f"It is {value!r}."))


def wrong_allocator(value: object) -> OptionTypeError:
    what = "The allocator must be an object of type that fulfills the BaseCUDAMemoryManager protocol."
    return OptionTypeError(say(what, f"It is {value!r}; it needs a method memalloc(size), or memalloc_async(size, stream)."))


def not_a_member(value: object, enum: str, names: Iterable[str] = ()) -> OptionError:
    names = tuple(names)
    return OptionError(
        say(f"{value!r} is not a valid {enum}", f"Its members are {listed(names)}." if names else f"Pass a member of {enum}.")
    )


def wrong_value(name: str, value: object, allowed: str) -> OptionError:
    """An option out of its range; `allowed` says the range, as in "an integer >= 1"."""
    return OptionError(say(f"The value provided for {name} ({value!r}) is not valid.", f"It must be {allowed}."))


def qualifiers_not_an_array(value: object) -> QualifiersTypeError:
    what = f"The qualifiers must be specified as a NumPy array of length 3 and dtype matrix_qualifiers_dtype, not a {type(value).__name__}"
    return QualifiersTypeError(say(what, "Use numpy.zeros(3, dtype=matrix_qualifiers_dtype) and set its 'is_conjugate'."))


def wrong_qualifiers(shape: Sequence[int], dtype: object) -> OptionError:
    what = "The qualifiers must be specified as a NumPy array of length 3 corresponding to the operands A, B, and C"
    given = f"It has shape {tuple(shape)} and dtype {dtype}; use numpy.zeros(3, dtype=matrix_qualifiers_dtype)."
    return OptionError(say(f"{what} of type 'matrix_qualifiers_dtype'.", given))


def conjugate_c() -> OptionError:
    what = "The conjugate flag is currently not supported for operand C."
    return OptionError(say(what, "Pass `c.conj()` (resolved), and set the flag of A and B alone."))


def strict_deviation(what: str) -> OptionError:
    """A difference that `MatmulOptions(strict=True)` refuses."""
    return OptionError(say(f"strict=True refuses this plan: {what}", "Use another engine, or strict=False to accept the difference."))


# ---------------------------------------------------------------- epilog and its inputs


def not_an_epilog(value: object, names: Iterable[str] = ()) -> EpilogTypeError:
    names = tuple(names)
    what = f"Not supported. `epilog` must be a MatmulEpilog, its name or an @epilogue function; it is {value!r}."
    return EpilogTypeError(
        say(what, f"The names are {listed(names)}." if names else "`print(list(epigemm.MatmulEpilog))` shows the names.")
    )


def wrong_input_names(epilog: str, required: Iterable[str], given: Iterable[str]) -> EpilogInputError:
    required, given = sorted(required), list(given)
    missing, extra = sorted(set(required) - set(given)), sorted(set(given) - set(required))
    names = "{" + ", ".join(map(repr, required)) + "}" if required else "set()"
    what = f"The epilog {epilog} requires the following input tensors: {names}. The provided tensor names are: dict_keys({given})."
    hints = (f"Missing: {listed(missing)}." if missing else "", f"Unknown: {listed(extra)}." if extra else "")
    return EpilogInputError(say(what, *hints))


def inputs_not_by_name(value: object) -> OptionTypeError:
    what = f"The epilog's inputs must be given by name, as a dict, not as a {type(value).__name__}."
    return OptionTypeError(say(what, "Pass epilog_inputs={'bias': tensor}."))


def inputs_without_epilog(given: Iterable[str]) -> EpilogInputError:
    return EpilogInputError(say(f"`epilog_inputs` ({listed(given)}) are given without an epilog.", "Pass `epilog=` too."))


def unknown_input(epilog: str, name: str, known: Iterable[str]) -> UnknownInputError:
    known = tuple(known)
    hint = f"Its inputs are {listed(known)}." if known else "It has no inputs."
    return UnknownInputError(say(f"The epilog {epilog} has no input '{name}'.", hint))


def bias_extent(dimension: str, extent: int, expected: int) -> ShapeError:
    """A predefined epilog's bias; `dimension` is "M" (its length) or "N" (which must be 1)."""
    if dimension == "M":
        what = f"The M dimension of the bias vector ({extent}) must match the M dimension of A."
        return ShapeError(say(what, f"Its shape must be ({expected},) or ({expected}, 1); to add along N, pass it as (1, N)."))
    what = f"The N dimension of the bias vector ({extent}) must be equal to 1."
    return ShapeError(say(what, f"Its shape must be ({expected},) or ({expected}, 1); a bias along N is (1, N)."))


def bias_stride(stride: int, axis: int = -1) -> LayoutError:
    what = f"The stride of the bias [{stride}] must be 1 along the dimension {axis}, which corresponds to the M dimension."
    return LayoutError(say(what, "Make the bias contiguous, or use engine='auto'."))


def bias_batch(given: Sequence[int], expected: Sequence[int], name: str = "bias") -> ShapeError:
    what = f"The batch dimensions of the {name} {list(given)} must match with that of the matrix multiplication definition"
    return ShapeError(say(f"{what} {list(expected)}.", f"Leave the batch away to use one {name} for all, or give every extent (or 1)."))


def bias_batch_order(given: Sequence[int], expected: Sequence[int], name: str = "bias") -> LayoutError:
    what = f"The batch axis order of the {name} {tuple(given)} must match with that of the other operands {tuple(expected)}."
    return LayoutError(say(what, f"Make the {name} contiguous, or use engine='auto'."))


def input_length(name: str, length: int, m: int, n: int, *, along: str) -> ShapeError:
    """A 1-D input that does not fit its own rule; `along` is the axis of that rule, "m" or "n"."""
    expected = {"m": m, "n": n}[along]
    what = f"The 1-D input `{name}` of length {length} must have length {expected}: it lies along {along} (m={m}, n={n})."
    return ShapeError(say(what, f"Give its shape in full: ({m}, 1) to lie along m, or (1, {n}) to lie along n."))


def input_shape(name: str, shape: Sequence[int], m: int, n: int, batch: Sequence[int] = ()) -> ShapeError:
    what = f"The epilogue input `{name}` of shape {tuple(shape)} does not broadcast to (..., m={m}, n={n}) with batch {list(batch)}."
    return ShapeError(say(what, f"It may be a scalar, ({m}, 1), (1, {n}) or ({m}, {n}), with leading batch dimensions."))


def aux_dtype(kind: str, epilog: str, given: str, expected: str) -> DTypeError:
    """An aux input of the wrong dtype; `kind` is "RELU" or "GELU"."""
    what = f"The dtype of the {kind} auxiliary input for epilog {epilog} must be '{expected}'. The dtype is '{given}'."
    return DTypeError(say(what, f"Pass what {kind}_AUX or {kind}_AUX_BIAS returned as '{kind.lower()}_aux'."))


def aux_shape(epilog: str, given: Sequence[int], expected: Sequence[int]) -> ShapeError:
    shape = ", ".join(str(extent) for extent in expected)
    what = f"The auxiliary epilog input for epilog {epilog} must have the MM shape (..., {shape}). The shape is {tuple(given)}."
    if len(given) < 2:
        what = f"{what} (not enough values to unpack)"
    return ShapeError(say(what, "Pass the aux output of the forward epilog as it was returned: its rows are padded."))


def aux_stride(kind: str, strides: Sequence[int]) -> LayoutError:
    what = (
        f"The stride of the {kind} auxiliary input {list(strides)} must be 1 along the dimension 0, which corresponds to the M dimension."
    )
    return LayoutError(say(what, "It is column-major; pass the aux output of the forward epilog as it was returned."))


def k_is_one(epilogs: str) -> ShapeError:
    """An engine's refusal; `epilogs` is "DRELU" or "DGELU"."""
    return ShapeError(say(f"K=1 is not supported for {epilogs} epilogs", "Use engine='auto'; the other engines compute it."))


def aux_type_refused(epilogs: str) -> OptionError:
    """`epilogs` is "RELU" or "BGRAD"."""
    what = f"Custom type for auxiliary outputs is not supported for {epilogs} epilogs."
    return OptionError(say(what, "Leave MatmulEpilogPreferences.aux_type away; it is for GELU_AUX and GELU_AUX_BIAS."))


def aux_amax_refused() -> OptionError:
    what = "epilog.aux_amax=True is not supported when epilog output type is not FP8."
    return OptionError(say(what, "Set MatmulEpilogPreferences.aux_type to an FP8 type, or aux_amax=False."))


def needs_column_major(epilog: str, name: str = "c") -> LayoutError:
    """An engine's refusal of BGRADA and BGRADB with a row-major C."""
    what = f"The epilog {epilog} requires input matrix '{name}' to be F-contiguous (column-major)."
    return LayoutError(say(what, "Use engine='auto', or numpy.asfortranarray."))


# ---------------------------------------------------------------- state


def not_planned(what: str = "Execution") -> StateError:
    return StateError(
        say(f"{what} cannot be performed before plan() has been called.", "Call plan() first, with the epilog if there is one.")
    )


def freed() -> InvalidMatmulState:
    what = "The Matmul object cannot be used after resources are free'd"
    return InvalidMatmulState(say(what, "Create another, or move the call into its `with` block."))


def operands_released(what: str = "Execution") -> StateError:
    text = f"{what} cannot be performed after the operands have been released."
    return StateError(say(f"{text} Use reset_operands() to provide new operands.", "The plan is kept; only the tensors are gone."))


def partial_reset(required: Iterable[str]) -> OptionError:
    what = "After release_operands(), all required operands must be provided to reset_operands()."
    return OptionError(say(f"{what} Required: {', '.join(required)}", "The plan is kept; only the tensors are gone."))


def nothing_reset() -> OptionError:
    return OptionError(
        say("reset_operands() was called without an operand.", "Pass those to replace; to let them go, use release_operands().")
    )


_RESET_TYPES: dict[str, type[EpigemmError]] = {
    "extents": ShapeError,
    "strides": LayoutError,
    "data type": DTypeError,
    "number": ShapeError,
    "conjugate flag": DTypeError,
}


def reset_mismatch(what: str, name: str, given: object, original: object) -> EpigemmError:
    """A new operand that does not fit the plan; `what` is a key of the table above."""
    text = f"The {what} of the new operand must match the {what} of the original operand."
    hint = f"Operand {name}: {given} given, {original} planned; create another Matmul for it (plans are cached)."
    return _RESET_TYPES[what](say(text, hint))


def reset_without_c() -> OptionError:
    what = "The matrix multiplication problem specification does not include operand C, so it cannot be reset."
    return OptionError(say(what, "Create another Matmul with `c` and `beta`."))


# ---------------------------------------------------------------- planning, engines and algorithms


def wrong_stream(stream: object) -> OptionTypeError:
    what = f"The stream must be an integer, or an object with `ptr`, `cuda_stream` or `handle`; it is a {type(stream).__name__}."
    return OptionTypeError(say(what, "Leave it away to use the current stream."))


def no_algorithm(reasons: Iterable[str] = ()) -> PlanningError:
    return PlanningError(say("Planning failed to find any suitable algorithm.", *reasons))


def foreign_algorithm() -> AlgorithmError:
    what = "Algorithm passed to execute() has to be included in the plan() algorithms"
    return AlgorithmError(say(what, "Take it from `algorithms` of this Matmul, or pass it to plan(algorithms=[...])."))


def stored_for_another(name: str, stored: object, needed: object) -> AlgorithmError:
    what = f"A stored algorithm does not fit: its {name} is {stored!r}, and {needed!r} is needed."
    return AlgorithmError(say(what, "Plan or autotune again here; algorithms do not travel between these."))


def damaged_algorithm(how: str) -> AlgorithmError:
    return AlgorithmError(say(f"A stored algorithm is damaged: {how}.", "Plan or autotune again."))


def unbound_algorithm() -> AlgorithmError:
    what = "An algorithm that was unpickled does not know the problem that it is for."
    return AlgorithmError(say(what, "Pass it to plan(algorithms=[...]), which checks it, or store algorithms by to_data()."))


def read_only_setting(name: str) -> AlgorithmError:
    return AlgorithmError(say(f"{name} of an algorithm cannot be changed.", "Take another of plan()'s algorithms."))


def too_much_workspace(needed: int, limit: int) -> AlgorithmError:
    what = f"This algorithm needs {needed} bytes of workspace, and memory_limit allows {limit}."
    return AlgorithmError(say(what, "Raise memory_limit, or take one of the algorithms that plan() finds."))


def wrong_workspace(allocator: object, found: object) -> OptionError:
    what = f"The allocator {allocator!r} returned {found!r} for the workspace."
    remedy = "It must own device memory whose address, a multiple of 256, is its device_ptr, device_pointer, ptr or pointer."
    return OptionError(say(what, remedy))


def not_algorithms(value: object) -> AlgorithmTypeError:
    what = f"The algorithms passed to plan() are of wrong type. One is {value!r}."
    return AlgorithmTypeError(say(what, "Pass Algorithm objects, as plan() returns them."))


def no_algorithms() -> NoAlgorithmsError:
    what = "The sequence of algorithms passed to plan() is empty (index is out of bounds)."
    return NoAlgorithmsError(say(what, "Leave `algorithms` away to have them found."))


def unknown_engine(name: str, known: Iterable[str]) -> OptionError:
    return OptionError(say(f"There is no engine {name!r}.", f"The engines are {listed(map(repr, known))}, or 'auto' to have one chosen."))


def engine_of_other_device(engine: str, device: str, known: Iterable[str]) -> EngineUnavailable:
    what = f"The engine {engine!r} does not compute on {device}."
    return EngineUnavailable(say(what, f'There: {listed(known, "or") or "none"}; or engine="auto".'))


def all_refuse(refusals: Iterable[tuple[str, str]], problem: str) -> UnsupportedProblem:
    return UnsupportedProblem(say(f"No engine computes {problem}.", *(f"{engine}: {sentence}" for engine, sentence in refusals)))


def several_accumulators(epilog: str, accumulators: int) -> EpilogInputError:
    what = f"The epilog {epilog} has one accumulator, and {accumulators} B operands were given."
    return EpilogInputError(say(what, f"Pass one B, or an @epilogue function whose first {accumulators} parameters are the accumulators."))


def no_epilog_for_several(accumulators: int) -> EpilogInputError:
    what = f"{accumulators} B operands were given and no epilog, so nothing says what D is made of."
    remedy = f"Pass one B, or epilog= an @epilogue function whose first {accumulators} parameters are the accumulators."
    return EpilogInputError(say(what, remedy))


def engine_unavailable(engine: str, why: str, remedy: str = "") -> EngineUnavailable:
    return EngineUnavailable(say(f"engine {engine!r} is not available: {why}", remedy or "Use engine='auto' to let one be chosen."))


def no_device(index: int, why: str) -> EngineUnavailable:
    what = f"The operands cannot be sent to device_id={index}: {why.splitlines()[0]}"
    return EngineUnavailable(
        say(what, *(line.strip() for line in why.splitlines()[1:]), "Leave device_id away to compute them on the CPU.")
    )


def cannot_fuse(engine: str, node: str, expression: str, *details: str) -> UnsupportedEpilogue:
    """The named engine's refusal of one node, as in ``cannot_fuse("cublaslt", "`silu` (node 2", ...)``."""
    what = f"{engine} cannot fuse {node} of {expression}."
    return UnsupportedEpilogue(say(what, *details, "Use engine='auto' to let one be chosen."))


def library_status(call: str, status: str, code: int, hint: str = "") -> LibraryError:
    return LibraryError(say(f"{status} ({code})", f"Returned by {call}.", hint))


# ---------------------------------------------------------------- FP8


def scales_required(names: Iterable[str] = ()) -> OptionError:
    what = "Scales are required for narrow-precision (FP8 and lower) operations. Please set `quantization_scales` argument."
    missing = tuple(names)
    hint = f"Missing: {listed(missing)}. " if missing else ""
    return OptionError(say(what, f"{hint}Pass {{'a': 1.0, 'b': 1.0}} to use the operands as they are."))


def scale_missing(name: str) -> OptionError:
    what = f"Scale for {name} is not specified"
    return OptionError(say(what, f"It is of a narrow-precision type: set `quantization_scales.{name.lower()}` (1.0 leaves it as it is)."))


def scale_refused(name: str) -> OptionError:
    what = f"Quantization scaling is not supported for {name} when it is not a narrow-precision (FP8 and lower) type."
    return OptionError(say(what, f"Leave `quantization_scales.{name.lower()}` away; use alpha or beta."))


def wrong_scale(name: str, given: str) -> OptionError:
    what = f"The quantization scale for {name} must be a scalar or a float32 tensor of shape () or (1,), not {given}."
    return OptionError(say(what, "Scales are tensor-wide."))


def not_divisible_by_16(m: int, n: int, k: int) -> ShapeError:
    what = f"M={m} N={n} K={k} must be divisible by 16 for FP8 operations"
    return ShapeError(say(what, "Pad the operands with zeros, or use engine='auto'."))


def result_amax_refused(dtype: str) -> OptionError:
    what = f"result_amax=True is allowed only for narrow-precision (FP8 and lower) results, and D is {dtype}."
    return OptionError(say(what, "Set result_type to an FP8 type, or take eg.amax(eg.abs(y)) in an epilogue."))


# ---------------------------------------------------------------- options: memory and the plan cache's key


def already_freed() -> StateError:
    return StateError(say("The buffer has already been freed.", "Call free() once, or let the object go out of scope."))


def unfingerprintable(name: str, value: object) -> StoreKeyError:
    what = f"A plan cannot be cached for {name}={value!r}: a {type(value).__name__} has no content to compare by."
    return StoreKeyError(say(what, "Set the option to a plain value, or use Matmul, which keeps its plan itself."))

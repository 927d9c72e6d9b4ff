"""Prepared: a planned product, ready to run on any data of the signature that it was made for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from epigemm import binding, compute_types, dtypes, effects, engines, errors, specification, tensors
from epigemm.arguments import Arguments, scalar_tensor
from epigemm.binding import D_SCALE, Epilog
from epigemm.engines import outputs
from epigemm.engines.base import AbstractExecutable, Call
from epigemm.engines.cuda import libraries
from epigemm.expression.check import result_dtype
from epigemm.expression.nodes import MATRIX, Output
from epigemm.options import MatmulEpilogPreferences, MatmulOptions, MatmulPlanPreferences, as_options, conjugate_flags, memory_limit_bytes
from epigemm.plans import Candidate, Plan
from epigemm.problem import Compute, Operand, Problem
from epigemm.specification import Product
from epigemm.tensors import Tensor
from epigemm.tuning.select import select
from epigemm.workspace import Workspace


@dataclass(slots=True)
class Prepared:
    """A product, its epilog, its plan and the executables of the candidates that ran. Safe to share between threads.

    Args:
        product: the product without its epilogue.
        epilog: what `epilog=` meant, narrow outputs included.
        plan: problem, checked expression, candidates.
        inplace: whether D is C.
        extras: the outputs besides D, and the operand of each.
        blocking: whether a run on a GPU waits for its result.
        allocator: where cuBLASLt's workspace comes from, None for the core's own.
        views: input name -> the shape and strides under which the expression reads it, None where it is read as given.
    """

    product: Product
    epilog: Epilog
    plan: Plan
    inplace: bool
    views: dict[str, tuple[tuple[int, ...], tuple[int, ...]] | None]
    extras: tuple[tuple[Output, Operand], ...] = ()
    blocking: bool = False
    allocator: Any = None
    executables: dict[Candidate, AbstractExecutable] = field(default_factory=dict)

    def executable(self, candidate: Candidate) -> AbstractExecutable:
        """The candidate, prepared once. Two threads may both prepare it; one is kept."""
        found = self.executables.get(candidate)
        if found is None:
            made = engines.get(candidate.engine).prepare(self.plan.problem, self.plan.expression, candidate)
            found = self.executables.setdefault(candidate, made)
        return found

    def execute(
        self,
        arguments: Arguments,
        candidate: Candidate,
        *,
        scratch: bool = False,
        stream: int | None = None,
        workspace: Workspace | None = None,
    ) -> Any:
        """D, or (D, {name: tensor}), of matrix arguments.

        Args:
            arguments: of the signature that this was prepared for.
            candidate: one of the plan's.
            scratch: write into new tensors even where `out` or an in-place C was given.
            stream: the raw handle of the stream to use; None is the current one of the operands' package.
            workspace: the allocator's buffers that the caller keeps; None has them for this call alone.
        """
        problem = self.plan.problem
        target = None if scratch else (arguments.c if self.inplace else arguments.out)
        if target is not None:
            name = "C" if self.inplace else "out"
            tensors.check_writable(target, name)
            _check_overlap(target, arguments, name)
        # What is allocated for a stream must come from it: memory freed on another may still be in use there.
        with tensors.LIBRARIES[arguments.a.library].on_stream(arguments.a.device, stream):
            d = target or tensors.empty(arguments.a, problem.d)
            extras = [(o, tensors.empty(arguments.a, operand)) for o, operand in self.extras]
            used = stream_of(arguments.a, stream)
            call = self._call(arguments, d, extras, used)
            if self.allocator is not None:
                workspace = workspace or Workspace(self.allocator)
                call.workspace = workspace.on(_index(problem.device), used)
            self.executable(candidate).run(call)
        if self.blocking and not scratch:
            wait(problem.device, used)
        if target is not None:
            tensors.mark_written(target)
        result = self._squeezed(d) if target is None else d.array
        if not extras:
            return result
        return result, {o.name: binding.presented(self.epilog, o, problem, tensor) for o, tensor in extras}

    def _call(self, arguments: Arguments, d: Tensor, extras: list[tuple[Output, Tensor]], stream: int) -> Call:
        given = _with_scales(arguments, self.epilog)
        inputs = {name: given[name] if view is None else given[name].view(*view) for name, view in self.views.items()}
        alpha, beta = scalars(self.product, arguments)
        return Call(
            a=_data(arguments.a),
            b=tuple(_data(b) for b in arguments.b),
            c=None if arguments.c is None else _data(arguments.c),
            d=_data(d),
            inputs={name: _data(tensor) for name, tensor in (*inputs.items(), *_operand_scales(arguments))},
            outputs={o.name: _data(self._unpadded(o, tensor)) for o, tensor in extras},
            alpha=alpha,
            beta=beta,
            stream=stream,
        )

    def _unpadded(self, output: Output, tensor: Tensor) -> Tensor:
        """A padded matrix cut to D's extents, its padding zeroed where the host can reach it."""
        problem = self.plan.problem
        if output.extent != MATRIX or tensor.shape[-2:] == (problem.m, problem.n):
            return tensor
        if tensor.device == tensors.CPU:
            tensor.numpy()[..., problem.m :, :] = 0
            tensor.numpy()[..., problem.n :] = 0
        return tensor.view((*problem.batch, problem.m, problem.n), tensor.strides)

    def _squeezed(self, d: Tensor) -> Any:
        if not self.product.squeeze:
            return d.array
        dropped = {axis % len(d.shape) for axis in self.product.squeeze}
        kept = [axis for axis in range(len(d.shape)) if axis not in dropped]
        return d.view(tuple(d.shape[i] for i in kept), tuple(d.strides[i] for i in kept)).array


def stream_of(a: Tensor, stream: int | None) -> int:
    """The raw handle of a stream: the given one, else the current one of operand A's package on its device."""
    return tensors.LIBRARIES[a.library].stream(a.device) if stream is None else stream


def wait(device: str, stream: int) -> None:
    """Waits until a stream's work is done; on the CPU it is."""
    if device != tensors.CPU:
        libraries.open_driver().synchronize(_index(device), stream)


def release_workspaces(device: str) -> None:
    """Gives back the workspaces that are kept for streams and that no launch holds; the CPU engine keeps none."""
    if device != tensors.CPU:
        libraries.open_driver().release_workspaces()


def _index(device: str) -> int:
    return int(device.partition(":")[2])


def prepare(
    arguments: Arguments,
    epilog: Any,
    options: MatmulOptions,
    preferences: MatmulPlanPreferences,
    qualifiers: Any = None,
    engine: str = "auto",
) -> Prepared:
    """Everything between a call and its execution: specify, resolve the epilogue, check, select.

    Args:
        arguments: as collected, 1-D operands still 1-D.
        epilog: as given.
        options, preferences: checked.
        qualifiers: as given.
        engine: "auto" or a name.
    """
    epilog_preferences = as_options(MatmulEpilogPreferences, preferences.epilog, "epilog preferences")
    meant = binding.resolve(epilog, len(arguments.b), epilog_preferences)
    made = product(arguments, options, qualifiers, result_dtype(meant.expression))
    matrices = specification.matrices(arguments)
    meant = binding.with_narrow_outputs(meant, made, options.result_amax, epilog_preferences)
    problem = made.problem
    if made.d_order is None and meant.order is not None:
        problem = specification.with_order(made, matrices, meant.order)
    placed = binding.place(meant, made, problem.order, _with_scales(matrices, meant))
    inputs = tuple((name, tensor.operand()) for name, tensor in placed.items())
    problem = replace(problem, inputs=inputs, compute=_compute(problem, options, preferences))
    expression = binding.checked(meant.expression, problem)
    plan = select(problem, expression, engine, int(preferences.limit or 0))
    plan = replace(plan, notes=(*plan.notes, *effects.notes(options, preferences, plan.engine)))
    given = _with_scales(matrices, meant)
    views = {name: None if tensor is given[name] else (tensor.shape, tensor.strides) for name, tensor in placed.items()}
    extras = tuple((o, outputs.operand(problem, o)) for o in expression.extras)
    allocator = None if problem.device == tensors.CPU else options.allocator
    return Prepared(made, meant, plan, options.inplace, views, extras, options.blocking is True, allocator)


def _compute(problem: Problem, options: MatmulOptions, preferences: MatmulPlanPreferences) -> Compute:
    """The numerical options with the workspace limit in bytes: of a GPU's memory; on the CPU only a limit that is no fraction counts.

    What cuBLASLt alone reads, its handle and which of its algorithms may be taken, is added on a GPU.
    """
    limit = options.memory_limit
    if problem.device == tensors.CPU:
        share = (isinstance(limit, str) and "%" in limit) or (isinstance(limit, float) and limit <= 1)
        return problem.compute if share or limit is None else replace(problem.compute, memory_limit=memory_limit_bytes(limit, 0))
    total = libraries.open_driver().device_total_bytes(_index(problem.device))
    return replace(
        problem.compute,
        memory_limit=memory_limit_bytes("80%" if limit is None else limit, total),
        reduction_scheme_mask=int(preferences.reduction_scheme_mask or 0),
        max_waves_count=float(preferences.max_waves_count or 0),
        numerical_impl_mask=int(preferences.numerical_impl_mask or 0),
        handle=options.handle or 0,
    )


def product(arguments: Arguments, options: MatmulOptions, qualifiers: Any = None, cast: str | None = None) -> Product:
    """The product that arguments and options describe, its scalars checked too.

    Args:
        arguments, options, qualifiers: as in `prepare`.
        cast: the dtype that the epilogue casts D to, taken where nothing else fixes D's dtype.
    """
    if cast and options.result_type is None and arguments.c is None:
        options = replace(options, result_type=dtypes.of(cast).cuda_type)
    a, is_complex = arguments.a, arguments.a.dtype.is_complex
    flags = [conjugate_flags(qualifiers, lazy=(a.conjugate, b.conjugate), is_complex=is_complex) for b in arguments.b]
    conjugate = (flags[0][0], *(flag for _, flag in flags))
    found = specification.specify(specification.matrices(arguments), options, conjugate, arguments)
    specification.narrow_scales(found, arguments.scales, d_scaled=cast is None)
    scalars(found, arguments)
    return found


def scalars(product: Product, arguments: Arguments) -> tuple[Any, Any]:
    """alpha and beta as host numbers of the scale type; on the CPU with the scales of narrow operands folded in."""
    alpha = 1.0 if arguments.alpha is None else compute_types.scalar(arguments.alpha, product.scale_type, "alpha").item()
    has_beta = arguments.c is not None
    if has_beta and arguments.beta is None:
        raise errors.c_without_beta()
    beta = compute_types.scalar(arguments.beta, product.scale_type, "beta").item() if has_beta else 0.0
    problem, scales = product.problem, arguments.scales
    if problem.device != tensors.CPU:
        return alpha, beta  # the scales go to the engine as tensors: see _operand_scales
    if problem.a.dtype.is_narrow:
        alpha *= _scale_value("a", scales.a) * _scale_value("b", scales.b)
    if problem.c is not None and problem.c.dtype.is_narrow:
        beta *= _scale_value("c", scales.c)
    return alpha, beta


def _data(tensor: Tensor) -> Any:
    return tensor.numpy() if tensor.device == tensors.CPU else tensor.pointer


def _with_scales(arguments: Arguments, epilog: Epilog) -> dict[str, Tensor]:
    """The inputs and, where D is narrow, D's scale among them."""
    if D_SCALE not in epilog.expression.input_names:
        return arguments.inputs
    return {**arguments.inputs, D_SCALE: _scale_tensor(arguments.a, "d", arguments.scales.d)}


# The names under which a GPU engine finds the scales of narrow A and B among a call's inputs.
A_SCALE, B_SCALE = "quantization_scale_a", "quantization_scale_b"


def _operand_scales(arguments: Arguments) -> list[tuple[str, Tensor]]:
    """The scales of narrow operands on a GPU as tensors there; on the CPU they are folded into alpha."""
    if not arguments.a.dtype.is_narrow or arguments.a.device == tensors.CPU:
        return []
    scales = arguments.scales
    return [(A_SCALE, _scale_tensor(arguments.a, "a", scales.a)), (B_SCALE, _scale_tensor(arguments.a, "b", scales.b))]


def _scale_tensor(a: Tensor, name: str, scale: Any) -> Tensor:
    if scale is None:
        raise errors.scale_missing(name.upper())
    if isinstance(scale, (bool, int, float)) or not hasattr(scale, "shape"):
        return scalar_tensor(a, float(scale))
    tensor = tensors.wrap(scale, f"quantization_scales.{name}")
    if tensor.shape not in ((), (1,)) or tensor.dtype.name != "float32":
        raise errors.wrong_scale(name.upper(), f"{tensor.dtype.name} of shape {tensor.shape}")
    if (tensor.library, tensor.device) != (a.library, a.device):
        raise errors.package_mismatch(f"{a.library} on {a.device}", f"{tensor.library} on {tensor.device}", f"the scale for {name.upper()}")
    return tensor


def _scale_value(name: str, scale: Any) -> float:
    """The value of a scale on the host."""
    if scale is None:
        raise errors.scale_missing(name.upper())
    if isinstance(scale, (bool, int, float)):
        return float(scale)
    tensor = tensors.wrap(scale, f"quantization_scales.{name}") if hasattr(scale, "shape") and scale.shape is not None else None
    if tensor is None or tensor.shape not in ((), (1,)) or tensor.dtype.name != "float32" or tensor.device != tensors.CPU:
        raise errors.wrong_scale(name.upper(), repr(scale))
    return float(tensor.numpy().reshape(()))


def _check_overlap(target: Tensor, arguments: Arguments, name: str) -> None:
    """`out` may be exactly C or a full (m, n) epilogue input; any other overlap with what is read is refused."""
    exact = {"C": arguments.c, **arguments.inputs}
    reads = {**{k: t for k, t in arguments.operands().items() if t is not target}, **arguments.inputs}
    for what, tensor in reads.items():
        same = what in exact and (tensor.pointer, tensor.shape, tensor.strides, tensor.dtype) == (
            target.pointer,
            target.shape,
            target.strides,
            target.dtype,
        )
        if not same and tensors.shares_memory(target, tensor):
            raise errors.out_overlaps(what, name)

"""What a user passed, wrapped: tensors by role, scalars, scales. No meaning is given to it here but that of its package and device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from epigemm import compute_types, errors, tensors
from epigemm.options import MatmulQuantizationScales, as_options
from epigemm.tensors import Tensor


@dataclass(slots=True)
class Arguments:
    """The tensors and scalars of one call.

    Args:
        a, b, c, out: the operands; `b` has one tensor for each accumulator.
        inputs: the epilogue's inputs by name.
        alpha, beta: host scalars as given.
        scales: tensor-wide scales of narrow operands as given.
        several: whether `b` was given as a tuple.
    """

    a: Tensor
    b: tuple[Tensor, ...]
    c: Tensor | None = None
    out: Tensor | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    alpha: Any = None
    beta: Any = None
    scales: MatmulQuantizationScales = field(default_factory=MatmulQuantizationScales)
    several: bool = False

    @property
    def signature(self) -> tuple[object, ...]:
        """What of the arguments decides a plan."""
        optional = (None if t is None else t.signature for t in (self.c, self.out))
        inputs = ((name, t.signature) for name, t in self.inputs.items())
        return self.a.signature, tuple(b.signature for b in self.b), *optional, tuple(inputs), self.several

    @property
    def copied(self) -> bool:
        """Whether a tensor was read through a copy of the user's."""
        return any(t.copied for t in (*self.operands().values(), *self.inputs.values(), *([self.out] if self.out else [])))

    def operands(self) -> dict[str, Tensor]:
        """The operands that are there, under the names that errors use."""
        names = ("B",) if len(self.b) == 1 else tuple(f"B[{i}]" for i in range(len(self.b)))
        found = {"A": self.a, **dict(zip(names, self.b, strict=True))}
        return found if self.c is None else {**found, "C": self.c}


def collect(a: Any, b: Any, c: Any = None, out: Any = None) -> Arguments:
    """The operands wrapped, all of one package and on one device.

    Raises:
        errors.OperandTypeError, errors.PackageMismatchError, errors.DeviceMismatchError: they are not.
    """
    several = isinstance(b, (tuple, list))
    if several and not b:
        raise errors.no_operands("b")
    bs = tuple(b) if several else (b,)
    arguments = Arguments(
        a=tensors.wrap(a, "A"),
        b=tuple(tensors.wrap(x, "B") for x in bs),
        c=None if c is None else tensors.wrap(c, "C"),
        out=None if out is None else tensors.wrap(out, "out"),
        several=several,
    )
    operands = list(arguments.operands().values()) + ([] if arguments.out is None else [arguments.out])
    if len({t.library for t in operands}) > 1:
        raise errors.mixed_packages({t.library for t in operands})
    if len({t.device for t in operands}) > 1:
        raise errors.mixed_devices({t.device for t in operands})
    return arguments


def collect_inputs(arguments: Arguments, inputs: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """The epilogue's inputs wrapped; Python and NumPy scalars become tensors of no dimensions.

    Raises:
        errors.PackageMismatchError, errors.DeviceMismatchError: one is not of the operands' package, or not on their device.
    """
    if inputs is not None and not isinstance(inputs, Mapping):
        raise errors.inputs_not_by_name(inputs)
    return {name: _input(arguments.a, name, value) for name, value in (inputs or {}).items()}


def _input(a: Tensor, name: str, value: Any) -> Tensor:
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return scalar_tensor(a, value, name)
    tensor = tensors.wrap(value, name)
    if tensor.library != a.library:
        raise errors.package_mismatch(a.library, tensor.library, f"epilog input '{name}'")
    if tensor.device != a.device:
        raise errors.epilog_input_device(name, tensor.device, a.device)
    return tensor


def scalar_tensor(a: Tensor, value: Any, name: str = "scalar") -> Tensor:
    """A host scalar as a tensor of no dimensions beside operand A: an integer stays one (a seed), the rest has A's accumulator type.

    Raises:
        errors.OptionError: it is no number of that type: complex, beyond its range, a date.
    """
    integer = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_, np.timedelta64))
    if integer and not -(2**63) <= value < 2**63:
        raise errors.wrong_value(name, value, "an integer from -2**63 to 2**63 - 1")
    array = np.asarray(value, np.int64) if integer else np.asarray(compute_types.number(value, a.dtype.acc.name, name))
    if a.device == tensors.CPU:
        return tensors.wrap(tensors.LIBRARIES[a.library].from_numpy(array), "scalar")
    return tensors.wrap(tensors.LIBRARIES[a.library].to_device(array, a.device), "scalar")


def host_scalar(value: Any) -> Any:
    """alpha or beta so that a later change of the caller's array changes nothing; what is no number stays, to be refused with its type."""
    if value is None or isinstance(value, (bool, int, float, complex)):
        return value
    number = compute_types.python_number(value)
    return value if number is None else number


def warn_beta_ignored(beta: Any, stacklevel: int) -> None:
    """Warns, at the caller's caller `stacklevel` frames up, of a beta without a C."""
    warnings.warn(
        f"Matmul: the provided beta={beta} is ignored since operand C is not specified.", errors.EpigemmWarning, stacklevel=stacklevel
    )


# ---------------------------------------------------------------- reset


@dataclass(frozen=True, slots=True)
class Form:
    """What operands must look like to take the place of others; holds no tensor.

    Args:
        tensors: name -> (library, device, dtype name, shape, strides).
        inputs: the same of the epilogue's inputs.
        accumulators: number of B operands.
        scaled: whether there were quantization scales.
        alpha, beta: the scalars, which stay when the operands are released.
    """

    tensors: dict[str, tuple[Any, ...]]
    inputs: dict[str, tuple[Any, ...]]
    accumulators: int
    scaled: bool
    alpha: Any
    beta: Any

    @staticmethod
    def of(arguments: Arguments) -> Form:
        """The form of these arguments."""
        scaled = any(value is not None for value in vars(arguments.scales).values())
        found = {"a": arguments.a, "c": arguments.c, **{f"b[{i}]": b for i, b in enumerate(arguments.b)}}
        return Form(
            {name: t.signature for name, t in found.items() if t is not None},
            {name: t.signature for name, t in arguments.inputs.items()},
            len(arguments.b),
            scaled,
            arguments.alpha,
            arguments.beta,
        )


@dataclass(frozen=True, slots=True)
class Replacement:
    """The arguments of one `reset_operands`; None keeps."""

    a: Any = None
    b: Any = None
    c: Any = None
    alpha: Any = None
    beta: Any = None
    quantization_scales: Any = None
    epilog_inputs: Mapping[str, Any] | None = None


def replaced(old: Arguments | None, form: Form, new: Replacement, input_names: tuple[str, ...], *, checked: bool) -> Arguments:
    """The arguments after a reset.

    Args:
        old: the present arguments, None after `release_operands`.
        form: what the operands must look like.
        new: what was given.
        input_names: the planned epilogue's inputs.
        checked: whether to check the form of what is new.
    """
    if all(getattr(new, f.name) is None for f in fields(new)):
        raise errors.nothing_reset()
    if old is None:
        _check_complete(form, new)
        arguments = Arguments(a=wrapped(new.a, "a", form, checked), b=(), alpha=form.alpha, beta=form.beta)
    else:
        arguments = replace(old, inputs=dict(old.inputs))
    if new.c is not None and "c" not in form.tensors:
        raise errors.reset_without_c()
    if new.beta is not None and "c" not in form.tensors:
        warn_beta_ignored(new.beta, stacklevel=6)
    if new.a is not None:
        arguments.a = wrapped(new.a, "a", form, checked)
    if new.b is not None:
        arguments.b, arguments.several = _new_b(new.b, form, checked)
    if new.c is not None:
        arguments.c = wrapped(new.c, "c", form, checked)
    arguments.alpha = arguments.alpha if new.alpha is None else host_scalar(new.alpha)
    arguments.beta = arguments.beta if new.beta is None or "c" not in form.tensors else host_scalar(new.beta)
    if new.quantization_scales is not None:
        arguments.scales = _new_scales(arguments.scales, new.quantization_scales)
    _replace_inputs(arguments, form, new, input_names, checked)
    return arguments


def _check_complete(form: Form, new: Replacement) -> None:
    required = ["a", "b", *(["c"] if "c" in form.tensors else []), *(["epilog_inputs"] if form.inputs else [])]
    required += ["quantization_scales"] if form.scaled else []
    complete = all(getattr(new, name) is not None for name in required)
    if not complete or not set(form.inputs) <= set(new.epilog_inputs or {}):
        raise errors.partial_reset(required)


def _new_b(b: Any, form: Form, checked: bool) -> tuple[tuple[Tensor, ...], bool]:
    several = isinstance(b, (tuple, list))
    bs = tuple(b) if several else (b,)
    if len(bs) != form.accumulators:
        raise errors.reset_mismatch("number", "B", len(bs), form.accumulators)
    return tuple(wrapped(x, f"b[{i}]", form, checked) for i, x in enumerate(bs)), several


def _new_scales(old: MatmulQuantizationScales, new: Any) -> MatmulQuantizationScales:
    """The old scales with the new ones in their place, in an object of our own."""
    given = as_options(MatmulQuantizationScales, new, "matrix multiplication quantization scales")
    return replace(old, **{name: value for name, value in vars(given).items() if value is not None})


def _replace_inputs(arguments: Arguments, form: Form, new: Replacement, names: tuple[str, ...], checked: bool) -> None:
    if new.epilog_inputs is not None and not isinstance(new.epilog_inputs, Mapping):
        raise errors.inputs_not_by_name(new.epilog_inputs)
    for name, value in (new.epilog_inputs or {}).items():
        if name not in names:
            raise errors.unknown_input("of this plan", name, names)
        tensor = _input(arguments.a, name, value)
        if checked and name in form.inputs:
            _check_form(tensor, name, form.inputs[name])
        arguments.inputs[name] = tensor


def wrapped(array: Any, name: str, form: Form, checked: bool) -> Tensor:
    """A new operand, its form checked against that of the one it replaces."""
    tensor = tensors.wrap(array, name)
    if checked:
        _check_form(tensor, name.partition("[")[0].upper(), form.tensors[name])
    return tensor


def _check_form(tensor: Tensor, name: str, original: tuple[Any, ...]) -> None:
    library, device, dtype, shape, strides, _, conjugate = original
    if tensor.library != library:
        raise errors.package_mismatch(library, tensor.library)
    if tensor.device != device:
        raise errors.device_mismatch(name, tensor.device, device)
    if tensor.shape != shape:
        raise errors.reset_mismatch("extents", name, tensor.shape, shape)
    if tensor.dtype.name != dtype:
        raise errors.reset_mismatch("data type", name, tensor.dtype.name, dtype)
    if tensor.device != tensors.CPU and tensor.strides != strides:
        raise errors.reset_mismatch("strides", name, tensor.strides, strides)
    if tensor.conjugate != conjugate:
        raise errors.reset_mismatch("conjugate flag", name, tensor.conjugate, conjugate)

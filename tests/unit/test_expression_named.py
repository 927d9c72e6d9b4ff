"""The fifteen predefined epilogs as expressions, and the recognition of each however it is written."""

from __future__ import annotations

import pytest

import epigemm.expression as eg
from epigemm.enums import MatmulEpilog as E
from epigemm.expression.check import check
from epigemm.expression.derivatives import gelu_slope
from epigemm.expression.format import text
from epigemm.expression.grad import gradient
from epigemm.expression.named import NAMED, named, recognise
from epigemm.expression.values import Value
from epigemm.problem import Operand, Problem

M, N = 64, 48
KINDS = {
    "column": Operand.dense("bf16", (M, 1)),
    "row": Operand.dense("bf16", (1, N)),
    "matrix": Operand.dense("bf16", (M, N), "col"),
    "bits": Operand.dense("u8", (16, N), "col"),
    "scalar": Operand.dense("f32", (1, 1)),
}
PEER = {"bias": "column", "relu_aux": "bits", "gelu_aux": "matrix"}

TEXTS = {
    E.RELU: "d = relu(acc)",
    E.RELU_AUX: "d = relu(acc)\nrelu_aux = bitmask(acc >= 0)",
    E.BIAS: "d = acc + bias",
    E.RELU_BIAS: "d = relu(acc + bias)",
    E.RELU_AUX_BIAS: "t0 = acc + bias\nd = relu(t0)\nrelu_aux = bitmask(t0 >= 0)",
    E.DRELU: "d = where(unbitmask(relu_aux), acc, 0)",
    E.DRELU_BGRAD: "d = where(unbitmask(relu_aux), acc, 0)\ndrelu_bgrad = sum(d, axis=n)",
    E.GELU: "d = gelu_tanh(acc)",
    E.GELU_AUX: "d = gelu_tanh(acc)\ngelu_aux = acc",
    E.GELU_BIAS: "d = gelu_tanh(acc + bias)",
    E.GELU_AUX_BIAS: "t0 = acc + bias\nd = gelu_tanh(t0)\ngelu_aux = t0",
    E.BGRADA: "d = acc\nbgrada = operand_sum(a)",
    E.BGRADB: "d = acc\nbgradb = operand_sum(b)",
}


def checked(expression, **places):
    operands = {name: KINDS[places.get(name, PEER.get(name, "column"))] for name in expression.input_names}
    return check(expression, Problem.of("bf16", m=M, n=N, k=32, inputs=operands, order="col"))


def found(function, **places):
    return recognise(checked(eg.as_epilogue(function).expression(), **places))


def test_all_fifteen_are_there():
    assert set(NAMED) == set(E) - {E.DEFAULT}
    with pytest.raises(KeyError):
        named(E.DEFAULT)


@pytest.mark.parametrize("epilog", NAMED)
def test_each_is_its_formula(epilog):
    expression = named(epilog)
    if epilog in TEXTS:
        assert text(expression) == TEXTS[epilog]
    else:
        slope = eg.as_epilogue(lambda acc, gelu_aux: acc * Value(gelu_slope(gelu_aux.node, "tanh"))).expression().d.node
        assert expression.d.node is slope
    assert expression.name == epilog.name


@pytest.mark.parametrize("epilog", NAMED)
def test_each_is_recognised_as_itself(epilog):
    result = recognise(checked(named(epilog)))
    row = NAMED[epilog]
    assert result.epilog == epilog
    assert result.inputs == tuple((name, name) for name in row.inputs)
    assert result.outputs == tuple((name, name) for name in row.aux_names)
    assert result.bias_extent == ("column" if "bias" in row.inputs else "")
    assert result.sum_axis == ("n" if "BGRAD" in epilog.name and "_" in epilog.name else "")


def test_stored_types_follow_the_peer():
    outputs = {e: {o.name: (o.dtype, o.extent, o.pad) for o in checked(named(e)).extras} for e in NAMED}
    assert outputs[E.RELU_AUX_BIAS] == {"relu_aux": ("uint8", "bits", 1)}
    assert outputs[E.GELU_AUX_BIAS] == {"gelu_aux": ("bfloat16", "matrix", 8)}
    assert outputs[E.DRELU_BGRAD] == {"drelu_bgrad": ("bfloat16", "column", 1)}
    assert outputs[E.DGELU_BGRAD] == {"dgelu_bgrad": ("bfloat16", "column", 1)}
    assert outputs[E.BGRADA] == {"bgrada": ("bfloat16", "column", 1)}
    assert outputs[E.BGRADB] == {"bgradb": ("bfloat16", "row", 1)}
    assert checked(named(E.GELU_AUX, aux_dtype="float8_e4m3fn")).extras[0].dtype == "float8_e4m3fn"


def _relu_mask(acc, b):
    return eg.outputs(eg.relu(acc + b), m=eg.bitmask(acc + b >= 0))


SPELLINGS = [
    (lambda acc: acc, {}, E.DEFAULT, ""),
    (lambda acc, b: b + acc, {}, E.BIAS, "column"),
    (lambda acc, b: acc + b, {"b": "row"}, E.BIAS, "row"),
    (lambda acc, b: acc - (-b), {}, E.BIAS, "column"),
    (lambda acc, b: eg.relu(acc + b), {"b": "row"}, E.RELU_BIAS, "row"),
    (lambda acc, b: eg.maximum(acc * 1.0 + b, 0), {}, E.RELU_BIAS, "column"),
    (lambda acc, b: eg.clamp(acc + b, lo=0.0), {}, E.RELU_BIAS, "column"),
    (lambda acc, b: eg.where(acc + b <= 0, 0.0, acc + b), {}, E.RELU_BIAS, "column"),
    (lambda acc, b: eg.where(~(acc + b < 0), acc + b, 0.0), {}, E.RELU_BIAS, "column"),
    (lambda acc: eg.cast(eg.relu(acc), "bfloat16"), {}, E.RELU, ""),
    (lambda acc, b: eg.gelu(b + acc, approximate="tanh"), {"b": "row"}, E.GELU_BIAS, "row"),
    (_relu_mask, {"b": "row"}, E.RELU_AUX_BIAS, "row"),
    (lambda acc: eg.outputs(eg.relu(acc), m=eg.relu_aux(acc)), {}, E.RELU_AUX, ""),
    (lambda acc: eg.outputs(eg.gelu(acc, approximate="tanh"), pre=acc), {}, E.GELU_AUX, ""),
    (lambda acc, mask: eg.where(eg.unbitmask(mask), acc, 0), {"mask": "bits"}, E.DRELU, ""),
    (lambda acc, mask: eg.where(~eg.unbitmask(mask), 0.0, acc), {"mask": "bits"}, E.DRELU, ""),
    (lambda acc: eg.outputs(acc, s=eg.operand_sum("a")), {}, E.BGRADA, ""),
    # not what cuBLASLt has
    (lambda acc: eg.gelu(acc), {}, None, ""),
    (lambda acc: eg.where(acc > 0, acc, 0.0), {}, None, ""),
    (lambda acc, b: eg.relu(acc + b), {"b": "matrix"}, None, ""),
    (lambda acc, b: eg.relu(acc + b), {"b": "scalar"}, None, ""),
    (lambda acc, b: eg.relu(acc) + b, {}, None, ""),
    (lambda acc: eg.cast(eg.cast(acc, "float16"), "bfloat16"), {}, None, ""),
    (lambda acc: eg.outputs(eg.relu(acc), m=eg.bitmask(acc > 0)), {}, None, ""),
    (lambda acc, b: eg.outputs(eg.relu(acc + b), m=eg.bitmask(acc >= 0)), {}, None, ""),
    (lambda acc: eg.outputs(eg.relu(acc), m=eg.relu_aux(acc), s=eg.sum(acc)), {}, None, ""),
    (lambda acc: eg.outputs(acc, s=eg.operand_sum("a"), t=eg.operand_sum("b")), {}, None, ""),
    (lambda acc: eg.leaky_relu(acc), {}, None, ""),
]


@pytest.mark.parametrize(("function", "places", "epilog", "bias"), SPELLINGS, ids=[str(i) for i in range(len(SPELLINGS))])
def test_users_spellings(function, places, epilog, bias):
    result = found(function, **places)
    assert (result.epilog if result else None) == epilog
    if result:
        assert result.bias_extent == bias


def test_recognition_gives_the_users_names():
    result = found(_relu_mask, b="row")
    assert result.inputs == (("bias", "b"),)
    assert result.outputs == (("relu_aux", "m"),)


def test_two_accumulators_are_no_epilog():
    expression = eg.epilogue(accumulators=2)(lambda g, u: eg.relu(g)).expression()
    assert recognise(check(expression, Problem.of("bf16", m=M, n=N, k=8, accumulators=2))) is None


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [
        (lambda acc, bias: eg.gelu(acc + bias, approximate="tanh"), E.GELU_AUX_BIAS, E.DGELU_BGRAD),
        (lambda acc: eg.gelu(acc, approximate="tanh"), E.GELU_AUX, E.DGELU),
        (lambda acc, bias: eg.relu(acc + bias), None, E.DRELU_BGRAD),
        (lambda acc: eg.relu(acc), None, E.DRELU),
    ],
)
def test_derived_passes_reach_the_library(function, forward, backward):
    expression = eg.as_epilogue(function).expression()
    derived = gradient(expression, dict.fromkeys(expression.input_names, "row"))
    first = recognise(checked(derived.forward, bias="row"))
    assert (first.epilog if first else None) == forward
    second = recognise(checked(derived.backward, saved_0="bits" if "RELU" in backward.name else "matrix"))
    assert second.epilog == backward
    assert second.sum_axis == ("m" if "BGRAD" in backward.name else "")

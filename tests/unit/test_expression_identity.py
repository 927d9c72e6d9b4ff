"""Expressions are values: equal by content, hashable, picklable, shared."""

from __future__ import annotations

import copy
import pickle

import pytest

import epigemm.expression as eg
from epigemm.enums import MatmulEpilog
from epigemm.expression.named import NAMED, named
from epigemm.expression.nodes import Node, acc, constant


@eg.epilogue
def module_level(acc, bias, *, scale=1.0):
    return eg.outputs(eg.gelu((acc + bias) * scale), total=eg.sum(acc))


def test_equal_content_is_equal_whatever_the_name():
    def first(acc, bias):
        return eg.relu(acc + bias)

    second = eg.epilogue(lambda x, bias: eg.relu(x + bias)).expression()
    assert eg.as_epilogue(first).expression() == second
    assert hash(eg.as_epilogue(first).expression()) == hash(second)
    assert second != eg.epilogue(lambda x, b: eg.relu(x + b)).expression()
    assert second != eg.epilogue(lambda x, bias, other: eg.relu(x + bias)).expression()


def test_numbers_that_compare_equal_stay_apart():
    nodes = {constant(1), constant(1.0), constant(True), constant(0.0), constant(-0.0)}
    assert len(nodes) == 5


@pytest.mark.parametrize("epilog", NAMED)
def test_named_expressions_survive_pickling(epilog):
    expression = named(epilog)
    again = pickle.loads(pickle.dumps(expression))
    assert again == expression
    assert again.d.node is expression.d.node
    assert copy.deepcopy(expression) == expression


def test_an_epilogue_survives_pickling():
    for epilogue in (module_level, module_level(scale=2.0)):
        again = pickle.loads(pickle.dumps(epilogue))
        assert again == epilogue
        assert again.expression() == epilogue.expression()


def test_constants_decide_equality():
    assert module_level(scale=2.0) == module_level(scale=2.0)
    assert hash(module_level(scale=2.0)) == hash(module_level(scale=2.0))
    assert module_level(scale=2) != module_level(scale=2.0)


def test_shared_parts_are_one_node():
    node = acc()
    for _ in range(200):
        node = Node("add", node, node)
    expression = eg.epilogue(lambda acc: acc).expression()
    assert len(list(expression.nodes())) == 1
    assert node is Node("add", node.args[0], node.args[1])
    assert len(repr(node)) <= 1000
    assert pickle.loads(pickle.dumps(node)) is node


def test_relu_aux_bias_is_one_expression_by_both_routes():
    user = eg.epilogue(lambda acc, bias: eg.outputs(eg.relu(acc + bias), relu_aux=eg.relu_aux(acc + bias))).expression()
    assert user == named(MatmulEpilog.RELU_AUX_BIAS)

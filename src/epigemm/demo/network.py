"""The network and its gradients, twice: through fused products, and step by step in plain NumPy.

Both keep a sample's features contiguous, so that the products read the same memory: the fused way writes it as [features, samples],
column-major, which is what the predefined epilogs give; NumPy writes it as [samples, features].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epigemm.api import matmul
from epigemm.enums import MatmulEpilog

SIZES = (64, 256, 128, 10)
FUSED, PLAIN = "fused", "step by step"

WAYS = (FUSED, PLAIN)

Array = NDArray[Any]
Options = dict[str, Any] | None


@dataclass(slots=True)
class Parameters:
    """One weight [out, in] and one bias [out] for each layer; gradients have the same form."""

    weights: list[Array]
    biases: list[Array]

    def all(self) -> list[Array]:
        return [*self.weights, *self.biases]


# (parameters, images [samples, 64], labels [samples]) -> mean loss, gradients
Gradients = Callable[[Parameters, Array, Array], tuple[float, Parameters]]


def initial(seed: int) -> Parameters:
    """Weights from He's normal distribution, biases 0, float32."""
    random = np.random.default_rng(seed)
    shapes = list(zip(SIZES[1:], SIZES[:-1], strict=True))
    weights = [(random.standard_normal(shape) * np.sqrt(2 / shape[1])).astype(np.float32) for shape in shapes]
    return Parameters(weights, [np.zeros(out, np.float32) for out, _ in shapes])


def cross_entropy(scores: Array, labels: Array) -> tuple[float, Array]:
    """The mean loss of softmax(scores) and its gradient by the scores, both for scores [samples, classes]."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(axis=1, keepdims=True)
    picked = (np.arange(len(labels)), labels)
    loss = float((np.log(totals[:, 0]) - shifted[picked]).mean())
    gradient = exponentials / totals
    gradient[picked] -= 1
    gradient /= np.float32(len(labels))
    return loss, gradient


def fused_gradients(parameters: Parameters, images: Array, labels: Array, options: Options = None) -> tuple[float, Parameters]:
    """Forward and backward in eight products; no bias, activation, mask or bias gradient is a step of its own.

    Args:
        parameters, images, labels: as in `Gradients`.
        options: of every product.
    """

    def product(a: Array, b: Array, epilog: MatmulEpilog | None = None, **inputs: Array) -> Any:
        return matmul(a, b, epilog=epilog, epilog_inputs=inputs, options=options)

    weights, biases = parameters.weights, parameters.biases
    values, masks = [images.T], []  # [features, samples]
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        hidden, aux = product(weight, values[-1], MatmulEpilog.RELU_AUX_BIAS, bias=bias)
        values.append(hidden)
        masks.append(aux["relu_aux"])
    scores = product(weights[-1], values[-1], MatmulEpilog.BIAS, bias=biases[-1])
    loss, d_scores = cross_entropy(scores.T, labels)

    # x g^T = (g x^T)^T: the weight's gradient comes out column-major, so its transpose lies as the weight does.
    d_weight, aux = product(values[-1], d_scores, MatmulEpilog.BGRADB)
    d_weights, d_biases, gradient = [d_weight.T], [aux["bgradb"]], d_scores.T
    for layer in reversed(range(len(masks))):
        gradient, aux = product(weights[layer + 1].T, gradient, MatmulEpilog.DRELU_BGRAD, relu_aux=masks[layer])
        d_biases.insert(0, aux["drelu_bgrad"])
        d_weights.insert(0, product(values[layer], gradient.T).T)
    return loss, Parameters(d_weights, d_biases)


def plain_gradients(parameters: Parameters, images: Array, labels: Array) -> tuple[float, Parameters]:
    """The same in plain NumPy, every operation a step that writes its result."""
    weights, biases = parameters.weights, parameters.biases
    values, masks = [images], []  # [samples, features]
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        before = values[-1] @ weight.T + bias
        values.append(np.maximum(before, 0))
        masks.append(before >= 0)
    loss, gradient = cross_entropy(values[-1] @ weights[-1].T + biases[-1], labels)

    d_weights, d_biases = [gradient.T @ values[-1]], [gradient.sum(axis=0)]
    for layer in reversed(range(len(masks))):
        gradient = np.where(masks[layer], gradient @ weights[layer + 1], np.float32(0))
        d_biases.insert(0, gradient.sum(axis=0))
        d_weights.insert(0, gradient.T @ values[layer])
    return loss, Parameters(d_weights, d_biases)


def way(name: str, options: Options = None) -> Gradients:
    """How gradients are computed, by its name; the options are those of fused products."""
    return partial(fused_gradients, options=options) if name == FUSED else plain_gradients


def predict(parameters: Parameters, images: Array) -> Array:
    """The digit that each image [samples, 64] is taken for, computed in plain NumPy whichever way the network was trained."""
    values = images
    for weight, bias in zip(parameters.weights[:-1], parameters.biases[:-1], strict=True):
        values = np.maximum(values @ weight.T + bias, 0)
    return np.argmax(values @ parameters.weights[-1].T + parameters.biases[-1], axis=1)

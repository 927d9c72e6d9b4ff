"""Training the network both ways from the same start on the same minibatches, and what is measured of it."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from epigemm import errors
from epigemm.api import Matmul, matmul
from epigemm.demo.digits import Array, Digits
from epigemm.demo.network import FUSED, SIZES, WAYS, Gradients, Options, Parameters, initial, predict, way
from epigemm.enums import MatmulEpilog
from epigemm.tuning.measure import interleaved_us

BATCH = 64
RATE, MOMENTUM = 0.05, 0.9

# A layer as wide as real models have them, where what fusing saves outweighs what a call costs.
WIDE_M, WIDE_N, WIDE_K = 4096, 2048, 256
WIDE_ROUNDS, WHOLE_ROUNDS = 9, 15


@dataclass(slots=True)
class Training:
    """One network while it is trained by stochastic gradient descent with momentum.

    Args:
        way: one of `network.WAYS`.
        gradients: the loss and its gradients, computed in this way.
        parameters: trained in place.
        velocity: the momentum.
        losses: the mean loss of each epoch so far.
        step_us: the time of each step so far, in microseconds.
    """

    way: str
    gradients: Gradients
    parameters: Parameters
    velocity: list[Array]
    losses: list[float] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)

    @staticmethod
    def start(name: str, seed: int, options: Options = None) -> Training:
        """The untrained network; the options are those of fused products."""
        parameters = initial(seed)
        return Training(name, way(name, options), parameters, [np.zeros_like(x) for x in parameters.all()])

    def epoch(self, digits: Digits, order: Array) -> None:
        """One pass over the images in this order; what does not fill a minibatch waits for the next epoch's order."""
        losses = []
        for first in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[first : first + BATCH]
            images, labels = digits.images[chosen], digits.labels[chosen]
            start = time.perf_counter_ns()
            losses.append(self.step(images, labels))
            self.step_us.append((time.perf_counter_ns() - start) / 1e3)
        self.losses.append(float(np.mean(losses)))

    def step(self, images: Array, labels: Array) -> float:
        """The loss on a minibatch, before it is learnt from."""
        loss, gradients = self.gradients(self.parameters, images, labels)
        for parameter, gradient, velocity in zip(self.parameters.all(), gradients.all(), self.velocity, strict=True):
            velocity *= np.float32(MOMENTUM)
            velocity += gradient
            parameter -= np.float32(RATE) * velocity
        return loss


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one network.

    Args:
        accuracy: the share of held-out digits that it tells right.
        losses: the mean training loss of each epoch.
        training_s: the sum of its steps' times.
        step_us: the median time of a step on a minibatch.
        whole_us: the median time of the gradients over all training images at once.
        whole_peak_bytes: the most that this has allocated at a time.
        predictions: the digit that it takes each held-out image for.
    """

    accuracy: float
    losses: tuple[float, ...]
    training_s: float
    step_us: float
    whole_us: float
    whole_peak_bytes: int
    predictions: Array


@dataclass(frozen=True, slots=True)
class Wide:
    """relu(x W^T + b) at m=4096 n=2048 k=256, fused and step by step.

    Args:
        fused_ms, plain_ms: medians.
        ratio: the median over rounds of fused time by plain time.
        fused_bytes, plain_bytes: peak memory allocated.
    """

    fused_ms: float
    plain_ms: float
    ratio: float
    fused_bytes: int
    plain_bytes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both networks and the plan behind the fused one.

    Args:
        epochs, seed: as asked for.
        place: the sentence that says where the products ran and why.
        outcomes: by way of computing.
        explain: the plan of the first hidden layer, as text.
        wide: the same epilogue on a wide layer.
    """

    epochs: int
    seed: int
    place: str
    outcomes: dict[str, Outcome]
    explain: str
    wide: Wide


def compare(digits: Digits, epochs: int, seed: int, on_epoch: Callable[[int, dict[str, float]], None]) -> Comparison:
    """Both networks trained, epoch by epoch in turn, so that a busy machine meets them alike; then memory, in a pass of its own.

    Args:
        digits: from `digits.load`.
        epochs: passes over the training images, at least 1.
        seed: of the initial weights and of the minibatches.
        on_epoch: called after each epoch with the number of epochs done and the losses of both.
    """
    options, sentence = place()
    trainings = {name: Training.start(name, seed, options) for name in WAYS}
    for name in WAYS:
        warm_up(Training.start(name, seed, options), digits)
    random = np.random.default_rng(seed)
    for done in range(1, epochs + 1):
        order = random.permutation(len(digits.labels))
        for training in trainings.values():
            training.epoch(digits, order)
        on_epoch(done, {name: training.losses[-1] for name, training in trainings.items()})
    runs = [lambda t=t: t.gradients(t.parameters, digits.images, digits.labels) for t in trainings.values()]  # type: ignore[misc]
    whole_us = interleaved_us(runs, WHOLE_ROUNDS)
    outcomes = {t.way: outcome(t, digits, us) for t, us in zip(trainings.values(), whole_us, strict=True)}
    return Comparison(epochs, seed, sentence, outcomes, explain(trainings[FUSED].parameters, digits, options), wide(seed, options))


def warm_up(training: Training, digits: Digits) -> None:
    """A few steps of a network that is thrown away: what is planned or loaded once does not count as training."""
    for _ in range(3):
        training.step(digits.images[:BATCH], digits.labels[:BATCH])


def outcome(training: Training, digits: Digits, whole_us: float) -> Outcome:
    """What a trained network is worth, and what it costs."""
    predictions = predict(training.parameters, digits.held_out_images)
    return Outcome(
        accuracy=float((predictions == digits.held_out_labels).mean()),
        losses=tuple(training.losses),
        training_s=sum(training.step_us) / 1e6,
        step_us=statistics.median(training.step_us),
        whole_us=whole_us,
        whole_peak_bytes=peak_bytes(lambda: training.gradients(training.parameters, digits.images, digits.labels)),
        predictions=predictions,
    )


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that `run` has allocated at a time, NumPy's included; it runs once before, unmeasured."""
    run()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        run()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak - before


def place() -> tuple[Options, str]:
    """The options of fused products, and the sentence that says where they run and why: on a GPU if one is there that takes them."""
    options, one = {"device_id": 0}, np.ones((1, 1), np.float32)
    try:
        matmul(one, one, options=options)
    except errors.EpigemmError as error:
        return None, f"On the CPU, where NumPy arrays lie. On no GPU: {_sentences(error)}"
    return options, "On the GPU: MatmulOptions(device_id=0) has NumPy arrays copied there and back at every call."


def _sentences(error: Exception) -> str:
    """An error's lines as one paragraph, each with its full stop."""
    return " ".join(line.strip().removesuffix(".") + "." for line in str(error).splitlines())


def explain(parameters: Parameters, digits: Digits, options: Options) -> str:
    """The plan of the first hidden layer."""
    images = digits.images[:BATCH].T
    with Matmul(parameters.weights[0], images, options=options) as product:
        product.plan(epilog=MatmulEpilog.RELU_AUX_BIAS, epilog_inputs={"bias": parameters.biases[0]})
        return product.explain()


def wide(seed: int, options: Options) -> Wide:
    """Bias and ReLU on a wide layer, both ways, interleaved."""
    random = np.random.default_rng(seed)
    x, w = (random.standard_normal((size, WIDE_K), np.float32) for size in (WIDE_M, WIDE_N))
    bias = random.standard_normal(WIDE_N, np.float32)

    def fused() -> object:
        return matmul(w, x.T, epilog=MatmulEpilog.RELU_BIAS, epilog_inputs={"bias": bias}, options=options)

    def plain() -> object:
        return np.maximum(x @ w.T + bias, 0)

    fused_bytes, plain_bytes = peak_bytes(fused), peak_bytes(plain)
    rounds = [(elapsed_ms(fused), elapsed_ms(plain)) for _ in range(WIDE_ROUNDS)]
    fused_ms, plain_ms = (statistics.median(times) for times in zip(*rounds, strict=True))
    return Wide(fused_ms, plain_ms, statistics.median(f / p for f, p in rounds), fused_bytes, plain_bytes)


def elapsed_ms(run: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e6


def layers() -> str:
    """The network in words: "64-256-128-10"."""
    return "-".join(map(str, SIZES))

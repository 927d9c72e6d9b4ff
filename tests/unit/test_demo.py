"""The demo: both networks learn, agree and are what they say."""

from __future__ import annotations

import io

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("rich")

from rich.console import Console

from epigemm import errors, matmul
from epigemm.demo import digits, network, plot, show, training
from epigemm.demo.network import FUSED, PLAIN, SIZES


@pytest.fixture(scope="module")
def data():
    return digits.load(0)


@pytest.fixture(scope="module")
def compared(data):
    done = []
    result = training.compare(data, 8, 0, lambda epoch, losses: done.append((epoch, losses)))
    assert [epoch for epoch, _ in done] == list(range(1, 9))
    return result


def test_the_data_is_all_of_it_split_once(data):
    assert data.images.shape == (1347, 64)
    assert data.held_out_images.shape == (450, 64)
    assert data.images.dtype == np.float32
    assert data.images.min() == 0
    assert data.images.max() == 1
    rows = {row.tobytes() for row in np.concatenate([data.images, data.held_out_images])}
    assert len(rows) == 1797  # no two digits are alike, so none is on both sides


def gradients(data, samples=48):
    parameters = network.initial(1)
    images, labels = data.images[:samples], data.labels[:samples]
    return parameters, images, labels


def test_fused_and_plain_gradients_agree(data):
    arguments = gradients(data)
    (fused_loss, fused), (plain_loss, plain) = (network.way(way)(*arguments) for way in (FUSED, PLAIN))
    assert fused_loss == pytest.approx(plain_loss, rel=1e-6)
    for mine, other in zip(fused.all(), plain.all(), strict=True):
        assert mine.shape == other.shape
        assert mine.dtype == np.float32
        # A sum over at most 256 terms in another order.
        assert np.abs(mine - other).max() <= 256 * np.finfo(np.float32).eps * np.abs(other).max()


@pytest.mark.parametrize("way", [FUSED, PLAIN])
def test_gradients_are_those_of_the_loss(data, way):
    """Against central differences in float64, along a random direction of each parameter."""
    parameters, images, labels = gradients(data)
    _, found = network.way(way)(parameters, images, labels)
    random = np.random.default_rng(2)
    wide = [x.astype(np.float64) for x in parameters.all()]
    step = 1e-6
    for index, gradient in enumerate(found.all()):
        direction = random.standard_normal(gradient.shape)
        losses = []
        for sign in (1, -1):
            moved = [x + sign * step * direction if i == index else x for i, x in enumerate(wide)]
            at = network.Parameters(moved[: len(SIZES) - 1], moved[len(SIZES) - 1 :])
            losses.append(network.plain_gradients(at, images.astype(np.float64), labels)[0])
        slope = (losses[0] - losses[1]) / (2 * step)
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_both_networks_learn_and_agree(compared):
    fused, plain = compared.outcomes[FUSED], compared.outcomes[PLAIN]
    assert fused.accuracy >= 0.95
    assert plain.accuracy >= 0.95
    assert abs(fused.accuracy - plain.accuracy) <= 2 / 450
    assert fused.losses[-1] < 0.2 * fused.losses[0]
    assert fused.losses == pytest.approx(plain.losses, rel=1e-2)


def test_the_fused_step_needs_less_memory(compared):
    assert 0 < compared.outcomes[FUSED].whole_peak_bytes < compared.outcomes[PLAIN].whole_peak_bytes
    assert compared.wide.fused_bytes < 0.6 * compared.wide.plain_bytes


def test_peak_bytes_counts_what_lives_at_the_same_time():
    def run():
        for _ in range(3):
            np.ones(1 << 20, np.uint8)
        return np.ones(1 << 19, np.uint8)

    assert 1 << 20 <= training.peak_bytes(run) < (1 << 20) + (1 << 16)


def test_training_is_deterministic(data):
    runs = [training.Training.start(FUSED, 3) for _ in range(2)]
    for run in runs:
        run.epoch(data, np.arange(256))
    for one, two in zip(runs[0].parameters.all(), runs[1].parameters.all(), strict=True):
        assert np.array_equal(one, two)


def test_it_says_where_it_ran_and_shows_the_plan(compared):
    options, sentence = training.place()
    assert compared.place == sentence
    assert sentence.startswith("On the CPU, where NumPy arrays lie. On no GPU: " if options is None else "On the GPU: ")
    assert "relu_aux = bitmask(" in compared.explain
    assert ("engines     cpu: " in compared.explain) is (options is None)


def test_where_a_gpu_takes_the_products_it_is_used(monkeypatch):
    """`matmul` stands in for a machine with a GPU: that every product is asked to go there is what is tested."""
    asked = []

    def on_gpu(a, b, *, options, **rest):
        asked.append(options)
        return matmul(a, b, **rest)

    monkeypatch.setattr(training, "matmul", on_gpu)
    monkeypatch.setattr(network, "matmul", on_gpu)
    options, sentence = training.place()
    assert sentence.startswith("On the GPU: ")
    network.way(FUSED, options)(network.initial(0), np.ones((4, 64), np.float32), np.arange(4))
    assert asked == [{"device_id": 0}] * 9  # the probe and eight products


@pytest.mark.parametrize("width", [60, 80, 160])
def test_what_it_prints_fits(compared, data, width):
    out = io.StringIO()
    console = Console(file=out, width=width)
    show.opening(console, data)
    show.result(console, compared, data)
    before_plan = out.getvalue().partition("Where it ran")[0]
    assert max(map(len, before_plan.splitlines())) <= width
    assert f"{compared.outcomes[FUSED].accuracy:.1%}" in before_plan


def test_it_says_which_was_faster(compared):
    fused, plain = compared.outcomes[FUSED], compared.outcomes[PLAIN]
    assert ("the products are tiny" in show.verdict(compared)) is (fused.step_us > plain.step_us)
    assert f"takes {fused.whole_us / plain.whole_us:.2f} of NumPy's time" in show.verdict(compared)


def test_the_json_has_what_is_shown(compared, data):
    found = show.as_json(compared, data)
    assert found["networks"][FUSED]["accuracy"] == compared.outcomes[FUSED].accuracy
    assert found["differing_predictions"] <= 2
    assert found["explain"] == compared.explain.splitlines()


def test_the_picture_is_drawn(compared, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "demo.png"
    plot.require(path)
    plot.draw(compared, path)
    pixels = image.imread(path)
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 100


@pytest.mark.parametrize("name", ["demo.xyz", "missing/demo.png"])
def test_a_picture_that_cannot_be_written_is_refused_at_once(tmp_path, name):
    pytest.importorskip("matplotlib")
    with pytest.raises(errors.OptionError, match="plot"):
        plot.require(tmp_path / name)

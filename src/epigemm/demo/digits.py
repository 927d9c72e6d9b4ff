"""The handwritten digits that scikit-learn ships: 1,797 images of 8 by 8 pixels, split into those to learn from and those held out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epigemm import errors

HELD_OUT = 450
WHITE = 16.0  # the value of the brightest pixel

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Digits:
    """Images as rows, float32 of shape (samples, 64) in [0, 1], and their digits.

    Args:
        images, labels: to learn from.
        held_out_images, held_out_labels: to judge by.
    """

    images: Array
    labels: Array
    held_out_images: Array
    held_out_labels: Array


def load(seed: int = 0) -> Digits:
    """The data, shuffled and split.

    Args:
        seed: of the shuffle.

    Raises:
        errors.EngineUnavailable: scikit-learn, which ships the images, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise errors.missing_package("The demo", "scikit-learn", "demo") from error
    bunch = load_digits()
    order = np.random.default_rng(seed).permutation(len(bunch.target))
    images = np.ascontiguousarray(bunch.data[order] / WHITE, np.float32)
    labels = bunch.target[order]
    return Digits(images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT])

"""What the demo prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from epigemm.demo.digits import Array, Digits
from epigemm.demo.network import FUSED, PLAIN
from epigemm.demo.training import BATCH, WIDE_K, WIDE_M, WIDE_N, Comparison, Outcome, layers

_SHADES = " ░▒▓█"
_IMAGE_COLUMNS, _GAP = 16, 3  # a pixel is two characters wide


def opening(console: Console, digits: Digits) -> None:
    """What is about to happen."""
    console.print(
        f"[bold]A {layers()} network learns handwritten digits[/]: {len(digits.labels)} images to learn from, "
        f"{len(digits.held_out_labels)} held out. Forward by RELU_AUX_BIAS and BIAS, backward by DRELU_BGRAD and BGRADB, so that bias, "
        "activation, mask and bias gradient happen inside the products. Beside it the same network in plain NumPy, step by step: "
        "same start, same minibatches, same optimiser.\n"
    )


def result(console: Console, comparison: Comparison, digits: Digits) -> None:
    """What became of both networks, what it cost, and why it ran as it did."""
    fused, plain = comparison.outcomes[FUSED], comparison.outcomes[PLAIN]
    console.print(samples(digits, fused.predictions, console.width))
    console.print(table(fused, plain, comparison.epochs))
    console.print(f"{agreement(fused, plain)}\n{verdict(comparison)}\n")
    console.print(f"[bold]Where it ran[/]  {escape(comparison.place)}\n[bold]The plan of the first layer[/]")
    console.print("\n".join(f"  {line}" for line in comparison.explain.splitlines()), markup=False, soft_wrap=True)


def samples(digits: Digits, predictions: Array, width: int) -> Text:
    """Some held-out digits, a few that the network gets wrong first, each over what it is taken for; as many as fit."""
    shown = max(1, min(8, (width + _GAP) // (_IMAGE_COLUMNS + _GAP)))
    right = predictions == digits.held_out_labels
    wrong = np.flatnonzero(~right)[: shown // 2]
    chosen = [*wrong, *np.flatnonzero(right)[: shown - len(wrong)]]
    images = [digits.held_out_images[i].reshape(8, 8) for i in chosen]
    text = Text(no_wrap=True)
    for row in range(8):
        lines = ("".join(2 * _SHADES[round(p * (len(_SHADES) - 1))] for p in image[row]) for image in images)
        text.append((" " * _GAP).join(lines).rstrip() + "\n")
    for i in chosen:
        taken, truth = int(predictions[i]), int(digits.held_out_labels[i])
        note = str(taken) if taken == truth else f"{taken}, but is {truth}"
        text.append(note.center(_IMAGE_COLUMNS + _GAP), style="bold green" if taken == truth else "bold red")
    return text.append("\n")


def table(fused: Outcome, plain: Outcome, epochs: int) -> Table:
    """Both side by side."""
    drawn = Table(box=None, padding=(0, 3, 0, 0))
    for heading, justify in (("", "left"), (FUSED, "right"), (PLAIN, "right")):
        drawn.add_column(heading, justify=justify)  # type: ignore[arg-type]
    lines: dict[str, Callable[[Outcome], str]] = {
        "held-out digits told right": lambda o: f"{o.accuracy:.1%}",
        f"training loss after {epochs} epochs": lambda o: f"{o.losses[-1]:.5f}",
        "time training": lambda o: f"{o.training_s:.2f} s",
        f"  of a step on {BATCH} images": lambda o: f"{o.step_us:.0f} µs",
        "time, all images at once": lambda o: f"{o.whole_us / 1e3:.2f} ms",
        "peak memory, all images at once": lambda o: f"{o.whole_peak_bytes / 1e6:.2f} MB",
    }
    for name, cell in lines.items():
        drawn.add_row(name, cell(fused), cell(plain))
    return drawn


def agreement(fused: Outcome, plain: Outcome) -> str:
    """On how many held-out digits the two networks differ."""
    differing = int((fused.predictions != plain.predictions).sum())
    if not differing:
        return f"Both take every one of the {len(fused.predictions)} held-out digits for the same."
    return f"They differ on {differing} of {len(fused.predictions)} held-out digits: float32 sums in another order."


def verdict(comparison: Comparison) -> str:
    """Which was faster, said as it is."""
    fused, plain, wide = comparison.outcomes[FUSED], comparison.outcomes[PLAIN], comparison.wide
    small, whole = fused.step_us / plain.step_us, fused.whole_us / plain.whole_us
    why = ": the products are tiny, and to check and dispatch a call costs more than they do" if small > 1 else ""
    return (
        f"A fused step on {BATCH} images takes {small:.2f} times as long{why}. "
        f"Over all images at once it takes {whole:.2f} of NumPy's time, "
        f"and a wide layer, relu(x Wᵀ + b) of m={WIDE_M} n={WIDE_N} k={WIDE_K}, {wide.ratio:.2f} ({wide.fused_ms:.1f} against "
        f"{wide.plain_ms:.1f} ms) and {wide.fused_bytes / wide.plain_bytes:.2f} of its memory ({wide.fused_bytes / 2**20:.1f} against "
        f"{wide.plain_bytes / 2**20:.1f} MiB)."
    )


def as_json(comparison: Comparison, digits: Digits) -> dict[str, Any]:
    """All of it as JSON takes it."""
    wide = comparison.wide
    return {
        "network": layers(),
        "epochs": comparison.epochs,
        "seed": comparison.seed,
        "batch": BATCH,
        "training_images": len(digits.labels),
        "held_out_images": len(digits.held_out_labels),
        "place": comparison.place,
        "networks": {
            way: {
                "accuracy": o.accuracy,
                "losses": list(o.losses),
                "training_s": o.training_s,
                "step_us": o.step_us,
                "whole_us": o.whole_us,
                "whole_peak_bytes": o.whole_peak_bytes,
            }
            for way, o in comparison.outcomes.items()
        },
        "differing_predictions": int((comparison.outcomes[FUSED].predictions != comparison.outcomes[PLAIN].predictions).sum()),
        "wide": {
            "m": WIDE_M,
            "n": WIDE_N,
            "k": WIDE_K,
            "ratio": wide.ratio,
            "fused_ms": wide.fused_ms,
            "plain_ms": wide.plain_ms,
            "fused_bytes": wide.fused_bytes,
            "plain_bytes": wide.plain_bytes,
        },
        "explain": comparison.explain.splitlines(),
    }

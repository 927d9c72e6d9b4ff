"""The demo's picture: loss curves on the left, time and memory on the right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from epigemm import errors
from epigemm.demo.network import FUSED, PLAIN
from epigemm.demo.training import BATCH, WIDE_K, WIDE_M, WIDE_N, Comparison, layers

_COLOURS = {FUSED: "#0b6e4f", PLAIN: "#e07a1f"}
_GREY = "#555555"


def require(path: Path) -> None:
    """Checks, before minutes are spent, that the picture can be made.

    Raises:
        errors.MissingPackageError: matplotlib is not installed.
        errors.OptionError: the folder does not exist, or the ending is none that matplotlib writes.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise errors.missing_package("--plot", "matplotlib", "demo") from error
    endings = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in endings:
        raise errors.wrong_value("plot", str(path), f"a file that ends in one of .{', .'.join(endings)}")
    if not path.absolute().parent.is_dir():
        raise errors.wrong_value("plot", str(path), "a file in a folder that exists")


def draw(comparison: Comparison, path: Path) -> None:
    """Writes the picture; the file's ending decides its format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 4.6), dpi=150, layout="constrained")
    figure.suptitle(f"A {layers()} network learns handwritten digits: fused products against NumPy, step by step", fontsize=12)
    losses, steps, whole, memory, wide = figure.subplots(1, 5, width_ratios=(2.8, 1, 1, 1, 1))
    _losses(losses, comparison)
    fused, plain = comparison.outcomes[FUSED], comparison.outcomes[PLAIN]
    _bars(steps, f"time of a step\non {BATCH} images", "µs", fused.step_us, plain.step_us, "{:.0f}")
    _bars(whole, "time over\nall images at once", "ms", fused.whole_us / 1e3, plain.whole_us / 1e3, "{:.1f}")
    _bars(memory, "peak memory over\nall images at once", "MB", fused.whole_peak_bytes / 1e6, plain.whole_peak_bytes / 1e6, "{:.1f}")
    title = f"time of a wide layer\nm={WIDE_M} n={WIDE_N} k={WIDE_K}"
    _bars(wide, title, "ms", comparison.wide.fused_ms, comparison.wide.plain_ms, "{:.1f}")
    figure.savefig(path)


def _losses(axes: Any, comparison: Comparison) -> None:
    styles: dict[str, dict[str, Any]] = {FUSED: {"linewidth": 4.5, "alpha": 0.55}, PLAIN: {"linewidth": 1.4, "linestyle": (0, (5, 2))}}
    for way, outcome in comparison.outcomes.items():
        label = f"{way}: {outcome.accuracy:.1%} of held-out digits"
        epochs = range(1, len(outcome.losses) + 1)
        axes.plot(epochs, outcome.losses, color=_COLOURS[way], label=label, **styles[way])
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("mean training loss")
    fused, plain = (comparison.outcomes[way].losses for way in (FUSED, PLAIN))
    apart = max(abs(f - p) / p for f, p in zip(fused, plain, strict=True))
    axes.set_title(f"the losses differ by at most {apart:.1g} of their size", fontsize=10, color=_GREY)
    axes.legend(frameon=False)
    axes.grid(True, which="major", alpha=0.25)
    _bare(axes)


def _bars(axes: Any, title: str, unit: str, fused: float, plain: float, form: str) -> None:
    bars = axes.bar((FUSED, PLAIN), (fused, plain), color=[_COLOURS[FUSED], _COLOURS[PLAIN]], width=0.65)
    axes.bar_label(bars, [f"{form.format(value)} {unit}" for value in (fused, plain)], padding=3, fontsize=9)
    axes.set_title(title, fontsize=10, color=_GREY)
    axes.set_ylim(0, 1.15 * max(fused, plain))
    axes.set_yticks([])
    axes.tick_params(axis="x", length=0, labelsize=9)
    _bare(axes, left=False)


def _bare(axes: Any, left: bool = True) -> None:
    for side in ("top", "right", *(() if left else ("left",))):
        axes.spines[side].set_visible(False)

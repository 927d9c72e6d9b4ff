"""Every predefined epilog on a GPU: its time through cuBLASLt and unfused, relative to the bare product of the same operands.

Usage: python -m epigemm.bench.epilogs RESULT.json [ROUNDS]

The bare product is the fastest of cuBLASLt's first 16 algorithms, found in the same run. All of an epilog's contenders are timed in
interleaved rounds with a cold L2, after their results were compared with the CPU engine's on some columns and with each other.
"""

from __future__ import annotations

import importlib
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from epigemm import tensors
from epigemm.algorithms import Algorithm
from epigemm.api import Matmul, matmul
from epigemm.bench.measure import Ratio
from epigemm.bench.report import write
from epigemm.bench.stamp import stamp
from epigemm.engines.cuda import libraries
from epigemm.enums import MatmulComputeType, MatmulEpilog
from epigemm.errors import UnsupportedEpilogue, UnsupportedProblem
from epigemm.expression.named import NAMED

ROUNDS = 11
BARE, FUSED, EXACT, IN_PLACE = "bare", "fused", "unfused exact", "unfused in_place"
M, N = 4096, 16384  # features, tokens: the transposed view of x Wᵀ + b
_FLUSH_BYTES = 128 << 20  # twice an H200's L2
_COLUMNS = 8  # compared with the CPU engine

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """One column of the table.

    Args:
        dtype: of all operands.
        k: the inner extent.
        compute: name of a MatmulComputeType, "" for the default.
        m, n: D's.
    """

    dtype: str
    k: int
    compute: str = ""
    m: int = M
    n: int = N

    def __str__(self) -> str:
        return f"{self.dtype}{' ' + self.compute if self.compute else ''} m={self.m} n={self.n} k={self.k}"

    @property
    def unit(self) -> float:
        """The relative error of a stored value, or of an operand where products round theirs."""
        return {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(self.dtype, 2.0**-10 if self.compute else 2.0**-20)


TF32 = "COMPUTE_32F_FAST_TF32"
SHAPES = (
    *(Shape(dtype, k) for dtype in ("bfloat16", "float16") for k in (4096, 1024)),
    *(Shape("float32", k, TF32) for k in (4096, 1024)),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One epilog over one shape, measured.

    Args:
        shape, epilog: what.
        auto: the candidate that `engine="auto"` takes, and why.
        predicted_us: by contender, where its engine predicts.
        refusals: by contender, why it did not run.
        times_us: by contender, one number a round.
    """

    shape: Shape
    epilog: str
    auto: str
    predicted_us: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    times_us: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, who: str) -> Ratio | None:
        """Against the bare product, None if it did not run."""
        return Ratio.of(self.times_us[who], self.times_us[BARE]) if who in self.times_us else None

    def as_json(self) -> dict[str, Any]:
        ratios = {who: asdict(Ratio.of(times, self.times_us[BARE])) for who, times in self.times_us.items()}
        medians = {who: round(statistics.median(times), 2) for who, times in self.times_us.items()}
        return {**asdict(self), "median_us": medians, "ratio": ratios}


# ---------------------------------------------------------------- operands and contenders


@dataclass(slots=True)
class Operands:
    """The tensors of one shape on the GPU: w [m, k] row-major, x [k, n] column-major, and what epilogs read.

    Args:
        by_name: the epilogs' inputs.
        x_row: x row-major, for BGRADB.
    """

    shape: Shape
    w: Any
    x: Any
    x_row: Any
    by_name: dict[str, Any]

    @staticmethod
    def normal(shape: Shape) -> Operands:
        """Standard normal numbers; masks and pre-activations as the forward epilogs write them."""
        torch = importlib.import_module("torch")
        dtype = getattr(torch, shape.dtype)
        generator = torch.Generator("cuda").manual_seed(0)

        def draw(*size: int) -> Any:
            return torch.randn(size, device="cuda", dtype=torch.float32, generator=generator).to(dtype)

        w, x, bias = draw(shape.m, shape.k), draw(shape.n, shape.k).t(), draw(shape.m, 1)
        operands = Operands(shape, w, x, x.contiguous(), {"bias": bias})
        for name in ("relu_aux", "gelu_aux"):
            _, extras = matmul(w, x, epilog=f"{name[:4]}_aux", engine="unfused", options=operands.options)
            operands.by_name[name] = extras[name]
        return operands

    @property
    def options(self) -> dict[str, Any]:
        return {"compute_type": MatmulComputeType[self.shape.compute]} if self.shape.compute else {}

    def product(self, x_row: bool) -> Matmul:
        """The product with a column-major D, its x row-major where BGRADB needs that."""
        return Matmul(self.w, self.x_row if x_row else self.x, options={**self.options, "result_order": "col"})

    def inputs(self, epilog: MatmulEpilog | None) -> dict[str, Any] | None:
        names = NAMED[epilog].inputs if epilog is not None else ()
        return {name: self.by_name[name] for name in names} or None

    def sliced(self, epilog: MatmulEpilog) -> Any:
        """D's first columns by the CPU engine."""
        x = (self.x_row if epilog == MatmulEpilog.BGRADB else self.x)[:, :_COLUMNS]
        inputs = {name: (t if name == "bias" else t[:, :_COLUMNS]).cpu() for name, t in (self.inputs(epilog) or {}).items()}
        result = matmul(self.w.cpu(), x.cpu(), epilog=epilog, epilog_inputs=inputs or None, options=self.options, engine="cpu")
        return (result[0] if isinstance(result, tuple) else result).double().numpy()


def bare(operands: Operands, x_row: bool) -> Run:
    """The fastest of cuBLASLt's first 16 algorithms for the plain product."""
    product = operands.product(x_row)
    product.plan(engine="cublaslt", preferences={"limit": 16})
    product.autotune(iterations=5)
    return product.execute


def contenders(operands: Operands, epilog: MatmulEpilog) -> tuple[dict[str, Run], dict[str, float], dict[str, str]]:
    """Those that run the epilog, what they are predicted to take, and the refusals of the others."""
    runs: dict[str, Run] = {}
    predicted: dict[str, float] = {}
    refusals: dict[str, str] = {}
    for engine, wanted in (("cublaslt", {FUSED: None}), ("unfused", {EXACT: "exact", IN_PLACE: "in_place"})):
        product = operands.product(epilog == MatmulEpilog.BGRADB)
        try:
            found = product.plan(epilog=epilog, epilog_inputs=operands.inputs(epilog), engine=engine)
        except (UnsupportedEpilogue, UnsupportedProblem) as refusal:
            refusals |= {who: str(refusal).splitlines()[-1].strip() for who in wanted}
            continue
        for who, way in wanted.items():
            algorithm = next((a for a in found if way is None or a.candidate["way"] == way), None)
            if algorithm is None:
                refusals[who] = "the product is rounded once in D's memory too"
                continue
            runs[who] = _execution(product, algorithm)
            if algorithm.candidate.predicted_us is not None:
                predicted[who] = round(algorithm.candidate.predicted_us, 2)
    return runs, predicted, refusals


def _execution(product: Matmul, algorithm: Algorithm) -> Run:
    return lambda: product.execute(algorithm=algorithm)


def chosen(operands: Operands, epilog: MatmulEpilog) -> str:
    """What `engine="auto"` takes, and why."""
    with operands.product(epilog == MatmulEpilog.BGRADB) as product:
        product.plan(epilog=epilog, epilog_inputs=operands.inputs(epilog))
        return next(line for line in product.explain().splitlines() if line.startswith("plan")).removeprefix("plan").strip()


# ---------------------------------------------------------------- measuring


def verify(operands: Operands, epilog: MatmulEpilog, runs: dict[str, Run]) -> None:
    """Asserts that each contender's D is the CPU engine's on some columns, and that their further outputs agree.

    Raises:
        AssertionError: one is off by more than its roundings.
    """
    want = operands.sliced(epilog)
    # A product that is rounded before it is multiplied by a slope of at most 1.13, and rounded again: 4 units of the largest value.
    allowed = 4 * operands.shape.unit * max(1.0, float(np.abs(want).max()))
    sums: dict[str, Any] = {}
    for who, run in runs.items():
        result = run()
        d, extras = result if isinstance(result, tuple) else (result, {})
        off = float(np.abs(d[:, :_COLUMNS].double().cpu().numpy() - want).max())
        if not off <= allowed:
            raise AssertionError(f"{operands.shape} {epilog.name}, {who}: D is off by {off:.3g}, and {allowed:.3g} is allowed")
        for name, value in extras.items():
            if value.dim() == 1:
                found = value.double().cpu().numpy()
                first = sums.setdefault(name, found)
                if not np.abs(found - first).max() <= 16 * operands.shape.unit * np.abs(first).max():
                    raise AssertionError(f"{operands.shape} {epilog.name}, {who}: {name} differs from the first contender's")


def times_us(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """One number a round of each, by events, in a random order, with nothing of the operands in L2."""
    core, stream = libraries.open_driver(), tensors.LIBRARIES["torch"].stream("cuda:0")
    flush = core.allocate(0, _FLUSH_BYTES, stream)
    order, shuffle = list(runs), random.Random(0).shuffle
    events: dict[str, list[tuple[Any, Any]]] = {who: [] for who in runs}
    try:
        for _ in range(rounds):
            shuffle(order)
            for who in order:
                core.fill(0, flush, 0, _FLUSH_BYTES, stream)
                start, end = core.Event(0), core.Event(0)
                start.record(stream)
                runs[who]()
                end.record(stream)
                events[who].append((start, end))
        core.synchronize(0, stream)
        return {who: [round(end.elapsed_ms(start) * 1e3, 2) for start, end in pairs] for who, pairs in events.items()}
    finally:
        core.free(0, flush, stream)


def measure(shape: Shape, rounds: int = ROUNDS, epilogs: tuple[MatmulEpilog, ...] = tuple(NAMED)) -> Iterator[Row]:
    """Each epilog over one shape, verified and timed."""
    operands = Operands.normal(shape)
    plain = {x_row: bare(operands, x_row) for x_row in (False, True)}
    for epilog in epilogs:
        runs, predicted, refusals = contenders(operands, epilog)
        verify(operands, epilog, runs)
        all_runs = {BARE: plain[epilog == MatmulEpilog.BGRADB], **runs}
        yield Row(shape, epilog.name, chosen(operands, epilog), predicted, refusals, times_us(all_runs, rounds))


def device() -> dict[str, str]:
    """GPU, driver and library, for the stamp."""
    core = libraries.open_cublaslt()
    libraries.open_driver()
    return {"gpu": core.device_name(0), "driver": str(core.driver_version()), "cublasLt": str(core.cublaslt_version())}


def report(rows: list[Row], rounds: int) -> dict[str, Any]:
    """The stamped result as JSON takes it."""
    data = {"schema": 1, "suite": "epilogs", "rounds": rounds, "stamp": {**stamp(), **device()}}
    return {**data, "rows": [row.as_json() for row in rows]}


def line(row: Row) -> str:
    """A row as text: time over the bare product's, and what auto takes."""
    shown = []
    for who in (FUSED, EXACT, IN_PLACE):
        ratio = row.ratio(who)
        shown.append(f"{who} {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio is not None else f"{who} refused")
    return f"{row.shape} {row.epilog:<14} {', '.join(shown)}; auto: {row.auto.split('(')[0]}"


def main(result: Path, rounds: int = ROUNDS) -> None:
    """Measure every shape, print its lines as they come, write the result."""
    rows = []
    for shape in SHAPES:
        for row in measure(shape, rounds):
            rows.append(row)
            print(line(row), flush=True)
    write(report(rows, rounds), result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))

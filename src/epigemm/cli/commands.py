"""The subcommands: each gathers values, then prints them as a person or as a program wants them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import epigemm
from epigemm import errors

app = typer.Typer(
    help="Matrix products whose epilogue runs inside the product's own kernel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# Results go to stdout; progress to stderr, so that `--json` can be piped.
console, progress_console = Console(highlight=False), Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Engine = Annotated[str, typer.Option(help="The engine to use; `auto` lets one be chosen.")]


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        print(epigemm.__version__)
        raise typer.Exit


@app.command(short_help="Engines and libraries found and missing.")
def info(as_json: AsJson = False) -> None:
    """Versions, engines and libraries found and missing, what to install, BLAS, the store."""
    from epigemm.cli.info import gather, table

    found = gather()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        console.print(table(found))


@app.command(short_help="Train a network on handwritten digits.")
def demo(
    epochs: Annotated[int, typer.Option(min=1, max=1000, help="Passes over the training images.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of the split, the initial weights and the minibatches.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw losses, times and memory into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a network on handwritten digits through fused products, and the same one step by step."""
    from epigemm.demo import digits, show, training

    data = digits.load(seed)
    if plot is not None:
        from epigemm.demo.plot import require

        require(plot)
    if not as_json:
        show.opening(console, data)
    with bar() as progress:
        task = progress.add_task("training both networks", total=epochs)
        result = training.compare(data, epochs, seed, lambda done, _: progress.update(task, completed=done))
    if as_json:
        print(json.dumps(show.as_json(result, data), indent=1))
    else:
        show.result(console, result, data)
    if plot is not None:
        from epigemm.demo.plot import draw

        draw(result, plot)
        if not as_json:
            console.print(f"\npicture: {plot}", soft_wrap=True)


@app.command(short_help="Measure against eager PyTorch and NumPy.")
def bench(
    suite: Annotated[
        str, typer.Argument(help="What to measure: linear, or smoke to see that all runs; on a GPU host, headline.")
    ] = "linear",
    engine: Engine = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved timings of each contender; 7 or more to be quoted.")] = 11,
    patience: Annotated[float, typer.Option(min=0, help="Seconds a case in which rounds that others disturb are timed again.")] = 30,
    memory: Annotated[bool, typer.Option(help="Measure peak memory over a 1 GiB output too (Linux).")] = True,
    to: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the stamped result; - prints it.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a bar is missed.")] = False,
) -> None:
    """Measure fused products against the same in eager PyTorch and in NumPy, verified, on the same threads."""
    from epigemm.bench import report
    from epigemm.bench.suites import DEVICE_SUITES, SUITES

    if suite in DEVICE_SUITES:
        _bench_on_device(suite, "auto" if engine == "cpu" else engine, rounds, to, check)
        return
    if suite not in SUITES:
        raise errors.wrong_value("suite", suite, f"one of {', '.join((*SUITES, *DEVICE_SUITES))}")
    measured = measure(suite, engine, rounds, patience, memory)
    data = measured.as_json()
    if str(to) == "-":
        print(report.text(data), end="")
    else:
        console.print(report.table(measured))
        for line in report.memory_lines(measured):
            console.print(line)
    if to is not None and str(to) != "-":
        report.write(data, to)
        console.print(f"written to {to}", soft_wrap=True)
    if check and not measured.holds:
        raise typer.Exit(1)


def _bench_on_device(suite: str, engine: str, rounds: int, to: Path | None, check: bool) -> None:
    import importlib

    from epigemm.bench import device, report
    from epigemm.bench.suites import DEVICE_SUITES

    torch = device.torch_with_gpu()
    groups: list[Any] = []
    data: dict[str, Any] = {}
    for group in importlib.import_module(DEVICE_SUITES[suite]).measure(torch, engine, rounds):
        groups.append(group)
        data = device.as_json(
            suite, engine, max((len(t) for g in groups for t in g.times.values()), default=0), groups, device.stamp(torch)
        )
        if to is not None and str(to) != "-":
            report.write(data, to)  # a group at a time: what comes later may fail
    print(report.text(data) if str(to) == "-" else "\n".join(device.lines(data)))
    if check and not data["holds"]:
        raise typer.Exit(1)


def measure(suite: str, engine: str, rounds: int, patience_s: float, with_memory: bool) -> Any:
    """The report of one suite, with a progress bar."""
    from epigemm.bench import baselines, memory, stamp
    from epigemm.bench.measure import measure as measure_case
    from epigemm.bench.report import Report
    from epigemm.bench.suites import SUITES

    baselines.share_threads()
    cases = SUITES[suite]
    with_memory = with_memory and memory.supported()
    rows = []
    with bar() as progress:
        task = progress.add_task(suite, total=len(cases) * rounds + (len(memory.CONTENDERS) if with_memory else 0))
        for case in cases:
            progress.update(task, description=str(case))
            rows.append(measure_case(case, engine, rounds, patience_s, lambda: progress.advance(task)))
        progress.update(task, description="peak memory")
        peaks = memory.measure(engine, lambda: progress.advance(task)) if with_memory else []
    return Report(suite, engine, rounds, stamp.stamp(), tuple(rows), tuple(peaks))


@app.command(short_help="Which engine would run a product, and why.")
def explain(
    problem: Annotated[str, typer.Argument(help='As in "m=4096 n=11008 k=4096 bf16 gelu_bias".')],
    engine: Engine = "auto",
    as_json: AsJson = False,
) -> None:
    """Which engine would run a product with a predefined epilog, how, and why.

    Nothing is computed. For an epilogue of yours: Matmul(a, b), plan(epilog=...), then explain().
    """
    from epigemm.cli import problems

    text = problems.explain(problem, engine)
    print(json.dumps({"problem": problem, "explain": text.splitlines()}, indent=1) if as_json else text)


def bar() -> Progress:
    """A progress bar that leaves nothing behind; none where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=progress_console, transient=True, disable=not progress_console.is_terminal)

"""The one selector: which engine runs a problem."""

from __future__ import annotations

from epigemm import engines, errors
from epigemm.expression.nodes import Expression
from epigemm.plans import Answer, Candidate, Plan
from epigemm.problem import Problem

AUTO = "auto"


def select(problem: Problem, expression: Expression, engine: str = AUTO, limit: int = 8) -> Plan:
    """The plan that `matmul` runs for this problem.

    The first of these that applies:
      1. `engine` is a name: that engine, or its refusal is raised.
      2. the engine with the lowest predicted time among those of the problem's device that accept; one that predicts nothing comes last.

    Args:
        problem: shapes, strides, dtypes, device.
        expression: the checked epilogue.
        engine: "auto", or a name of `engines.ENGINES`.
        limit: how many candidates to keep.

    Returns:
        A plan with at least one candidate, best first.

    Raises:
        errors.UnsupportedProblem: the named engine, or every engine, refuses; the message holds their sentences.
        errors.EngineUnavailable: no engine computes on the problem's device.
        errors.PlanningError: `limit` is 0.
    """
    if limit < 1:
        raise errors.no_algorithm([f"preferences.limit is {limit}"])
    names = engines.for_device(problem.device) if engine == AUTO else (engine,)
    if engine != AUTO:
        engines.get(engine)
        if engine not in engines.named_for_device(problem.device):
            raise errors.engine_of_other_device(engine, problem.device, engines.for_device(problem.device))
    if not names:
        why = "none of the engines of this version computes there"
        raise errors.engine_unavailable(f"for {problem.device}", why, "Move the operands to the CPU.")
    answers, offers = _ask(names, problem, expression, limit)
    if not offers:
        raise errors.all_refuse([(a.engine, a.refusal) for a in answers], str(problem))
    best = min(offers, key=lambda name: _predicted(offers[name][0].predicted_us))
    reason = f"engine={engine!r} was asked for" if engine != AUTO else _why(best, len(offers), len(answers))
    notes = engines.get(best).notes(problem, expression)
    return Plan(problem, expression, offers[best][:limit], answers, reason, notes)


def _ask(
    names: tuple[str, ...], problem: Problem, expression: Expression, limit: int
) -> tuple[tuple[Answer, ...], dict[str, tuple[Candidate, ...]]]:
    """Each engine's answer, and what those that accept offer."""
    answers: list[Answer] = []
    offers: dict[str, tuple[Candidate, ...]] = {}
    for name in names:
        refusal = engines.get(name).supports(problem, expression)
        if refusal is None:
            offers[name] = engines.get(name).candidates(problem, expression, limit)
            answers.append(Answer(name, candidate=offers[name][0]))
        else:
            answers.append(Answer(name, refusal=str(refusal)))
    return tuple(answers), offers


def _predicted(predicted_us: float | None) -> float:
    return float("inf") if predicted_us is None else predicted_us


def _why(best: str, accepted: int, asked: int) -> str:
    if asked == 1:
        return f"{best} is the only engine of this device"
    return f"{best} is the only engine that accepts" if accepted == 1 else f"{best} has the lowest predicted time of {accepted}"

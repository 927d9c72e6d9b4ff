"""What an engine is: it accepts or refuses a problem, offers ways to run it, prepares one and runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from epigemm.engines import stored
from epigemm.expression.nodes import Expression
from epigemm.plans import Candidate
from epigemm.problem import Problem


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an engine does not run a problem: a sentence that names the node, dtype or layout at fault and the remedy."""

    sentence: str

    def __str__(self) -> str:
        return self.sentence


@dataclass(slots=True)
class Call:
    """The data of one run. For the CPU engine every tensor is a NumPy array, for a GPU engine an address as an integer.

    Args:
        a, b, c, d: as the problem describes them, the batch not yet broadcast.
        inputs: the epilogue's inputs by name.
        outputs: the tensors of the expression's outputs besides D, by name, as `engines.outputs.operand` describes them.
        alpha, beta: the host scalars, scales of narrow operands already folded in. alpha = 0 never reads A or B, beta = 0 never reads C.
        stream: the raw stream of a GPU call.
        workspace: (bytes) -> an address of the user's allocator for work on `stream`, or 0, which like None means: have your own.
    """

    a: Any
    b: tuple[Any, ...]
    c: Any
    d: Any
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    alpha: complex | float = 1.0
    beta: complex | float = 0.0
    stream: int = 0
    workspace: Callable[[int], int] | None = None


@dataclass(frozen=True, slots=True)
class DirectLaunch:
    """A run that is one launch with alpha = 1 and beta = 0.

    Args:
        run: (*addresses, stream) -> None.
        names: whose addresses, in order: "a", "b", "d", an input or an output; "" is the address 0.
    """

    run: Callable[..., None]
    names: tuple[str, ...]


class AbstractExecutable(ABC):
    """A prepared candidate: everything that does not change between calls is done."""

    @abstractmethod
    def run(self, call: Call) -> None:
        """Compute into `call.d` and `call.outputs`."""

    def direct(self) -> DirectLaunch | None:
        """The launch that the direct path calls; None, as here, where a run is more than one launch or needs more than addresses."""
        return None


class AbstractEngine(ABC):
    """The interface of `engines/<name>/`. Engines hold no user data and may be used from any thread."""

    name: str

    @abstractmethod
    def supports(self, problem: Problem, expression: Expression) -> Refusal | None:
        """None if this engine runs the problem with this checked expression, else why not."""

    @abstractmethod
    def candidates(self, problem: Problem, expression: Expression, limit: int) -> tuple[Candidate, ...]:
        """Up to `limit` ways to run a problem that `supports` accepted, the one expected to be fastest first."""

    def applicable_algorithm_ids(self, problem: Problem, expression: Expression, limit: int = 8) -> list[int]:
        """Numbers of up to `limit` algorithms that could run the problem: here, positions among the candidates."""
        return list(range(len(self.candidates(problem, expression, limit))))[:limit]

    def capabilities(self, candidate: Candidate) -> Any:
        """What a candidate can do: here, the names of its settings."""
        return tuple(name for name, _ in candidate.config)

    def stored_for(self, problem: Problem, expression: Expression) -> dict[str, Any]:
        """What a stored candidate is valid for, as JSON's types: format, engine, problem and versions."""
        problem_text, versions = stored.problem_text(problem, expression), stored.versions(problem.device)
        return {"schema": stored.SCHEMA, "engine": self.name, "problem": problem_text, "versions": versions}

    def encoded(self, candidate: Candidate) -> dict[str, Any]:
        """A candidate as JSON's types."""
        return stored.encoded(candidate)

    def decoded(self, data: Mapping[str, Any]) -> Candidate:
        """The candidate that `encoded` wrote; `prepare` checks it.

        Raises:
            errors.AlgorithmError: the data is damaged.
        """
        return stored.decoded(self.name, data)

    def to_data(self, problem: Problem, expression: Expression, candidate: Candidate) -> dict[str, Any]:
        """A candidate as JSON's types, with what it is valid for."""
        return {**self.stored_for(problem, expression), **self.encoded(candidate)}

    def from_data(self, problem: Problem, expression: Expression, data: Mapping[str, Any]) -> Candidate:
        """The candidate that `to_data` wrote.

        Raises:
            errors.AlgorithmError: it was written for something else, the message says for what; or it is damaged.
        """
        stored.check(data, self.stored_for(problem, expression))
        return self.decoded(data)

    @abstractmethod
    def notes(self, problem: Problem, expression: Expression) -> tuple[str, ...]:
        """What a user may want to know of this engine's way with an accepted problem: what it copies, where it deviates."""

    @abstractmethod
    def prepare(self, problem: Problem, expression: Expression, candidate: Candidate) -> AbstractExecutable:
        """Make one candidate ready to run."""

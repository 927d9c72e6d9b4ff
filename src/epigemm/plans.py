"""Plan: which engine runs a problem, how, and why; and the bounded in-process cache of plans."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from epigemm.expression import format
from epigemm.expression.nodes import Expression
from epigemm.problem import Problem

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way in which an engine can run a problem.

    Args:
        engine: the engine's name.
        config: its settings as sorted (name, value) pairs, data that can be printed and stored: ("panel_rows", 256).
        workspace_bytes: what a run allocates besides the outputs.
        predicted_us: expected time, None where the engine does not predict.
    """

    engine: str
    config: tuple[tuple[str, Hashable], ...] = ()
    workspace_bytes: int = 0
    predicted_us: float | None = None

    def __getitem__(self, name: str) -> Any:
        return dict(self.config)[name]

    def __str__(self) -> str:
        inside = ", ".join(f"{k}={v}" for k, v in self.config)
        return f"{self.engine}({inside})"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one engine said when it was asked: its first candidate, or the sentence with which it refused."""

    engine: str
    candidate: Candidate | None = None
    refusal: str = ""

    def __str__(self) -> str:
        if self.candidate is None:
            return f"{self.engine}: refuses: {self.refusal}"
        predicted = self.candidate.predicted_us
        return f"{self.engine}: {self.candidate}" + (f", predicted {predicted:.0f} us" if predicted is not None else "")


@dataclass(frozen=True, slots=True)
class Plan:
    """How one problem will be run.

    Args:
        problem: what is computed.
        expression: the checked epilogue.
        candidates: ways to run it, best first; `candidates[0]` is taken.
        answers: what each engine that was asked said.
        reason: why this engine was taken, one sentence.
        notes: what else a user may want to know: operands copied, deviations.
    """

    problem: Problem
    expression: Expression
    candidates: tuple[Candidate, ...]
    answers: tuple[Answer, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        return self.candidates[0].engine

    @property
    def workspace_bytes(self) -> int:
        """The most that a run of any of the candidates allocates besides the outputs."""
        return max(c.workspace_bytes for c in self.candidates)

    def explain(self) -> str:
        """The problem, the epilogue, what each engine answered, what is taken and why, as lines of text."""
        lines = [f"problem     {self.problem}"]
        text = format.text(self.expression).splitlines() or [""]
        lines += [f"{'expression' if i == 0 else '':<12}{line}" for i, line in enumerate(text)]
        lines += [f"{'engines' if i == 0 else '':<12}{answer}" for i, answer in enumerate(self.answers)]
        lines += [f"plan        {self.candidates[0]}, workspace {self.workspace_bytes} bytes: {self.reason}"]
        lines += [f"{'notes' if i == 0 else '':<12}{note}" for i, note in enumerate(self.notes)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"Plan({self.candidates[0]}, workspace_bytes={self.workspace_bytes})"


# One for all caches: it is held for some dictionary operations only.
_lock = threading.Lock()


def _free_lock() -> None:
    """In a forked child: a thread that held the lock is gone, and would hold it for ever."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_lock)


class PlanCache(Generic[V]):
    """A bounded, thread-safe, least-recently-used map from everything that decides a plan to the prepared plan."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The entry for `key`, made by `make()` on a miss. Two threads may both make it; one result is kept."""
        with _lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        made = make()
        with _lock:
            kept = self._entries.setdefault(key, made)
            self._entries.move_to_end(key)
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)
            return kept

    def clear(self) -> None:
        with _lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

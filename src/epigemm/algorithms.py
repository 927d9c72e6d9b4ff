"""Algorithm: one way to run a planned product, as the user holds, changes and stores it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from epigemm import engines, errors
from epigemm.engines import stored
from epigemm.expression.nodes import Expression
from epigemm.plans import Candidate
from epigemm.problem import Problem

# Set by the library; a change of them would change nothing, or not what is run.
_READ_ONLY = ("algorithm_id", "capabilities", "data", "engine", "waves")


class Algorithm:
    """One way to run a planned product: what `Matmul.plan` returns, best first.

    Its settings are attributes (`tile` and `stages` of cuBLASLt's algorithms, `panel_rows` of the CPU engine); setting one changes what
    `execute` runs. Two algorithms are equal only if they are the same object.

    Args:
        candidate: the engine and its settings.
        origin: the problem and the epilogue that it was planned for, where known.

    Example:
        >>> import numpy as np, epigemm as eg
        >>> a, b = np.ones((4, 8), np.float32), np.ones((8, 4), np.float32)
        >>> data = eg.Matmul(a, b).plan()[0].to_data()
        >>> algorithms = eg.Matmul(a, b).plan(algorithms=[eg.Algorithm.from_data(data)])
    """

    __slots__ = ("_header", "_origin", "candidate")

    candidate: Candidate
    _origin: tuple[Problem, Expression] | None
    _header: dict[str, Any] | None

    def __init__(self, candidate: Candidate, origin: tuple[Problem, Expression] | None = None) -> None:
        object.__setattr__(self, "candidate", candidate)
        object.__setattr__(self, "_origin", origin)
        object.__setattr__(self, "_header", None)

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self.candidate.engine

    @property
    def capabilities(self) -> Any:
        """What it can do: of cuBLASLt's an `AlgorithmCapabilities`, asked of the library; of others the names of their settings."""
        return engines.get(self.engine).capabilities(self.candidate)

    @property
    def algorithm_id(self) -> int:
        """Its number, as `Matmul.applicable_algorithm_ids` lists them: cuBLASLt's own; of others the position among the engine's
        candidates, -1 where its settings are none of these.

        Raises:
            errors.AlgorithmError: its problem is not known.
        """
        config = dict(self.candidate.config)
        if "algorithm_id" in config:
            return int(config["algorithm_id"])  # type: ignore[call-overload, no-any-return]
        problem, expression = self._planned_for()
        found = engines.get(self.engine).candidates(problem, expression, 1 << 20)
        return next((i for i, x in enumerate(found) if x.config == self.candidate.config), -1)

    # ------------------------------------------------------------ storing

    def to_data(self) -> dict[str, Any]:
        """Itself as JSON's types, with the problem and the versions that it is valid for.

        Raises:
            errors.AlgorithmError: its problem is not known, because it was pickled.
        """
        engine = engines.get(self.engine)
        if self._header is not None:
            return {**self._header, **engine.encoded(self.candidate)}
        return engine.to_data(*self._planned_for(), self.candidate)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Algorithm:
        """The algorithm that `to_data` wrote; `plan(algorithms=[it])` checks that it is one for the problem, the library and the device.

        Raises:
            errors.AlgorithmError: the data is damaged, or of another format.
            errors.EngineUnavailable: the library that reads its settings is missing.
        """
        if not isinstance(data, Mapping) or any(name not in data for name in ("schema", "engine", "problem", "versions")):
            raise errors.damaged_algorithm("schema, engine, problem or versions are missing")
        stored.check(data, {"schema": stored.SCHEMA})
        made = cls(engines.get(str(data["engine"])).decoded(data))
        header = {"schema": stored.SCHEMA, "engine": made.engine, "problem": data["problem"], "versions": data["versions"]}
        object.__setattr__(made, "_header", header)
        return made

    def check(self, problem: Problem, expression: Expression) -> None:
        """Takes the problem for its own, unless it was stored for another.

        Raises:
            errors.AlgorithmError: it was stored for another problem, library or device; the message says which.
        """
        if self._header is not None:
            stored.check(self._header, engines.get(self.engine).stored_for(problem, expression))
        object.__setattr__(self, "_origin", (problem, expression))

    def _planned_for(self) -> tuple[Problem, Expression]:
        if self._origin is None:
            raise errors.unbound_algorithm()
        return self._origin

    # ------------------------------------------------------------ settings

    def __getattr__(self, name: str) -> Hashable:
        config = dict(self.candidate.config)
        if name in config:
            return config[name]
        known = ", ".join(config) or "no settings"
        raise AttributeError(f"An algorithm of the engine {self.engine!r} has no {name!r}. It has: {known}.")

    def __setattr__(self, name: str, value: Hashable) -> None:
        if name == "candidate":
            object.__setattr__(self, name, value)
            return
        if name in _READ_ONLY:
            raise errors.read_only_setting(name)
        old = self.__getattr__(name)
        if not isinstance(value, Hashable) or (isinstance(old, int) and not isinstance(value, int)):
            raise errors.wrong_value(name, value, "an integer" if isinstance(old, int) else f"as {old!r} is")
        config = tuple((key, value if key == name else old) for key, old in self.candidate.config)
        object.__setattr__(self, "candidate", replace(self.candidate, config=config, predicted_us=None))

    def __reduce__(self) -> tuple[type[Algorithm], tuple[Candidate]]:
        return Algorithm, (self.candidate,)

    def __repr__(self) -> str:
        return f"Algorithm({self.candidate})"

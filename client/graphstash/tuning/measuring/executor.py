"""The interface that a search measures with."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from graphstash.tuning.measuring.measurement import Measurement, Method
from graphstash.tuning.measuring.target import Target
from graphstash.tuning.space import Value

__all__ = ["Executor", "MakeExecutor"]


class Executor(ABC):
    """Measures configurations of a target, in processes that may crash; a context manager.

    Attributes:
        workers: maximum configurations in progress.
    """

    workers: int
    _done: list[Measurement]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Kill all workers, even busy ones."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Number of submitted configurations that `results` has not returned yet."""

    @abstractmethod
    def submit(self, configuration: Mapping[str, Value]) -> None:
        """Queue a configuration; `results` returns its measurement."""

    def results(self) -> list[Measurement]:
        """Return the available results; wait for one if configurations are pending.

        Raises:
            MeasuringError: nothing can be measured.
        """
        while self.pending and not self._done:
            self._advance()
        found = [*self._done]
        self._done.clear()
        return found

    def compare(self, configurations: Sequence[Mapping[str, Value]]) -> list[Measurement]:
        """Measure configurations in turns on one machine, without other work of this executor.

        Raises:
            MeasuringError: nothing can be measured.
            RuntimeError: other configurations are pending.
        """
        if self.pending:
            raise RuntimeError(
                f"{self.pending} configurations are pending: take their results first"
            )
        return self._compare(configurations)

    @abstractmethod
    def _advance(self) -> None:
        """Hand out work, wait for an event, and collect results."""

    @abstractmethod
    def _compare(self, configurations: Sequence[Mapping[str, Value]]) -> list[Measurement]:
        """Implement `compare`; no configuration is pending."""


class MakeExecutor(Protocol):
    """Creates an executor: `Pool`, `RayPool`, or a `partial` of one."""

    def __call__(self, target: Target, *, workers: int = 1, method: Method) -> Executor:
        """Return an executor for a target."""

"""What a search measures with."""

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
        workers: how many configurations it takes in hand at a time.
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
        """Ends all workers, whatever they do."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """How many configurations were submitted and not yet returned by `results`."""

    @abstractmethod
    def submit(self, configuration: Mapping[str, Value]) -> None:
        """Queues a configuration; `results` has what comes of it."""

    def results(self) -> list[Measurement]:
        """Waits for a result, and returns that and all others that are there; none is pending then
        when there is none.

        Raises:
            MeasuringError: when nothing can be measured.
        """
        while self.pending and not self._done:
            self._advance()
        found = [*self._done]
        self._done.clear()
        return found

    def compare(self, configurations: Sequence[Mapping[str, Value]]) -> list[Measurement]:
        """Measures configurations in turns, on one machine, beside no others.

        Raises:
            MeasuringError: as `results`.
            RuntimeError: while other configurations are pending.
        """
        if self.pending:
            raise RuntimeError(
                f"{self.pending} configurations are pending: take their results first"
            )
        return self._compare(configurations)

    @abstractmethod
    def _advance(self) -> None:
        """Hands out work, waits until something happens, and takes what has come."""

    @abstractmethod
    def _compare(self, configurations: Sequence[Mapping[str, Value]]) -> list[Measurement]:
        """Measures in turns; nothing else is pending."""


class MakeExecutor(Protocol):
    """`Pool`, `RayPool`, or a `partial` of one."""

    def __call__(self, target: Target, *, workers: int = 1, method: Method) -> Executor:
        """An executor for a target."""

"""The interface of a kernel to tune."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, TypeAlias

from graphstash.tuning.space import Value

__all__ = ["Kernel", "Target"]

Kernel: TypeAlias = Callable[[], object]
"""A built configuration. A call runs it once, and returns when the result is complete."""


class Target(ABC):
    """Builds, checks and runs configurations.

    A target is pickled once into each measuring process, which calls all methods except `describe`.
    Create inputs and the reference result in `prepare`, so that the pickle stays small.
    """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return JSON, equal for targets whose costs on equal machines are comparable."""

    def prepare(self) -> None:  # noqa: B027 - optional
        """Prepare a measuring process, once, before the first build.

        Raises:
            Exception: nothing can be measured here; ends the search.
        """

    @abstractmethod
    def build(self, configuration: Mapping[str, Value]) -> Kernel:
        """Compile a configuration.

        Raises:
            Exception: compiling fails; counts as failure "compile", a `MemoryError` as "memory".
        """

    def check(self, kernel: Kernel) -> bool:
        """Run a kernel once, and return whether its result is right.

        Called twice before the first sample and once after the last. Fill the outputs with garbage
        before each run, to detect a kernel that skips elements or adds to old values.
        """
        kernel()
        return True

    def renew(self) -> None:  # noqa: B027 - optional
        """Change the values of the inputs in place, and the result that `check` expects.

        Called before a kernel's last check, to detect a kernel that repeats an earlier result. Also
        called after a kernel fails before its first sample, as it may have written into the inputs.
        """

    def cost(self, kernel: Kernel, calls: int) -> float:
        """Return the cost of a call, finite and above 0. Default: mean seconds of the calls.

        Args:
            kernel: the kernel to measure; `check` has accepted it.
            calls: number of calls, 1 or more, that take long enough for the host's clock. A target
                with a more precise clock, such as a GPU's, may ignore it.
        """
        started = perf_counter()
        for _ in range(calls):
            kernel()
        return (perf_counter() - started) / calls

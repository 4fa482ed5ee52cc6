"""What a search tunes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, TypeAlias

from graphstash.tuning.space import Value

__all__ = ["Kernel", "Target"]

Kernel: TypeAlias = Callable[[], object]
"""A configuration that was built. A call runs it once and returns when its result is complete."""


class Target(ABC):
    """Builds, checks and runs configurations.

    It is pickled once into each measuring process, where all methods but `describe` are called; so
    keep small what it carries, and make inputs and the reference result in `prepare`.
    """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What is tuned, as JSON: equal where costs can be compared on equal machines."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to do
        """Called once in each measuring process before anything is built.

        Raises:
            Exception: nothing can be measured here; ends the search.
        """

    @abstractmethod
    def build(self, configuration: Mapping[str, Value]) -> Kernel:
        """Compiles a configuration.

        Raises:
            Exception: it does not compile; counted as the failure "compile".
        """

    def check(self, kernel: Kernel) -> bool:
        """Run a kernel once, and return whether its result is right.

        Called twice before the first sample and again after the last one. Write garbage into the
        outputs before each run: a kernel may leave out elements, or add to what is there.
        """
        kernel()
        return True

    def renew(self) -> None:  # noqa: B027 - most have no inputs
        """Change the values of the inputs in place, and what `check` expects.

        Called before the last check of a kernel, which finds a kernel that returns the result of an
        earlier call, and after a kernel that failed: it may have written into the inputs.
        """

    def cost(self, kernel: Kernel, calls: int) -> float:
        """What a call costs: a finite number above 0, by default the mean seconds of some calls.

        Args:
            kernel: the kernel to measure; `check` has accepted it.
            calls: as many as make a sample that a clock resolves, 1 or more. A target that has
                clocks of its own, such as those of a GPU, may ignore it.
        """
        started = perf_counter()
        for _ in range(calls):
            kernel()
        return (perf_counter() - started) / calls

"""Any kernel that a Python function builds."""

from collections.abc import Callable, Mapping
from typing import Any

from graphstash.tuning.measuring import Target
from graphstash.tuning.measuring.target import Kernel
from graphstash.tuning.space import Value

__all__ = ["CallableTarget"]


class CallableTarget(Target):
    """A target made of functions.

        def build(configuration):
            kernel = compile_somehow(block=configuration["block"])
            return lambda: kernel(INPUT)

        def is_right(result):
            return numpy.allclose(result, REFERENCE)

        target = CallableTarget(build, name="row sums of 4096x4096 float32", is_right=is_right)

    Measuring processes import the functions by their names: define them at the top level of a
    module. In a script, start the search under `if __name__ == "__main__":`.

    Args:
        build: takes the values of a configuration by name, and returns what runs it once and waits
            for its end. It may raise anything.
        name: of what is tuned, for those who share measurements: say in it what the cost depends
            on, such as shapes and types.
        is_right: takes what the kernel returned, twice before the first sample and once after the
            last one; False if that is wrong. Without it, wrong results are not noticed.
        renew: changes the inputs in place before the last check, and what `is_right` expects.
            Without it, a kernel that repeats its first result is not noticed, and a kernel that
            writes into the inputs can make others look wrong. See `CheckedOutput`.
        cost: takes a kernel and a number of calls and returns what a call costs, where that is
            something else than wall time. See `Target.cost`.
    """

    def __init__(
        self,
        build: Callable[[Mapping[str, Value]], Kernel],
        *,
        name: str,
        is_right: Callable[[Any], object] | None = None,
        cost: Callable[[Kernel, int], float] | None = None,
        renew: Callable[[], object] | None = None,
    ) -> None:
        self._build = build
        self._name = name
        self._is_right = is_right
        self._cost = cost
        self._renew = renew

    def describe(self) -> dict[str, Any]:
        """The name it was given."""
        return {"target": "callable", "name": self._name}

    def build(self, configuration: Mapping[str, Value]) -> Kernel:
        """What the function builds."""
        return self._build(configuration)

    def check(self, kernel: Kernel) -> bool:
        """Whether what it returns is right."""
        result = kernel()
        return self._is_right is None or bool(self._is_right(result))

    def renew(self) -> None:
        """Call the function that changes the inputs."""
        if self._renew is not None:
            self._renew()

    def cost(self, kernel: Kernel, calls: int) -> float:
        """What the function of the cost says, or else the mean seconds of a call."""
        if self._cost is None:
            return super().cost(kernel, calls)
        return self._cost(kernel, calls)

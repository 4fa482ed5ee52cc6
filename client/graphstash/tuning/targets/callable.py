"""A target for any kernel that a Python function builds."""

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

    Measuring processes import the functions, so define them at the top level of a module. In a
    script, start the search under `if __name__ == "__main__":`.

    Args:
        build: takes a configuration's values by name, and returns a callable that runs the kernel
            once and waits for its end. May raise anything.
        name: identifies the kernel for all hosts that share measurements. Include everything that
            the cost depends on, such as shapes and types.
        is_right: takes the kernel's result, and returns False if it is wrong. See `Target.check`.
            Without it, wrong results are not detected.
        renew: changes the inputs in place, and the result that `is_right` expects. See
            `Target.renew` and `CheckedOutput`. Without it, a kernel that repeats its first result
            is not detected, and a kernel that writes into the inputs can make others look wrong.
        cost: takes a kernel and a number of calls, and returns the cost of a call. See
            `Target.cost`. Default: wall time.
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
        """Return the name."""
        return {"target": "callable", "name": self._name}

    def build(self, configuration: Mapping[str, Value]) -> Kernel:
        """Call `build`."""
        return self._build(configuration)

    def check(self, kernel: Kernel) -> bool:
        """Run the kernel, and pass its result to `is_right`."""
        result = kernel()
        return self._is_right is None or bool(self._is_right(result))

    def renew(self) -> None:
        """Call `renew`."""
        if self._renew is not None:
            self._renew()

    def cost(self, kernel: Kernel, calls: int) -> float:
        """Call `cost`; by default, return the mean seconds of a call."""
        if self._cost is None:
            return super().cost(kernel, calls)
        return self._cost(kernel, calls)

"""A target for any kernel that a Python function builds."""

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from graphstash.tuning.measuring import Target
from graphstash.tuning.measuring.target import Kernel
from graphstash.tuning.space import Value

__all__ = ["CallableTarget"]

_GARBAGE: Final = 101
"""Fits into every number type, and into few results."""

_SMALL_BYTES: Final = 1024**2
_BLOCKS: Final = 8
"""Number of blocks to spoil of small results. Kernels allocate other blocks before their result."""


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
        is_right: takes the kernel's result, and returns whether it is right. See `Target.check`.
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
        self._blanks: list[Callable[[], object]] = []

    def describe(self) -> dict[str, Any]:
        """Return the name, and which functions were given.

        A target that checks more would otherwise use schedules of one that does not.
        """
        functions = {"is_right": self._is_right, "renew": self._renew, "cost": self._cost}
        given = [name for name, function in functions.items() if function is not None]
        return {"target": "callable", "name": self._name, "given": given}

    def build(self, configuration: Mapping[str, Value]) -> Kernel:
        """Call `build`."""
        return self._build(configuration)

    def check(self, kernel: Kernel) -> bool:
        """Run the kernel, and pass its result to `is_right`.

        First spoil free memory of the last result's size. An array that a kernel allocates and
        does not fill would otherwise have the memory, and the values, of an earlier right result.
        """
        _spoil(self._blanks)
        result = kernel()
        if self._is_right is None:
            return True
        self._blanks = _blanks_of(result)
        if (verdict := self._is_right(result)) is None:
            raise TypeError("is_right returned None; return whether the result is right")
        return bool(verdict)

    def renew(self) -> None:
        """Call `renew`."""
        if self._renew is not None:
            self._renew()

    def cost(self, kernel: Kernel, calls: int) -> float:
        """Call `cost`; by default, return the mean seconds of a call."""
        if self._cost is None:
            return super().cost(kernel, calls)
        return self._cost(kernel, calls)


def _blanks_of(result: object) -> list[Callable[[], object]]:
    """Return functions that make arrays of garbage with the sizes of a result's arrays."""
    parts: Iterable[Any] = result if isinstance(result, list | tuple) else [result]
    blanks: list[Callable[[], object]] = []
    for part in parts:
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and isinstance(part, numpy.ndarray):
            blank = partial(numpy.full, part.shape, _GARBAGE, part.dtype)
        elif torch is not None and isinstance(part, torch.Tensor):
            blank = partial(torch.full, part.shape, _GARBAGE, dtype=part.dtype, device=part.device)
        else:
            continue
        blanks += [blank] * (_BLOCKS if part.nbytes <= _SMALL_BYTES else 1)
    return blanks


def _spoil(blanks: Iterable[Callable[[], object]]) -> None:
    """Make all arrays, and free them together."""
    arrays: list[object] = []
    with suppress(Exception):  # no memory, or a type that has no such value
        arrays.extend(blank() for blank in blanks)

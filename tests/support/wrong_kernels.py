"""Wrong kernels, most of them with a right first result, for `CallableTarget`."""

import itertools
from typing import Any

import numpy as np

from graphstash import tuning

_A = np.arange(12.0).reshape(3, 4)
_EXPECTED = _A.sum(axis=1)
_renewals = itertools.count(1)

SPACE = tuning.ParameterSpace(
    {"does": ["scribbles", "right", "right, slowly", "leaves", "adds", "memoizes"]}
)


def _rows() -> Any:
    return _A.sum(axis=1)


def build(configuration: Any) -> Any:
    """Return a kernel that sums rows, with the fault that the configuration names."""
    does = configuration["does"]
    memoized: Any = None
    total = np.zeros(3)

    def kernel() -> Any:
        nonlocal memoized
        if does == "leaves":  # memory that a right result may have had before
            return np.empty(3)
        if does == "adds":  # split-k without clearing
            total.__iadd__(_rows())
            return total
        if does == "memoizes":
            memoized = _rows() if memoized is None else memoized
            return memoized
        result = _rows()
        if does == "scribbles":  # uses its inputs as scratch memory
            _A[...] = -1
        return result

    kernel.does = does  # type: ignore[attr-defined] # for tests
    return kernel


def is_right(result: Any) -> bool:
    return bool((result == _EXPECTED).all())


def renew() -> None:
    _A[...] = np.arange(12.0).reshape(3, 4) + next(_renewals)
    _EXPECTED[...] = _A.sum(axis=1)


def costs(kernel: Any, calls: int) -> float:
    """Call the kernel, and return its cost. A wrong kernel reports the lowest."""
    for _ in range(min(calls, 3)):
        kernel()
    return {"right": 2.0, "right, slowly": 3.0}.get(kernel.does, 1.0)


def target(**options: Any) -> tuning.CallableTarget:
    options = {"is_right": is_right, "renew": renew, "cost": costs} | options
    return tuning.CallableTarget(build, name="row sums", **options)

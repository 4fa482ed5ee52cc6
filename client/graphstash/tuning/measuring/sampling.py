"""Take samples of built kernels, in a measuring process.

    check       the first two runs; their results are compared with the reference result. The
                second run detects a kernel that writes into its inputs. After a failure, inputs
                are renewed, as the kernel may have corrupted them for the next one
    warm-up     one more run fills caches, maps pages and lets clocks rise
    samples     rounds of one sample of each kernel; every second round is in reverse order
    check       once more, with other inputs: a kernel may be right on its first call only

Rounds make the comparison fair: changing load affects all kernels alike.
"""

import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from graphstash.tuning.measuring.measurement import Method
from graphstash.tuning.measuring.target import Kernel, Target

__all__ = ["Built", "ending_forks", "take_samples"]

_MAX_CALLS: Final = 1_000_000
"""Most calls of a kernel for one sample, in case a clock stands still."""


@contextmanager
def ending_forks() -> Iterator[None]:
    """End forked copies of this process when they leave the block.

    They would otherwise measure and answer beside this process.
    """
    process = os.getpid()
    status: object = 0
    try:
        yield
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) else 1
        raise
    finally:
        if os.getpid() != process:
            os._exit(status if isinstance(status, int) else bool(status))


@dataclass
class Built:
    """A configuration that a measuring process was told to build.

    Attributes:
        kernel: the built kernel; None after a failure.
        failure: see `measurement.FAILURES`.
        reason: description of the failure, for people.
        samples: costs that the target returned, not checked yet.
    """

    kernel: Kernel | None = None
    failure: str | None = None
    reason: str = ""
    samples: list[object] = field(default_factory=list)
    calls: int = 1
    seconds: float = 0.0

    def attempt(self, word: str, call: Callable[[], object]) -> object:
        """Return a call's result; if it raises, fail with the given word."""
        try:
            with ending_forks():
                return call()
        except MemoryError as error:
            self.fail("memory", repr(error))
        except BaseException as error:  # noqa: BLE001 - a trial may raise even SystemExit
            self.fail(word, f"{type(error).__name__}: {error}")
        return None

    def fail(self, failure: str, reason: str) -> None:
        """Mark as failed, which excludes it from further steps."""
        self.kernel, self.failure, self.reason = None, failure, reason


def take_samples(
    target: Target, built: Sequence[Built], method: Method, begin: Callable[[int], None]
) -> None:
    """Check, warm up and measure the built kernels; set `samples` or `failure` of each.

    Args:
        target: the target that built them.
        built: the configurations to compare.
        method: how thoroughly to measure.
        begin: called with a kernel's index before each of its checks and samples.
    """
    for index, each in enumerate(built):
        if each.kernel is not None:
            begin(index)
            _begin(target, each, method)
    order = list(enumerate(built))
    for _ in range(method.samples):
        for index, each in order:
            if each.kernel is not None and (
                not each.samples or each.seconds < method.trial_seconds
            ):
                begin(index)
                _sample(target, each)
        order.reverse()
    for index, each in enumerate(built):
        if each.kernel is not None:
            begin(index)
            _check(target, each, renew=target.renew)


def _begin(target: Target, built: Built, method: Method) -> None:
    for _ in range(2):
        if built.kernel is not None:
            _check(target, built)
    _warm_up(target, built, method)
    if built.kernel is None:
        with suppress(Exception), ending_forks():  # the last check raises the same error
            target.renew()


def _check(target: Target, built: Built, *, renew: Callable[[], object] | None = None) -> None:
    kernel = built.kernel
    assert kernel is not None  # noqa: S101 - for mypy

    def check() -> bool:
        if renew is not None:
            renew()
        return bool(target.check(kernel))

    is_right = built.attempt("run", check)
    if not is_right and built.failure is None:
        built.fail("wrong", "its result is not the reference result")


def _warm_up(target: Target, built: Built, method: Method) -> None:
    """Run a kernel once more, and compute how many calls make a sample."""
    if (kernel := built.kernel) is None:
        return
    started = perf_counter()
    built.attempt("run", lambda: target.cost(kernel, 1))
    seconds = max(perf_counter() - started, method.sample_seconds / _MAX_CALLS)
    built.calls = math.ceil(method.sample_seconds / seconds)
    built.seconds = seconds


def _sample(target: Target, built: Built) -> None:
    kernel = built.kernel
    assert kernel is not None  # noqa: S101 - for mypy
    started = perf_counter()
    gc.disable()
    try:
        sample = built.attempt("run", lambda: target.cost(kernel, built.calls))
    finally:
        gc.enable()
    built.samples.append(sample)
    built.seconds += perf_counter() - started

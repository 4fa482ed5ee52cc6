"""Take samples of built kernels, in a measuring process.

check       compare the results of the first two runs with the reference result. The second run
            detects a kernel that writes into its inputs
warm-up     run once more, to fill caches, map pages and raise clocks. If the kernel has failed
            by now, renew the inputs, which it may have corrupted
samples     take one sample of each kernel per round. Several kernels race: see `race`
check       once more, with other inputs, to detect a kernel that repeats its first result
"""

import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Real
from reprlib import repr as short
from time import perf_counter
from typing import Final

from graphstash.tuning.measuring.measurement import MAX_SAMPLES, Method
from graphstash.tuning.measuring.race import Race
from graphstash.tuning.measuring.target import Kernel, Target
from graphstash.tuning.space import MAX_COST

__all__ = ["BuiltKernel", "ending_forks", "take_samples"]

_MAX_CALLS: Final = 1_000_000
"""Maximum calls per sample, if the clock did not advance during the warm-up."""


@contextmanager
def ending_forks() -> Iterator[None]:
    """End forked children of this process when they leave the block.

    Otherwise a child would go on to measure and to send results, as its parent does.
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
class BuiltKernel:
    """A configuration in a measuring process.

    Attributes:
        kernel: the built kernel; None before the build and after a failure.
        failure: see `measurement.FAILURES`.
        reason: description of the failure.
        samples: costs, corrected for load if several kernels raced.
        calls: number of calls per sample.
        seconds: seconds of the warm-up and the samples so far.
    """

    kernel: Kernel | None = None
    failure: str | None = None
    reason: str = ""
    samples: list[float] = field(default_factory=list)
    calls: int = 1
    seconds: float = 0.0

    def attempt(self, word: str, call: Callable[[], object]) -> object:
        """Return a call's result. If it raises, fail with `word`; a `MemoryError` with "memory"."""
        try:
            with ending_forks():
                return call()
        except MemoryError as error:
            self.fail("memory", repr(error))
        except BaseException as error:  # noqa: BLE001 - a trial may raise even SystemExit
            self.fail(word, f"{type(error).__name__}: {error}")
        return None

    def fail(self, failure: str, reason: str) -> None:
        """Set the failure, and drop the kernel, which ends its trial."""
        self.kernel, self.failure, self.reason = None, failure, reason


def take_samples(
    target: Target, built: Sequence[BuiltKernel], method: Method, begin: Callable[[], None]
) -> None:
    """Check, warm up and measure the built kernels; set `samples` or `failure` of each.

    Calls `begin` before the first two checks and warm-up of a kernel, before each sample, and
    before the last check.
    """
    for each in built:
        if each.kernel is not None:
            begin()
            _begin(target, each, method)
    _race(target, [each for each in built if each.kernel is not None], method, begin)
    for each in built:
        if each.kernel is not None:
            begin()
            _check(target, each, renew=target.renew)


def _race(
    target: Target, runners: Sequence[BuiltKernel], method: Method, begin: Callable[[], None]
) -> None:
    race = Race(len(runners))
    left = method.final_samples * len(runners)
    while race.continues(
        least=method.samples, most=MAX_SAMPLES if len(race.running) <= left else 0
    ):
        costs: dict[int, float | None] = {}
        for number in race.running:
            begin()
            costs[number] = _sample(target, runners[number])
        left -= len(costs)
        race.end_round(costs)
        for number in list(race.running):
            if runners[number].seconds >= method.trial_seconds:
                race.stop(number)
    for number, each in enumerate(runners):
        if each.kernel is not None:
            each.samples = race.costs(number)


def _begin(target: Target, built: BuiltKernel, method: Method) -> None:
    for _ in range(2):
        if built.kernel is not None:
            _check(target, built)
    _warm_up(target, built, method)
    if built.kernel is None:
        with suppress(Exception), ending_forks():  # the last checks report it
            target.renew()


def _check(
    target: Target, built: BuiltKernel, *, renew: Callable[[], object] | None = None
) -> None:
    kernel = built.kernel
    assert kernel is not None  # noqa: S101 - for mypy

    def check() -> bool:
        if renew is not None:
            renew()
        return bool(target.check(kernel))

    is_right = built.attempt("run", check)
    if not is_right and built.failure is None:
        built.fail("wrong", "its result is not the reference result")


def _warm_up(target: Target, built: BuiltKernel, method: Method) -> None:
    """Run a kernel once more, and set the number of calls per sample."""
    if (kernel := built.kernel) is None:
        return
    started = perf_counter()
    built.attempt("run", lambda: target.cost(kernel, 1))
    seconds = max(perf_counter() - started, method.sample_seconds / _MAX_CALLS)
    built.calls = math.ceil(method.sample_seconds / seconds)
    built.seconds = seconds


def _sample(target: Target, built: BuiltKernel) -> float | None:
    """Return the cost of a kernel, or None after a failure."""
    kernel = built.kernel
    assert kernel is not None  # noqa: S101 - for mypy
    started = perf_counter()
    gc.disable()
    try:
        sample = built.attempt("run", lambda: target.cost(kernel, built.calls))
    finally:
        gc.enable()
    built.seconds += perf_counter() - started
    if built.failure is not None:
        return None
    if 0 < (cost := _to_float(sample)) <= MAX_COST:
        return cost
    built.fail("cost", f"a sample costs {short(sample)}")
    return None


def _to_float(value: object) -> float:
    """Convert a number of any library; NaN for other values."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf

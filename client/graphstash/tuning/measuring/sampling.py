"""How a measuring process takes samples of the kernels that it has built.

    check       the first two runs; compared with the reference result. The second run finds a
                kernel that writes into its inputs. Inputs are renewed after a kernel that fails,
                which may have ruined them for the next one
    warm-up     one more run: caches are filled, pages are mapped, clocks have risen
    samples     in rounds: one of each kernel, and in the opposite order in every second round
    check       once more, with other inputs: a kernel may be right on its first call only

Rounds make the comparison fair: load that comes and goes meets all kernels alike.
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

__all__ = ["Built", "only_here", "take_samples"]

_MAX_CALLS: Final = 1_000_000
"""Of a kernel for one sample, should a clock stand still."""


@contextmanager
def only_here() -> Iterator[None]:
    """Ends processes that the block has forked where they leave it: they would measure and answer
    beside this one.
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
        kernel: None after a failure.
        failure: see `measurement.FAILURES`.
        reason: of a failure, for people.
        samples: what the target said each costs, checked by nobody yet.
    """

    kernel: Kernel | None = None
    failure: str | None = None
    reason: str = ""
    samples: list[object] = field(default_factory=list)
    calls: int = 1
    seconds: float = 0.0

    def attempt(self, word: str, call: Callable[[], object]) -> object:
        """What a call returns; it fails under this word where it raises anything."""
        try:
            with only_here():
                return call()
        except MemoryError as error:
            self.fail("memory", repr(error))
        except BaseException as error:  # noqa: BLE001 - a trial may do anything, such as sys.exit()
            self.fail(word, f"{type(error).__name__}: {error}")
        return None

    def fail(self, failure: str, reason: str) -> None:
        """Takes it out of what follows."""
        self.kernel, self.failure, self.reason = None, failure, reason


def take_samples(
    target: Target, built: Sequence[Built], method: Method, begin: Callable[[int], None]
) -> None:
    """Checks, warms up and measures what was built; fills in `samples` or `failure` of each.

    Args:
        target: it built them.
        built: what is compared.
        method: how thoroughly.
        begin: told the index of a kernel before each check and before each sample of it.
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
        with suppress(Exception), only_here():  # the last check raises it again
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
    """Runs it once more, and finds how many calls make a sample."""
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

"""WaitBudget: the total time that a job waits for other jobs' compilations or a busy server.

A wait for a busy server ends when a compilation is expected to finish sooner. The rest of the wait
is expected to last as long as the server says, and at least as long as the wait has lasted.

A lease does not show that its holder will ever finish. Any writer can hold a lease, and a server
can reply "held" forever. Therefore waiting has a budget:

* One holder uses at most half of the budget. A wait that obtains the artifact is refunded, up to
  the compile time that it saved. All refunds together are at most twice the budget. So a job waits
  for at most three budgets, at most one of them in vain, even with a malicious server or holder.
* After three consecutive waits in vain, the job starts no wait for five minutes.
* A wait for a holder does not begin if less time is left than this process's average compilation
  takes: the wait would likely end before the artifact exists.

A wait inside another one of the same thread suspends the outer one, so that no second is deducted
twice, and is settled as a part of it. The ranks of a distributed job depend on each other's waits,
so they share one budget.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import inf
from random import uniform
from time import monotonic
from typing import Final, Self

from graphstash.errors import BusyError

__all__ = ["Wait", "WaitBudget"]

_HOLDER_SHARE: Final = 0.5
_CREDIT: Final = 2.0
"""Maximum sum of all refunds, in budgets."""

_LOADED: Final = "a loaded server"
_UNAVAILABLE: Final = "a server that cannot answer"
"""These replace the holder's name in a wait for a server."""

_MIN_PAUSE_SECONDS: Final = 0.1

_MAX_VAIN_WAITS: Final = 3
_PAUSE_SECONDS: Final = 300.0


class WaitBudget:
    """The budget of a job. Thread-safe."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self._seconds = seconds
        self._lock = threading.Lock()  # guards the fields below
        self._left = seconds
        self._credit = _CREDIT * seconds
        self._spent_on: defaultdict[str, float] = defaultdict(float)
        self._compile_seconds = 0.0
        self._compile_count = 0
        self._vain_waits = 0
        self._paused_until = 0.0
        self.innermost = threading.local()  # `wait`: the wait of a thread that began last

    @property
    def left(self) -> float:
        """Remaining seconds of the budget."""
        return max(0.0, self._left)

    def wait(self) -> "Wait":
        """Return a wait that has not begun, as a context manager."""
        return Wait(self)

    def left_for(self, holder: str, *, most_seconds: float = inf) -> float:
        """Return the seconds that the job may still wait for a holder or a server."""
        with self._lock:
            share = min(most_seconds, _HOLDER_SHARE * self._seconds) - self._spent_on[holder]
            return max(0.0, min(self._left, share))

    @property
    def is_paused(self) -> bool:
        """Whether the job begins no wait now, because its last waits were in vain."""
        return self.clock() < self._paused_until

    def reason_to_skip(self, holder: str) -> str | None:
        """Return why the job must not begin a wait for a holder, or None if it may."""
        left = self.left_for(holder)
        if left <= 0.0:
            return self.spent_message()
        if self.is_paused:
            return f"the last {self._vain_waits} waits were in vain"
        expected = self._compile_seconds / max(1, self._compile_count)
        if left < expected:
            return (
                f"compiling takes {expected:.3g} s here on average, and this job waits at most "
                f"{left:.3g} s more for it"
            )
        return None

    def spent_message(self) -> str:
        """Return a message for a wait that ends because the budget is spent."""
        return (
            f"this job has waited long enough, {self._spent:.3g} s (GRAPHSTASH_WAIT_SECONDS is "
            f"{self._seconds:g}, half of it for one holder)"
        )

    def add_compilation(self, seconds: float) -> None:
        """Add a compilation of this process to the average."""
        with self._lock:
            self._compile_seconds += seconds
            self._compile_count += 1

    def spend(self, holder: str, seconds: float) -> None:
        """Deduct the time that the job has waited for a holder."""
        with self._lock:
            self._left -= seconds
            self._spent_on[holder] += seconds

    def settle(self, spent: dict[str, float], *, saved_seconds: float | None) -> None:
        """Settle a wait that has ended. `saved_seconds` is None if it was in vain."""
        with self._lock:
            if saved_seconds is not None:
                total = sum(spent.values())
                back = min(total, saved_seconds, self._credit)
                self._credit -= back
                self._left += back
                for holder, seconds in spent.items():
                    self._spent_on[holder] -= back * seconds / total if total else 0.0
                self._vain_waits = 0
                return
            self._vain_waits += 1
            if self._vain_waits >= _MAX_VAIN_WAITS:
                self._paused_until = self.clock() + _PAUSE_SECONDS

    @property
    def server_waits(self) -> dict[str, float]:
        """Seconds spent on a server, by the reason of the waits."""
        with self._lock:
            return {reason: self._spent_on[reason] for reason in (_LOADED, _UNAVAILABLE)}

    def share(self, left: float, server_waits: Mapping[str, float]) -> None:
        """Lower the budget to what the leading rank has left; it waited for all ranks."""
        with self._lock:
            self._left = min(self._left, left)
            for reason, seconds in server_waits.items():
                self._spent_on[reason] = max(self._spent_on[reason], seconds)

    @property
    def _spent(self) -> float:
        return self._seconds - self._left


class Wait:
    """One wait, which begins when the server reports a holder or is busy.

    Attributes:
        left: Seconds that the wait may still last; 0 before it begins.
        has_begun: Whether the wait has begun.
        saved_seconds: Compile time that the wait saved, or None while it is in vain.
    """

    def __init__(self, budget: WaitBudget) -> None:
        self.left = 0.0
        self.has_begun = False
        self.saved_seconds: float | None = None
        self._budget = budget
        self._outer: Wait | None = None
        self._holder = ""
        self._began = self._since = 0.0
        self._spent: defaultdict[str, float] = defaultdict(float)

    def reason_to_skip(self, holder: str) -> str | None:
        """Begin the wait, or deduct the time since the last call.

        Returns:
            None if the job may wait for this holder, else the reason why not.
        """
        if self.has_begun:
            self.deduct()
            reason_to_skip = None if self._budget.left_for(holder) else self._budget.spent_message()
        else:
            reason_to_skip = self._budget.reason_to_skip(holder)
            if reason_to_skip is None:
                self._begin()
        self._holder = holder
        self.left = self._budget.left_for(holder)
        return reason_to_skip

    def pause_seconds(
        self, busy: BusyError, *, compile_seconds: float | None = None
    ) -> float | None:
        """Begin or continue the wait for a busy server.

        Args:
            busy: Answer of the server.
            compile_seconds: Known time of the compilation that would replace the call.

        Returns:
            Seconds until the next call, or None if the job must not wait any longer. They are
            random: the server refuses many processes at once, and must not get them back at once.
        """
        if self.has_begun:
            self.deduct()
        elif self._budget.is_paused:
            return None
        self._holder = _LOADED if busy.patience_seconds == inf else _UNAVAILABLE
        self.left = self._budget.left_for(self._holder, most_seconds=busy.patience_seconds)
        waited = self._since - self._began
        expected = max(busy.retry_after_seconds, _MIN_PAUSE_SECONDS)
        is_slower = compile_seconds is not None and compile_seconds < max(expected, waited)
        if is_slower or expected > self.left:
            return None
        if not self.has_begun:
            self._begin()
        return expected * uniform(0.1, 1.0)  # noqa: S311 - no secret

    def deduct(self) -> None:
        """Deduct the time since the last call, if the wait has begun."""
        if self.has_begun:
            now = self._budget.clock()
            self._budget.spend(self._holder, now - self._since)
            self._spent[self._holder] += now - self._since
            self._since = now

    def resume(self, spent: Mapping[str, float], *, since: float) -> None:
        """Continue after a wait inside this one, which leaves its settlement to this one."""
        for holder, seconds in spent.items():
            self._spent[holder] += seconds
        self._since = since

    def _begin(self) -> None:
        self._outer = getattr(self._budget.innermost, "wait", None)
        if self._outer is not None:
            self._outer.deduct()
        self._budget.innermost.wait = self
        self.has_begun = True
        self._began = self._since = self._budget.clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.has_begun:
            return
        self._budget.innermost.wait = self._outer
        if self._outer is not None:
            self._outer.resume(self._spent, since=self._since)
        else:
            self.deduct()
            self._budget.settle(self._spent, saved_seconds=self.saved_seconds)

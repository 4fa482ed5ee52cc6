"""WaitBudget: how long a job waits for the compilations of others, in all.

A lease says that somebody compiles, not that it will ever end: whoever may write can hold one, and
a server can answer "held" for ever. So waiting is an investment with a limit:

* The job has a budget, and one holder gets at most half of it. A wait that brought the artifact
  gives back what its compilation had taken, until that is twice the budget: whatever server and
  holders do, a job waits at most three budgets, and one of them in vain.
* After three waits in vain in a row the job does not wait for a while.
* A wait does not begin when less is left than a compilation takes here on average: it would end
  before the other's does.

The ranks of a distributed job wait for each other's waits, so they share one budget.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from time import monotonic
from typing import Final, Self

__all__ = ["Wait", "WaitBudget"]

_HOLDER_SHARE: Final = 0.5
_CREDIT: Final = 2.0
"""What waits that paid may give back in all, in budgets."""

_MAX_VAIN_WAITS: Final = 3
_PAUSE_SECONDS: Final = 300.0


class WaitBudget:
    """What is left; safe for many threads.

    Args:
        seconds: the budget.
        clock: seconds that never run backwards.
    """

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

    @property
    def left(self) -> float:
        """Seconds that the job may still wait."""
        return max(0.0, self._left)

    def wait(self) -> "Wait":
        """A wait that has not begun: a context manager."""
        return Wait(self)

    def left_for(self, holder: str) -> float:
        """Seconds that the job may still wait for a holder."""
        with self._lock:
            share = _HOLDER_SHARE * self._seconds - self._spent_on[holder]
            return max(0.0, min(self._left, share))

    def why_not(self, holder: str) -> str | None:
        """Why it makes no sense to begin a wait for a holder; None when it does."""
        left = self.left_for(holder)
        if left <= 0.0:
            return self.what_is_spent()
        if self.clock() < self._paused_until:
            return f"the last {self._vain_waits} waits brought nothing"
        expected = self._compile_seconds / max(1, self._compile_count)
        if left < expected:
            return (
                f"compiling takes {expected:.3g} s here on average, and this job waits at most "
                f"{left:.3g} s more for it"
            )
        return None

    def what_is_spent(self) -> str:
        """Why a wait ends before its time, for people."""
        return (
            f"this job has waited long enough, {self._spent:.3g} s (GRAPHSTASH_WAIT_SECONDS is "
            f"{self._seconds:g}, half of it for one holder)"
        )

    def compiled(self, seconds: float) -> None:
        """A compilation of this process took so long."""
        with self._lock:
            self._compile_seconds += seconds
            self._compile_count += 1

    def spend(self, holder: str, seconds: float) -> None:
        """The job has waited for a holder."""
        with self._lock:
            self._left -= seconds
            self._spent_on[holder] += seconds

    def settle(self, spent: dict[str, float], *, saved_seconds: float | None) -> None:
        """A wait has ended: what was spent on each holder, and the compilation that it saved; None
        when it was in vain.
        """
        with self._lock:
            if saved_seconds is not None:
                back = min(sum(spent.values()), saved_seconds, self._credit)
                self._credit -= back
                self._left += back
                for holder, seconds in spent.items():
                    self._spent_on[holder] -= min(back, seconds)
                self._vain_waits = 0
                return
            self._vain_waits += 1
            if self._vain_waits >= _MAX_VAIN_WAITS:
                self._paused_until = self.clock() + _PAUSE_SECONDS

    def share(self, left: float) -> None:
        """Another rank of this job has so much left: waiting was for all of them."""
        with self._lock:
            self._left = min(self._left, left)

    @property
    def _spent(self) -> float:
        return self._seconds - self._left


class Wait:
    """One wait; it begins with the answer that somebody compiles.

    Attributes:
        left: seconds that it may still last; 0 before it begins.
        has_begun: whether it has.
        saved_seconds: the compilation that it saved; None while it is in vain.

    Args:
        budget: pays for it.
    """

    def __init__(self, budget: WaitBudget) -> None:
        self.left = 0.0
        self.has_begun = False
        self.saved_seconds: float | None = None
        self._budget = budget
        self._holder = ""
        self._since = 0.0
        self._spent: defaultdict[str, float] = defaultdict(float)

    def why_not(self, holder: str) -> str | None:
        """Begins the wait, or pays for the time since the last call.

        Returns:
            None while it makes sense to wait for this holder, else why not.
        """
        if self.has_begun:
            self._pay()
            why_not = None if self._budget.left_for(holder) else self._budget.what_is_spent()
        else:
            why_not = self._budget.why_not(holder)
            self.has_begun = why_not is None
            self._since = self._budget.clock()
        self._holder = holder
        self.left = self._budget.left_for(holder)
        return why_not

    def _pay(self) -> None:
        now = self._budget.clock()
        self._budget.spend(self._holder, now - self._since)
        self._spent[self._holder] += now - self._since
        self._since = now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.has_begun:
            self._pay()
            self._budget.settle(self._spent, saved_seconds=self.saved_seconds)

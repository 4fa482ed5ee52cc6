"""Findings: what a check found, and how to fix it."""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

__all__ = ["Finding", "State", "Topic", "fail", "ok", "skipped", "warn", "within"]

_T = TypeVar("_T")


class State(StrEnum):
    """What a finding means for a job."""

    OK = "ok"
    WARN = "warn"
    """The cache works, but not optimally or not for long."""
    FAIL = "fail"
    """Jobs run without the cache, or without a part of it."""
    SKIPPED = "skipped"
    """Not checked: an earlier check failed, or the settings leave nothing to check."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: subject of the check.
        state: meaning for a job.
        found: result of the check.
        advice: how to fix the problem. Empty if there is no problem.
    """

    name: str
    state: State
    found: str
    advice: str = ""


Topic = Generator[Finding, None, _T]
"""A generator of findings. Its return value is for later topics."""


def ok(name: str, found: str) -> Finding:
    """Report a check that found no problem."""
    return Finding(name, State.OK, found)


def warn(name: str, found: str, advice: str) -> Finding:
    """Report a problem that leaves the cache working."""
    return Finding(name, State.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Finding:
    """Report a problem that keeps the cache, or a part of it, from working."""
    return Finding(name, State.FAIL, found, advice)


def skipped(name: str, why: str) -> Finding:
    """Report a check that was skipped."""
    return Finding(name, State.SKIPPED, why)


def within(seconds: float, work: Callable[[], _T]) -> _T:
    """Return the result of `work`. It runs in a thread: a dead network disk may block it for ever.

    Raises:
        TimeoutError: `work` did not finish within `seconds`. Its thread keeps running.
        Exception: raised by `work`.
    """
    future: Future[_T] = Future()

    def answer() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - outermost frame of a thread; raised below
            future.set_exception(error)

    threading.Thread(target=answer, name="graphstash-doctor", daemon=True).start()
    return future.result(seconds)

"""Findings: what a check found, and what to do about it."""

import queue
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

__all__ = ["Finding", "State", "Topic", "fail", "ok", "plural", "skipped", "warn", "within"]

_T = TypeVar("_T")


class State(StrEnum):
    """What a finding means for a job."""

    OK = "ok"
    WARN = "warn"
    """The cache works, but not as well as it could, or not for long."""
    FAIL = "fail"
    """Jobs go on without the cache, or without a part of it."""
    SKIPPED = "skipped"
    """Not tried, because something before it failed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        state: what it means.
        found: what is so, without what to do.
        advice: what to do; empty where all is well.
    """

    name: str
    state: State
    found: str
    advice: str = ""


Topic = Generator[Finding, None, _T]
"""Findings as they come; in the end what later topics build on."""


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name, State.OK, found)


def warn(name: str, found: str, advice: str) -> Finding:
    """Works, and could be better."""
    return Finding(name, State.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Finding:
    """Does not work."""
    return Finding(name, State.FAIL, found, advice)


def skipped(name: str, why: str) -> Finding:
    """Not tried."""
    return Finding(name, State.SKIPPED, why)


def plural(count: int, word: str) -> str:
    """A count with its word: `1 file`, `2 files`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def within(seconds: float, work: Callable[[], _T]) -> _T:
    """Does what may block for ever, such as a look at a dead network disk, in a thread.

    Raises:
        TimeoutError: it is not done within `seconds`; the thread is left behind.
        OSError: as `work` raised it.
    """
    answers: queue.SimpleQueue[tuple[_T, None] | tuple[None, Exception]] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put((work(), None))
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame: raised below
            answers.put((None, error))

    threading.Thread(target=answer, name="graphstash-doctor", daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value] # there is one where there is no error

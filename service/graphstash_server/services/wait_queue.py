"""WaitQueue: requests of this process that wait for a key's artifact or lease.

Commits of this process wake the requests. Commits of other processes do so through notifications of
the database. A wake-up is only a hint: notifications may be lost, and a lease may expire. The first
waiter of a key is therefore its poller, which queries the database from time to time. The other
waiters sleep until they are woken.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from graphstash_schema import Digest, InvalidValueError
from graphstash_server.keys import StoredKey
from graphstash_server.services.counters import Counters

if TYPE_CHECKING:
    from graphstash_server.tracing import Tracing

__all__ = ["Notification", "Ticket", "WaitQueue"]


class Notification(NamedTuple):
    """A change of a key: the digest of its stored artifact, or None if its lease is free."""

    key: StoredKey
    digest: Digest | None

    @classmethod
    def ready(cls, key: StoredKey, digest: Digest) -> Self:
        """Return the notification that the artifact is stored."""
        return cls(key, digest)

    @classmethod
    def free(cls, key: StoredKey) -> Self:
        """Return the notification that the lease is free."""
        return cls(key, None)

    @property
    def payload(self) -> str:
        """Text form that is sent to other processes."""
        digest = f"{self.digest.sha256} {self.digest.size_bytes}" if self.digest else "-"
        return f"{' '.join(self.key.columns)} {digest}"

    @classmethod
    def parse(cls, payload: str) -> Self | None:
        """Read a payload. Return None for a form that only later releases know."""
        words = payload.split(" ")
        try:
            namespace, fingerprint, kind, device_type = words[:4]
            key = StoredKey.parse(
                namespace=namespace, kind=kind, device_type=device_type, fingerprint=fingerprint
            )
            if words[4:] == ["-"]:
                return cls.free(key)
            sha256, size_bytes = words[4:]
            return cls.ready(key, Digest(sha256, int(size_bytes)))
        except (ValueError, InvalidValueError):
            return None


class Ticket(asyncio.Event):
    """A waiter's place in the queue, set when the waiter should query the database
    again. `digest` is the digest of the artifact, if a notification contained it.
    """

    digest: Digest | None = None


@dataclass(kw_only=True, eq=False)
class WaitQueue:
    """Queue the waiters of each key. A waiter that leaves passes its wake-up to the next waiter.

    Attributes:
        are_informed: whether notifications of other processes arrive, so that polling can be rare.
        is_closed: whether the server is stopping, so that requests must not wait any longer.
    """

    counters: Counters
    tracing: "Tracing | None" = None

    def __post_init__(self) -> None:
        self.are_informed = False
        self._waiting: dict[StoredKey, list[Ticket]] = {}
        self.is_closed = False

    @property
    def count(self) -> int:
        """Number of requests that wait now."""
        return sum(len(tickets) for tickets in self._waiting.values())

    def count_of(self, key: StoredKey) -> int:
        """Return the number of requests that wait for one key."""
        return len(self._waiting.get(key, ()))

    @contextmanager
    def joined(self, key: StoredKey) -> Iterator[Ticket]:
        """Queue for a key. Join before the first query: later changes then wake the ticket."""
        ticket = Ticket()
        self._waiting.setdefault(key, []).append(ticket)
        self.counters.add_waiters(1)
        try:
            with nullcontext() if self.tracing is None else self.tracing.span("lease.wait"):
                yield ticket
        finally:
            self.counters.add_waiters(-1)
            tickets = self._waiting[key]
            was_needed = tickets[0] is ticket or ticket.is_set()
            tickets.remove(ticket)
            if not tickets:
                del self._waiting[key]
            elif was_needed:
                self._wake_next(key)

    def is_poller(self, key: StoredKey, ticket: Ticket) -> bool:
        """Whether this waiter polls the database for all waiters of its key."""
        return self._waiting[key][0] is ticket

    def wake(self, notification: Notification) -> None:
        """Wake all waiters if the artifact is stored, or one waiter if the lease is free."""
        if notification.digest is None:
            self._wake_next(notification.key)
            return
        for ticket in self._waiting.get(notification.key, ()):
            ticket.digest = notification.digest
            ticket.set()

    def look_again(self) -> None:
        """Wake every poller, because a notification may have been lost."""
        for tickets in self._waiting.values():
            tickets[0].set()

    def close(self) -> None:
        """Wake all waiters because the server is stopping. They reply at once."""
        self.is_closed = True
        for tickets in self._waiting.values():
            for ticket in tickets:
                ticket.set()

    def _wake_next(self, key: StoredKey) -> None:
        for ticket in self._waiting.get(key, ()):
            if not ticket.is_set():
                ticket.set()
                return

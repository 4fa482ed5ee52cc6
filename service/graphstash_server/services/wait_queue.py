"""WaitQueue: requests of this process that wait for a key's artifact or lease.

Commits of this process wake the requests. Commits of other processes do so through notifications of
the database. A wake-up is only a hint: notifications may be lost, and a lease may expire. The first
waiter of a key is therefore its poller, which queries the database from time to time. The other
waiters sleep until they are woken.

Each waiter occupies a connection. If waiters occupied all, holders could neither renew their leases
nor publish. So a part of the connections stays free of waiters.
"""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from graphstash_schema import Digest, InvalidValueError
from graphstash_server.keys import StoredKey
from graphstash_server.services.counters import Counters

if TYPE_CHECKING:
    from graphstash_server.tracing import Tracing

__all__ = ["Notification", "Ticket", "WaitQueue"]

_FREE_SHARE: Final = 1 / 8
"""Share of the connections that waiters leave to other requests, at least one connection."""


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
    again. `digest` is the digest of the artifact, if a notification contained it. `may_wait` is
    whether the queue had room for the waiter.
    """

    digest: Digest | None = None
    may_wait = True


@dataclass(kw_only=True, eq=False)
class WaitQueue:
    """Queue the waiters of each key. A waiter that leaves passes its wake-up to the next waiter.

    Attributes:
        connections: maximum number of connections of this process.
        are_informed: whether notifications of other processes arrive, so that polling can be rare.
        count: number of requests that wait now.
        is_closed: whether the server is stopping, so that requests must not wait any longer.
    """

    counters: Counters
    connections: int
    tracing: "Tracing | None" = None

    def __post_init__(self) -> None:
        self.are_informed = False
        self.count = 0
        self._waiting: dict[StoredKey, list[Ticket]] = {}
        self._most = self.connections - math.ceil(self.connections * _FREE_SHARE)
        self.is_closed = False

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
            with (
                self.counted() as ticket.may_wait,
                nullcontext() if self.tracing is None else self.tracing.span("lease.wait"),
            ):
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

    @contextmanager
    def counted(self) -> Iterator[bool]:
        """Count a request that waits. Yield whether it may, or should be answered at once."""
        may_wait = self.count < self._most
        self.count += 1
        try:
            yield may_wait
        finally:
            self.count -= 1

    def is_poller(self, key: StoredKey, ticket: Ticket) -> bool:
        """Return whether this waiter polls the database for all waiters of its key."""
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

"""Waiters: the requests of this process that wait until a key's artifact or lease is theirs.

They are woken by what this process commits and, over the database's notifications, by what others
commit. Waking is a hint, never a promise. So the first waiter of a key is its lookout: it looks at
the database by itself now and then, because notifications can be missed and a lease can expire. The
others sleep until they are woken.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

from graphstash_schema import Digest, InvalidValueError
from graphstash_server.keys import StoredKey

__all__ = ["Ticket", "Waiters", "Wake"]


class Wake(NamedTuple):
    """What is told about a key.

    Attributes:
        key: which one.
        digest: of the artifact that is there now; None when the lease is free.
    """

    key: StoredKey
    digest: Digest | None

    @classmethod
    def ready(cls, key: StoredKey, digest: Digest) -> Self:
        """The artifact is there."""
        return cls(key, digest)

    @classmethod
    def free(cls, key: StoredKey) -> Self:
        """The lease is free."""
        return cls(key, None)

    @property
    def payload(self) -> str:
        """As it travels between processes."""
        digest = f"{self.digest.sha256} {self.digest.size_bytes}" if self.digest else "-"
        return f"{' '.join(self.key.columns)} {digest}"

    @classmethod
    def parse(cls, payload: str) -> Self | None:
        """None for what a later release may say and this one does not know."""
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
    """One waiter's place in the line; set when it is worth looking again.

    Attributes:
        digest: of the artifact that is there, when it was told.
    """

    digest: Digest | None = None


class Waiters:
    """Used from the event loop only. A waiter that leaves never takes anything along: what it was
    woken for is handed to the next one.

    Attributes:
        are_informed: whether other processes' news come in, so that looking can be left for long.
    """

    def __init__(self) -> None:
        self.are_informed = False
        self._waiting: dict[StoredKey, list[Ticket]] = {}
        self._is_closed = False

    @property
    def count(self) -> int:
        """How many requests wait now."""
        return sum(len(tickets) for tickets in self._waiting.values())

    @property
    def is_closed(self) -> bool:
        """Whether the server is stopping, so that nobody should wait any longer."""
        return self._is_closed

    @contextmanager
    def joined(self, key: StoredKey) -> Iterator[Ticket]:
        """Waits in line for a key.

        Join before looking the first time: what changes in between is not missed then.
        """
        ticket = Ticket()
        self._waiting.setdefault(key, []).append(ticket)
        try:
            yield ticket
        finally:
            line = self._waiting[key]
            was_needed = line[0] is ticket or ticket.is_set()
            line.remove(ticket)
            if not line:
                del self._waiting[key]
            elif was_needed:
                self._wake_next(key)

    def is_lookout(self, key: StoredKey, ticket: Ticket) -> bool:
        """Whether this waiter looks for all others of its key."""
        return self._waiting[key][0] is ticket

    def wake(self, news: Wake) -> None:
        """Wakes everybody when the artifact is there, one waiter when the lease is free."""
        if news.digest is None:
            self._wake_next(news.key)
            return
        for ticket in self._waiting.get(news.key, ()):
            ticket.digest = news.digest
            ticket.set()

    def look_again(self) -> None:
        """Wakes every lookout: something may have been missed."""
        for line in self._waiting.values():
            line[0].set()

    def close(self) -> None:
        """The server is stopping: everybody is woken and answers at once."""
        self._is_closed = True
        for line in self._waiting.values():
            for ticket in line:
                ticket.set()

    def _wake_next(self, key: StoredKey) -> None:
        for ticket in self._waiting.get(key, ()):
            if not ticket.is_set():
                ticket.set()
                return

"""Waiters: the requests of this process that wait until a key's artifact or lease is theirs.

Waking is a hint, never a promise: whoever is woken looks at the database again. The first waiter of
a key is its lookout: it looks every half second by itself, because another process may have
published or released, and because a lease can expire. The others sleep until they are woken.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from graphstash_server.keys import StoredKey

__all__ = ["Waiters"]


class Waiters:
    """Used from the event loop only. A waiter that leaves never takes anything along: what it was
    woken for is handed to the next one.
    """

    def __init__(self) -> None:
        self._waiting: dict[StoredKey, list[asyncio.Event]] = {}
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
    def joined(self, key: StoredKey) -> Iterator[asyncio.Event]:
        """Waits in line for a key; the event is set when it is worth looking again.

        Join before looking the first time: what changes in between is not missed then.
        """
        ticket = asyncio.Event()
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
                self.wake_one(key)

    def is_lookout(self, key: StoredKey, ticket: asyncio.Event) -> bool:
        """Whether this waiter looks for all others of its key."""
        return self._waiting[key][0] is ticket

    def wake_all(self, key: StoredKey) -> None:
        """The artifact is there."""
        for ticket in self._waiting.get(key, ()):
            ticket.set()

    def wake_one(self, key: StoredKey) -> None:
        """The lease is free; or its lookout left, and the next one takes over."""
        for ticket in self._waiting.get(key, ()):
            if not ticket.is_set():
                ticket.set()
                return

    def close(self) -> None:
        """The server is stopping: everybody is woken and answers at once."""
        self._is_closed = True
        for key in self._waiting:
            self.wake_all(key)

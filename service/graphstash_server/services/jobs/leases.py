"""LeaseService: one process compiles a graph while other processes wait for its artifact.

Leases are advisory. An upload needs no lease. After a lease expires, the next waiter compiles.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import (
    Digest,
    ErrorCode,
    LeaseReply,
    LeaseRequest,
    LeaseState,
    Namespace,
)
from graphstash_server.clock import Clock, jitter
from graphstash_server.db.engine import Database
from graphstash_server.db.notifications import notify
from graphstash_server.db.queries.artifacts import find_artifact
from graphstash_server.db.queries.leases import (
    LeaseRow,
    acquire_lease,
    count_held_leases,
    find_lease,
    has_room_for_lease,
    list_held_leases,
    release_lease,
    renew_lease,
    shorten_lease,
)
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.services.counters import Counters
from graphstash_server.services.wait_queue import Notification, Ticket, WaitQueue

__all__ = ["Acquisition", "HeldLease", "LeaseService", "lost"]

_POLL_SECONDS = 0.4
_POLL_SECONDS_WITH_NOTIFICATIONS = 5.0
"""Mean seconds between two queries of a poller, without and with notifications. Jitter changes each
pause by up to half of the mean, so that the servers of a fleet do not poll in step. Either way, a
waiter gets its reply within about half a second after the commit of another server."""


_MAX_CLOCK_SKEW = timedelta(seconds=1)
"""How far the clocks of two servers may differ. A clock that was set back by less is ignored."""

_MAX_HELD = 1024
"""Leases that one caller may hold at a time. A whole team may share one token, and each of its
processes holds a lease for every graph that it compiles."""

_MAX_ROWS = 8192
"""Lease rows of one caller or one namespace, including ended leases. A row has 500 bytes, and
counting this many rows takes a millisecond."""


class Acquisition(NamedTuple):
    """A caller's request for a lease, and how long the caller waits for it."""

    key: StoredKey
    request: LeaseRequest
    wait_seconds: float
    caller: str


class HeldLease(NamedTuple):
    """A lease that is held now. `waiters` is the number of requests that wait in this process."""

    key: StoredKey
    holder: str
    expires_at: datetime
    waiters: int


@dataclass(kw_only=True, eq=False)
class LeaseService:
    """Grant, renew and release leases."""

    database: Database
    artifacts: ArtifactService
    wait_queue: WaitQueue
    counters: Counters
    clock: Clock
    new_token: Callable[[], str] = lambda: secrets.token_hex(16)

    def __post_init__(self) -> None:
        # Without this bound, callers of a thousand keys would occupy every shared connection, and
        # the uploads that they wait for would queue behind them.
        self._query_slots = asyncio.Semaphore(self.database.shared_connections)
        self._next_tries: dict[
            tuple[StoredKey, str], asyncio.Future[LeaseReply | ServerError | None]
        ] = {}

    async def acquire(
        self, acquisition: Acquisition, *, gone: "asyncio.Future[None]"
    ) -> LeaseReply:
        """Grant the lease. If it is held, wait until it is free or the artifact is stored.

        After `wait_seconds`, or if the server stops or has too many waiters, reply that the lease
        is held. The caller of this method completes `gone` when the client disconnects. A lease
        granted after that is released at once.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + acquisition.wait_seconds
        with self.wait_queue.joined(acquisition.key) as ticket:

            def wake(_: object) -> None:
                ticket.set()

            gone.add_done_callback(wake)
            try:
                while True:
                    ticket.clear()
                    if ticket.digest is not None:
                        return _ready(ticket.digest)
                    reply = await self._share_try(acquisition)
                    if gone.done() and reply.token is not None:
                        await self.release(acquisition.key, token=reply.token)
                    rest = deadline - loop.time()
                    may_wait = ticket.may_wait and not self.wait_queue.is_closed
                    is_over = rest <= 0 or gone.done() or not may_wait
                    if reply.state is not LeaseState.HELD or is_over:
                        return reply
                    await self._pause(acquisition.key, ticket, reply=reply, rest_seconds=rest)
            finally:
                gone.remove_done_callback(wake)

    async def renew(self, key: StoredKey, *, token: str, request: LeaseRequest) -> LeaseReply:
        """Extend a held lease by the requested duration, counted from now.

        Raises:
            ServerError: 410 if the token no longer holds the lease.
        """
        now = self.clock()
        async with self.database.writing() as connection:
            fencing = await renew_lease(
                connection,
                key,
                token=token,
                holder=request.holder,
                now=now,
                ttl_seconds=request.ttl_seconds,
            )
        if fencing is None:
            raise lost(key)
        return _granted(token=token, fencing=fencing, ttl_seconds=request.ttl_seconds)

    async def release(self, key: StoredKey, *, token: str) -> None:
        """End a lease and wake one waiter, which wakes the others if it finds the artifact.

        Does not raise if the lease was released before, or ended by an upload.

        Raises:
            ServerError: 410 if the token never held the lease, or lost it.
        """
        now = self.clock()
        async with self.database.writing() as connection:
            is_ended = await release_lease(connection, key, token=token, now=now)
            if is_ended:
                await notify(connection, [Notification.free(key).payload])
            else:
                last = await find_lease(connection, key)
                is_ended = last is not None and last.token == token and last.released_at is not None
        if not is_ended:
            raise lost(key)
        self.wait_queue.wake(Notification.free(key))

    async def count_held(self) -> int:
        """Return the number of leases held now, over all servers."""
        async with self.database.reading() as connection:
            return await count_held_leases(connection, now=self.clock())

    async def list_held(self, namespaces: Sequence[Namespace], *, limit: int) -> list[HeldLease]:
        """Return up to `limit` held leases of these namespaces, latest expiry first."""
        async with self.database.reading() as connection:
            rows = await list_held_leases(connection, namespaces, now=self.clock(), limit=limit)
        return [HeldLease(*row, self.wait_queue.count_of(row[0])) for row in rows]

    async def _share_try(self, acquisition: Acquisition) -> LeaseReply:
        """Try to take the lease. Requests of one caller for one key share a try that has not begun,
        and its outcome unless it grants the lease. Otherwise a new graph of 2,000 processes would
        cost thousands of statements, one after another.
        """
        shared_by = acquisition.key, acquisition.caller
        while (waiting := self._next_tries.get(shared_by)) is not None:
            shared = await asyncio.shield(waiting)
            if isinstance(shared, ServerError):
                raise shared
            if shared is not None:
                return shared
        own = self._next_tries[shared_by] = asyncio.get_running_loop().create_future()
        shared = None
        try:
            async with self._query_slots:
                del self._next_tries[shared_by]  # a request from now on may know of a later change
                reply, digest = await self._try(acquisition)
            if digest is not None:
                self.wait_queue.wake(Notification.ready(acquisition.key, digest))
            if reply.state is not LeaseState.GRANTED:
                shared = reply
        except ServerError as error:
            shared = error
            raise
        else:
            return reply
        finally:
            if self._next_tries.get(shared_by) is own:  # cancelled
                del self._next_tries[shared_by]
            own.set_result(shared)

    async def _try(self, acquisition: Acquisition) -> tuple[LeaseReply, Digest | None]:
        """Look for the artifact, then for a free lease. Repeat if another process changes either.

        Returns:
            The reply, and the digest of the artifact if it is stored.
        """
        lost: Digest | None = None
        while True:
            row = await self.artifacts.find(acquisition.key)
            if row is not None:
                return _ready(row.digest), row.digest
            lease = await find_lease(self.database, acquisition.key)
            now = self.clock()
            if lease is not None and lease.is_held(now):
                return await self._held(acquisition.key, lease, now), None
            reply = await self._take(acquisition, lost=lost)
            if isinstance(reply, LeaseReply):
                if lease is not None and lease.released_at is None:
                    self.counters.count_expired_lease()
                return reply, None
            lost = reply  # unless the next look finds its blob

    async def _take(
        self, acquisition: Acquisition, *, lost: Digest | None
    ) -> LeaseReply | Digest | None:
        """Take a free lease. Return None if it is no longer free, or the blob of the artifact if
        that is stored, unless it is `lost`: the blob is absent.

        The lookup follows the grant, so that it finds every upload that commits before it. A later
        upload ends this lease, unless both transactions overlap on PostgreSQL: then the holder
        compiles in vain.
        """
        now = self.clock()
        token = self.new_token()
        async with self.database.writing() as connection:
            await _check_limits(connection, acquisition, now)
            fencing = await acquire_lease(
                connection,
                acquisition.key,
                token=token,
                holder=acquisition.request.holder,
                caller=acquisition.caller,
                now=now,
                ttl_seconds=acquisition.request.ttl_seconds,
            )
            if fencing is None:
                return None
            stored = await find_artifact(connection, acquisition.key)
            if stored is not None and stored.digest != lost:
                # Keep the row of the process that published: it may still release its lease.
                await connection.rollback()
                return stored.digest
        return _granted(token=token, fencing=fencing, ttl_seconds=acquisition.request.ttl_seconds)

    async def _pause(
        self, key: StoredKey, ticket: Ticket, *, reply: LeaseReply, rest_seconds: float
    ) -> None:
        """Sleep until a wake-up, the deadline or, for the poller, the next query."""
        seconds = rest_seconds
        if self.wait_queue.is_poller(key, ticket):
            mean = (
                _POLL_SECONDS_WITH_NOTIFICATIONS if self.wait_queue.are_informed else _POLL_SECONDS
            )
            poll_seconds = mean * (0.5 + jitter())
            seconds = min(seconds, poll_seconds, reply.expires_in_seconds or 0.0)
        try:
            async with asyncio.timeout(seconds):
                await ticket.wait()
        except TimeoutError:
            return

    async def _held(self, key: StoredKey, lease: LeaseRow, now: datetime) -> LeaseReply:
        """Reply that the lease is held.

        If the clock was set back since the grant, first shorten the lease to its full duration from
        now. Otherwise waiters would wait longer than that for a dead holder.
        """
        expires_at = min(lease.expires_at, lease.latest_end(now))
        if lease.expires_at - expires_at > _MAX_CLOCK_SKEW:
            async with self.database.writing() as connection:
                await shorten_lease(connection, key, lease, expires_at=expires_at)
        return LeaseReply(
            state=LeaseState.HELD,
            holder=lease.holder,
            expires_in_seconds=(expires_at - now).total_seconds(),
        )


async def _check_limits(
    connection: AsyncConnection, acquisition: Acquisition, now: datetime
) -> None:
    """Bound the rows in the database, and the number of keys that one caller can block.

    Raises:
        ServerError: 409 if the caller or the namespace has reached a limit.
    """
    caller, namespace = acquisition.caller, acquisition.key.namespace
    held = await count_held_leases(connection, now=now, caller=caller)
    if held >= _MAX_HELD:
        raise _too_many(f"{caller} holds", _MAX_HELD)
    if not await has_room_for_lease(connection, "caller", caller, now=now, most=_MAX_ROWS):
        raise _too_many(f"{caller} has", _MAX_ROWS)
    if not await has_room_for_lease(connection, "namespace", namespace, now=now, most=_MAX_ROWS):
        raise _too_many(f"the namespace {namespace} has", _MAX_ROWS)


def _too_many(who: str, most: int) -> ServerError:
    return ServerError(
        ErrorCode.TOO_MANY_LEASES,
        f"{who} {most} leases, which is the limit: compile without one, or retry when some have "
        "ended",
        limit=most,
    )


def _ready(digest: Digest) -> LeaseReply:
    return LeaseReply(state=LeaseState.READY, digest=str(digest), size_bytes=digest.size_bytes)


def _granted(*, token: str, fencing: int, ttl_seconds: float) -> LeaseReply:
    return LeaseReply(
        state=LeaseState.GRANTED, token=token, fencing=fencing, ttl_seconds=ttl_seconds
    )


def lost(key: StoredKey) -> ServerError:
    """Return the error for a token that does not hold the lease."""
    return ServerError(
        ErrorCode.LEASE_LOST,
        f"this token does not hold the lease on {key.key}: it expired, was released, or was never "
        "granted; continue without it, or acquire it again",
    )

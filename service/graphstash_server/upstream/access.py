"""UpstreamAccess: callers whose credential the upstream knows.

A region sends an unknown token or JWT to the upstream, which answers with the caller's grants. The
answer is valid for 28 seconds, a refusal for 5. After 15 seconds the next use of a valid answer
renews it in the background. While the upstream does not answer, a credential stays valid for
`upstream_offline_seconds` after its last confirmation, which the database keeps. The database has
only hashes of credentials.

Anyone can make up tokens. So a bounded number of unknown callers waits, and callers whom the
upstream has confirmed before wait only for each other.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from graphstash_schema import AccessKind, ErrorCode
from graphstash_schema.protocol import ADMIN_PREFIX
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.upstream import (
    delete_caller,
    find_caller,
    prune_callers,
    put_caller,
)
from graphstash_server.errors import ServerError
from graphstash_server.logs import in_background
from graphstash_server.services.identity.authentication import MAX_DECISION_AGE
from graphstash_server.services.identity.principals import Principal
from graphstash_server.upstream.client import MAX_IDENTIFYING, UpstreamClient, UpstreamError

__all__ = ["UpstreamAccess"]

_RENEWED_SECONDS: Final = 15.0
_CONFIRMED_SECONDS: Final = 30.0 - MAX_DECISION_AGE.total_seconds()
"""A revoked token is valid for at most 30 seconds, of which the upstream's own cache takes two."""

_REFUSED_SECONDS: Final = 5.0
_MAX_KNOWN: Final = 10_000
_EVER: Final = datetime.min.replace(tzinfo=UTC)
_UNKNOWN_AT_ONCE: Final = 8
_CONFIRMED_AT_ONCE: Final = MAX_IDENTIFYING - _UNKNOWN_AT_ONCE
"""Concurrent questions about callers. At a round trip of 100 ms, 32 renew 4,800 callers in 15 s."""

_MAX_UNKNOWN: Final = 64
"""Unknown callers that wait. Further ones are asked to retry."""

_STORED_AGAIN_SECONDS: Final = 300.0
"""Seconds after which the database stores another confirmation of a caller."""


class _Decision(NamedTuple):
    at: float
    principal: Principal | None
    stored_at: float | None
    """When this process last stored the confirmation, or None."""

    def is_valid(self, now: float) -> bool:
        seconds = _REFUSED_SECONDS if self.principal is None else _CONFIRMED_SECONDS
        return now - self.at < seconds

    def is_due(self, now: float) -> bool:
        return self.principal is not None and now - self.at >= _RENEWED_SECONDS


@dataclass(kw_only=True, eq=False)
class UpstreamAccess:
    """Authenticate callers by the upstream's answers. Safe for concurrent calls."""

    client: UpstreamClient
    database: Database
    clock: Clock
    offline: timedelta
    seconds: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # Apart, so that guessed tokens evict no known one.
        self._known: OrderedDict[str, _Decision] = OrderedDict()
        self._refused: OrderedDict[str, _Decision] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Principal | None]] = {}
        self._unknown: set[str] = set()
        self._slots = asyncio.Semaphore(_CONFIRMED_AT_ONCE)
        self._unknown_slots = asyncio.Semaphore(_UNKNOWN_AT_ONCE)

    def find_now(self, credentials: str) -> Principal | None:
        """Return a caller from memory. None if refused, or if that needs the upstream."""
        decision = self._valid(_name_of(credentials), credentials)
        return decision.principal if decision is not None else None

    async def find(self, credentials: str) -> Principal | None:
        """Return a caller, or None if the upstream refuses the credentials.

        Raises:
            ServerError: 503 if the upstream neither answers nor has confirmed the caller before, or
                if too many unknown callers wait.
        """
        name = _name_of(credentials)
        decision = self._valid(name, credentials)
        if decision is not None:
            return decision.principal
        is_confirmed = await self._is_stored(name)
        return await asyncio.shield(self._ask_once(name, credentials, is_confirmed=is_confirmed))

    async def prune(self) -> None:
        """Forget callers that were confirmed too long ago."""
        async with self.database.writing() as connection:
            await prune_callers(connection, before=self.clock() - self.offline)

    def _ask_once(
        self, name: str, credentials: str, *, is_confirmed: bool
    ) -> "asyncio.Task[Principal | None]":
        """Return the task that asks about a caller. It outlives the requests that wait for it."""
        if (asking := self._asking.get(name)) is not None:
            return asking
        if not is_confirmed:
            if len(self._unknown) >= _MAX_UNKNOWN:
                raise ServerError(
                    ErrorCode.UNAVAILABLE,
                    "the token cannot be checked now, because many unknown callers wait; retry",
                    retry_after_seconds=1.0,
                )
            self._unknown.add(name)
        slots = self._slots if is_confirmed else self._unknown_slots
        asking = self._asking[name] = in_background(self._ask(name, credentials, slots))

        def end(task: "asyncio.Task[Principal | None]") -> None:
            del self._asking[name]
            self._unknown.discard(name)
            if not task.cancelled():
                task.exception()  # nothing waits for a renewal

        asking.add_done_callback(end)
        return asking

    async def _ask(self, name: str, credentials: str, slots: asyncio.Semaphore) -> Principal | None:
        try:
            async with slots:
                asked_at = self.seconds()
                answer = await self.client.ask(f"{ADMIN_PREFIX}/access", credentials=credentials)
            if answer.status == 401:
                await self._refuse(name)
                return None
            caller = answer.parse(Principal)
        except UpstreamError as error:
            return await self._confirmed_before(name, error)
        if caller.kind not in (AccessKind.TOKEN, AccessKind.OIDC):
            # An upstream without authentication accepts any text.
            await self._refuse(name)
            return None
        return await self._confirm(name, caller, now=asked_at)

    async def _confirm(self, name: str, caller: Principal, *, now: float) -> Principal:
        before = self._known.get(name)
        stored_at = before.stored_at if before is not None else None
        if stored_at is None or now - stored_at >= _STORED_AGAIN_SECONDS:
            async with self.database.writing() as connection:
                await put_caller(
                    connection, name, access=caller.model_dump_json(), now=self.clock()
                )
            stored_at = now
        # The upstream has compared the expiry with its own clock.
        principal = caller.model_copy(update={"expires_at": None})
        self._remember(name, _Decision(now, principal, stored_at))
        return principal

    async def _refuse(self, name: str) -> None:
        self._remember(name, _Decision(self.seconds(), None, None))
        if await self._is_stored(name):
            async with self.database.writing() as connection:
                await delete_caller(connection, name)

    async def _is_stored(self, name: str) -> bool:
        async with self.database.reading() as connection:
            return await find_caller(connection, name, since=_EVER) is not None

    async def _confirmed_before(self, name: str, error: UpstreamError) -> Principal | None:
        since = self.clock() - self.offline
        async with self.database.reading() as connection:
            stored = await find_caller(connection, name, since=since)
        if stored is None:
            self._known.pop(name, None)
            raise ServerError(
                ErrorCode.UNAVAILABLE,
                f"the token cannot be checked: {error}, and has not confirmed it recently; retry",
                retry_after_seconds=_REFUSED_SECONDS,
            )
        principal = Principal.model_validate_json(stored)
        before = self._known.get(name)
        stored_at = before.stored_at if before is not None else None
        self._remember(name, _Decision(self.seconds(), principal, stored_at))
        return principal

    def _valid(self, name: str, credentials: str) -> _Decision | None:
        """Return the decision about a caller. Renew it in the background if it is due."""
        decision = self._known.get(name) or self._refused.get(name)
        now = self.seconds()
        if decision is None or not decision.is_valid(now):
            return None
        if decision.is_due(now):
            self._ask_once(name, credentials, is_confirmed=True)
        return decision

    def _remember(self, name: str, decision: _Decision) -> None:
        self._known.pop(name, None)
        self._refused.pop(name, None)
        kept = self._refused if decision.principal is None else self._known
        kept[name] = decision
        if len(kept) > _MAX_KNOWN:
            kept.popitem(last=False)


def _name_of(credentials: str) -> str:
    return hashlib.sha256(credentials.encode()).hexdigest()

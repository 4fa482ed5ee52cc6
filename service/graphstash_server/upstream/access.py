"""UpstreamAccess: callers whose credential the upstream knows.

A region sends an unknown token or JWT to the upstream, which answers with the caller's grants. The
answer is valid for 15 seconds, a refusal for 5. While the upstream does not answer, a credential
stays valid for `upstream_offline_seconds` after its last confirmation, which the database keeps.
The database has only hashes of credentials.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from graphstash_schema import Access, AccessKind, ErrorCode
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
from graphstash_server.services.identity.principals import Principal
from graphstash_server.upstream.client import UpstreamClient, UpstreamError

__all__ = ["UpstreamAccess"]

_CONFIRMED_SECONDS: Final = 15.0
_REFUSED_SECONDS: Final = 5.0
_MAX_KNOWN: Final = 10_000
_EVER: Final = datetime.min.replace(tzinfo=UTC)
_MAX_AT_ONCE: Final = 8
"""Concurrent questions to the upstream, so that guessed tokens do not take all connections."""

_STORED_AGAIN_SECONDS: Final = 300.0
"""Seconds after which the database stores another confirmation of a caller."""


class _Decision(NamedTuple):
    at: float
    principal: Principal | None
    stored_at: float

    def is_fresh(self, now: float) -> bool:
        seconds = _REFUSED_SECONDS if self.principal is None else _CONFIRMED_SECONDS
        return now - self.at < seconds


@dataclass(kw_only=True, eq=False)
class UpstreamAccess:
    """Ask the upstream who callers are. Safe for concurrent calls."""

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
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)

    def find_now(self, credentials: str) -> Principal | None:
        """Return a caller from memory. None if refused, or if that needs the upstream."""
        decision = self._fresh(_name_of(credentials))
        return decision.principal if decision is not None else None

    async def find(self, credentials: str) -> Principal | None:
        """Return a caller, or None if the upstream refuses the credentials.

        Raises:
            ServerError: 503 if the upstream neither answers nor has confirmed the caller before.
        """
        name = _name_of(credentials)
        decision = self._fresh(name)
        if decision is not None:
            return decision.principal
        asking = self._asking.get(name)
        if asking is None:
            asking = self._asking[name] = in_background(self._ask(name, credentials))
            asking.add_done_callback(lambda _: self._asking.pop(name))
        return await asyncio.shield(asking)

    async def prune(self) -> None:
        """Forget callers that were confirmed too long ago."""
        async with self.database.writing() as connection:
            await prune_callers(connection, before=self.clock() - self.offline)

    async def _ask(self, name: str, credentials: str) -> Principal | None:
        try:
            async with self._slots:
                answer = await self.client.call(
                    "GET", f"{ADMIN_PREFIX}/access", credentials=credentials
                )
            if answer.status == 401:
                await self._refuse(name)
                return None
            access = answer.parsed(Access)
        except UpstreamError as error:
            return await self._confirmed_before(name, error)
        if access.kind not in (AccessKind.TOKEN, AccessKind.OIDC):
            # An upstream without authentication accepts any text.
            await self._refuse(name)
            return None
        return await self._confirm(name, access)

    async def _confirm(self, name: str, access: Access) -> Principal:
        now = self.seconds()
        before = self._known.get(name)
        stored_at = before.stored_at if before is not None else now
        if before is None or now - stored_at >= _STORED_AGAIN_SECONDS:
            async with self.database.writing() as connection:
                await put_caller(
                    connection, name, access=access.model_dump_json(), now=self.clock()
                )
            stored_at = now
        # The upstream has compared the expiry with its own clock.
        principal = _principal(access.model_copy(update={"expires_at": None}))
        self._remember(name, _Decision(now, principal, stored_at))
        return principal

    async def _refuse(self, name: str) -> None:
        self._remember(name, _Decision(self.seconds(), None, 0.0))
        async with self.database.reading() as connection:
            stored = await find_caller(connection, name, since=_EVER)
        if stored is not None:
            async with self.database.writing() as connection:
                await delete_caller(connection, name)

    async def _confirmed_before(self, name: str, error: UpstreamError) -> Principal | None:
        since = self.clock() - self.offline
        async with self.database.reading() as connection:
            stored = await find_caller(connection, name, since=since)
        if stored is None:
            raise ServerError(
                ErrorCode.UNAVAILABLE,
                f"the token cannot be checked: {error}, and has not confirmed it recently; retry",
                retry_after_seconds=_REFUSED_SECONDS,
            )
        principal = _principal(Access.model_validate_json(stored))
        self._remember(name, _Decision(self.seconds(), principal, self.seconds()))
        return principal

    def _fresh(self, name: str) -> _Decision | None:
        decision = self._known.get(name) or self._refused.get(name)
        return decision if decision is not None and decision.is_fresh(self.seconds()) else None

    def _remember(self, name: str, decision: _Decision) -> None:
        self._known.pop(name, None)
        self._refused.pop(name, None)
        kept = self._refused if decision.principal is None else self._known
        kept[name] = decision
        if len(kept) > _MAX_KNOWN:
            kept.popitem(last=False)


def _principal(access: Access) -> Principal:
    return Principal.of(
        kind=access.kind,
        name=access.name,
        grants=access.grants,
        expires_at=access.expires_at,
        issuer=access.issuer,
        subject=access.subject or "",
        token=access.token,
    )


def _name_of(credentials: str) -> str:
    return hashlib.sha256(credentials.encode()).hexdigest()

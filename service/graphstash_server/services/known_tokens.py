"""KnownTokens: what the database says about tokens, remembered for two seconds.

So a hit asks nothing about its token, and a revocation is seen by every server within two seconds
(on PostgreSQL at once, by notification). Unknown ids are remembered, too, apart from the others,
and all look-ups of a process share one statement at a time: whoever guesses tokens costs the
database next to nothing and pushes out nobody.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Final, NamedTuple

from graphstash_schema import AccessKind
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.tokens import TokenRow, find_tokens
from graphstash_server.services.principals import Principal

__all__ = ["MAX_DECISION_AGE", "KnownToken", "KnownTokens"]

MAX_DECISION_AGE: Final = timedelta(seconds=2)
"""How long what is known about a caller is taken for true."""

_MAX_KNOWN = 10_000
_MAX_UNKNOWN = 10_000
"""Ids of 16 characters: about 2 MB."""

_AT_ONCE = 500
"""Below every database's limit on parameters."""


class KnownToken(NamedTuple):
    """A token that is not revoked: whose it is, and the SHA-256 of its secret in hex."""

    principal: Principal
    secret_sha256: str


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the database said at a time."""

    read_at: datetime
    token: KnownToken | None

    def is_fresh(self, now: datetime) -> bool:
        """Whether it still counts; not when the clock was turned back."""
        return timedelta(0) <= now - self.read_at < MAX_DECISION_AGE


class KnownTokens:
    """Used from the event loop only."""

    def __init__(self, *, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._known: OrderedDict[str, _Seen] = OrderedDict()
        self._unknown: OrderedDict[str, _Seen] = OrderedDict()
        self._wanted: dict[str, asyncio.Future[KnownToken | None]] = {}
        self._reading: set[str] = set()  # what is asked now; less what is forgotten meanwhile
        self._reader: asyncio.Task[None] | None = None

    async def find(self, token_id: str) -> KnownToken | None:
        """A token as it was at most two seconds ago; None when there is none, or it was revoked.

        Raises:
            ServerError: 503.
        """
        seen = self._known.get(token_id) or self._unknown.get(token_id)
        if seen is not None and seen.is_fresh(self._clock()):
            return seen.token
        found = self._wanted.get(token_id)
        if found is None:
            found = self._wanted[token_id] = asyncio.get_running_loop().create_future()
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        return await asyncio.shield(found)

    def forget(self, token_id: str) -> None:
        """Something happened to a token: the next use asks the database. A statement that is under
        way may have looked too early: whoever waits for it waits for another one.
        """
        self._reading.discard(token_id)
        self._known.pop(token_id, None)
        self._unknown.pop(token_id, None)

    async def _read(self) -> None:
        """Reads what is wanted, and what comes to be wanted meanwhile; then it ends."""
        try:
            while self._wanted:
                batch = dict(islice(self._wanted.items(), _AT_ONCE))
                read_at = self._clock()
                self._reading = set(batch)
                try:
                    async with self._database.reading() as connection:
                        rows = await find_tokens(connection, list(batch))
                except Exception as error:  # noqa: BLE001 - it belongs to those who wait
                    self._settle(batch, error)
                else:
                    batch = {name: found for name, found in batch.items() if name in self._reading}
                    known = {token_id: _known(rows.get(token_id)) for token_id in batch}
                    for token_id, token in known.items():
                        self._remember(token_id, _Seen(read_at, token))
                    self._settle(batch, known)
        finally:
            self._reader = None
            for found in self._wanted.values():
                found.cancel()
            self._wanted.clear()

    def _settle(
        self,
        batch: Mapping[str, asyncio.Future[KnownToken | None]],
        answer: Mapping[str, KnownToken | None] | Exception,
    ) -> None:
        for token_id, found in batch.items():
            del self._wanted[token_id]
            if isinstance(answer, Exception):
                found.set_exception(answer)
                found.exception()  # nobody may wait any more
            else:
                found.set_result(answer[token_id])

    def _remember(self, token_id: str, seen: _Seen) -> None:
        self.forget(token_id)
        kept, most = (
            (self._unknown, _MAX_UNKNOWN) if seen.token is None else (self._known, _MAX_KNOWN)
        )
        kept[token_id] = seen
        if len(kept) > most:
            kept.popitem(last=False)


def _known(row: TokenRow | None) -> KnownToken | None:
    if row is None or row.info.revoked_at is not None:
        return None
    principal = Principal.of(
        kind=AccessKind.TOKEN,
        name=f"token:{row.info.id} {row.info.description}",
        grants=row.info.grants,
        expires_at=row.info.expires_at,
    )
    return KnownToken(principal, row.secret_sha256)

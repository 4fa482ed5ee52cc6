"""PolicyService: the rules of each namespace, known to every request without asking the database.

The whole table is read at most every two seconds and kept in memory: it has a row per namespace
that somebody gave rules to, not per namespace that somebody named. So a change holds on this server
at once and on every other one within two seconds.

While the database does not answer, what was read last goes on to hold, for a minute at most. A
server that never read the table, or not for so long, refuses: no rules are not the default ones.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from graphstash_schema import (
    AuditAction,
    ErrorCode,
    Namespace,
    NamespaceInfo,
    NamespacePolicy,
    WriteMode,
)
from graphstash_server.actor import Actor
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.policies import (
    delete_policy,
    find_policy,
    list_policies,
    put_policy,
)
from graphstash_server.errors import ServerError
from graphstash_server.services.rates import Rates

__all__ = ["PolicyService", "check_writable"]

_LOGGER = logging.getLogger(__name__)

_FRESH_SECONDS = 2.0
"""How old the policies in memory may be; also the time between two tries of a failing database."""

_KEPT_SECONDS = 60.0
"""How long they hold while the database does not answer."""

_DEFAULT: Final = NamespacePolicy()


def check_writable(namespace: Namespace, policy: NamespacePolicy) -> None:
    """Refuses a write into a namespace that is only read.

    Raises:
        ServerError: 403.
    """
    if policy.mode is WriteMode.READ_ONLY:
        raise ServerError(
            ErrorCode.READ_ONLY,
            f"the namespace {namespace} is read-only: write into another one, or let an admin open "
            f"it (graphstash namespace set {namespace} --mode write_once)",
        )


class PolicyService:
    """Used from the event loop only."""

    def __init__(
        self, *, database: Database, clock: Clock, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        """Reads nothing yet.

        Args:
            database: where the policies are.
            clock: the time.
            seconds: a clock that never goes back.
        """
        self._database = database
        self._clock = clock
        self._seconds = seconds
        self._rates = Rates(seconds=seconds)
        self._known: Mapping[Namespace, NamespacePolicy] = {}
        self._limits: Mapping[str, int] = {}
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._failure: ServerError | None = None
        self._tries = 0
        self._reading = asyncio.Lock()

    async def of(self, namespace: Namespace) -> NamespacePolicy:
        """The rules of a namespace: its own, or the default ones.

        Raises:
            ServerError: 503, see above.
        """
        if not self._is_younger(self._tried_at, _FRESH_SECONDS):
            await self._refresh()
        return self._known.get(namespace, _DEFAULT)

    async def limits(self) -> Mapping[str, int]:
        """Bytes that namespaces may have, of those whose policy says it.

        Raises:
            ServerError: 503, see above.
        """
        if not self._is_younger(self._tried_at, _FRESH_SECONDS):
            await self._refresh()
        return self._limits

    def admit(self, namespace: Namespace, policy: NamespacePolicy) -> None:
        """Counts a request against the rate of its namespace, in this process.

        Raises:
            ServerError: 429, with the seconds after which one is let in.
        """
        if policy.requests_per_second is not None:
            self._rates.take(namespace, per_second=policy.requests_per_second)

    async def list_all(self) -> list[NamespaceInfo]:
        """Every namespace that has a policy of its own, by name, as it is now.

        Raises:
            ServerError: 503.
        """
        async with self._database.reading() as connection:
            return await list_policies(connection)

    async def find(self, namespace: Namespace) -> NamespaceInfo | None:
        """One namespace, as it is now; None when it has no policy of its own.

        Raises:
            ServerError: 503.
        """
        async with self._database.reading() as connection:
            return await find_policy(connection, namespace)

    async def put(
        self, namespace: Namespace, policy: NamespacePolicy, actor: Actor
    ) -> NamespaceInfo:
        """Gives a namespace a policy, in place of the one that it had.

        Raises:
            ServerError: 503.
        """
        now = self._clock()
        async with self._database.writing() as connection:
            await put_policy(connection, namespace, policy, now=now)
            rules = policy.model_dump_json(exclude_defaults=True)
            record = AuditRecord(
                now, actor, AuditAction.POLICY_SET, namespace, subject=namespace, detail=rules
            )
            await add_audit(connection, [record])
        await self._forget()
        return NamespaceInfo(namespace=namespace, policy=policy, updated_at=now)

    async def remove(self, namespace: Namespace, actor: Actor) -> bool:
        """Takes a namespace's policy away: the defaults hold; False when it had none.

        Raises:
            ServerError: 503.
        """
        async with self._database.writing() as connection:
            is_gone = await delete_policy(connection, namespace)
            if is_gone:
                record = AuditRecord(
                    self._clock(), actor, AuditAction.POLICY_REMOVE, namespace, subject=namespace
                )
                await add_audit(connection, [record])
        await self._forget()
        return is_gone

    async def _forget(self) -> None:
        """Lets the next request read again; a reading that is under way may have been too early."""
        async with self._reading:
            self._tried_at = None

    async def _refresh(self) -> None:
        """Reads the table once, whoever waits for it: when it cannot be read, all who waited are
        told so, or each would wait for a try of its own, one after the other.

        Raises:
            ServerError: 503, when that fails and what was read last is too old.
        """
        tries = self._tries
        async with self._reading:
            if self._is_younger(self._tried_at, _FRESH_SECONDS):
                return
            if self._failure is not None and self._tries != tries:
                raise ServerError(self._failure.code, self._failure.detail) from self._failure
            asked_at = self._seconds()
            self._failure = None
            try:
                known = {info.namespace: info.policy for info in await self.list_all()}
            except ServerError as error:
                self._tries += 1
                if not self._is_younger(self._read_at, _KEPT_SECONDS):
                    self._failure = error
                    raise
                _LOGGER.warning("the policies could not be read, the last ones hold: %s", error)
            else:
                self._known = known
                self._limits = {
                    namespace: policy.limit_bytes
                    for namespace, policy in known.items()
                    if policy.limit_bytes is not None
                }
                self._read_at = asked_at
            self._tried_at = self._seconds()

    def _is_younger(self, at: float | None, seconds: float) -> bool:
        return at is not None and self._seconds() - at < seconds

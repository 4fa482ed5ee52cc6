"""Policies, request rates and byte budgets of namespaces."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final, NamedTuple

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
from graphstash_server.db.prepared import Row
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.locks import lock_name
from graphstash_server.db.queries.policies import (
    PolicyRow,
    delete_policy,
    find_policy,
    find_policy_mark,
    list_policies,
    list_rules,
    put_policy,
)
from graphstash_server.db.queries.usage import list_namespaces
from graphstash_server.errors import ServerError
from graphstash_server.services.buckets import Buckets

__all__ = ["Budget", "Budgets", "PolicyLimits", "PolicyService", "Rates", "check_writable"]

_SOFT_SHARE = 0.9
_ROOM_SHARE = 0.95


class Budget(NamedTuple):
    """Byte limits; None is no limit. An upload must not exceed the hard limit. Above the soft
    limit, eviction begins.
    """

    hard_bytes: int | None
    soft_bytes: int | None

    @classmethod
    def of(cls, hard_bytes: int | None, soft_bytes: int | None = None) -> "Budget":
        """Return a budget. Default soft limit: nine tenths of the hard limit."""
        if soft_bytes is None and hard_bytes is not None:
            soft_bytes = int(hard_bytes * _SOFT_SHARE)
        return cls(hard_bytes, soft_bytes)

    @property
    def is_none(self) -> bool:
        """Whether neither limit is set."""
        return self.hard_bytes is None and self.soft_bytes is None

    @property
    def goal_bytes(self) -> int | None:
        """Size at which eviction stops: below the soft limit, so that not every upload evicts."""
        return None if self.soft_bytes is None else int(self.soft_bytes * _ROOM_SHARE)

    def exceeds_soft_limit(self, used_bytes: int) -> bool:
        """Return whether the soft limit is exceeded."""
        return self.soft_bytes is not None and used_bytes > self.soft_bytes


class PolicyLimits(NamedTuple):
    """Byte limits in policies, by namespace. Each change of any policy sets a new random mark."""

    size_bytes: Mapping[str, int] = MappingProxyType({})
    mark: str | None = None


class Budgets:
    """Budgets of a store and its namespaces.

    Args:
        store: budget of the whole store.
        namespace_bytes: hard limit of each namespace that matches no exception.
        exceptions: hard limits by pattern (`ci-*`). The first matching pattern applies.
    """

    def __init__(
        self,
        store: Budget,
        *,
        namespace_bytes: int | None = None,
        exceptions: Mapping[str, int] | None = None,
    ) -> None:
        self.store = store
        self._default = Budget.of(namespace_bytes)
        self._exceptions = [
            (pattern, Budget.of(limit)) for pattern, limit in (exceptions or {}).items()
        ]

    def of(self, namespace: str, limits: PolicyLimits) -> Budget:
        """Return the budget of a namespace. Its policy's limit, in `limits`, takes precedence."""
        if namespace in limits.size_bytes:
            return Budget.of(limits.size_bytes[namespace])
        for pattern, budget in self._exceptions:
            if fnmatchcase(namespace, pattern):
                return budget
        return self._default


class Rates:
    """Request rate limits of namespaces, shared by all workers of this server.

    Each namespace has a token bucket, which fills at the rate in its policy. The bucket holds one
    second's requests, and at least one.
    """

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets

    def take(self, namespace: Namespace, *, per_second: float, bucket: str = "") -> None:
        """Count one request, against the namespace's bucket or another one at the same rate.

        Raises:
            ServerError: 429, with the seconds until the bucket has a token.
        """
        most = max(per_second, 1.0)
        taken, rest = self._buckets.take(bucket or namespace, 1, most=most, per_second=per_second)
        if not taken:
            wait_seconds = (1.0 - rest) / per_second
            raise ServerError(
                ErrorCode.RATE_LIMITED,
                f"the namespace {namespace} makes more than {per_second:g} requests a second of "
                f"this server: retry in {wait_seconds:.3g} s; an administrator can raise the rate "
                f"(graphstash namespace set {namespace} --requests-per-second)",
                limit=per_second,
                retry_after_seconds=wait_seconds,
            )


_LOGGER = logging.getLogger(__name__)

_FRESH_SECONDS = 2.0
"""Seconds between two reads, also after a failed read while the last policies stay in force."""

_KEPT_SECONDS = 60.0
"""How long policies stay in force after the last successful read if the database fails."""

_DEFAULT: Final = NamespacePolicy()

_LOCK: Final = "policy {}"
"""Lock of a change, which reads the policy and then writes all of it."""


def check_writable(namespace: Namespace, policy: NamespacePolicy) -> None:
    """Refuse a write to a read-only namespace.

    Raises:
        ServerError: 403.
    """
    if policy.mode is WriteMode.READ_ONLY:
        raise ServerError(
            ErrorCode.READ_ONLY,
            f"the namespace {namespace} is read-only: write to another one, or ask an "
            f"administrator to open it (graphstash namespace set {namespace} --mode write_once)",
        )


@dataclass(kw_only=True, eq=False)
class PolicyService:
    """The policy of each namespace, which requests look up without a query.

    Each process keeps the whole table in memory, and reads it again after two seconds. So a change
    applies at once in the process that makes it, and within two seconds in other workers and on
    other servers. If no row changed, a read builds nothing. A policy object is built on first use.
    So ten thousand rows cost the event loop a millisecond or two.

    If the database fails, the last policies stay in force for up to a minute. After that, or before
    the first successful read, requests are refused: a process must not apply the defaults to a
    namespace with a policy.
    """

    database: Database
    clock: Clock
    rates: Rates
    seconds: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._rows: Sequence[Row] = ()
        self._row_of: Mapping[str, Row] = {}
        self._policies: dict[str, NamespacePolicy] = {}
        self._limits = PolicyLimits()
        self._is_anything_public = False
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._failure: ServerError | None = None
        self._failed_reads = 0
        self._reading = asyncio.Lock()

    async def of(self, namespace: Namespace) -> NamespacePolicy:
        """Return the policy of a namespace, or else the default policy."""
        await self._refresh()
        return self._in_memory(namespace)

    def now_of(self, namespace: Namespace) -> NamespacePolicy | None:
        """Like `of`, but return None if that needs a query."""
        if not self._is_younger(self._tried_at, _FRESH_SECONDS):
            return None
        return self._in_memory(namespace)

    def _in_memory(self, namespace: Namespace) -> NamespacePolicy:
        policy = self._policies.get(namespace)
        if policy is not None:
            return policy
        row = self._row_of.get(namespace)
        if row is None:
            return _DEFAULT
        self._policies[namespace] = PolicyRow(*row).policy
        return self._policies[namespace]

    async def is_anything_public(self) -> bool:
        """Return whether anonymous callers may read any namespace."""
        await self._refresh()
        return self._is_anything_public

    async def limits(self) -> PolicyLimits:
        """Return the byte limits in policies."""
        await self._refresh()
        return self._limits

    def admit(self, namespace: Namespace, policy: NamespacePolicy) -> None:
        """Count a request against the rate of its namespace on this server.

        Raises:
            ServerError: 429, as from `Rates.take`.
        """
        if policy.requests_per_second is not None:
            self.rates.take(namespace, per_second=policy.requests_per_second)

    def admit_comparison(self, namespace: Namespace, policy: NamespacePolicy) -> None:
        """Like `admit`, for comparisons of regions, which neither delay jobs nor wait for them."""
        if policy.requests_per_second is not None:
            per_second, bucket = policy.requests_per_second, f"{namespace} compared"
            self.rates.take(namespace, per_second=per_second, bucket=bucket)

    async def namespaces(self) -> Sequence[str]:
        """Return the namespaces in which an artifact or a manifest was ever stored."""
        async with self.database.reading() as connection:
            return await list_namespaces(connection)

    async def list_all(self) -> list[NamespaceInfo]:
        """Read all namespaces that have a policy, ordered by name, from the database."""
        async with self.database.reading() as connection:
            return await list_policies(connection)

    async def find(self, namespace: Namespace) -> NamespaceInfo | None:
        """Read a namespace with its policy from the database, or return None without a policy."""
        async with self.database.reading() as connection:
            return await find_policy(connection, namespace)

    async def put(
        self, namespace: Namespace, policy: NamespacePolicy, actor: Actor
    ) -> NamespaceInfo:
        """Set the policy of a namespace, replacing the earlier one."""
        return await self.change(namespace, policy.model_dump(), actor)

    async def change(
        self, namespace: Namespace, changes: Mapping[str, Any], actor: Actor
    ) -> NamespaceInfo:
        """Change fields of the policy of a namespace. The other fields keep their value.

        Raises:
            ValidationError: a value is invalid.
        """
        now = self.clock()
        async with self.database.writing() as connection:
            await lock_name(connection, _LOCK.format(namespace))
            known = await find_policy(connection, namespace)
            before = known.policy if known is not None else _DEFAULT
            policy = NamespacePolicy.model_validate({**before.model_dump(), **changes})
            await put_policy(connection, namespace, policy, now=now)
            rules = policy.model_dump_json(exclude_defaults=True)
            record = AuditRecord(
                now, actor, AuditAction.POLICY_SET, namespace, subject=namespace, detail=rules
            )
            await add_audit(connection, [record])
        await self._forget()
        return NamespaceInfo(namespace=namespace, policy=policy, updated_at=now)

    async def remove(self, namespace: Namespace, actor: Actor) -> bool:
        """Remove a namespace's policy, so that the defaults apply. Return whether it had one."""
        async with self.database.writing() as connection:
            await lock_name(connection, _LOCK.format(namespace))
            is_gone = await delete_policy(connection, namespace)
            if is_gone:
                record = AuditRecord(
                    self.clock(), actor, AuditAction.POLICY_REMOVE, namespace, subject=namespace
                )
                await add_audit(connection, [record])
        await self._forget()
        return is_gone

    async def _forget(self) -> None:
        """Make the next request read the table, after a running read, which may miss the change."""
        async with self._reading:
            self._tried_at = None

    async def _refresh(self) -> None:
        """Read the table if the last read is too old, once for all waiting callers. They also share
        its failure, or each would make its own attempt, one after another.

        Raises:
            ServerError: 503 if the read fails and the last successful read is too old.
        """
        if self._is_younger(self._tried_at, _FRESH_SECONDS):
            return
        failed_reads = self._failed_reads
        async with self._reading:
            if self._is_younger(self._tried_at, _FRESH_SECONDS):
                return
            if self._failure is not None and self._failed_reads != failed_reads:
                raise ServerError(self._failure.code, self._failure.detail) from self._failure
            asked_at = self.seconds()
            self._failure = None
            try:
                rows = await list_rules(self.database)
                mark = await find_policy_mark(self.database)
            except ServerError as error:
                self._failed_reads += 1
                if not self._is_younger(self._read_at, _KEPT_SECONDS):
                    self._failure = error
                    raise
                _LOGGER.warning(
                    "could not read the policies, the last ones stay in force: %s", error
                )
            else:
                if rows != self._rows:
                    self._load(rows)
                self._limits = self._limits._replace(mark=mark)
                self._read_at = asked_at
            self._tried_at = self.seconds()

    def _load(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._row_of = {row[0]: row for row in rows}
        self._policies = {}
        parsed = [PolicyRow(*row) for row in rows]
        self._limits = PolicyLimits(
            {
                rules.namespace: rules.limit_bytes
                for rules in parsed
                if rules.limit_bytes is not None
            }
        )
        self._is_anything_public = any(rules.anonymous_read for rules in parsed)

    def _is_younger(self, at: float | None, seconds: float) -> bool:
        return at is not None and self.seconds() - at < seconds

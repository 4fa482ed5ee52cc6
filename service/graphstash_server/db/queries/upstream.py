"""Statements of a region: its queue of publishes, claims of downloads, confirmed callers, and the
withdrawals that it has applied.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import zip_longest
from typing import Final, NamedTuple

from sqlalchemy import ColumnElement, and_, bindparam, delete, func, not_, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest, Namespace
from graphstash_schema.names import LIST_START, ListPosition
from graphstash_schema.region import Publisher
from graphstash_server.artifact import Artifact
from graphstash_server.db.prepared import Prepared, Transaction
from graphstash_server.db.queries.shared import (
    KEY_COLUMNS,
    QUEUED_UNTIL,
    insert_in,
    insert_into,
    is_key,
    key_parameters,
    key_values,
    new_values,
    prefixed,
    stored_key,
    upsert,
    where_key,
)
from graphstash_server.db.queries.withdrawals import GAP
from graphstash_server.db.tables import (
    artifacts,
    identifiers,
    upstream_callers,
    upstream_downloads,
    upstream_namespaces,
    upstream_publishes,
    withdrawals,
)
from graphstash_server.keys import StoredKey

__all__ = [
    "MAX_SINCE",
    "QueuedPublish",
    "claim_download",
    "claim_publishes",
    "count_publishes",
    "delete_caller",
    "end_download",
    "end_publish",
    "find_attempts",
    "find_caller",
    "find_download_claim",
    "find_earlier",
    "find_position",
    "find_upstream_id",
    "has_artifacts",
    "is_withdrawn_since",
    "list_positions",
    "lock_position",
    "note_positions",
    "note_upstream_id",
    "prune_callers",
    "put_caller",
    "put_position",
    "queue_publishes",
    "renew_download",
    "renew_publish",
    "retry_publish",
    "use_namespace",
]

_UPSTREAM: Final = "upstream"

_LONGEST_PAUSE: Final = timedelta(minutes=6)
"""Longer than a claim or a pause. A wrong clock has set a later attempt, which is due at once."""

_MAX_GROWTH: Final = 1.5

MAX_SINCE: Final = 10_000
"""Withdrawals that a commit compares with its artifact. After more, it counts as withdrawn."""

_QUEUE = Prepared(
    lambda dialect: (
        insert_in(dialect, upstream_publishes)
        .values(new_values(upstream_publishes, (each.name for each in upstream_publishes.c)))
        .on_conflict_do_update(
            index_elements=list(upstream_publishes.primary_key),
            set_={
                name: bindparam(f"new_{name}", type_=upstream_publishes.c[name].type)
                for name in ("sha256", "attempts", "next_at", "publisher")
            },
        )
    )
)
_PIN = Prepared(
    lambda _: (
        update(artifacts)
        .where(where_key(artifacts))
        .values(pinned_until=bindparam("until", type_=artifacts.c.pinned_until.type))
    )
)


_LOCK_POSITION = Prepared(
    lambda _: (
        select(upstream_namespaces.c.position)
        .where(upstream_namespaces.c.namespace == bindparam("followed"))
        .with_for_update()
    )
)
_WITHDRAWN_SINCE = Prepared(
    lambda _: (
        select(withdrawals.c.number)
        .where(
            withdrawals.c.namespace == bindparam("of_namespace"),
            withdrawals.c.number > bindparam("start"),
            or_(
                withdrawals.c.sha256 == bindparam("blob"),
                withdrawals.c.cause == GAP,
                withdrawals.c.number > bindparam("most"),
            ),
        )
        .limit(1)
    )
)


class QueuedPublish(NamedTuple):
    """An artifact to send to the upstream. `sha256` names the blob that was queued."""

    key: StoredKey
    sha256: str
    attempts: int
    publisher: str


async def queue_publishes(
    connection: Transaction, rows: Sequence[tuple[Artifact, Publisher]], *, now: datetime
) -> None:
    """Queue artifacts that this transaction has stored, and pin them until they are sent."""
    await _QUEUE.execute_all(
        connection,
        [
            prefixed(
                "new_",
                {
                    **key_values(row.key),
                    "sha256": row.digest.sha256,
                    "attempts": 0,
                    "next_at": now,
                    "publisher": publisher.header,
                },
            )
            for row, publisher in rows
        ],
    )
    await _PIN.execute_all(
        connection, [{**key_parameters(row.key), "until": QUEUED_UNTIL} for row, _ in rows]
    )


async def claim_publishes(
    connection: AsyncConnection, *, now: datetime, until: datetime, limit: int
) -> list[QueuedPublish]:
    """Return publishes that are due, oldest first. No other process gets them before `until`."""
    table = upstream_publishes
    due = (
        select(*(table.c[name] for name in (*KEY_COLUMNS, "sha256", "attempts", "publisher")))
        .where(or_(table.c.next_at <= now, table.c.next_at > now + _LONGEST_PAUSE))
        .order_by(table.c.next_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    found = [
        QueuedPublish(stored_key(row), row.sha256, row.attempts, row.publisher)
        for row in await connection.execute(due)
    ]
    if found:
        claim = update(table).where(where_key(table)).values(next_at=bindparam("until"))
        await connection.execute(
            claim, [{**key_parameters(each.key), "until": until} for each in found]
        )
    return found


async def end_publish(connection: AsyncConnection, key: StoredKey, digest: Digest) -> None:
    """Drop a publish from the queue and unpin the key's artifact, unless a publish of other bytes
    has replaced it.
    """
    table = upstream_publishes
    ended = delete(table).where(is_key(table, key), table.c.sha256 == digest.sha256)
    if (await connection.execute(ended)).rowcount:
        pinned = (is_key(artifacts, key), artifacts.c.pinned_until == QUEUED_UNTIL)
        await connection.execute(update(artifacts).where(*pinned).values(pinned_until=None))


async def retry_publish(connection: AsyncConnection, key: StoredKey, *, until: datetime) -> None:
    """Plan the next attempt of a publish that the upstream did not take."""
    table = upstream_publishes
    values = {"next_at": until, "attempts": table.c.attempts + 1}
    await connection.execute(update(table).where(is_key(table, key)).values(values))


async def renew_publish(
    connection: AsyncConnection, key: StoredKey, digest: Digest, *, until: datetime
) -> None:
    """Extend the claim of a publish, unless its artifact was replaced."""
    table = upstream_publishes
    is_claimed = (is_key(table, key), table.c.sha256 == digest.sha256)
    await connection.execute(update(table).where(*is_claimed).values(next_at=until))


async def find_attempts(connection: AsyncConnection, key: StoredKey) -> int | None:
    """Return how often the upstream did not take the queued artifact of a key, or None if none is
    queued.
    """
    table = upstream_publishes
    found = select(table.c.attempts).where(is_key(table, key))
    return (await connection.execute(found)).scalar()


async def count_publishes(connection: AsyncConnection) -> int:
    """Return the length of the queue."""
    counted = select(func.count()).select_from(upstream_publishes)
    return int((await connection.execute(counted)).scalar_one())


async def claim_download(
    connection: AsyncConnection, key: StoredKey, *, now: datetime, until: datetime
) -> bool:
    """Claim the download of a key until a time. Return False if another process has claimed it."""
    table = upstream_downloads
    statement = insert_into(connection, table).values(**key_values(key), claimed_until=until)
    statement = statement.on_conflict_do_update(
        index_elements=list(table.primary_key),
        set_={"claimed_until": statement.excluded.claimed_until},
        where=_has_ended(now, until),
    )
    return (await connection.execute(statement)).rowcount == 1


async def find_download_claim(connection: AsyncConnection, key: StoredKey) -> datetime | None:
    """Return when the claim of a download ends, also if that is over. None without a claim."""
    table = upstream_downloads
    found = select(table.c.claimed_until).where(is_key(table, key))
    return (await connection.execute(found)).scalar()


async def renew_download(connection: AsyncConnection, key: StoredKey, *, until: datetime) -> None:
    """Extend the claim of a download."""
    table = upstream_downloads
    await connection.execute(update(table).where(is_key(table, key)).values(claimed_until=until))


async def end_download(connection: AsyncConnection, key: StoredKey) -> None:
    """Drop the claim of a download."""
    await connection.execute(delete(upstream_downloads).where(is_key(upstream_downloads, key)))


def _has_ended(now: datetime, until: datetime) -> ColumnElement[bool]:
    """Match claims that have ended, or that a wrong clock has set too far ahead."""
    end = upstream_downloads.c.claimed_until
    return or_(end <= now, end > until + (until - now))


async def put_caller(
    connection: AsyncConnection, credential: str, *, access: str, now: datetime
) -> None:
    """Store the access of a caller whose credential, by its SHA-256, the upstream confirmed."""
    values = {"credential_sha256": credential, "access": access, "confirmed_at": now}
    await connection.execute(upsert(connection, upstream_callers, values))


async def find_caller(
    connection: AsyncConnection, credential: str, *, since: datetime
) -> str | None:
    """Return the access of a caller that the upstream has confirmed since a time, or None."""
    table = upstream_callers
    is_recent = and_(table.c.credential_sha256 == credential, table.c.confirmed_at >= since)
    return (await connection.execute(select(table.c.access).where(is_recent))).scalar()


async def delete_caller(connection: AsyncConnection, credential: str) -> None:
    """Forget a caller whose credential the upstream refuses."""
    table = upstream_callers
    await connection.execute(delete(table).where(table.c.credential_sha256 == credential))


async def prune_callers(connection: AsyncConnection, *, before: datetime) -> None:
    """Forget callers that the upstream has last confirmed before a time."""
    table = upstream_callers
    await connection.execute(delete(table).where(table.c.confirmed_at < before))


async def find_position(connection: AsyncConnection, namespace: Namespace) -> ListPosition | None:
    """Return the applied withdrawals of a namespace, or None if the region does not use it."""
    table = upstream_namespaces
    found = select(table.c.position).where(table.c.namespace == namespace, table.c.used)
    position = (await connection.execute(found)).scalar()
    return None if position is None else ListPosition(position)


async def list_positions(connection: AsyncConnection) -> dict[Namespace, ListPosition]:
    """Return the applied withdrawals of each namespace that the region uses."""
    table = upstream_namespaces
    found = select(table.c.namespace, table.c.position).where(table.c.used)
    return {Namespace(row[0]): ListPosition(row[1]) for row in await connection.execute(found)}


async def note_positions(
    connection: AsyncConnection, ends: Mapping[Namespace, ListPosition]
) -> None:
    """Store the ends of the upstream's lists as positions of the namespaces that the region does
    not use.
    """
    if not ends:
        return
    statement = insert_into(connection, upstream_namespaces)
    statement = statement.on_conflict_do_update(
        index_elements=[upstream_namespaces.c.namespace],
        set_={"position": statement.excluded.position},
        where=not_(upstream_namespaces.c.used),
    )
    await connection.execute(
        statement,
        [
            {"namespace": name, "position": position, "used": False}
            for name, position in sorted(ends.items())
        ],
    )


async def use_namespace(connection: AsyncConnection, namespace: Namespace) -> None:
    """Follow the withdrawals of a namespace from its position at the last probe on. The upstream
    had none then if the region knows no position.
    """
    values = {"namespace": namespace, "position": LIST_START, "used": True}
    statement = insert_into(connection, upstream_namespaces).values(values)
    statement = statement.on_conflict_do_update(
        index_elements=[upstream_namespaces.c.namespace], set_={"used": True}
    )
    await connection.execute(statement)


async def lock_position(connection: Transaction, namespace: Namespace) -> str | None:
    """Lock the position of a followed namespace until the commit, and return it. Lock nothing after
    it.
    """
    found = await _LOCK_POSITION.fetch_one(connection, {"followed": namespace})
    return found[0] if found is not None else None


async def find_earlier(connection: AsyncConnection, namespace: Namespace) -> list[ListPosition]:
    """Return some of the positions that the region had before its present one, newest first. They
    are dense near the present position and rare far from it.
    """
    table = upstream_namespaces
    found = select(table.c.earlier).where(table.c.namespace == namespace)
    earlier = (await connection.execute(found)).scalar() or ""
    return [ListPosition(each) for each in earlier.split()]


async def put_position(
    connection: AsyncConnection,
    namespace: Namespace,
    position: ListPosition,
    *,
    after: ListPosition,
) -> bool:
    """Store the withdrawals of a followed namespace that the region has applied after a position.
    Return False if another process has stored another position since.
    """
    if await lock_position(connection, namespace) != after:
        return False
    known = [after, *await find_earlier(connection, namespace)]
    earlier = _thinned(
        [each for each in known if 0 < each.number < position.number], newest=position
    )
    values = {"namespace": namespace, "position": position, "earlier": " ".join(earlier)}
    await connection.execute(upsert(connection, upstream_namespaces, values))
    return True


def _thinned(positions: Sequence[ListPosition], *, newest: ListPosition) -> list[ListPosition]:
    """Return positions whose distances from the newest one grow by at most `_MAX_GROWTH`, unless
    larger gaps are given: about 60 of 100,000.
    """
    kept: list[ListPosition] = []
    nearer = 1
    for each, further in zip_longest(positions, positions[1:]):
        if further is None or newest.number - further.number > _MAX_GROWTH * nearer:
            kept.append(each)
            nearer = newest.number - each.number
    return kept


async def is_withdrawn_since(
    connection: Transaction, namespace: Namespace, digest: Digest, *, start: int
) -> bool:
    """Return whether this server's list has a withdrawal of a blob, a gap, or too many withdrawals
    after a number.
    """
    most = start + MAX_SINCE
    given = {"of_namespace": namespace, "start": start, "blob": digest.sha256, "most": most}
    return bool(await _WITHDRAWN_SINCE.fetch(connection, given))


async def has_artifacts(connection: AsyncConnection) -> bool:
    """Return whether the store has an artifact."""
    return (await connection.execute(select(artifacts.c.sha256).limit(1))).first() is not None


async def find_upstream_id(connection: AsyncConnection) -> str | None:
    """Return the identifier of the upstream to which this store belongs, or None."""
    found = select(identifiers.c.value).where(identifiers.c.name == _UPSTREAM)
    return (await connection.execute(found)).scalar()


async def note_upstream_id(connection: AsyncConnection, value: str) -> None:
    """Store the identifier of the upstream, unless the store belongs to one."""
    statement = insert_into(connection, identifiers).values(name=_UPSTREAM, value=value)
    await connection.execute(statement.on_conflict_do_nothing())

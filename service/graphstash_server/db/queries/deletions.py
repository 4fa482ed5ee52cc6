"""Statements on `deletions` and `generations`."""

from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    and_,
    bindparam,
    delete,
    func,
    literal_column,
    not_,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Digest
from graphstash_server.db.prepared import Prepared, Source, Transaction, is_one_of
from graphstash_server.db.queries.shared import insert_in, insert_into, new_values
from graphstash_server.db.tables import deletions, generations

__all__ = [
    "abandon_deletion",
    "add_deletions",
    "claim_blobs",
    "claim_deletions",
    "count_deletions",
    "drop_deletions",
    "end_deletions",
    "find_claimed",
    "find_generations",
    "find_marked",
    "find_state",
    "find_states",
    "pending_bytes",
    "release_deletions",
    "renew_claims",
]


_IS_UNCONFIRMED: ColumnElement[bool] = or_(
    deletions.c.unconfirmed, deletions.c.claimed_until.is_not(None)
)
"""Whether the store may still delete the blob: a server has claimed it, or a claim ended without a
response of the store."""


_MARK = Prepared(
    lambda dialect: (
        insert_in(dialect, deletions)
        .values(new_values(deletions, ("sha256", "size_bytes")))
        .on_conflict_do_nothing()
    )
)


async def add_deletions(connection: Transaction, digests: Sequence[Digest]) -> None:
    """Mark blobs of removed artifacts."""
    if not digests:
        return
    sizes = {digest.sha256: digest.size_bytes for digest in digests}
    await _MARK.execute_all(
        connection,
        [{"new_sha256": sha256, "new_size_bytes": sizes[sha256]} for sha256 in sorted(sizes)],
    )


async def claim_deletions(
    connection: AsyncConnection,
    *,
    now: datetime,
    duration: timedelta,
    limit: int,
    spared: Collection[str] = (),
) -> list[Digest]:
    """Claim marked blobs without a current claim, except the blobs in `spared` (SHA-256). The claim
    lasts until `now + duration`, which also identifies it.
    """
    free = (
        select(deletions.c.sha256)
        .where(
            or_(deletions.c.claimed_until.is_(None), not_(_is_claimed(now, duration))),
            deletions.c.sha256.not_in(sorted(spared)),
        )
        .order_by(deletions.c.sha256)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    statement = (
        update(deletions)
        .where(deletions.c.sha256.in_(free))
        .values(claimed_until=now + duration, unconfirmed=_IS_UNCONFIRMED)
        .returning(deletions.c.sha256, deletions.c.size_bytes)
    )
    return [Digest(*found) for found in await connection.execute(statement)]


async def claim_blobs(
    connection: AsyncConnection, digests: Sequence[Digest], *, until: datetime
) -> None:
    """Claim blobs, marked or not."""
    if not digests:
        return
    statement = insert_into(connection, deletions)
    statement = statement.on_conflict_do_update(
        index_elements=[deletions.c.sha256],
        set_={
            "claimed_until": statement.excluded.claimed_until,
            "unconfirmed": _IS_UNCONFIRMED,
        },
    )
    await connection.execute(
        statement,
        [
            {"sha256": each.sha256, "size_bytes": each.size_bytes, "claimed_until": until}
            for each in sorted(digests, key=str)
        ],
    )


async def renew_claims(
    connection: AsyncConnection,
    digests: Sequence[Digest],
    *,
    held_until: datetime,
    until: datetime,
) -> set[str]:
    """Extend the claims that end at `held_until`. Return the SHA-256 of their blobs."""
    statement = (
        update(deletions)
        .where(_is_of(digests), deletions.c.claimed_until == held_until)
        .values(claimed_until=until)
        .returning(deletions.c.sha256)
    )
    return set((await connection.scalars(statement)).all())


async def find_claimed(
    connection: AsyncConnection, digests: Sequence[Digest], *, now: datetime, duration: timedelta
) -> set[str]:
    """Return the SHA-256 of the blobs that a server is deleting now."""
    statement = select(deletions.c.sha256).where(_is_of(digests), _is_claimed(now, duration))
    return set((await connection.scalars(statement)).all())


def _is_of(digests: Sequence[Digest]) -> ColumnElement[bool]:
    return deletions.c.sha256.in_([digest.sha256 for digest in digests])


def _is_claimed(now: datetime, duration: timedelta) -> ColumnElement[bool]:
    """Match claims that have not ended. A claim that ends more than two durations from now was made
    before the clock was set back, and counts as ended.
    """
    return deletions.c.claimed_until.between(now, now + 2 * duration)


async def find_states(source: Source, digests: Sequence[Digest]) -> tuple[set[str], dict[str, int]]:
    """Return in one statement the SHA-256 of the blobs that the store may still delete, and the
    generations by SHA-256. Blobs of generation 0 are left out.
    """
    if len(digests) == 1:  # most uploads; a list would cost as much as the rest of the statement
        found = await _STATES_OF_ONE.fetch(source, {"blob": digests[0].sha256})
    else:
        found = await _STATES.fetch(source, {"blobs": [digest.sha256 for digest in digests]})
    doomed = {sha256 for sha256, generation in found if generation == _DOOMED}
    return doomed, {sha256: generation for sha256, generation in found if generation != _DOOMED}


_DOOMED: Final = -1
"""Marks the rows of `_STATES` with blobs that the store may still delete. No generation."""


# One statement reads both tables at the same time. Ending a deletion increments the generation in
# the same transaction, so a blob is found doomed or with its new generation.
def _states(is_wanted: Callable[[ColumnElement[str], str], ColumnElement[bool]]) -> Prepared:
    """Prepare a statement. `is_wanted` returns the condition on a column, for a dialect."""
    return Prepared(
        lambda dialect: union_all(
            select(deletions.c.sha256, literal_column(str(_DOOMED), BigInteger)).where(
                is_wanted(deletions.c.sha256, dialect), _IS_UNCONFIRMED
            ),
            select(generations.c.sha256, generations.c.generation).where(
                is_wanted(generations.c.sha256, dialect)
            ),
        )
    )


_STATES = _states(lambda column, dialect: is_one_of(column, "blobs", dialect))
_STATES_OF_ONE = _states(lambda column, _: column == bindparam("blob"))


async def release_deletions(
    connection: AsyncConnection, digests: Sequence[Digest], *, held_until: datetime
) -> None:
    """End claims for which the server sent no request to the store. Keep the marks."""
    if digests:
        is_held = deletions.c.claimed_until == held_until
        await connection.execute(
            update(deletions).where(_is_of(digests), is_held).values(claimed_until=None)
        )


async def drop_deletions(connection: AsyncConnection, digests: Sequence[Digest]) -> None:
    """Remove the marks of blobs that artifacts use. Only valid if no server has asked the store to
    delete them. Otherwise use `abandon_deletion` or `end_deletions`.
    """
    if digests:
        await connection.execute(delete(deletions).where(_is_of(digests)))


async def abandon_deletion(connection: AsyncConnection, digest: Digest) -> None:
    """Remove the mark of a blob before an upload. If the store may still delete the blob, the
    upload stores it under a new name.
    """
    await _remove(connection, _is_of([digest]), is_unconfirmed=_IS_UNCONFIRMED)


async def end_deletions(
    connection: AsyncConnection,
    digests: Sequence[Digest],
    *,
    retried: Sequence[Digest] = (),
    held_until: datetime,
) -> None:
    """Remove the marks of deleted blobs whose claim ends at `held_until`. If the store has not
    responded to an earlier claim, or to a request of a blob in `retried`, the next upload of the
    blob uses a new name.
    """
    if digests:
        where = and_(_is_of(digests), deletions.c.claimed_until == held_until)
        is_unconfirmed = or_(deletions.c.unconfirmed, _is_of(retried))
        await _remove(connection, where, is_unconfirmed=is_unconfirmed)


async def _remove(
    connection: AsyncConnection, where: ColumnElement[bool], *, is_unconfirmed: ColumnElement[bool]
) -> None:
    """Remove marks, and increment the generations of blobs whose deletion is unconfirmed."""
    removed = delete(deletions).where(where).returning(deletions.c.sha256, is_unconfirmed)
    renamed = sorted(
        sha256 for sha256, is_renamed in await connection.execute(removed) if is_renamed
    )
    if not renamed:
        return
    statement = insert_into(connection, generations)
    statement = statement.on_conflict_do_update(
        index_elements=[generations.c.sha256],
        set_={"generation": generations.c.generation + 1},
    )
    await connection.execute(statement, [{"sha256": sha256, "generation": 1} for sha256 in renamed])


async def find_generations(source: Source, digests: Sequence[Digest]) -> dict[str, int]:
    """Return the generations by SHA-256. Blobs of generation 0 are left out."""
    blobs = [digest.sha256 for digest in digests]
    return dict(map(tuple, await _GENERATIONS.fetch(source, {"blobs": blobs})))


_GENERATIONS = Prepared(
    lambda dialect: select(generations.c.sha256, generations.c.generation).where(
        is_one_of(generations.c.sha256, "blobs", dialect)
    )
)


async def find_marked(connection: AsyncConnection, digests: Sequence[Digest]) -> set[str]:
    """Return the SHA-256 of the marked blobs."""
    statement = select(deletions.c.sha256).where(_is_of(digests))
    return set((await connection.scalars(statement)).all())


async def find_state(source: Source, digest: Digest) -> tuple[bool, int]:
    """Return in one statement whether a blob is marked for deletion, and its generation."""
    found = await _STATE.fetch_one(source, {"blob": digest.sha256})
    assert found is not None  # noqa: S101 - the statement has no condition
    return bool(found[0]), found[1] or 0


_STATE = Prepared(
    lambda _: select(
        select(deletions.c.size_bytes).where(deletions.c.sha256 == bindparam("blob")).exists(),
        select(generations.c.generation)
        .where(generations.c.sha256 == bindparam("blob"))
        .scalar_subquery(),
    ),
    finds_one=True,
)


async def count_deletions(connection: AsyncConnection) -> int:
    """Return the number of marked blobs."""
    return int(await connection.scalar(select(func.count()).select_from(deletions)) or 0)


async def pending_bytes(connection: AsyncConnection) -> int:
    """Return the total size of the marked blobs, which the store may still hold."""
    total = await connection.scalar(select(func.coalesce(func.sum(deletions.c.size_bytes), 0)))
    return int(total or 0)

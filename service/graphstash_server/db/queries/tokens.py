"""Statements on `tokens`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Grant, TokenInfo
from graphstash_server.db.prepared import Prepared, Source, is_one_of
from graphstash_server.db.tables import tokens

__all__ = [
    "TokenRow",
    "count_exchanged_tokens",
    "count_live_tokens",
    "delete_ended_tokens",
    "find_tokens",
    "find_unrevoked",
    "insert_token",
    "list_tokens",
    "revoke_token",
    "touch_tokens",
]

_TOUCH = (
    update(tokens)
    .where(
        tokens.c.id == bindparam("token_id"),
        or_(tokens.c.last_used_at.is_(None), tokens.c.last_used_at < bindparam("at")),
    )
    .values(last_used_at=bindparam("at"))
)


class TokenRow(NamedTuple):
    """A stored token, with the SHA-256 of its secret in hex."""

    info: TokenInfo
    secret_sha256: str


async def insert_token(connection: AsyncConnection, row: TokenRow) -> None:
    """Add a token."""
    values = row.info.model_dump()
    values["grants"] = " ".join(map(str, row.info.grants))
    await connection.execute(insert(tokens).values(**values, secret_sha256=row.secret_sha256))


async def find_tokens(source: Source, ids: Sequence[str]) -> dict[str, TokenRow]:
    """Return the tokens with these IDs, by ID, including revoked ones."""
    found = {}
    for row in await _FIND.fetch(source, {"ids": ids}):
        columns = dict(zip(tokens.c.keys(), row, strict=True))
        found[columns["id"]] = TokenRow(_info(columns), columns["secret_sha256"])
    return found


_FIND = Prepared(lambda dialect: select(tokens).where(is_one_of(tokens.c.id, "ids", dialect)))


async def find_unrevoked(source: Source, ids: Sequence[str]) -> set[str]:
    """Return the IDs of existing tokens that are not revoked. Usually takes one count."""
    ((count,),) = await _COUNT_UNREVOKED.fetch(source, {"ids": ids})
    if count == len(ids):
        return set(ids)
    return {row[0] for row in await _FIND_UNREVOKED.fetch(source, {"ids": ids})}


def _of_unrevoked(column: ColumnElement[Any], dialect: str) -> Select[tuple[Any]]:
    is_wanted = is_one_of(tokens.c.id, "ids", dialect)
    return select(column).select_from(tokens).where(is_wanted, tokens.c.revoked_at.is_(None))


_COUNT_UNREVOKED = Prepared(partial(_of_unrevoked, func.count()))
_FIND_UNREVOKED = Prepared(partial(_of_unrevoked, tokens.c.id))


async def list_tokens(connection: AsyncConnection) -> list[TokenInfo]:
    """Return all tokens, newest first."""
    statement = select(tokens).order_by(tokens.c.created_at.desc(), tokens.c.id)
    return [_info(result._asdict()) for result in await connection.execute(statement)]


async def count_live_tokens(connection: AsyncConnection, *, now: datetime) -> int:
    """Count tokens that are neither revoked nor expired."""
    statement = select(func.count()).select_from(tokens).where(_is_live(now))
    return int(await connection.scalar(statement) or 0)


async def count_exchanged_tokens(
    connection: AsyncConnection,
    *,
    now: datetime,
    since: datetime,
    of: tuple[str, str] | None = None,
) -> int:
    """Count tokens exchanged for JWTs that are live or were created after `since`. `of` restricts
    the count to one caller: issuer, and name in the audit log.
    """
    statement = (
        select(func.count())
        .select_from(tokens)
        .where(tokens.c.issuer.is_not(None), or_(_is_live(now), tokens.c.created_at > since))
    )
    if of is not None:
        statement = statement.where(tokens.c.issuer == of[0], tokens.c.created_by == of[1])
    return int(await connection.scalar(statement) or 0)


async def revoke_token(connection: AsyncConnection, token_id: str, *, now: datetime) -> bool:
    """Revoke a token. Return False if it is absent or already revoked."""
    statement = (
        update(tokens)
        .where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
        .values(revoked_at=now)
    )
    return (await connection.execute(statement)).rowcount == 1


async def delete_ended_tokens(
    connection: AsyncConnection, *, before: datetime, exchanged_before: datetime
) -> int:
    """Delete tokens that were revoked or expired before a time. Return their number. For tokens
    exchanged for JWTs, the time is `exchanged_before`.
    """
    ended = or_(
        _has_ended(before), and_(tokens.c.issuer.is_not(None), _has_ended(exchanged_before))
    )
    return (await connection.execute(delete(tokens).where(ended))).rowcount


async def touch_tokens(connection: AsyncConnection, uses: Mapping[str, datetime]) -> None:
    """Store when tokens were last used. Keeps later stored times."""
    await connection.execute(
        _TOUCH, [{"token_id": token_id, "at": at} for token_id, at in sorted(uses.items())]
    )


def _is_live(now: datetime) -> ColumnElement[bool]:
    return and_(
        tokens.c.revoked_at.is_(None),
        or_(tokens.c.expires_at.is_(None), tokens.c.expires_at > now),
    )


def _has_ended(before: datetime) -> ColumnElement[bool]:
    return or_(tokens.c.revoked_at < before, tokens.c.expires_at < before)


def _info(columns: Mapping[str, Any]) -> TokenInfo:
    grants = tuple(map(Grant.parse, columns["grants"].split()))
    return TokenInfo.model_validate({**columns, "grants": grants})

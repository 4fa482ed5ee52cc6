"""Statements that list the artifacts of a namespace, a page at a time."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import Column, ColumnElement, and_, literal, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import Namespace
from graphstash_schema.listing import ArtifactQuery, ListOrder
from graphstash_server.artifact import Artifact, DescribedArtifact
from graphstash_server.db.queries.shared import KEYED_ARTIFACT_COLUMNS, KNOWN_KINDS, described_of
from graphstash_server.db.tables import artifacts, descriptions, environments

__all__ = ["Place", "list_page"]

_BEYOND_HEX: Final = "g"
"""Sorts after every hex digit."""

_KEY: Final = (artifacts.c.fingerprint, artifacts.c.kind, artifacts.c.device_type)
_DESCENDING: Final[dict[ListOrder, tuple[Column[Any], ...]]] = {
    ListOrder.NEWEST: (artifacts.c.created_at, *_KEY),
    ListOrder.SIZE: (artifacts.c.size_bytes, *_KEY),
}
"""Columns of each order that begins with the largest values. Each has an index."""

_LISTED = (
    select(*KEYED_ARTIFACT_COLUMNS, descriptions.c.label)
    .outerjoin(descriptions)
    .where(artifacts.c.withheld_at.is_(None), artifacts.c.kind.in_(KNOWN_KINDS))
)
_DETAILED = _LISTED.add_columns(
    descriptions.c.parts.label("program"), environments.c.parts.label("environment")
).outerjoin(environments, environments.c.id == descriptions.c.environment)

_AT_ONCE: Final = 50
"""Rows converted per event loop iteration: a millisecond."""


class Place(NamedTuple):
    """The end of a page: the last artifact that the query scanned, perhaps excluded by filters."""

    first: datetime | int
    """Size in bytes if the largest artifacts come first, otherwise the time of creation."""
    fingerprint: str
    kind: str
    device_type: str


async def list_page(
    connection: AsyncConnection,
    namespace: Namespace,
    query: ArtifactQuery,
    *,
    after: Place | None,
    limit: int,
    most_scanned: int,
) -> tuple[list[DescribedArtifact], Place | None]:
    """Return the page after a place, and its end if more artifacts may follow.

    The statement scans at most `most_scanned` artifacts in index order, because few of a million
    may match. It reads descriptions' parts only if the query asks for details.
    """
    order, within = _order_of(query.order), _range_of(namespace, query, after)
    ends = (
        select(*_place_columns(query.order))
        .where(within)
        .order_by(*order)
        .offset(most_scanned - 1)
        .limit(1)
    )
    end = (await connection.execute(ends)).first()
    last = None if end is None else Place(*end)
    chosen = (_DETAILED if query.details else _LISTED).where(within, *_filters_of(query))
    if last is not None:
        chosen = chosen.where(~_is_after(query.order, last))
    found: list[DescribedArtifact] = []
    rows = await connection.execute(chosen.order_by(*order).limit(limit + 1))
    for part in rows.partitions(_AT_ONCE):
        found += map(described_of, part)
        await asyncio.sleep(0)  # a whole page takes ten milliseconds; let other tasks run
    if len(found) > limit:
        return found[:limit], _place_of(found[limit - 1].artifact, query.order)
    return found, last


def _place_of(artifact: Artifact, order: ListOrder) -> Place:
    key, is_size = artifact.key, order is ListOrder.SIZE
    first = artifact.digest.size_bytes if is_size else artifact.created_at
    return Place(first, key.fingerprint, key.kind.value, key.device_type)


def _place_columns(order: ListOrder) -> Sequence[Column[Any]]:
    return _DESCENDING[order if order in _DESCENDING else ListOrder.NEWEST]


def _order_of(order: ListOrder) -> Sequence[ColumnElement[Any]]:
    columns = _DESCENDING.get(order)
    return _KEY if columns is None else [column.desc() for column in columns]


def _range_of(
    namespace: Namespace, query: ArtifactQuery, after: Place | None
) -> ColumnElement[bool]:
    """Return the conditions that an index evaluates."""
    chosen = [artifacts.c.namespace == namespace]
    if query.fingerprint:
        chosen.append(artifacts.c.fingerprint >= query.fingerprint)
        chosen.append(artifacts.c.fingerprint < query.fingerprint + _BEYOND_HEX)
    if after is not None:
        chosen.append(_is_after(query.order, after))
    return and_(*chosen)


def _is_after(order: ListOrder, place: Place) -> ColumnElement[bool]:
    columns = _DESCENDING.get(order)
    if columns is not None:
        return tuple_(*columns) < _values(columns, place)
    return tuple_(*_KEY) > _values(_KEY, place[1:])


def _values(columns: Sequence[Column[Any]], values: Sequence[Any]) -> ColumnElement[Any]:
    paired = zip(columns, values, strict=True)
    return tuple_(*(literal(value, column.type) for column, value in paired))


def _filters_of(query: ArtifactQuery) -> list[ColumnElement[bool]]:
    filters = []
    if query.kind is not None:
        filters.append(artifacts.c.kind == query.kind.value)
    if query.device_type is not None:
        filters.append(artifacts.c.device_type == query.device_type)
    if query.label:
        filters.append(descriptions.c.label.icontains(query.label, autoescape=True))
    return filters

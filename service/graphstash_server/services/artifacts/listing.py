"""ListingService: lists the artifacts of a namespace, page by page."""

import asyncio
from dataclasses import dataclass
from typing import Final

from graphstash_schema import DeviceType, ErrorCode, Fingerprint, Namespace
from graphstash_schema.explanation import Description
from graphstash_schema.listing import (
    MAX_DETAILED_ARTIFACTS,
    ArtifactList,
    ArtifactQuery,
    ListedArtifact,
    ListOrder,
)
from graphstash_schema.stats import MAX_COUNT
from graphstash_server.artifact import DescribedArtifact
from graphstash_server.clock import parsed_time
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.listing import Place, list_page
from graphstash_server.errors import ServerError

__all__ = ["ListingService"]

_SCANNED: Final = 5000
"""Maximum artifacts that one call scans: a few milliseconds in the database."""

_AT_ONCE: Final = 25
"""Artifacts converted per event loop iteration: a millisecond or two."""


@dataclass(kw_only=True, eq=False)
class ListingService:
    """Lists artifacts. Safe for concurrent calls."""

    database: Database

    async def list_artifacts(self, namespace: Namespace, query: ArtifactQuery) -> ArtifactList:
        """Return a page of artifacts that GET would serve.

        Raises:
            ServerError: 400 if `after` does not have the form of a page's `next`.
        """
        after = _parse(query.after, query.order) if query.after else None
        limit = min(query.limit, MAX_DETAILED_ARTIFACTS) if query.details else query.limit
        async with self.database.reading() as connection:
            rows, last = await list_page(
                connection, namespace, query, after=after, limit=limit, most_scanned=_SCANNED
            )
        listed: list[ListedArtifact] = []
        for start in range(0, len(rows), _AT_ONCE):
            page = rows[start : start + _AT_ONCE]
            listed += [_listed(row, with_details=query.details) for row in page]
            await asyncio.sleep(0)  # a page takes tens of milliseconds; let other tasks run
        return ArtifactList(artifacts=tuple(listed), next=None if last is None else _format(last))


def _listed(row: DescribedArtifact, *, with_details: bool) -> ListedArtifact:
    artifact, metadata, description = row.artifact, row.metadata, None
    if metadata is not None and not with_details:
        metadata = metadata.model_copy(update={"parts": {}})
    if with_details and row.program is not None and row.environment is not None:
        description = Description(
            key=artifact.key.key,
            label=row.label,
            program=dict(row.program),
            environment=dict(row.environment),
        )
    return ListedArtifact(
        key=artifact.key.key,
        digest=str(artifact.digest),
        size_bytes=artifact.digest.size_bytes,
        created_at=artifact.created_at,
        last_used_at=artifact.last_used_at,
        hits=artifact.hits,
        label=row.label,
        metadata=metadata,
        description=description,
    )


def _format(place: Place) -> str:
    first = place.first if isinstance(place.first, int) else place.first.isoformat()
    return "/".join((str(first), *place[1:]))


def _parse(text: str, order: ListOrder) -> Place:
    try:
        first, fingerprint, kind, device_type = text.split("/")
        value = _size(first) if order is ListOrder.SIZE else parsed_time(first)
        place = Place(value, Fingerprint(fingerprint), kind, DeviceType(device_type))
        is_valid = kind.isidentifier()
    except (ValueError, OverflowError):
        is_valid = False
    if not is_valid:
        raise ServerError(
            ErrorCode.INVALID_REQUEST,
            f"after={text[:120]!r} does not come from a page in this order: use its `next` as it "
            "is, or leave it out to begin",
        )
    return place


def _size(text: str) -> int:
    if not 0 <= (size_bytes := int(text)) <= MAX_COUNT:
        raise ValueError(text)
    return size_bytes

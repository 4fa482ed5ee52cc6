"""ExplanationService: stores what artifacts were made of, and finds those nearest to a missed one.

From nearest to farthest: the same key in another namespace; the same program in another
environment; a program with the same label. Within each, artifacts with fewer differences are
nearer.
"""

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from difflib import SequenceMatcher
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import ArtifactMetadata, InvalidValueError, Namespace
from graphstash_schema.explanation import (
    Description,
    ExplainResponse,
    Relative,
    compare,
    identity_of,
)
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.descriptions import (
    DescribedRow,
    NewDescription,
    add_descriptions,
    count_undescribed,
    drop_unused_environments,
    find_described,
    list_by_identity,
    list_by_label,
)
from graphstash_server.keys import StoredKey
from graphstash_server.services.plausible_clock import PlausibleClock

__all__ = ["MAX_NAMESPACES", "ExplanationService"]

MAX_NAMESPACES: Final = 16
"""Maximum namespaces of one explanation. Each costs three short index scans."""

_CANDIDATES: Final = 16
_COMPARED: Final = 16
_RELATIVES: Final = 3
_LOOKED_AT: Final = 250

_UNUSED: Final = timedelta(days=1)


@dataclass(kw_only=True, eq=False)
class ExplanationService:
    """Store and compare descriptions of artifacts."""

    database: Database
    clock: PlausibleClock

    def __post_init__(self) -> None:
        self._comparing = asyncio.Semaphore(1)

    async def describe(self, namespace: Namespace, given: Sequence[Description]) -> int:
        """Describe stored artifacts that have no description yet. Return their number."""
        new = [
            NewDescription(
                StoredKey.of(namespace, each.key), each.label, each.program, each.environment
            )
            for each in given
        ]
        async with self.database.writing() as connection:
            return await add_descriptions(connection, new, now=self.clock())

    async def explain(
        self, namespace: Namespace, wanted: Description, *, readable: Sequence[Namespace]
    ) -> ExplainResponse:
        """Return the artifacts nearest to a missed one.

        Args:
            namespace: namespace of the missed artifact.
            wanted: description of the missed artifact.
            readable: namespaces to search, at most `MAX_NAMESPACES`.
        """
        async with self._comparing:  # only one call at a time holds descriptions in memory
            async with self.database.reading() as connection:
                rows: dict[StoredKey, DescribedRow] = {}
                for where in readable:
                    for row in await self._candidates(connection, where, wanted):
                        rows.setdefault(row.key, row)
                # The caller may have stored the missed artifact in the meantime.
                rows.pop(StoredKey.of(namespace, wanted.key), None)
                undescribed = 0
                if not rows:
                    undescribed = await count_undescribed(
                        connection, namespace, looked_at=_LOOKED_AT
                    )
            relatives = await asyncio.to_thread(_nearest, list(rows.values()), wanted)
        return ExplainResponse(relatives=relatives, undescribed=undescribed)

    async def drop_unused(self) -> None:
        """Delete environments that no artifact has used for a day."""
        async with self.database.writing() as connection:
            await drop_unused_environments(connection, before=self.clock.ago(_UNUSED))

    @staticmethod
    async def _candidates(
        connection: AsyncConnection, namespace: Namespace, wanted: Description
    ) -> list[DescribedRow]:
        kind = wanted.key.kind.value
        found = []
        same = await find_described(connection, StoredKey.of(namespace, wanted.key))
        if same is not None:
            found.append(same)
        if identity := identity_of(wanted.program):
            found += await list_by_identity(
                connection, namespace, kind, identity, limit=_CANDIDATES
            )
        if wanted.label:
            found += await list_by_label(
                connection, namespace, kind, wanted.label, limit=_CANDIDATES
            )
        return found


def _nearest(rows: Sequence[DescribedRow], wanted: Description) -> tuple[Relative, ...]:
    """Rank candidates. Run this in a thread: many large ones take some milliseconds."""
    relatives = heapq.nsmallest(_COMPARED, (_relative(row, wanted) for row in rows), key=_distance)
    relatives.sort(key=lambda each: (_distance(each)[:3], _tie_break(each)))  # stable
    return tuple(relatives[:_RELATIVES])


def _distance(relative: Relative) -> tuple[bool, bool, int, float]:
    return (
        bool(relative.differences),
        not relative.is_same_program,
        len(relative.differences),
        -relative.created_at.timestamp(),
    )


def _tie_break(relative: Relative) -> float:
    """Return how much values differ: among many shapes, the nearest differs in its type only."""
    return sum(
        1 - SequenceMatcher(None, each.here or "", each.there or "").quick_ratio()
        for each in relative.differences
    )


def _relative(row: DescribedRow, wanted: Description) -> Relative:
    identity = identity_of(wanted.program)
    producer = ""
    if row.metadata_header:
        try:
            producer = ArtifactMetadata.from_header(row.metadata_header).producer
        except InvalidValueError:  # a release with other rules stored it
            producer = ""
    return Relative(
        key=row.key.key,
        namespace=row.key.namespace,
        label=row.label,
        producer=producer,
        created_at=row.created_at,
        is_same_program=bool(identity) and identity == row.identity,
        differences=compare(wanted.parts, row.parts),
    )

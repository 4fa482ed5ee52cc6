"""ExplanationService: what artifacts were made of, and which are near to one that is missed.

Near is, in this order: the same key in another namespace; the same program in another environment;
a program that its user calls by the same name. Among those, fewer differences are nearer.
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
from graphstash_server.clock import Clock
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

__all__ = ["MAX_NAMESPACES", "ExplanationService"]

MAX_NAMESPACES: Final = 16
"""Of one explanation: each costs three short index scans."""

_CANDIDATES: Final = 16
_COMPARED: Final = 16
_RELATIVES: Final = 3
_LOOKED_AT: Final = 250

_UNUSED: Final = timedelta(days=1)


@dataclass(kw_only=True, eq=False)
class ExplanationService:
    """Keeps descriptions, and compares them."""

    database: Database
    clock: Clock

    def __post_init__(self) -> None:
        self._comparing = asyncio.Semaphore(1)

    async def describe(self, namespace: Namespace, given: Sequence[Description]) -> int:
        """Stores descriptions of artifacts that are there and that nobody has described; returns
        how many those were. What was said first stays.
        """
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
        """The nearest artifacts.

        Args:
            namespace: where it is missed.
            wanted: what is missed.
            readable: where to look, `MAX_NAMESPACES` at most.
        """
        async with self._comparing:  # one at a time has its descriptions in memory
            async with self.database.reading() as connection:
                rows: dict[StoredKey, DescribedRow] = {}
                for where in readable:
                    for row in await self._candidates(connection, where, wanted):
                        rows.setdefault(row.key, row)
                # It may have been stored since, by the one who asks.
                rows.pop(StoredKey.of(namespace, wanted.key), None)
                undescribed = 0
                if not rows:
                    undescribed = await count_undescribed(
                        connection, namespace, looked_at=_LOOKED_AT
                    )
            relatives = await asyncio.to_thread(_nearest, list(rows.values()), wanted)
        return ExplainResponse(relatives=relatives, undescribed=undescribed)

    async def drop_unused(self) -> None:
        """Deletes environments whose artifacts are gone."""
        async with self.database.writing() as connection:
            await drop_unused_environments(connection, before=self.clock() - _UNUSED)

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
    """Compares them; takes some milliseconds for many large ones, so it runs in a thread."""
    relatives = heapq.nsmallest(_COMPARED, (_relative(row, wanted) for row in rows), key=_distance)
    relatives.sort(key=lambda each: (_distance(each)[:3], _unlikeness(each)))  # a stable sort
    return tuple(relatives[:_RELATIVES])


def _distance(relative: Relative) -> tuple[bool, bool, int, float]:
    return (
        bool(relative.differences),
        not relative.is_same_program,
        len(relative.differences),
        -relative.created_at.timestamp(),
    )


def _unlikeness(relative: Relative) -> float:
    """How much the values differ: among many shapes, one in another type is the nearest."""
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
        except InvalidValueError:  # stored by a release with other rules
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

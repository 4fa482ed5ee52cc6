"""ExplanationService: stores what artifacts were made of, and finds those nearest to a missed one.

The nearest artifact has the fewest parts that differ, including parts that the response omits.
Ties go to the same program, then to the fewest words in the returned differences, then to the most
similar characters in them, then to the latest artifact.
"""

import asyncio
import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from difflib import SequenceMatcher
from operator import itemgetter
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import AuditEntry, Namespace
from graphstash_schema.explanation import (
    PACK_PART,
    Description,
    ExplainResponse,
    Relative,
    Removal,
    compare,
    differing_names,
    identity_of,
    is_of_program,
    is_reordered,
)
from graphstash_server.artifact import DescribedArtifact
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.audit import find_removal
from graphstash_server.db.queries.catalog import find_described
from graphstash_server.db.queries.descriptions import (
    NearRequest,
    add_descriptions,
    count_undescribed,
    drop_unused_environments,
    list_by_identity,
    list_by_label,
    list_by_near_label,
)
from graphstash_server.keys import StoredKey
from graphstash_server.services.plausible_clock import PlausibleClock

__all__ = ["MAX_NAMESPACES", "ExplanationService"]

MAX_NAMESPACES: Final = 16
"""Namespaces that one explanation searches. Each takes up to five short index scans."""

_MAX_CANDIDATES: Final = 32
"""Maximum artifacts that one query finds by program or by label."""

_MAX_NEAR_LINES: Final = 16
"""Maximum artifacts on each side of the wanted label whose labels name lines of the same script."""

_LINE: Final = re.compile(r"(.+:)\d+( in |$)")
"""A label that names a line of a script. The first group is the script."""

_MAX_COMPARED: Final = 16
"""Maximum candidates whose differences are compared word by word."""

_MAX_RELATIVES: Final = 3
_MAX_SAMPLED: Final = 250
"""Oldest artifacts, and newest artifacts, among which those without a description are counted."""

_MAX_CHANGES: Final = 4000
"""Newest entries of the audit log in which a removal is searched."""

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
        async with self.database.writing() as connection:
            return await add_descriptions(connection, namespace, given, now=self.clock())

    async def explain(
        self,
        namespace: Namespace,
        wanted: Description,
        *,
        readable: Sequence[Namespace],
        may_administer: bool = False,
        min_age: timedelta = timedelta(),
    ) -> ExplainResponse:
        """Return the artifacts nearest to a missed one.

        Args:
            namespace: namespace of the missed artifact.
            wanted: its description.
            readable: namespaces to search, at most `MAX_NAMESPACES`.
            may_administer: whether the caller may read who removed the artifact, and why.
            min_age: age of the run that missed it. Ignore younger artifacts: they were not stored
                when the run started, or are its own.
        """
        until = self.clock() - min_age
        async with self._comparing:  # only one call at a time holds descriptions in memory
            async with self.database.reading() as connection:
                rows: dict[StoredKey, DescribedArtifact] = {}
                for where in readable:
                    for row in await self._candidates(connection, where, wanted, until=until):
                        rows.setdefault(row.artifact.key, row)
                # Another job may have stored the missed artifact in the meantime.
                missed = StoredKey.of(namespace, wanted.key)
                rows.pop(missed, None)
                removal = await find_removal(
                    connection, missed, since=until, looked_at=_MAX_CHANGES
                )
                undescribed = 0
                if not rows:
                    undescribed = await count_undescribed(
                        connection, namespace, until=until, looked_at=_MAX_SAMPLED
                    )
            relatives = await asyncio.to_thread(_nearest, list(rows.values()), wanted)
            if not relatives and (pack := wanted.program.get(PACK_PART)):
                relatives = await self._other_environments(wanted, pack, readable, until=until)
        return ExplainResponse(
            relatives=relatives,
            undescribed=undescribed,
            removal=_removal(removal, with_names=may_administer),
        )

    async def drop_unused(self) -> None:
        """Delete environments that no artifact has and no publisher has sent for a day."""
        async with self.database.writing() as connection:
            await drop_unused_environments(connection, before=self.clock.ago(_UNUSED))

    async def _other_environments(
        self, wanted: Description, pack: str, readable: Sequence[Namespace], *, until: datetime
    ) -> tuple[Relative, ...]:
        """Return the nearest packs labelled `pack`. Return none if one of them has the same
        environment, because then the environment does not explain the miss.
        """
        environment = wanted.model_copy(update={"program": {}})
        async with self.database.reading() as connection:
            rows = [
                replace(row, program={}, environment=_environment_in(row.parts))
                for where in readable
                for row in await list_by_label(
                    connection,
                    NearRequest(where, wanted.key.kind.value, until, _MAX_CANDIDATES),
                    pack,
                )
            ]
        relatives = await asyncio.to_thread(_nearest, rows, environment)
        is_same = any(not each.differences for each in relatives)
        return () if is_same else relatives

    @staticmethod
    async def _candidates(
        connection: AsyncConnection,
        namespace: Namespace,
        wanted: Description,
        *,
        until: datetime,
    ) -> list[DescribedArtifact]:
        near = NearRequest(namespace, wanted.key.kind.value, until, _MAX_CANDIDATES)
        found = []
        same = await find_described(connection, StoredKey.of(namespace, wanted.key))
        if same is not None and same.is_described and same.artifact.created_at <= until:
            found.append(same)
        if identity := identity_of(wanted.program):
            found += await list_by_identity(connection, near, identity)
        if wanted.label:
            found += await list_by_label(connection, near, wanted.label)
        if line := _LINE.match(wanted.label):  # lines above the program may have moved it
            near = near._replace(limit=_MAX_NEAR_LINES)
            found += await list_by_near_label(connection, near, wanted.label, prefix=line[1])
        return found


def _removal(entry: AuditEntry | None, *, with_names: bool) -> Removal | None:
    if entry is None:
        return None
    found = Removal(action=entry.action.value, at=entry.at)
    if not with_names:  # the actor may be a token of another namespace
        return found
    reason = re.split(r"\s?sha256:", entry.detail, maxsplit=1)[0]
    return found.model_copy(update={"actor": entry.actor, "reason": reason})


def _environment_in(parts: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in parts.items() if not is_of_program(name)}


def _nearest(rows: Sequence[DescribedArtifact], wanted: Description) -> tuple[Relative, ...]:
    """Return the nearest candidates. Large ones take milliseconds, so call this in a thread."""
    identity = identity_of(wanted.program)

    def distance(row: DescribedArtifact) -> tuple[int, bool, float]:
        return (
            len(differing_names(wanted.parts, row.parts)),
            not _is_same_program(row, identity),
            -row.artifact.created_at.timestamp(),
        )

    nearest = heapq.nsmallest(
        _MAX_COMPARED, ((distance(row), row) for row in rows), key=itemgetter(0)
    )
    relatives = [(away[:2], _relative(row, wanted, identity)) for away, row in nearest]
    relatives.sort(key=lambda each: (each[0], _tie_break(each[1])))  # stable
    return tuple(relative for _, relative in relatives[:_MAX_RELATIVES])


def _tie_break(relative: Relative) -> tuple[int, float]:
    """Return the number of words in the differences, then how unlike their characters are. Among
    inputs, one of another dtype is nearer than one of another shape and dtype, and another order is
    nearest.
    """
    differences = [each for each in relative.differences if not is_reordered(each)]
    sides = [(each.here or "", each.there or "") for each in differences]
    return (
        sum(len(here.split()) + len(there.split()) for here, there in sides),
        sum(1 - SequenceMatcher(None, here, there).quick_ratio() for here, there in sides),
    )


def _relative(row: DescribedArtifact, wanted: Description, identity: str) -> Relative:
    key = row.artifact.key
    return Relative(
        key=key.key,
        namespace=key.namespace,
        label=row.label,
        producer=row.producer,
        created_at=row.artifact.created_at,
        is_same_program=_is_same_program(row, identity),
        differences=compare(wanted.parts, row.parts, kind=key.key.kind),
    )


def _is_same_program(row: DescribedArtifact, identity: str) -> bool:
    return bool(identity) and identity == identity_of(row.program or {})

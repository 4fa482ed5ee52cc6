"""CatalogService: finds and describes artifacts for people.

Results are bounded and omit withheld artifacts. The caller checks which namespaces may be read.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from graphstash_schema import ArtifactKind, Namespace
from graphstash_schema.explanation import Difference, compare
from graphstash_server.artifact import DescribedArtifact
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.catalog import (
    User,
    find_described,
    list_by_fingerprint,
    list_from_label,
    list_labelled,
    list_latest,
    list_users,
)
from graphstash_server.keys import StoredKey

__all__ = ["MAX_SEARCHED", "ArtifactDetails", "CatalogService"]

MAX_SEARCHED: Final = 500
"""Number of latest artifacts that are searched for text, without an index."""

_MAX_FOUND: Final = 50
_MAX_USERS: Final = 20
_TUNED: Final = "tuned "
_HELION: Final = "Helion kernel "
"""Prefixes of the labels of tuned kernels. The name of the kernel follows."""

_PREFIX: Final = re.compile(r"[0-9a-f]{4,64}")


@dataclass(frozen=True, slots=True)
class ArtifactDetails:
    """An artifact and the jobs that used it."""

    entry: DescribedArtifact
    users: Sequence[User]

    def differences(self, other: "ArtifactDetails") -> tuple[Difference, ...]:
        """Return the parts that differ."""
        kind = self.entry.artifact.key.key.kind
        return compare(self.entry.parts, other.entry.parts, kind=kind)


@dataclass(kw_only=True, eq=False)
class CatalogService:
    """List, search and describe artifacts. Safe for concurrent calls."""

    database: Database

    def __post_init__(self) -> None:
        self._reading = asyncio.Semaphore(1)

    async def latest(
        self, namespaces: Sequence[Namespace], *, limit: int
    ) -> list[DescribedArtifact]:
        """Return up to `limit` artifacts, last stored first."""
        async with self.database.reading() as connection:
            return await list_latest(connection, namespaces, limit=limit)

    async def search(self, namespaces: Sequence[Namespace], text: str) -> list[DescribedArtifact]:
        """Return artifacts with this label or prefix of the fingerprint, and those among the latest
        `MAX_SEARCHED` whose label, producer or toolchain contains the text.
        """
        text = text.strip()
        if not text:
            return []
        async with self._reading:  # only one call at a time holds metadata in memory
            async with self.database.reading() as connection:
                rows = await list_labelled(connection, namespaces, text, limit=_MAX_FOUND)
                if _PREFIX.fullmatch(text.lower()):
                    rows += await list_by_fingerprint(
                        connection, namespaces, text.lower(), limit=_MAX_FOUND
                    )
                recent = await list_latest(connection, namespaces, limit=MAX_SEARCHED)
            return await asyncio.to_thread(_matching, rows, recent, text.casefold())

    async def schedules(
        self, namespaces: Sequence[Namespace], name: str, *, limit: int
    ) -> tuple[list[DescribedArtifact], bool]:
        """Return tuned kernels whose names begin with a text, in the order of their names, and
        whether there may be more. The text may begin with `Helion kernel`, as Helion's labels do.

        Each namespace has an equal share of `limit`, and at least ten.
        """
        of_helion = "" if _HELION.startswith(name) else name.removeprefix(_HELION)
        share = max(10, limit // max(1, len(namespaces)))
        found: list[DescribedArtifact] = []
        is_cut = False
        async with self.database.reading() as connection:
            for where in namespaces:
                for label in (_TUNED + name, _HELION + of_helion):
                    rows = await list_from_label(
                        connection, where, ArtifactKind.SCHEDULE, label, limit=share
                    )
                    named = [row for row in rows if row.label.startswith(label)]
                    is_cut = is_cut or len(named) == share
                    found += named
        return sorted(found, key=lambda entry: entry.label), is_cut

    async def find(self, key: StoredKey) -> ArtifactDetails | None:
        """Return an artifact, or None if it is absent or withheld."""
        async with self.database.reading() as connection:
            found = await find_described(connection, key)
            users = await list_users(connection, key, limit=_MAX_USERS) if found else []
        return None if found is None else ArtifactDetails(found, users)


def _matching(
    rows: Sequence[DescribedArtifact], recent: Sequence[DescribedArtifact], pattern: str
) -> list[DescribedArtifact]:
    found = {row.artifact.key: row for row in rows}
    for row in recent:
        if len(found) >= _MAX_FOUND:
            break
        text = f"{row.label}\n{row.artifact.toolchain}\n{row.producer}"
        if pattern in text.casefold():
            found.setdefault(row.artifact.key, row)
    return list(found.values())[:_MAX_FOUND]

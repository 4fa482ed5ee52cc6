"""CatalogService: finds and describes artifacts for people.

Every answer is bounded, and what GET would not serve (a withheld artifact) is not in it. The caller
says which namespaces may be read.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from graphstash_schema import ArtifactMetadata, Digest, InvalidValueError, Namespace
from graphstash_schema.explanation import Difference, compare
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.catalog import (
    EntryDetails,
    EntryRow,
    UserRow,
    find_entry,
    list_by_fingerprint,
    list_labelled,
    list_latest,
    list_users,
)
from graphstash_server.keys import StoredKey

__all__ = ["MAX_SEARCHED", "ArtifactDetails", "CatalogService", "Entry", "User"]

MAX_SEARCHED: Final = 500
"""Latest artifacts in which text is searched: their metadata is read one by one."""

_MAX_FOUND: Final = 50
_MAX_USERS: Final = 20
_PREFIX: Final = re.compile(r"[0-9a-f]{4,64}")

User = UserRow


@dataclass(frozen=True, slots=True)
class Entry:
    """An artifact in a list. Label, toolchain and producer are as its publisher says."""

    key: StoredKey
    label: str
    digest: Digest
    compile_seconds: float
    toolchain: str
    producer: str
    hits: int
    created_at: datetime
    last_used_at: datetime


@dataclass(frozen=True, slots=True)
class ArtifactDetails:
    """One artifact. `parts` are those of its description, or shortened ones of its metadata."""

    entry: Entry
    metadata: ArtifactMetadata | None
    pinned_until: datetime | None
    is_described: bool
    program: Mapping[str, str]
    environment: Mapping[str, str]
    users: Sequence[User]

    @property
    def parts(self) -> dict[str, str]:
        """All of them."""
        return {**self.environment, **self.program}

    def differences(self, other: "ArtifactDetails") -> tuple[Difference, ...]:
        """In what another artifact differs."""
        return compare(self.parts, other.parts)


@dataclass(kw_only=True, eq=False)
class CatalogService:
    """Safe for concurrent calls."""

    database: Database

    def __post_init__(self) -> None:
        self._reading = asyncio.Semaphore(1)

    async def latest(self, namespaces: Sequence[Namespace], *, limit: int) -> list[Entry]:
        """The artifacts that were stored last."""
        async with self.database.reading() as connection:
            rows = await list_latest(connection, namespaces, limit=limit)
        return [_entry(row) for row in rows]

    async def search(self, namespaces: Sequence[Namespace], text: str) -> list[Entry]:
        """Artifacts whose label is a text or whose fingerprint begins with it, however old; and
        among the latest `MAX_SEARCHED`, those with the text in label, producer or toolchain.
        """
        wanted = text.strip()
        if not wanted:
            return []
        async with self._reading:  # one at a time has its metadata in memory
            async with self.database.reading() as connection:
                rows = await list_labelled(connection, namespaces, wanted, limit=_MAX_FOUND)
                if _PREFIX.fullmatch(wanted.lower()):
                    rows += await list_by_fingerprint(
                        connection, namespaces, wanted.lower(), limit=_MAX_FOUND
                    )
                recent = await list_latest(connection, namespaces, limit=MAX_SEARCHED)
            return await asyncio.to_thread(_matching, rows, recent, wanted.casefold())

    async def find(self, key: StoredKey) -> ArtifactDetails | None:
        """One artifact; None when it is absent or withheld."""
        async with self.database.reading() as connection:
            found = await find_entry(connection, key)
            users = await list_users(connection, key, limit=_MAX_USERS) if found else []
        return None if found is None else _details(found, users)


def _matching(rows: Sequence[EntryRow], recent: Sequence[EntryRow], wanted: str) -> list[Entry]:
    found = {row.key: _entry(row) for row in rows}
    for row in recent:
        if len(found) >= _MAX_FOUND:
            break
        if row.key in found:
            continue
        entry = _entry(row)
        text = f"{entry.label}\n{entry.toolchain}\n{entry.producer}"
        if wanted in text.casefold():
            found[row.key] = entry
    return list(found.values())[:_MAX_FOUND]


def _metadata(header: str) -> ArtifactMetadata | None:
    try:
        return ArtifactMetadata.from_header(header) if header else None
    except InvalidValueError:  # stored by a release with other rules
        return None


def _entry(row: EntryRow, metadata: ArtifactMetadata | None = None) -> Entry:
    known = metadata or _metadata(row.metadata_header)
    return Entry(
        key=row.key,
        label=row.label,
        digest=row.digest,
        compile_seconds=row.compile_seconds,
        toolchain=row.toolchain,
        producer=known.producer if known is not None else "",
        hits=row.hits,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
    )


def _details(found: EntryDetails, users: Sequence[User]) -> ArtifactDetails:
    metadata = _metadata(found.row.metadata_header)
    is_described = found.program is not None and found.environment is not None
    return ArtifactDetails(
        entry=_entry(found.row, metadata),
        metadata=metadata,
        pinned_until=found.pinned_until,
        is_described=is_described,
        program=found.program or {},
        environment=found.environment or ({} if metadata is None else metadata.parts),
        users=users,
    )

"""ManifestService: remembers the artifacts of a job, merged over its runs, bounded and aged."""

from collections.abc import Sequence
from datetime import timedelta

from graphstash_schema import Manifest, ManifestName, Namespace
from graphstash_schema.protocol import MAX_MANIFEST_ENTRIES
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.locks import lock_name
from graphstash_server.db.queries.manifests import (
    add_run,
    drop_unused_entries,
    has_manifest,
    list_entries,
    trim_entries,
)
from graphstash_server.keys import StoredKey

__all__ = ["ManifestService"]

_UNUSED = timedelta(days=90)
"""An entry that no run used for so long belongs to a model that is gone."""


class ManifestService:
    """Safe for concurrent calls: a merge is one transaction."""

    def __init__(self, *, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def get(self, namespace: Namespace, name: ManifestName) -> Manifest | None:
        """The manifest; None when there is none."""
        async with self._database.reading() as connection:
            entries = await list_entries(connection, namespace, name)
        return Manifest(name=name, entries=tuple(entries)) if entries else None

    async def merge(
        self, namespace: Namespace, name: ManifestName, keys: Sequence[StoredKey]
    ) -> tuple[Manifest, bool]:
        """Adds what one run used; a key that is named twice counts once.

        Returns:
            The manifest, and whether it is a new one.
        """
        now = self._clock()
        async with self._database.writing() as connection:
            await lock_name(connection, f"manifest {namespace}/{name}")
            is_new = not await has_manifest(connection, namespace, name)
            await add_run(connection, name, list(dict.fromkeys(keys)), now=now)
            await drop_unused_entries(connection, namespace, name, before=now - _UNUSED)
            await trim_entries(connection, namespace, name, keep=MAX_MANIFEST_ENTRIES)
            entries = await list_entries(connection, namespace, name)
        return Manifest(name=name, entries=tuple(entries)), is_new

"""PinService: keeps the artifacts of a job from eviction, or lets them go again."""

from collections.abc import Sequence
from datetime import datetime

from graphstash_schema import ManifestName, Namespace
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.keeping import pin_artifacts, unpin_artifacts
from graphstash_server.db.queries.manifests import list_entries
from graphstash_server.keys import StoredKey

__all__ = ["PinService"]


class PinService:
    """Safe for concurrent calls. A pin never gets shorter, but for `unpin`."""

    def __init__(self, *, database: Database) -> None:
        self._database = database

    async def pin(self, namespace: Namespace, job: ManifestName, *, until: datetime) -> int:
        """Pins what a job used; says how many artifacts its manifest names.

        Raises:
            ServerError: 503.
        """
        keys = await self._keys(namespace, job)
        async with self._database.writing() as connection:
            if keys:
                await pin_artifacts(connection, keys, until=until)
        return len(keys)

    async def unpin(self, namespace: Namespace, job: ManifestName) -> int:
        """Ends the pins of what a job used; says how many artifacts its manifest names.

        Raises:
            ServerError: 503.
        """
        keys = await self._keys(namespace, job)
        async with self._database.writing() as connection:
            if keys:
                await unpin_artifacts(connection, keys)
        return len(keys)

    async def _keys(self, namespace: Namespace, job: ManifestName) -> Sequence[StoredKey]:
        async with self._database.reading() as connection:
            entries = await list_entries(connection, namespace, job)
        return [StoredKey.of(namespace, entry.key) for entry in entries]

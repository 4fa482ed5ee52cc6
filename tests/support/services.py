"""The services of a server without HTTP, on a clock that a test turns, and a client's verbs."""

import hashlib
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

from graphstash_schema import ArtifactKey, Digest, Namespace, NamespacePolicy, WriteMode
from graphstash_server.actor import Actor
from graphstash_server.context import open_services, prepare_database
from graphstash_server.keys import StoredKey
from graphstash_server.services.commits import Upload
from graphstash_server.settings import load_settings
from graphstash_server.testing import MemoryBlobStore
from graphstash_server.testing.stores import as_chunks

__all__ = ["ACTOR", "OVERWRITE", "Turned", "Verbs", "key_of", "opener"]

ACTOR = Actor("somebody", "request-1")
OVERWRITE = NamespacePolicy(mode=WriteMode.OVERWRITE)


class Turned:
    """A clock that a test turns."""

    def __init__(self):
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self):
        return self.now

    def turn(self, seconds):
        self.now += timedelta(seconds=seconds)


def key_of(number=0, namespace="team"):
    fingerprint = hashlib.sha256(str(number).encode()).hexdigest()
    return StoredKey.of(Namespace(namespace), ArtifactKey.parse("jax", "cpu", fingerprint))


class Verbs:
    """What a client does with one server."""

    def __init__(self, context):
        self.context = context

    async def put(self, blob, number=0, *, policy=OVERWRITE, namespace="team", seconds=1.0):
        upload = Upload(
            key=key_of(number, namespace),
            digest=Digest.of(blob),
            metadata_header="",
            compile_seconds=seconds,
            toolchain="",
            only_if_absent=False,
            actor=ACTOR,
            policy=policy,
        )
        return await self.context.uploads.publish(upload, as_chunks(blob))

    async def get(self, number=0, namespace="team"):
        artifact = await self.context.artifacts.open(key_of(number, namespace))
        if artifact is None:
            return None
        try:
            size_bytes = artifact.reader.size_bytes
            return b"".join([chunk async for chunk in artifact.reader.chunks(0, size_bytes)])
        finally:
            await artifact.reader.close()

    async def used(self, namespace="team"):
        stats = (await self.context.statistics.read()).namespaces
        return next((each for each in stats if each.namespace == namespace), None)


def opener(directory, database_url):
    """Opens servers that share everything but the process's state."""
    blobs = MemoryBlobStore()
    clock = Turned()

    @asynccontextmanager
    async def opened(**options):
        settings = load_settings(data_dir=directory, database_url=database_url, **options)
        await prepare_database(settings, is_migrating=True)
        async with open_services(settings, blob_store=blobs, clock=clock) as context:
            yield Verbs(context)

    opened.blobs = blobs
    opened.clock = clock
    return opened

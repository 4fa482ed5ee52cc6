"""A region applies what its upstream withdraws, whatever else fails meanwhile.

The region runs in the test's process, and follows its upstream when the test says so.
"""

import json
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from graphstash_schema import ArtifactKey, NamespacePolicy
from graphstash_server.keys import StoredKey
from graphstash_server.testing import migrated_database
from support.api import DEVICE
from support.http_server import Answer
from support.regions import envelope
from support.services import opener

pytestmark = pytest.mark.anyio

BUSY = Answer(429, {"retry-after": "1"})


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Region:
    """A region in this process.

    Attributes:
        context: its services.
    """

    def __init__(self, world, context, opened):
        self._world, self._opened = world, opened
        self.context, self.region = context, context.region

    async def copy(self, *numbers, namespace="team"):
        """Publish artifacts at the upstream, and copy them. Return a client of the upstream."""
        center = self._world.api(self._world.center, namespace=namespace)
        for number in numbers:
            assert center.put(envelope(center, number), number).status_code == 201
            key = key_in(center, number)
            assert await self.region.fetches.fetch(key, NamespacePolicy(), patience_seconds=60)
        return center

    async def follow(self):
        """Probe the upstream, and apply its changes."""
        self._opened.clock.turn(10)
        await self.region.follower._round()

    async def kept(self, center, *numbers):
        """Return the artifacts of a namespace that the region has."""
        found = self.context.artifacts.find_stored
        return [each for each in numbers if await found(key_in(center, each)) is not None]


def key_in(center, number):
    key = ArtifactKey.parse("jax", DEVICE, center.fingerprint(number))
    return StoredKey.of(center.namespace, key)


@pytest.fixture
def opened_region(world, tmp_path):
    directory = tmp_path / "here"
    directory.mkdir()
    shutil.copy(migrated_database(), directory)
    opened = opener(directory, f"sqlite+aiosqlite:///{directory / 'graphstash.sqlite3'}")

    @asynccontextmanager
    async def make(change=None):
        async with opened(
            auth="tokens",
            upstream_url=world.link(change).url,
            upstream_token=world.admin,
            upstream_answer_seconds=30,
        ) as server:
            await server.context.region.follower.begin()
            try:
                yield Region(world, server.context, opened)
            finally:
                await server.context.region.close()

    make.blobs = opened.blobs
    return make


async def test_namespace_whose_withdrawals_fail_delays_no_other_one(opened_region):
    is_busy = True

    def change(request, answer):
        return BUSY if is_busy and "/aaa/withdrawals" in request.path else answer

    async with opened_region(change) as region:
        busy, other = [await region.copy(1, namespace=each) for each in ("aaa", "zeta")]
        for center in (busy, other):
            assert center.delete(1).status_code == 204
        await region.follow()
        assert await region.kept(other, 1) == []
        assert await region.kept(busy, 1) == [1]
        assert (await region.region.gauges())[2] == 1
        text = (await region.context.exposition.read()).decode()
        assert 'graphstash_upstream_total{event="follow_failed"} 1.0' in text
        assert "graphstash_upstream_behind 1.0" in text
        is_busy = False
        await region.follow()
        assert await region.kept(busy, 1) == []
        assert (await region.region.gauges())[2] == 0


async def test_policy_of_a_later_release_delays_no_withdrawal(opened_region):
    def change(request, answer):
        if not request.path.endswith("/-/upstream"):
            return answer
        state = json.loads(answer.body)
        state["namespaces"].setdefault("later", {})["policy"] = {"mode": "of a later release"}
        return replace(answer, body=json.dumps(state).encode())

    async with opened_region(change) as region:
        center = await region.copy(1)
        assert center.delete(1).status_code == 204
        await region.follow()
        assert await region.kept(center, 1) == []

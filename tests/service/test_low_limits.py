"""A limit far below the stored size evicts nothing until an administrator confirms it."""

import math

import pytest

from graphstash_schema import NamespacePolicy
from graphstash_server.errors import NoSpaceError
from graphstash_server.services.artifacts.eviction import Planned
from support.services import ACTOR, TEAM

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("limit", "where"),
    [
        ({"store_limit_bytes": 200}, "the store"),
        ({"store_limit_bytes": 10**9, "soft_limit_bytes": 200}, "the store"),
        ({"namespace_limits": {"te*": 200}}, "the namespace team"),
    ],
)
async def test_limit_far_below_the_stored_size_evicts_nothing_until_confirmed(
    opened, limit, where, caplog
):
    """A limit of 200 bytes instead of 200 GiB must not empty the store."""
    async with opened() as store:
        await store.fill(3)
    async with opened(**limit) as store:
        assert await store.evict() == 0
        assert [each async for each in store.context.evictor.plan()] == []
        assert await store.kept(3) == [0, 1, 2]
        assert f"{where} has more than twice its soft limit" in caplog.text
        with pytest.raises(NoSpaceError, match=f"{where} .*gc --evict-now"):
            await store.add(3)
        readiness = await store.context.health.check()
        assert readiness.is_ready
        assert (readiness.store_limit == "ok") == ("namespace_limits" in limit)
        plan = store.context.evictor.plan(is_confirmed=True)
        assert len([each async for each in plan]) == 3
        caplog.clear()
        assert await store.evict(is_confirmed=True) == 3
        assert "soft limit" not in caplog.text


@pytest.mark.parametrize("limits", [{"namespace_limit_bytes": 20_000}, {}])
async def test_namespace_limit_that_other_servers_exceed_needs_no_confirmation(opened, limits):
    """Each server admits uploads that fit beside its own."""
    async with opened() as other, opened(**limits) as store:
        other.context.policies.seconds = lambda: 0.0  # keeps its copy of the policies
        await other.add(0)
        if not limits:
            await store.context.policies.put(TEAM, NamespacePolicy(limit_bytes=20_000), ACTOR)
        assert await store.evict() == 0
        for number in range(1, 6):
            await other.add(number)
        assert await store.evict() == 5
        await store.add(6)


async def test_limit_needs_no_confirmation_once_it_was_met(opened):
    async with opened() as other:
        await other.fill(5)
        async with opened(namespace_limit_bytes=20_000) as store:
            assert await store.evict() == 0
            assert await store.evict(is_confirmed=True) == 4
            assert await store.evict() == 0
            await other.fill(5)
            assert await store.evict() == 4


async def test_policy_far_below_the_stored_size_evicts_nothing_until_confirmed(opened, caplog):
    async with opened() as store:
        await store.fill(3)
        limit = NamespacePolicy(limit_bytes=200)
        await store.context.policies.put(TEAM, limit, ACTOR)
        planned = Planned()
        planned.freed_bytes[TEAM] = 40_000
        assert [each async for each in store.context.evictor.plan(planned=planned)] == []
        assert await store.evict() == 0
        assert "namespace team has more than twice its soft limit" in caplog.text
        with pytest.raises(NoSpaceError, match=r"team --limit.*gc --evict-now"):
            await store.add(3)
        await store.context.policies.put(TEAM, NamespacePolicy(limit_bytes=90_000), ACTOR)
        await store.add(3)
        async with opened() as other:  # reads the policy at its start
            await store.context.policies.put(TEAM, limit, ACTOR)
            assert await other.evict() == 0
            assert await other.evict(is_confirmed=True) == 4
        await store.context.policies.put(TEAM, NamespacePolicy(limit_bytes=20_000), ACTOR)
        await store.add(4)
        assert await store.kept(5) == [4]


async def test_policy_needs_confirmation_on_a_server_that_missed_a_change(opened):
    async with opened() as store, opened() as other:
        limit = NamespacePolicy(limit_bytes=20_000)
        other.context.policies.seconds = lambda: math.inf  # reads the policies every time
        await store.add(0)
        await store.context.policies.put(TEAM, limit, ACTOR)
        assert await other.evict() == 0
        await store.context.policies.put(TEAM, NamespacePolicy(), ACTOR)
        await store.fill(5)
        store.clock.turn(1)
        await store.context.policies.put(TEAM, limit, ACTOR)
        assert await other.evict() == 0


async def test_limit_needs_confirmation_on_a_server_that_missed_a_higher_one(opened):
    limit = {"namespace_limit_bytes": 20_000}
    async with opened(**limit) as store, opened(**limit) as other:
        other.context.policies.seconds = lambda: math.inf  # reads the policies every time
        await store.add(0)
        assert await other.evict() == 0
        policies = store.context.policies
        await policies.put(TEAM, NamespacePolicy(limit_bytes=10**9), ACTOR)
        await store.fill(5)
        await policies.remove(TEAM, ACTOR)
        assert await other.evict() == 0
        assert await store.evict() == 0
        assert await other.evict(is_confirmed=True) == 4

"""The list of withdrawals: withheld, deleted and replaced artifacts, numbered in each namespace."""

import asyncio
import contextlib
import json
from dataclasses import replace

import pytest
import sqlalchemy as sa

from graphstash_schema import LookupResponse, Namespace
from graphstash_schema.names import LIST_START, ListPosition
from graphstash_schema.withdrawals import WithdrawalCause, WithdrawalList, WithdrawalQuery
from graphstash_server.commands.namespace import namespace
from graphstash_server.db.queries import upstream
from graphstash_server.db.queries.withdrawals import add_withdrawals
from graphstash_server.db.tables import withdrawal_heads, withdrawals
from graphstash_server.services.artifacts import service as artifact_service
from graphstash_server.services.artifacts import withdrawals as service
from graphstash_server.services.artifacts.uploads import WithdrawnMeanwhileError
from graphstash_server.testing import as_chunks
from support.services import ACTOR, OVERWRITE, key_of, upload_of
from support.statements import recorded

pytestmark = [pytest.mark.sql, pytest.mark.anyio]

TEAM = Namespace("team")


def read(api, after=LIST_START, **query):
    answer = api.http.get(f"/v1/{api.namespace}/withdrawals", params={"after": after, **query})
    assert answer.status_code == 200, answer.text
    return WithdrawalList.model_validate_json(answer.content)


def seen(page):
    return [(each.number, each.key.rpartition("/")[2], each.cause) for each in page.withdrawals]


def newest(api):
    body = api.call("lookup", {"keys": [api.key(99)]}).content
    return LookupResponse.model_validate_json(body).newest_withdrawal


async def page_of(server, after=LIST_START, **query):
    return await server.context.withdrawals.read(TEAM, WithdrawalQuery(after=after, **query))


async def withdraw(server, *numbers):
    for number in numbers:
        await server.put(b"%d" % number, number)
        await server.context.artifacts.delete(key_of(number), actor=ACTOR)


def test_withheld_deleted_and_replaced_artifacts_are_listed_in_their_order(api):
    assert newest(api) == read(api).newest == LIST_START
    rules = {"mode": "overwrite"}
    assert api.http.put(f"/v1/-/namespaces/{api.namespace}", json=rules).is_success
    for number, blob in ((1, b"one"), (2, b"two"), (3, b"three")):
        assert api.put(blob, number).is_success
    assert read(api).withdrawals == ()

    api.withhold(b"two", 2)
    assert api.delete(1).is_success
    assert api.put(b"other", 3).is_success
    assert api.put(b"other", 3).is_success  # equal bytes replace nothing

    page = read(api)
    assert page.is_complete
    assert seen(page) == [
        (1, api.fingerprint(2), "withheld"),
        (2, api.fingerprint(1), "deleted"),
        (3, api.fingerprint(3), "replaced"),
    ]
    assert page.position == page.newest == newest(api)
    assert seen(read(api, page.position)) == []
    assert api.delete(3).is_success
    assert seen(read(api, page.position)) == [(4, api.fingerprint(3), "deleted")]
    first = read(api, limit=2)
    assert [each.number for each in read(api, first.position, limit=1).withdrawals] == [3]


def test_malformed_position_or_limit_is_refused(api, problem):
    for query in (
        *({"after": each} for each in ("x", "-1", "1", "01-" + "a" * 16, "9" * 19)),
        *({"limit": each} for each in (0, 1001)),
    ):
        answer = api.http.get(f"/v1/{api.namespace}/withdrawals", params=query)
        problem(answer, 400, "invalid_request")


def test_upload_that_names_a_position_is_refused_after_a_withdrawal_of_its_bytes(api, problem):
    """As regions and late jobs send it."""
    blob = b"again " + api.namespace.encode()
    assert api.put(blob, 1).status_code == 201
    before = newest(api)
    assert api.delete(1).is_success
    problem(api.put(blob, 1, Graphstash_Withdrawals=before), 412, "precondition_failed")
    problem(api.put(blob, 1, Graphstash_Withdrawals="x"), 400, "invalid_request")
    assert api.get(1).status_code == 404
    assert api.stats()["size_bytes"] == 0
    assert api.put(b"other", 2, Graphstash_Withdrawals=before).status_code == 201
    assert api.put(blob, 1, Graphstash_Withdrawals=newest(api)).status_code == 201


async def test_upload_that_names_an_old_position_is_refused_at_a_bounded_cost(opened, monkeypatch):
    monkeypatch.setattr(upstream, "MAX_SINCE", 2)
    async with opened() as server:
        for number in range(3):
            await server.put(b"%d" % number, number)
        await withdraw(server, 0, 1)
        upload = replace(upload_of(key_of(9), b"new"), withdrawn_until=0)
        for is_old in (False, True):
            if is_old:
                await withdraw(server, 2)
                upload = replace(upload, key=key_of(10))
            with pytest.raises(WithdrawnMeanwhileError) if is_old else contextlib.nullcontext():
                await server.context.uploads.publish(upload, as_chunks(b"new"))


async def test_evictions_lost_blobs_and_failed_transactions_withdraw_nothing(opened):
    async with opened() as server:
        for number in range(3):
            await server.put(b"%d" % number, number)
        await server.context.artifacts.heal_all([await row_of(server, 0)])
        row = await row_of(server, 1)
        with contextlib.suppress(LookupError):
            async with server.context.database.writing() as connection:
                await add_deleted(connection, row, now=opened.clock())
                raise LookupError
        while await server.evict_one():
            pass
        assert (await page_of(server)).newest == LIST_START
        await withdraw(server, 1)
        assert (await page_of(server)).newest.number == 1


async def row_of(server, number):
    return await server.context.artifacts.find(key_of(number))


async def add_deleted(connection, row, *, now):
    withdrawn = [(row.key, row.digest)]
    await add_withdrawals(connection, withdrawn, cause=WithdrawalCause.DELETED, now=now)


async def test_restored_database_repeats_numbers_but_no_position(opened):
    """A position that the list lacks precedes a restore, or a long absence of the host."""
    async with opened() as server:
        await withdraw(server, 1, 2)
        before = (await page_of(server, limit=1)).position
        lost = (await page_of(server)).newest
        async with server.context.database.writing() as connection:  # restores a backup
            await connection.execute(sa.delete(withdrawals).where(withdrawals.c.number > 1))
            await connection.execute(
                sa.update(withdrawal_heads).values(number=1, mark=before.partition("-")[2])
            )
        await withdraw(server, 3, 4)
        newest = (await page_of(server)).newest
        other = "0" * 16 if not newest.endswith("0" * 16) else "1" * 16
        later = newest.replace("3-", "4-", 1)
        for text in (lost, f"3-{other}", f"2-{other}", later):
            page = await page_of(server, ListPosition(text))
            assert (page.is_complete, page.withdrawals, page.newest) == (False, (), newest)
        assert [each.number for each in (await page_of(server, before)).withdrawals] == [2, 3]


async def test_old_and_surplus_entries_are_pruned_except_for_an_anchor(opened, monkeypatch):
    async with opened() as server:
        await withdraw(server, 1, 2)
        second = (await page_of(server)).newest
        first = (await page_of(server, limit=1)).position
        opened.clock.turn(service.KEPT_FOR.total_seconds() + 1)
        await withdraw(server, 3)
        await server.context.withdrawals.prune()

        assert not (await page_of(server)).is_complete
        assert not (await page_of(server, first)).is_complete
        page = await page_of(server, second)
        assert page.is_complete
        assert [each.number for each in page.withdrawals] == [3]

        monkeypatch.setattr(service, "MAX_KEPT", 5)
        monkeypatch.setattr(service, "_PRUNED_AT_ONCE", 3)
        await withdraw(server, *range(17))
        await server.context.withdrawals.prune()
        async with server.context.database.reading() as connection:
            kept = (await connection.scalars(sa.select(withdrawals.c.number))).all()
        assert sorted(kept) == [15, 16, 17, 18, 19, 20]  # the first one as an anchor


async def test_number_is_visible_only_after_all_lower_ones(opened):
    """Two servers withdraw at the same time, and the first one commits last."""
    async with opened() as one, opened() as other:
        number_is_taken, may_commit = asyncio.Event(), asyncio.Event()

        async def slow():
            row = await row_of(one, 1)
            async with one.context.database.writing() as connection:
                await add_deleted(connection, row, now=opened.clock())
                number_is_taken.set()
                await may_commit.wait()

        for number in (1, 2):
            await one.put(b"%d" % number, number)
        first = asyncio.create_task(slow())
        await number_is_taken.wait()
        second = asyncio.create_task(other.context.artifacts.delete(key_of(2), actor=ACTOR))
        async with other.context.database.reading() as connection:
            while other.context.database.is_postgresql:  # until it waits for the lock
                found = await connection.scalar(
                    sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")
                )
                if found:
                    break
        assert (await page_of(other)).newest == LIST_START
        may_commit.set()
        await asyncio.gather(first, second)
        page = await page_of(other)
        assert [(each.number, each.key) for each in page.withdrawals] == [
            (number, str(key_of(number).key)) for number in (1, 2)
        ]


async def test_concurrent_withdrawals_of_all_kinds_are_numbered_without_gaps(opened):
    async with opened() as one, opened() as other:
        for number in range(24):
            await one.put(b"old %d" % number, number)
        work = [
            server.context.artifacts.delete(key_of(number), actor=ACTOR)
            if number % 2
            else server.put(b"new %d" % number, number, policy=OVERWRITE)
            for number, server in enumerate([one, other] * 12)
        ]
        is_done = False

        async def watch():
            while not is_done:
                page = await page_of(one)
                numbers = [each.number for each in page.withdrawals]
                assert numbers == list(range(1, page.newest.number + 1))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*work)
        is_done = True
        await watching
        page = await page_of(other)
        assert [each.number for each in page.withdrawals] == list(range(1, 25))


async def test_empty_page_takes_one_statement(opened):
    async with opened() as server:
        await withdraw(server, 1, 2)
        found = await server.context.artifacts.lookup(TEAM, [key_of(1)], caller="")
        assert found.newest_withdrawal.number == 2
        with recorded() as statements:
            await page_of(server, found.newest_withdrawal)
        assert len(statements) == 1
        with recorded() as statements:
            await page_of(server)
        assert len(statements) == 2


def test_cleared_namespace_withdraws_all_of_its_artifacts(command_on, connect, monkeypatch):
    monkeypatch.setattr(artifact_service, "_DELETION_PAGE", 2)
    command = command_on(namespace)
    api = connect(command.url)
    beside = connect(command.url, "team-2")
    for number in range(5):
        api.put(b"%d" % number, number)
    beside.put(b"0", 0)
    api.withhold(b"0", 0)

    assert "--yes" in command("clear", "team", status=2)
    assert api.get(1).status_code == 200
    result = json.loads(command("clear", "team", "--yes", "--json"))

    assert result == {"namespace": "team", "deleted": 5, "blobs_left": 0}
    page = read(api)
    assert [each.number for each in page.withdrawals] == list(range(1, 7))
    assert {each.key.rpartition("/")[2] for each in page.withdrawals} == {
        api.fingerprint(number) for number in range(5)
    }
    assert beside.get(0).status_code == 200
    assert beside.delete(0).is_success
    assert read(beside).newest.number == 1  # numbers are per namespace
    assert "0 artifacts deleted" in command("clear", "team", "--yes")

"""The list of withdrawals comes from a server that hangs, lags, is replaced or lies."""

import io
import math
import re
import shutil
import time
from contextlib import contextmanager

import pytest

from graphstash import CacheError
from graphstash._artifacts import withdrawals as module
from graphstash_schema.withdrawals import WithdrawalList
from graphstash_server.testing import LiveServer
from support.fault_proxy import Fault
from support.host import METADATA, key
from support.withdrawing import (
    apply,
    calls,
    delete,
    let_read,
    look_up,
    port_of,
    position,
    publish,
)


@pytest.fixture(scope="session")
def server(start_on_sqlite):
    return start_on_sqlite(LiveServer)


@pytest.mark.usefixtures("later")
def test_hanging_list_disables_only_own_copies(next_job, proxy):
    """Own copies are unusable until the server answers, because they may have been withdrawn."""
    next_job(url="none").put(key(1), b"own", METADATA)
    publish(next_job, 2)
    publisher = publish(next_job, 3)
    next_job().ensure_local(key(2))
    delete(publisher, 3)
    next_job(url=proxy.url).ensure_local(key(2))
    proxy.hold = re.compile(rb"GET /v1/[^/ ]+/withdrawals")
    job = next_job(url=proxy.url, first_byte_seconds=0.2, connect_seconds=0.2)
    assert job.get(key(2)) == b"graph"
    assert job.get(key(1)) is None
    proxy.hold = None
    proxy.go_on.set()
    again = next_job(url=proxy.url)
    assert again.get(key(1)) == b"own"


def test_job_waits_only_once_for_a_list_that_takes_long(next_job, proxy):
    publisher = publish(next_job, 1, 2)
    next_job(url=proxy.url).ensure_local(key(1))
    delete(publisher, 2)
    proxy.hold = re.compile(rb"GET /v1/[^/ ]+/withdrawals")
    look_up(job := next_job(url=proxy.url))
    assert proxy.held.wait(60)
    withdrawals, namespace = job.standing._withdrawals, job.config.namespace
    for seconds in (0.01, math.inf):  # Python refuses to wait for so long with OverflowError
        assert not withdrawals.is_current(namespace, wait_seconds=seconds)
    proxy.go_on.set()


@pytest.mark.usefixtures("later")
def test_host_away_for_too_long_uses_only_copies_that_the_server_has(next_job, caplog, monkeypatch):
    monkeypatch.setattr(module, "_MAX_READ", 2)
    publisher = publish(next_job, 1, 2, 3, 4, payload=b"wrong")
    look_up(first := next_job())
    assert position(first) == 0
    next_job(url="none").put(key(1), b"wrong", METADATA)
    next_job().ensure_local(key(4))
    for number in (1, 2, 3):
        delete(publisher, number)

    job = next_job()
    made = calls(monkeypatch, "withdrawals")
    assert job.get(key(1)) is None
    assert made == []
    assert "away for too long" in caplog.text
    assert position(job) == 3
    assert job.fetch(key(4), io.BytesIO()).source == "local"
    caplog.clear()
    look_up(next_job())
    assert caplog.text == ""


def test_download_while_the_clock_was_ahead_is_set_aside_like_earlier_ones(
    next_job, proxy, monkeypatch
):
    monkeypatch.setattr(module, "_MAX_READ", 2)
    publisher = publish(next_job, 1, 2, 3, payload=b"wrong")
    with monkeypatch.context() as ahead:
        ahead.setattr("graphstash._artifacts.reader.time", lambda: time.time() + 3600)
        look_up(job := next_job(url=proxy.url))
        job.ensure_local(key(1))
    for number in (1, 2, 3):
        delete(publisher, number)
    apply(next_job(url=proxy.url), 3)

    proxy.fault = Fault.RESET
    with pytest.raises(CacheError):
        next_job(url=proxy.url).get(key(1))


@pytest.mark.usefixtures("later")
def test_server_restored_from_a_backup_is_noticed(tmp_path, next_job, proxy, caplog):
    """The backup predates the withdrawal, so the restored server serves the artifact again."""
    data = tmp_path / "server"

    def job(host="host", **settings):
        return next_job(host, **{"url": proxy.url} | settings)

    @contextmanager
    def serving():
        with LiveServer(data) as server:
            proxy._upstream_port = port_of(server)
            yield

    with serving():
        publisher = job("publisher")
        for number in (1, 2):
            publisher.put(key(number), b"wrong", METADATA)
        job().ensure_local(key(2))
        delete(publisher, 2)
        apply(job(), 1)
    shutil.copytree(data, tmp_path / "backup")
    with serving():
        delete(publisher, 1)
        apply(job(), 2)
        job(url="none").put(key(3), b"own", METADATA)
    shutil.rmtree(data)
    shutil.copytree(tmp_path / "backup", data)
    with serving():
        apply(job(), 1)
        assert "restored from a backup" in caplog.text
        delete(publisher, 1)  # the operator repeats the withdrawal
        apply(job(), 2)
        last = job()
        assert last.get(key(1)) is None
        assert last.get(key(3)) is None  # may have been withdrawn between the backup and the crash


@pytest.mark.parametrize("has_withdrawn", [True, False])
@pytest.mark.usefixtures("later")
def test_empty_server_behind_the_url_destroys_nothing(next_job, proxy, tmp_path, has_withdrawn):
    """For example, a volume was not mounted. The host has results that no server stored."""
    with LiveServer(tmp_path / "empty") as empty:
        port = proxy._upstream_port
        for number in (5, 6):
            next_job(url="none").put(key(number), b"own", METADATA)
        publisher = publish(next_job, 1, 2, 3, 4)
        for number in (1, 2, 3):
            next_job(url=proxy.url).ensure_local(key(number))
        if has_withdrawn:
            delete(publisher, 4)
        apply(next_job(url=proxy.url), has_withdrawn)

        proxy._upstream_port = port_of(empty)
        job = next_job(url=proxy.url)
        assert [job.get(key(number)) for number in (1, 2)] == [None, None]
        assert job.get(key(5)) == (None if has_withdrawn else b"own")
        assert all(job.is_on_this_host(key(number)) for number in (1, 2, 3, 5, 6))
        proxy.fault = Fault.RESET
        if has_withdrawn:
            with pytest.raises(CacheError):
                next_job(url=proxy.url).get(key(1))  # may have been withdrawn

        proxy.fault = Fault.NONE
        proxy._upstream_port = port
        delete(publisher, 2)
        back = next_job(url=proxy.url)
        assert back.fetch(key(1), io.BytesIO()).source == "local"
        assert back.get(key(2)) is None
        let_read(back)
        assert not back.is_on_this_host(key(2))
        assert [back.get(key(number)) for number in (5, 6)] == [b"own", b"own"]
        proxy.fault = Fault.RESET
        assert next_job(url=proxy.url).get(key(3)) == b"graph"


def test_restored_server_that_yields_to_the_original_leaves_no_withdrawn_copy(
    next_job, proxy, tmp_path
):
    """The restored server had served an artifact that the original had withdrawn."""
    with LiveServer(tmp_path / "restored") as restored:
        port = proxy._upstream_port
        publisher = publish(next_job, 1, 2)
        next_job(url=proxy.url).ensure_local(key(2))
        delete(publisher)
        apply(next_job(url=proxy.url), 1)
        next_job("elsewhere", url=restored.url).put(key(1), b"graph", METADATA)
        proxy._upstream_port = port_of(restored)
        look_up(job := next_job(url=proxy.url))
        let_read(job)
        assert job.get(key(1)) == b"graph"
        proxy._upstream_port = port
        look_up(back := next_job(url=proxy.url))
        let_read(back)
        proxy.fault = Fault.RESET
        last = next_job(url=proxy.url)
        with pytest.raises(CacheError):
            last.get(key(1))
        assert last.get(key(2)) == b"graph"


def test_withdrawal_of_one_of_two_servers_behind_a_url_reaches_job_of_the_other(
    next_job, server, proxy
):
    """A publisher deletes each artifact on one server, and the job then asks the other server."""
    database_url = server._settings.database_url
    with LiveServer(server.data_dir, database_url=database_url) as other:
        ports = list(map(port_of, (server, other)))
        publisher = publish(next_job, *range(1, 7))
        for number in range(1, 7):
            next_job(url=proxy.url).ensure_local(key(number))
        look_up(job := next_job(url=proxy.url))
        for number in range(1, 6):
            assert job.get(key(number)) == b"graph"
            proxy._upstream_port = ports[number % 2]
            delete(publisher, number)
            proxy._upstream_port = ports[(number + 1) % 2]
            apply(job, number)
            assert job.get(key(number)) is None
        assert job.get(key(6)) == b"graph"


def test_torn_or_forged_position_is_ignored(next_job):
    publish(next_job, 1)
    look_up(job := next_job())
    noted = job.standing._withdrawals._host._folder / job.config.namespace
    for text in ("", "x", "7", "7-0123456789abcdef", "0"):
        noted.write_text(text)
        assert next_job().get(key(1)) == b"graph", text


def test_hostile_list_is_read_once_and_withdraws_nothing(next_job, monkeypatch):
    """The server repeats a page or sends malformed entries."""
    publish(next_job, 1)
    job = next_job()
    assert job.get(key(1)) == b"graph"
    look_up(job)
    made = []

    def endless(client, query, *, namespace):
        made.append(query.after)
        nonsense = {"number": 1, "key": "a/../../b", "digest": "x", "cause": "new"}
        nonsense["withdrawn_at"] = "2026-01-01T00:00:00Z"
        newest = "9-0123456789abcdef"
        return WithdrawalList(
            is_complete=True, withdrawals=(nonsense,), position=query.after, newest=newest
        )

    monkeypatch.setattr(module.ServerClient, "withdrawals", endless)
    namespace = job.config.namespace
    for newest in ("9-0123456789abcdef", "nonsense", "9" * 99):
        job.standing.follow(namespace, newest, asked_at=time.time())
        let_read(job)
    assert made == ["0"]
    assert job.get(key(1)) == b"graph"

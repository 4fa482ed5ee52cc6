"""Health, statistics, unknown paths, and headers of every answer."""

import asyncio
import functools
import os
import re
import sqlite3
import threading
from contextlib import closing

import httpx
import pytest

from graphstash_schema.settings import declarations
from graphstash_server import __version__
from graphstash_server.app import create_app
from graphstash_server.services import metrics
from graphstash_server.services.metrics import HealthService
from graphstash_server.settings import Settings
from graphstash_server.shared_text import SharedText
from graphstash_server.storage.disk import DiskBlobStore
from graphstash_server.testing import LiveServer, MemoryBlobStore
from support.waiting import until


def test_health_and_readiness_name_their_parts_and_leave_no_blob(api, files):
    before = files()
    health = api.http.get("/healthz")
    ready = api.http.get("/readyz")

    assert (health.status_code, health.json()) == (200, {"status": "ok", "version": __version__})
    assert ready.status_code == 200
    parts = ("database", "blob_store", "locks", "clock", "unknown_blobs", "store_limit")
    assert ready.json() == {"status": "ready"} | dict.fromkeys(parts, "ok")
    assert ready.headers["cache-control"] == "no-store"
    assert files() == before


@pytest.mark.anyio
async def test_shared_readiness_probe_reports_a_hanging_disk(opened, tmp_path, monkeypatch):
    """A probe writes to the store and requires no token, so callers share it."""
    hangs, goes_on, fsync = threading.Event(), threading.Event(), os.fsync
    probes = []

    def new_probe():
        probes.append(b"probe %d" % len(probes))
        return probes[-1]

    def hang(fd):
        hangs.set()
        goes_on.wait()
        fsync(fd)

    store = DiskBlobStore(tmp_path / "blobs")
    async with opened() as server:
        health = HealthService(
            database=server.context.database,
            blobs=store,
            plausible_clock=server.context.plausible_clock,
            unknown_blobs=SharedText(),
            limit_doubts=server.context.evictor.limit_doubts,
            new_probe=new_probe,
        )
        together = await asyncio.gather(*(health.check() for _ in range(50)))
        assert {each.is_ready for each in together} == {True}
        assert len(probes) == 1

        monkeypatch.setattr(metrics, "_FRESH_SECONDS", 0)
        monkeypatch.setattr(os, "fsync", hang)
        monkeypatch.setattr(metrics, "_STORE_SECONDS", 0.1)
        try:
            async with asyncio.timeout(60):
                while not hangs.is_set():
                    await health.check()
                begun = len(probes)
                found = [(await health.check()).blob_store for _ in range(3)]
        finally:
            goes_on.set()
        assert found == ["failed: no answer within 0.1 seconds"] * 3
        assert len(probes) == begun
        monkeypatch.setattr(metrics, "_STORE_SECONDS", 60)
        while not (await health.check()).is_ready:
            await asyncio.to_thread(until, lambda: not health._probing)
    await store.close()
    assert not [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]


def test_server_without_its_store_or_database_is_alive_but_not_ready(tmp_path, connect, problem):
    with LiveServer(tmp_path / "data", log_level="error") as server:
        api = connect(server.url)
        api.put(b"x", 1)
        (tmp_path / "data" / "blobs").rename(tmp_path / "elsewhere")

        refused = problem(api.http.get("/readyz"), 503, "unavailable", "blob store failed")
        assert refused["retryable"] is True
        assert "database ok" in refused["detail"]
        problem(api.get(1), 503, "unavailable")
        problem(api.put(b"y", 2), 503, "unavailable")
        assert api.http.get("/healthz").status_code == 200

        (tmp_path / "elsewhere").rename(tmp_path / "data" / "blobs")
        assert api.http.get("/readyz").status_code == 200
        assert api.get(1).content == b"x"

        with closing(sqlite3.connect(tmp_path / "data" / "graphstash.sqlite3")) as database:
            database.execute("DROP TABLE usage")
        until(lambda: api.http.get("/readyz").status_code == 503)
        problem(api.http.get("/readyz"), 503, "unavailable", "database failed", "blob store ok")


def test_every_answer_has_protocol_and_request_id_of_caller_if_given(api):
    ids = []
    for path in ("/healthz", "/v1/stats", "/nothing", api.path()):
        answer = api.http.get(path)
        assert answer.headers["graphstash-protocol"] == "1"
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", answer.headers["x-request-id"])
        ids.append(answer.headers["x-request-id"])
    assert len(set(ids)) == len(ids)

    kept = api.http.get("/healthz", headers={"X-Request-Id": "job-7.rank_3"})
    replaced = api.http.get("/healthz", headers={"X-Request-Id": "a b; <script>"})
    assert kept.headers["x-request-id"] == "job-7.rank_3"
    assert re.fullmatch(r"[A-Za-z0-9-]+", replaced.headers["x-request-id"])


def test_answer_names_an_unknown_path_or_the_allowed_methods(api, problem):
    for path in ("/nothing", "/v1", "/v1/team", "/redoc", "/v1/stats/", "/assets"):
        problem(api.http.get(path), 404, "unknown_path", path)
    for path, method, allowed in (
        (api.path(), "POST", {"GET", "HEAD", "PUT", "DELETE"}),
        (api.lease_path(), "GET", {"POST", "PUT", "DELETE"}),
        ("/v1/team/artifacts:lookup", "GET", {"POST"}),
        ("/v1/team/manifests/m", "DELETE", {"GET", "PUT"}),
        ("/healthz", "POST", {"GET"}),
        ("/audit", "PUT", {"GET", "HEAD"}),
        ("/sign-out", "GET", {"POST"}),
        ("/actions/pin", "GET", {"POST"}),
    ):
        answer = api.http.request(method, path)
        problem(answer, 405, "method_not_allowed", method)
        assert set(answer.headers["allow"].split(", ")) == allowed


def test_unexpected_store_error_shows_no_details(tmp_path, monkeypatch, connect, problem, caplog):
    store = MemoryBlobStore()
    app = functools.partial(create_app, blob_store=store)
    monkeypatch.setattr("graphstash_server.serving.server.create_app", app)
    open_whole = store.open

    async def broken(digest):
        raise ZeroDivisionError(f"secret path /srv/{digest}")

    async def shrinking(digest):
        reader = await open_whole(digest)
        reader._blob = reader._blob[:500]
        return reader

    with LiveServer(tmp_path) as server:
        api = connect(server.url)
        api.put(b"x" * 1000)
        monkeypatch.setattr(store, "open", broken)

        answer = api.get()

        refused = problem(answer, 500, "internal")
        assert "secret" not in answer.text
        assert answer.headers["x-request-id"] in refused["detail"]
        assert "ZeroDivisionError" in caplog.text
        assert answer.headers["x-request-id"] in caplog.text
        assert api.http.get("/healthz").status_code == 200

        monkeypatch.setattr(store, "open", shrinking)
        with pytest.raises(httpx.RemoteProtocolError):  # the server closes the connection
            api.get()


def test_every_setting_has_a_docstring():
    declared = declarations(Settings)

    assert declared.keys() == Settings.model_fields.keys()
    assert [name for name, each in declared.items() if not each.meaning] == []


def test_text_replaced_during_a_read_is_read_whole():
    shared = SharedText()
    shared.set("the first text, which is longer")
    memory = shared._memory

    class Replaced:
        def __getitem__(self, where):
            shared._memory = memory
            shared.set("the second")
            return memory[where]

    shared._memory = Replaced()
    assert shared.get() == "the second"

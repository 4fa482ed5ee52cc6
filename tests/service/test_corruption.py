"""The server reports a damaged database, returns no wrong bytes from it, and deletes nothing."""

import json
import re
import sqlite3
import sys
from contextlib import closing

import pytest
import sqlalchemy as sa

from graphstash_schema import ErrorCode
from graphstash_server.commands.fsck import fsck
from graphstash_server.commands.gc import gc
from graphstash_server.db.corruption import corruption_in
from graphstash_server.db.engine import Database
from graphstash_server.errors import CorruptDatabaseError
from graphstash_server.testing import LiveServer
from support.commands import invoke
from support.tokens import Guarded
from support.waiting import until

DATABASE = "graphstash.sqlite3"
_PAGE_BYTES = 4096


def blob_of(number):
    return f"{number} ".encode() * 5000


def checkpoint(path):
    """Move the log into the file, as SQLite does from time to time."""
    with closing(sqlite3.connect(path, timeout=60)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def cross_index(path):
    """Make the primary key's index lead artifacts 1 and 2 to each other's row. A copy with table
    and index of different moments has this damage.
    """
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT max(rowid) FROM artifacts").fetchone() == (3,)
        start = page_of(connection, "sqlite_autoindex_artifacts_1")
    image = bytearray(path.read_bytes())
    crossed = 0
    for cell in range(3):
        pointer = start + 8 + 2 * cell
        entry = start + int.from_bytes(image[pointer : pointer + 2])
        assert image[entry] < 128  # the length takes one byte; the entry ends with the row's number
        last = entry + image[entry]
        if image[last] in (2, 3):  # a 1 takes no byte
            image[last] ^= 1
            crossed += 1
    assert crossed == 2
    path.write_bytes(image)


def page_of(connection, name):
    """Return the offset of the first page of a table or index."""
    found = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", [name])
    return (found.fetchone()[0] - 1) * _PAGE_BYTES


def cut(path):
    """Overwrite the table of the artifacts."""
    with closing(sqlite3.connect(path)) as connection:
        start = page_of(connection, "artifacts")
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * _PAGE_BYTES)


def blobs_in(data_dir):
    return {path for path in (data_dir / "blobs").rglob("*") if path.is_file()}


@pytest.fixture
def stored(tmp_path, connect):
    """The data directory of a stopped server with three artifacts."""
    with LiveServer(tmp_path / "data", log_level="error") as server:
        api = connect(server.url)
        for number in range(3):
            assert api.put(blob_of(number), number).status_code == 201
    checkpoint(tmp_path / "data" / DATABASE)
    return tmp_path / "data"


def test_index_that_leads_to_another_row_is_a_miss(stored, connect, monkeypatch):
    async def skip(_):
        return None

    cross_index(stored / DATABASE)
    monkeypatch.setattr("graphstash_server.context.find_corruption", skip)
    with LiveServer(stored, log_level="error", maintenance_seconds=3600) as server:
        api = connect(server.url)
        assert api.get(0).content == blob_of(0)
        for number in (1, 2):
            for answer in (api.get(number), api.get(number)):  # with and without a cached row
                assert answer.status_code == 404
            assert api.head(number).status_code == 404
        assert api.call("lookup", {"keys": [api.key(1), api.key(2)]}).json()["found"] == []


def overwrite(path):
    path.write_bytes(b"no database at all" * 1000)


@pytest.mark.parametrize("damage", [cross_index, cut, overwrite])
def test_server_refuses_to_start_on_a_corrupt_database(stored, damage, monkeypatch, caplog):
    monkeypatch.setenv("GRAPHSTASH_DATA_DIR", str(stored))
    damage(stored / DATABASE)
    before = blobs_in(stored)
    commands, named = [(fsck,), (fsck, "--repair")], "   corrupt"
    if damage is overwrite:
        commands, named = [*commands, (gc,)], "the database is corrupt (file is not a database)"

    with pytest.raises(RuntimeError, match="did not start"):
        LiveServer(stored).start()
    assert re.search(r"the database is corrupt .* `graphstash restore`", caplog.text)
    for command in commands:
        printed = invoke(*command, status=1)
        assert named in printed
        assert not [word for word in ("repaired", "SELECT", "Traceback") if word in printed]
    if damage is not overwrite:
        assert json.loads(invoke(fsck, "--json", status=1).splitlines()[0])["problem"] == "corrupt"
    assert blobs_in(stored) == before


def test_metrics_report_a_corrupt_database_without_reading_tokens(tmp_path):
    with Guarded(tmp_path) as server:
        known, unknown = (server.token("read:*") for _ in range(2))
        assert server.http(known).get("/metrics").status_code == 200
        api = server.api("team")
        assert api.put(blob_of(0), 0).status_code == 201
        checkpoint(tmp_path / DATABASE)
        cut(tmp_path / DATABASE)
        assert api.put(blob_of(1), 1).status_code == 500
        for token in (known, unknown):
            answer = server.http(token).get("/metrics")
            assert answer.status_code == 200
            assert "graphstash_database_corrupt 1.0" in answer.text
            assert "graphstash_database_up 0.0" in answer.text
            assert ("graphstash_requests_total" in answer.text) is (token == known)


def test_server_stops_using_a_database_that_becomes_corrupt(stored, connect, caplog):
    before = blobs_in(stored)
    with LiveServer(
        stored, log_level="error", metrics="open", flush_seconds=0.02, maintenance_seconds=0.05
    ) as server:
        api = connect(server.url)
        assert api.http.get("/readyz").status_code == 200
        assert "graphstash_database_corrupt 0.0" in api.http.get("/metrics").text
        cut(stored / DATABASE)
        assert api.put(b"one more", 3).status_code == 500

        for number in range(2):
            until(lambda number=number: api.get(number).status_code == 500)
            problem = api.get(number).json()
            assert problem["code"] == "database_corrupt"
            assert problem["retryable"] is False
            assert "Retry-After" not in api.get(number).headers
        ready = api.http.get("/readyz")
        assert ready.status_code == 503
        assert "the database is corrupt" in ready.json()["detail"]
        assert "graphstash_database_corrupt 1.0" in api.http.get("/metrics").text
    said = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.message.count("the database is corrupt") for record in said] == [1]
    assert blobs_in(stored) >= before


CHECKED_LATE = """
import asyncio, os
import graphstash_server.context as context

find = context.find_corruption

async def find_late(url):
    while not os.path.exists(os.environ["GATE"]):
        await asyncio.sleep(0.01)
    return await find(url)

context.find_corruption, context._CHECK_SECONDS = find_late, 0.0
from graphstash_server.__main__ import main
main()
"""


@pytest.mark.extended
def test_no_worker_writes_after_one_detected_corruption(stored, start, connect, tmp_path):
    """As with a large database, whose check ends after the start."""
    cross_index(stored / DATABASE)
    gate = tmp_path / "gate"
    server = start(
        "--workers",
        "2",
        command=(sys.executable, "-c", CHECKED_LATE),
        environment={"GATE": str(gate)},
    )
    gate.touch()
    until(lambda: connect(server.url).put(b"early", 100).status_code == 500)
    later = [connect(server.url).put(b"%d" % number, number) for number in range(200, 230)]
    assert {answer.status_code for answer in later} == {500}
    assert connect(server.url).http.get("/readyz").status_code == 503


@pytest.mark.parametrize(
    ("name", "is_damage"),
    [
        *((each, True) for each in ("CORRUPT", "CORRUPT_INDEX", "CORRUPT_VTAB", "NOTADB")),
        *((each, False) for each in ("BUSY", "FULL", "IOERR_READ", "IOERR_CORRUPTFS", "INTERNAL")),
    ],
)
def test_only_error_codes_of_sqlite_for_damage_count_as_corruption(name, is_damage):
    """The lowest byte of SQLite's extended code is the code itself."""
    error = sqlite3.DatabaseError("what SQLite says")
    error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{name}")
    assert corruption_in(error) == ("what SQLite says" if is_damage else None)
    assert corruption_in(sa.exc.DatabaseError("SELECT 1", {}, error)) == corruption_in(error)


@pytest.mark.anyio
async def test_error_code_of_postgresql_for_damage_counts_as_corruption(on_postgresql):
    database = Database(on_postgresql)
    try:
        with pytest.raises(CorruptDatabaseError) as caught:
            async with database.reading() as connection:
                await connection.execute(
                    sa.text("DO $$ BEGIN RAISE EXCEPTION 'bad page' USING ERRCODE='XX001'; END $$")
                )
        assert caught.value.code is ErrorCode.DATABASE_CORRUPT
        with pytest.raises(CorruptDatabaseError, match="bad page"):
            async with database.writing():
                pass
    finally:
        await database.close()

"""`graphstash gc`, `fsck`, `pin` and `migrate`, beside a running server."""

import asyncio
import json
import signal
from datetime import UTC, datetime, timedelta
from unittest.mock import AsyncMock

import pytest

from graphstash_schema import ArtifactMetadata
from graphstash_server.commands.fsck import fsck
from graphstash_server.commands.gc import gc
from graphstash_server.commands.migrate import migrate
from graphstash_server.commands.pin import pin, unpin
from graphstash_server.commands.token import token
from graphstash_server.db.engine import Database
from graphstash_server.db.migrate import newest_revision
from graphstash_server.db.queries.recorded_times import lock_recorded_time, record_time
from graphstash_server.services.maintenance.reconciler import Reconciler
from graphstash_server.settings import load_settings
from graphstash_server.testing import LiveServer
from support.changes import execute
from support.commands import invoke as run
from support.postgres import EMPTY
from support.processes import graphstash, graphstash_unread
from support.waiting import until

BLOB = b"x" * 10_000
ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""For the output of a command. The tests of the services cover its effect on each database."""


@pytest.fixture
def serving(tmp_path, database_url, monkeypatch):
    """A server, and an environment in which commands find its data."""
    monkeypatch.setenv("GRAPHSTASH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("GRAPHSTASH_DATABASE_URL", database_url)
    # Otherwise the server repairs the damage of a test during its start.
    monkeypatch.setattr(Reconciler, "reconcile", AsyncMock())
    with LiveServer(
        tmp_path / "data",
        database_url=database_url,
        log_level="error",
        flush_seconds=0.05,
        maintenance_seconds=3600,
    ) as server:
        yield server


@pytest.fixture
def api(serving, connect):
    return connect(serving.url)


def put(api, count, size=10_000):
    for number in range(count):
        blob = str(number).encode().ljust(size, b".")
        assert api.put(blob, number, seconds=1 + number).status_code == 201


def lines(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@ON_SQLITE
@pytest.mark.parametrize("words", [("audit", "--json"), ("token", "list")])
def test_listing_whose_reader_is_closed_dies_of_sigpipe_without_output(api, words):
    put(api, 1)
    assert graphstash_unread(*words) == (-signal.SIGPIPE, "")


@ON_SQLITE
def test_misspelled_setting_of_a_server_is_reported_once(api):
    errors = graphstash("audit", GRAPHSTASH_STORE_LIMT_BYTES="1", GRAPHSTASH_URL="none").stderr
    assert errors.count("(did you mean GRAPHSTASH_STORE_LIMIT_BYTES?)") == 1
    assert "GRAPHSTASH_URL" not in errors


@ON_SQLITE
def test_gc_evicts_what_its_dry_run_prints(api, monkeypatch, files_in):
    put(api, 5)
    assert "0 artifacts evicted" in run(gc)
    assert "0 problems found" in run(fsck, "--deep")
    monkeypatch.setenv("GRAPHSTASH_SOFT_LIMIT_BYTES", "25000")

    for words in (("gc", "--dry-run"), ("gc",)):
        result = graphstash(*words, check=True)
        assert "0 artifacts" in result.stdout
        assert result.stderr.count("the store has more than twice its soft limit") == 1
    assert len(files_in()) == 5
    printed = run(gc, "--dry-run", "--evict-now")
    assert printed.count("over the soft limit") == 3
    assert api.path(0) in printed
    assert "3 artifacts would be evicted (29.3 KiB)" in printed
    assert len(files_in()) == 5

    records = lines(run(gc, "-n", "--json", "--evict-now"))
    assert [record["artifact"] for record in records] == [api.path(number) for number in range(3)]
    assert records[1]["compile_seconds"] == 2.0
    assert {record["reason"] for record in records} == {"over the soft limit"}

    assert "3 artifacts evicted; 3 blobs deleted" in run(gc, "--evict-now")
    assert len(files_in()) == 2


@ON_SQLITE
def test_gc_counts_an_artifact_once_if_several_options_select_it(api, monkeypatch):
    for number in range(5):
        metadata = ArtifactMetadata(compile_seconds=1 + number, raw_size_bytes=1, toolchain="old")
        api.put(BLOB, number, Graphstash_Metadata=metadata.to_header())
    monkeypatch.setenv("GRAPHSTASH_SOFT_LIMIT_BYTES", "35000")
    options = ("--unused-for", "0s", "--toolchain", "old", "--namespace", "team")
    records = lines(run(gc, "--dry-run", "--json", *options))
    assert sorted(record["artifact"] for record in records) == sorted(map(api.path, range(5)))
    records = lines(run(gc, "--dry-run", "--json", "--toolchain", "old", "--namespace", "other"))
    assert {record["reason"] for record in records} == {"over the soft limit"}
    assert "5 artifacts would be evicted (48.8 KiB)" in run(gc, "--dry-run", *options)
    assert "5 artifacts evicted" in run(gc, *options)


@pytest.mark.sql
def test_gc_evicts_artifacts_of_a_toolchain_or_unused_for_long(api, database_url):
    for number, toolchain in enumerate(["torch 2.6.0", "torch 2.7.0", "torch 2.7.0"]):
        metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=1, toolchain=toolchain)
        api.put(BLOB, number, Graphstash_Metadata=metadata.to_header())
    assert "1 artifact evicted" in run(gc, "--toolchain", "torch 2.6*")
    # the server may serve the row from memory for two seconds
    until(lambda: api.head(0).status_code == 404)

    execute(
        database_url,
        "UPDATE artifacts SET last_used_at = '2026-01-02 03:04:05' "
        f"WHERE fingerprint <> '{api.fingerprint(1)}'",
    )
    assert "0 artifacts evicted" in run(gc, "--unused-for", "90d", "--namespace", "other")
    assert "1 artifact evicted" in run(gc, "--unused-for", "90d", "--namespace", "team")
    assert api.head(1).status_code == 200


@pytest.mark.parametrize("age", ["ninety days", "²d", "52143w", "99999999999w", f"{'9' * 400}d"])
def test_malformed_or_excessive_age_is_refused_in_one_line(age):
    for command, option in ((gc, "--unused-for"), (gc, "--orphans-older-than")):
        printed = run(command, option, age, status=2)
        assert printed.startswith(f"graphstash: error: {age!r} is ")
    assert repr(age) in run(pin, "nightly", "--for", age, status=2)
    assert repr(age) in run(
        token, "create", "--grant", "read:*", "--description", "a", "--expires", age, status=2
    )


@pytest.mark.sql
def test_fsck_repairs_every_kind_of_damage_and_gc_deletes_old_orphans(
    api, serving, files_in, database_url
):
    put(api, 4)
    blobs = {path.read_bytes()[:1]: path for path in files_in()}
    blobs[b"0"].unlink()
    blobs[b"1"].write_bytes(b"cut")
    blobs[b"2"].write_bytes(b"2".ljust(10_000, b"?"))
    (blobs[b"3"].parent / blobs[b"3"].name.replace("0", "1")).write_bytes(b"orphan")
    execute(database_url, "UPDATE usage SET size_bytes = -77, hits = -1")
    assert api.stats()["size_bytes"] == 0

    found = lines(run(fsck, "--json", "--orphans-older-than", "0s", status=1))
    kinds = sorted(finding["problem"] for finding in found)
    assert kinds == ["lost", "lost", "miscounted", "orphan"]
    deep = lines(run(fsck, "--json", "--deep", "--orphans-older-than", "0s", status=1))
    damaged = [finding["name"] for finding in deep if finding["problem"] == "damaged"]
    assert api.path(2) in damaged

    repaired = run(fsck, "--deep", "--repair", "--orphans-older-than", "0s")
    assert "found and repaired" in repaired
    assert "0 problems found" in run(fsck, "--deep", "--orphans-older-than", "0s")
    assert [api.http.head(api.path(number)).status_code for number in range(4)] == [*[404] * 3, 200]
    assert api.stats()["artifacts"] == 1
    assert api.put(b"0".ljust(10_000, b"."), 0).status_code == 201

    orphan = serving.data_dir / "blobs" / "sha256" / "00" / f"{'0' * 64}"
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"nobody's")
    assert "0 blobs without an artifact" in run(gc)
    assert "1 blob without an artifact (8 B)" in run(gc, "--orphans-older-than", "0s")
    assert len(files_in()) == 2


@ON_SQLITE
def test_pinned_job_is_not_evicted_until_it_is_unpinned(api, monkeypatch):
    put(api, 3)
    api.http.put("/v1/team/manifests/gpt", json={"keys": [api.key(0)]}).raise_for_status()
    monkeypatch.setenv("GRAPHSTASH_SOFT_LIMIT_BYTES", "10000")

    assert "1 artifact of the job gpt: pinned for 30d" in run(
        pin, "gpt", "--namespace", "team", "--for", "30d"
    )
    assert "2 artifacts evicted" in run(gc, "--evict-now")
    for words in ([], ["--dry-run"]):
        printed = run(gc, "--evict-now", *words)
        assert printed.startswith("0 artifacts")
        assert "a limit is exceeded, but the other artifacts are pinned" in printed
        assert "GRAPHSTASH_*" not in printed
    monkeypatch.setenv("GRAPHSTASH_SOFT_LIMIT_BYTES", "30000")
    printed = run(gc, "--evict-now")
    assert "run this with the GRAPHSTASH_* variables of the server" in printed
    result = json.loads(run(pin, "gpt", "--namespace", "team", "--json"))
    assert (result["job"], result["artifacts"], result["pinned_until"][:4]) == ("gpt", 1, "9999")
    assert "no longer pinned" in run(unpin, "gpt", "--namespace", "team")
    result = json.loads(run(unpin, "gpt", "--namespace", "team", "--json"))
    assert result == {"job": "gpt", "artifacts": 1, "pinned_until": None}
    monkeypatch.setenv("GRAPHSTASH_SOFT_LIMIT_BYTES", "9000")
    assert "1 artifact evicted" in run(gc, "--evict-now")
    assert "`graphstash run --job unknown` first" in run(pin, "unknown", status=1)
    missing = "the job unknown has no manifest in the namespace default: nothing to unpin"
    assert missing in run(unpin, "unknown", status=1)
    assert "Nobody!" in run(pin, "x", "--namespace", "Nobody!", status=2)


@ON_SQLITE
def test_pin_lasts_as_long_as_requested_although_the_clock_is_behind(api, database_url):
    """Servers age artifacts by the recorded time, which never goes back."""
    recorded = datetime.now(UTC) + timedelta(days=10)

    async def record():
        database = Database(load_settings(database_url=database_url).database_url)
        async with database.writing() as connection:
            await lock_recorded_time(connection, now=recorded)
            await record_time(connection, recorded)
        await database.close()

    put(api, 1)
    api.http.put("/v1/team/manifests/gpt", json={"keys": [api.key(0)]}).raise_for_status()
    asyncio.run(record())
    result = json.loads(run(pin, "gpt", "--namespace", "team", "--for", "1d", "--json"))
    until = datetime.fromisoformat(result["pinned_until"])
    assert timedelta(days=1) <= until - recorded < timedelta(days=2)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_commands_require_a_migrated_database(tmp_path, monkeypatch, database, request):
    url = f"sqlite:///{tmp_path / 'graphstash.sqlite3'}"
    if database == "postgresql":
        url = request.getfixturevalue("postgres").new_database(template=EMPTY)
    monkeypatch.setenv("GRAPHSTASH_DATA_DIR", str(tmp_path / "new"))
    monkeypatch.setenv("GRAPHSTASH_DATABASE_URL", url)
    assert "no data directory" in run(gc, status=1)
    assert "graphstash migrate" in run(migrate, "--check", status=1)
    assert "graphstash migrate" in run(gc, status=1)

    assert f"revision none and is at {newest_revision()}" in run(migrate)
    assert f"is at revision {newest_revision()}: nothing to do" in run(migrate)
    known = {"before": newest_revision(), "revision": newest_revision()}
    assert json.loads(run(migrate, "--json")) == known
    assert "nothing to do" in run(migrate, "--check")
    assert "0 artifacts evicted" in run(gc)
    execute(url, "UPDATE alembic_version SET version_num = '9999'")  # like a later release
    assert "is at revision 9999: nothing to do" in run(migrate, "--check")


def test_error_of_a_bad_setting_names_it_without_the_password(monkeypatch):
    for variables, named in (
        ({"SOFT_LIMIT_BYTES": "much"}, "GRAPHSTASH_SOFT_LIMIT_BYTES=much is not valid"),
        (
            {"STORE_LIMIT_BYTES": "1GiB", "SOFT_LIMIT_BYTES": "2GiB"},
            "eviction has to begin before uploads are refused",
        ),
        (
            {"DATABASE_URL": "mysql://root:hunter2@db/x"},
            "postgresql://<user>:<password>@<host>/<database>",
        ),
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(f"GRAPHSTASH_{name}", value)
            printed = run(gc, status=2)
        assert named in printed
        assert "hunter2" not in printed


@pytest.fixture
def files_in(serving, stored_files):
    return lambda: stored_files(serving.data_dir)

"""`graphstash backup` and `restore`, beside servers that write, and killed at any step."""

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from alembic import command
from sqlalchemy.engine import make_url

from graphstash_schema import Digest
from graphstash_server.db.migrate import alembic_config
from graphstash_server.services.maintenance import backup as backup_module
from graphstash_server.testing import LiveServer
from support.api import DEVICE, Api
from support.clocks import HostClock
from support.moto import s3_settings
from support.processes import graphstash_here, python
from support.waiting import until

pytestmark = [pytest.mark.sql, pytest.mark.usefixtures("s3_credentials")]

KILLED = """
import os, signal, sys
steps = 0

def step(event, arguments):
    global steps
    if event in ("os.rename", "os.remove") and "__pycache__" not in str(arguments):
        steps += 1
        if steps == {at}:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(step)
sys.argv = ["graphstash", *{arguments!r}]
from graphstash.__main__ import main
try:
    main()
finally:
    print(f"steps: {{steps}}", file=sys.stderr)
"""
"""Kills the command before it renames or removes a file for the `at`-th time."""


def blob_of(number):
    return f"{number} ".encode() * 5000


def downgrade(path):
    """Takes a database back to an earlier revision."""
    config = alembic_config(f"sqlite+aiosqlite:///{path}")
    command.downgrade(config, "0010")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Site:
    """A server's database and blob store."""

    def __init__(self, directory, database_url, **store):
        self.directory = directory
        self.settings = {"database_url": database_url, **store}

    @contextmanager
    def serving(self):
        with LiveServer(
            self.directory, log_level="error", maintenance_seconds=3600, **self.settings
        ) as server:
            yield server

    @property
    def variables(self):
        return {
            f"GRAPHSTASH_{name.upper()}": value
            for name, value in {**self.settings, "data_dir": self.directory}.items()
        }

    def run(self, *arguments, status=0):
        done = graphstash_here(*arguments, **self.variables)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run_killed(self, *arguments, at=0):
        """Returns how many steps the command took; None if it was killed before."""
        program = KILLED.format(at=at, arguments=[str(each) for each in arguments])
        done = python(program, **self.variables)
        if at and done.returncode < 0:
            return None
        assert done.returncode == 0, done.stderr
        return int(done.stderr.rpartition("steps: ")[2])


@pytest.fixture
def new_site(tmp_path, request):
    """Makes empty sites."""
    numbers = iter(range(100))

    def make(database="sqlite", store="disk"):
        directory = tmp_path / f"site-{next(numbers)}"
        directory.mkdir()
        url = f"sqlite+aiosqlite:///{directory / 'graphstash.sqlite3'}"
        if database == "postgresql":
            url = request.getfixturevalue("postgres").new_database()
        if store == "disk":
            return Site(directory, url)
        s3 = request.getfixturevalue(store)
        return Site(directory, url, **s3_settings(s3.url, s3.new_bucket()))

    return make


def blobs_in(directory):
    return {path.name: path for path in (directory / "blobs").rglob("*") if path.is_file()}


def put(url, numbers):
    api = Api(url)
    for number in numbers:
        assert api.put(blob_of(number), number).status_code == 201
    api.close()


def stored_on(site, numbers):
    """The numbers whose artifacts a server of the site serves whole; others must be misses."""
    found = set()
    with site.serving() as server:
        api = Api(server.url)
        for number in numbers:
            answer = api.get(number)
            assert answer.status_code in (200, 404)
            if answer.status_code == 200:
                assert answer.content == blob_of(number)
                found.add(number)
        api.close()
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("sqlite", "disk"), ("sqlite", "disk")),
        (("postgresql", "disk"), ("postgresql", "disk")),
        (("sqlite", "disk"), ("postgresql", "moto")),
        (("postgresql", "moto"), ("sqlite", "disk")),
        pytest.param(("postgresql", "swift"), ("postgresql", "swift"), marks=pytest.mark.extended),
    ],
    ids="-".join,
)
def test_a_backup_under_load_restores_all_that_was_acknowledged_before(
    new_site, tmp_path, source, target, writers, connect
):
    site, backup = new_site(*source), tmp_path / "backup"
    with site.serving() as server:
        api = connect(server.url, "kept")
        assert api.put(b"an artifact of another namespace").status_code == 201
        site.run("namespace", "set", "team", "--limit", "10GiB")
        with writers([connect(server.url) for _ in range(3)]) as acknowledged:
            until(lambda: len(acknowledged) >= 40)
            site.run("backup", backup)
            before = dict(acknowledged)
            for number in list(before)[:5]:
                assert connect(server.url).delete(number).status_code == 204
                del before[number]
            told = json.loads(site.run("backup", backup, "--json"))
        assert told["left_out"] == 0
        assert told["copied"] < told["blobs"]
        policy = site.run("namespace", "show", "team", "--json")

    restored = new_site(*target)
    said = restored.run("restore", backup)
    assert f"{told['blobs']} blobs" in said
    assert restored.run("namespace", "show", "team", "--json") == policy
    assert "0 problems found" in restored.run("fsck", "--deep", "--orphans-older-than", "0s")
    with restored.serving() as server:
        api = connect(server.url)
        missing = [n for n, blob in before.items() if api.get(n).content != blob]
        assert missing == []
        assert connect(server.url, "kept").get().content == b"an artifact of another namespace"
        assert api.delete(next(iter(before))).status_code == 204  # goes on numbering the audit log


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_an_artifact_that_is_replaced_during_the_backup_is_in_it(
    new_site, tmp_path, database, monkeypatch, connect
):
    site, backup = new_site(database), tmp_path / "backup"
    take = backup_module.take_snapshot
    site.run("migrate")
    site.run("namespace", "set", "team", "--mode", "overwrite")
    with site.serving() as server:
        api = connect(server.url)
        put(server.url, range(3))
        snapshots = []

        def take_and_replace(*arguments):
            take(*arguments)
            snapshots.append(arguments)
            if len(snapshots) == 1:
                assert api.put(b"replaced", 1).status_code == 201
                assert api.delete(2).status_code == 204
                until(lambda: len(blobs_in(site.directory)) == 2)

        monkeypatch.setattr(backup_module, "take_snapshot", take_and_replace)
        site.run("backup", backup)
    assert len(snapshots) == 2

    restored = new_site(database)
    restored.run("restore", backup)
    with restored.serving() as server:
        answers = [connect(server.url).get(number) for number in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 404]
    assert answers[1].content == b"replaced"


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_backup_that_is_killed_leaves_the_one_before_and_continues(
    new_site, tmp_path, database, is_extended
):
    site, backup = new_site(database), tmp_path / "backup"
    with site.serving() as server:
        put(server.url, range(3))
        assert site.run_killed("backup", backup, at=6) is None
        assert "no complete backup" in new_site(database).run("restore", backup, status=1)
        site.run("backup", backup)
        first = shutil.copytree(backup, tmp_path / "first")
        api = Api(server.url)
        for number in range(2):
            api.delete(number)
        put(server.url, range(10, 13))
        api.close()
        trial = shutil.copytree(first, tmp_path / "trial")
        steps = site.run_killed("backup", trial)

        for at in chosen(steps, is_extended=is_extended):
            shutil.rmtree(backup)
            shutil.copytree(first, backup)
            assert site.run_killed("backup", backup, at=at) is None
            restored = new_site(database)
            restored.run("restore", backup)
            assert stored_on(restored, range(13)) in ({0, 1, 2}, {2, 10, 11, 12})
            site.run("backup", backup)
            assert blobs_in(backup).keys() == {
                Digest.of(blob_of(n)).sha256 for n in (2, 10, 11, 12)
            }
            assert len(list(backup.glob("database*.sqlite3"))) == 1


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize(
    "is_replacing",
    [pytest.param(False, marks=pytest.mark.extended), True],
    ids=["empty", "replaced"],
)
def test_a_restore_that_is_killed_lets_no_server_start_and_continues(
    new_site, tmp_path, database, is_replacing, is_extended
):
    source, backup = new_site(), tmp_path / "backup"
    with source.serving() as server:
        put(server.url, range(4))
        source.run("backup", backup)
    more = ["--replace"] if is_replacing else []

    def new_target():
        site = new_site(database)
        if is_replacing:
            with site.serving() as server:
                put(server.url, range(3, 6))
            assert "not empty" in site.run("restore", backup, status=1)
        return site

    steps = new_target().run_killed("restore", backup, *more)
    for at in chosen(steps, is_extended=is_extended):
        site = new_target()
        assert site.run_killed("restore", backup, *more, at=at) is None
        is_unfinished = (site.directory / "restore.json").exists()
        if is_unfinished:
            with pytest.raises(RuntimeError), site.serving():
                pass
            assert "a restore in" in site.run("gc", status=1)
        if is_unfinished or at < steps // 2:  # otherwise it was killed after its end
            site.run("restore", backup, *more)
        assert stored_on(site, range(6)) == {0, 1, 2, 3}
        left = {path.name for path in site.directory.iterdir()}
        assert not left & {"restore.json", "restore.sqlite3"}


def chosen(steps, *, is_extended):
    """Before which steps to kill."""
    assert steps > 6
    return range(1, steps + 1) if is_extended else [steps // 2, steps - 3]


def test_what_cannot_be_backed_up_or_restored_is_refused(new_site, tmp_path, monkeypatch):
    site, backup = new_site(), tmp_path / "backup"
    with site.serving() as server:
        put(server.url, range(2))
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.tex").write_text("precious")
        assert "is not empty and is no backup" in site.run("backup", tmp_path / "home", status=1)
        assert "is no backup" in new_site().run("restore", tmp_path / "home", status=1)
        assert "is no backup" in new_site().run("restore", tmp_path / "nothing", status=1)
        site.run("backup", backup)
        assert "a server uses" in site.run("restore", backup, "--replace", status=1)
    assert "not empty" in site.run("restore", backup, status=1)

    other = new_site()
    with other.serving() as server:
        put(server.url, range(10, 12))
        assert "the backup of another cache" in other.run("backup", backup, status=1)
    assert stored_on(new_restored(new_site, backup), range(2)) == {0, 1}

    manifest = json.loads((backup / "backup.json").read_text())
    for change, named in (
        ({"format": 2}, "has the format 2"),
        ({"revision": "9999"}, "which release"),
        ({"database_sha256": "0" * 64}, "has other bytes than its manifest says"),
        ({"database": "gone.sqlite3"}, "is gone"),
        ({"blobs": "many"}, "is damaged"),
    ):
        (backup / "backup.json").write_text(json.dumps(manifest | change))
        empty = new_site()
        assert named in empty.run("restore", backup, status=1)
        assert not (empty.directory / "restore.json").exists()
        assert stored_on(empty, range(2)) == set()


def back_up(site, backup):
    """Stores two artifacts, and backs them up."""
    with site.serving() as server:
        put(server.url, range(2))
    site.run("backup", backup)


def new_restored(new_site, backup):
    site = new_site()
    site.run("restore", backup)
    return site


def test_a_backup_of_a_damaged_store_says_what_it_lacks(new_site, tmp_path):
    site, backup = new_site(), tmp_path / "backup"
    with site.serving() as server:
        put(server.url, range(3))
    files = blobs_in(site.directory)
    files[Digest.of(blob_of(0)).sha256].write_bytes(b"?" * len(blob_of(0)))
    files[Digest.of(blob_of(1)).sha256].unlink()
    assert "2 artifacts left out" in site.run("backup", backup, status=1)
    assert stored_on(new_restored(new_site, backup), range(3)) == {2}


def test_a_damaged_backup_is_repaired_or_restored_in_part(new_site, tmp_path):
    site, backup = new_site(), tmp_path / "backup"
    with site.serving() as server:
        put(server.url, range(3))
        site.run("backup", backup)
        (damaged,) = (backup / "blobs").rglob(Digest.of(blob_of(1)).sha256)
        damaged.write_bytes(b"?" * len(blob_of(1)))

        part = new_site()
        assert "1 of 3 blobs are missing or damaged" in part.run("restore", backup, status=1)
        assert "1 artifact left out" in part.run("restore", backup, "--partial", status=1)
        assert stored_on(part, range(3)) == {0, 2}
        assert '"copied": 1' in site.run("backup", backup, "--deep", "--json")
    assert stored_on(new_restored(new_site, backup), range(3)) == {0, 1, 2}


def test_a_truncated_blob_is_copied_again_and_stays(new_site, tmp_path):
    site, backup = new_site(), tmp_path / "backup"
    with site.serving() as server:
        put(server.url, range(2))
        site.run("backup", backup)
        truncated = blobs_in(backup)[Digest.of(blob_of(1)).sha256]
        truncated.write_bytes(b"?")
        assert '"copied": 1' in site.run("backup", backup, "--json")
    assert truncated.read_bytes() == blob_of(1)
    assert stored_on(new_restored(new_site, backup), range(2)) == {0, 1}


def test_a_backup_without_blobs_replaces_nothing_unless_it_may_be_partial(new_site, tmp_path):
    site, backup = new_site(), tmp_path / "backup"
    with site.serving() as server:
        put(server.url, range(3))
        site.run("backup", backup)
    shutil.rmtree(backup / "blobs")
    other = new_site()
    with other.serving() as server:
        put(server.url, range(2, 5))

    said = other.run("restore", backup, "--replace", status=1)
    assert "2 of 3 blobs are missing or damaged" in said  # the target itself has the third
    assert stored_on(other, range(5)) == {2, 3, 4}
    assert "2 artifacts left out" in other.run(
        "restore", backup, "--replace", "--partial", status=1
    )
    assert stored_on(other, range(5)) == {2}


def test_a_backup_is_not_replaced_by_another_cache_with_the_same_artifact(new_site, tmp_path):
    site, backup = new_site(), tmp_path / "backup"
    with site.serving() as server:
        put(server.url, range(5))
    site.run("backup", backup)
    emptied = new_site()
    with emptied.serving() as server:
        put(server.url, range(1))
    for more in ([], ["--moved"]):
        assert "is the backup of another cache" in emptied.run("backup", backup, *more, status=1)
    assert len(blobs_in(backup)) == 5


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_backup_is_not_replaced_by_an_earlier_database_of_its_cache(new_site, tmp_path, database):
    stale, backup = new_site(), tmp_path / "backup"
    with stale.serving() as server:
        put(server.url, range(1))
    stale.run("backup", tmp_path / "first")
    moved = new_site(database)
    moved.run("restore", tmp_path / "first")
    with moved.serving() as server:
        put(server.url, range(1, 4))
    moved.run("backup", backup)

    said = stale.run("backup", backup, status=1)
    for named in (moved, stale):
        assert make_url(named.settings["database_url"]).database in said
    assert "--moved" in said
    assert len(blobs_in(backup)) == 4
    moved.run("backup", tmp_path / "first", "--moved")
    assert len(blobs_in(tmp_path / "first")) == 4
    moved.run("backup", tmp_path / "first")


def test_a_corrupt_database_does_not_replace_a_backup(new_site, tmp_path):
    site, backup = new_site(), tmp_path / "backup"
    with site.serving() as server:
        put(server.url, range(3))
        site.run("backup", backup)
    path = site.directory / "graphstash.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'artifacts'"
        ).fetchone()
    with path.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 4096)

    assert "the database is corrupt" in site.run("backup", backup, status=1)
    site.run("restore", backup, "--replace")
    assert stored_on(site, range(3)) == {0, 1, 2}


def test_a_backup_of_the_revision_before_is_upgraded(new_site, tmp_path):
    site, backup = new_site(), tmp_path / "backup"
    with site.serving() as server:
        put(server.url, range(2))
        site.run("backup", backup)
    manifest = json.loads((backup / "backup.json").read_text())
    before = backup / manifest["database"]
    downgrade(before)
    manifest |= {"revision": "0010", "database_sha256": sha256_of(before)}
    (backup / "backup.json").write_text(json.dumps(manifest))

    assert stored_on(new_restored(new_site, backup), range(2)) == {0, 1}


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_what_was_withheld_or_revoked_after_the_backup_stays_so(new_site, tmp_path, database):
    site, backup = new_site(database), tmp_path / "backup"
    site.run("migrate")
    grant = ("token", "create", "--grant", "read:team", "--description", "ci", "--json")
    tokens = [json.loads(site.run(*grant))["info"]["id"] for _ in range(2)]
    with site.serving() as server:
        put(server.url, range(4))
        site.run("backup", backup)
        api = Api(server.url)
        for number in (0, 1):
            api.withhold(blob_of(number), number)
        site.run("quarantine", "release", f"team/jax/{DEVICE}/{api.fingerprint(1)}")
        assert api.delete(2).status_code == 204
        api.close()
        site.run("token", "revoke", tokens[0])

    site.run("restore", backup, "--replace")
    assert stored_on(site, range(4)) == {1, 2, 3}
    steps = site.run_killed("restore", backup, "--replace")
    before_end = steps - 4  # the rows are replaced, and the restore is about to say so
    assert site.run_killed("restore", backup, "--replace", at=before_end) is None
    assert "may have replaced rows" in site.run("restore", "--abandon", status=1)
    site.run("restore", backup, "--replace")
    assert stored_on(site, range(4)) == {1, 2, 3}
    told = {each["id"]: each["revoked_at"] for each in listed(site)}
    assert told[tokens[0]] is not None
    assert told[tokens[1]] is None


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_what_was_withheld_stays_so_if_the_backup_was_taken_by_a_wrong_clock(
    new_site, tmp_path, database
):
    site, backup, host = new_site(database), tmp_path / "backup", HostClock(tmp_path)
    with site.serving() as server:
        put(server.url, range(2))
        host.set(timedelta(days=1))
        program = "from graphstash.__main__ import main; main()"
        done = python(program, "backup", backup, "--json", **site.variables, **host.environment)
        api = Api(server.url)
        api.withhold(blob_of(0), 0)
        api.close()
    taken_at = datetime.fromisoformat(json.loads(done.stdout)["taken_at"])
    is_ahead = taken_at > datetime.now(UTC) + timedelta(hours=12)
    assert is_ahead is (database == "sqlite")  # PostgreSQL has a clock of its own

    site.run("restore", backup, "--replace")
    assert stored_on(site, range(2)) == {1}


def listed(site):
    found = json.loads(site.run("token", "list", "--json"))
    return found["tokens"] if isinstance(found, dict) else found


def test_a_restore_without_space_changes_nothing(new_site, tmp_path):
    site, backup = new_site(), tmp_path / "backup"
    back_up(site, backup)
    other = new_site()
    with other.serving() as server:
        put(server.url, range(2, 4))
    full = Site(other.directory, **other.settings, min_free_bytes="1PiB")
    assert "the disk has room for 0" in full.run("restore", backup, "--replace", status=1)
    assert len(blobs_in(other.directory)) == 2
    assert stored_on(other, range(4)) == {2, 3}


def test_a_restore_that_found_a_damaged_blob_can_be_abandoned(new_site, tmp_path):
    site, backup = new_site(), tmp_path / "backup"
    back_up(site, backup)
    damaged = blobs_in(backup)[Digest.of(blob_of(1)).sha256]
    damaged.write_bytes(b"?" * len(blob_of(1)))
    other = new_site()
    assert "there is nothing to do" in other.run("restore", "--abandon", status=1)
    with other.serving() as server:
        put(server.url, range(2, 4))

    said = other.run("restore", backup, "--replace", status=1)
    assert "1 of 2 blobs are missing or damaged" in said
    assert "graphstash restore --abandon" in other.run("gc", status=1)
    other.run("restore", "--abandon")
    assert stored_on(other, range(4)) == {2, 3}


def test_no_server_starts_while_a_restore_reads_the_replaced_database(
    new_site, tmp_path, monkeypatch
):
    site, backup = new_site(), tmp_path / "backup"
    back_up(site, backup)
    upgrade, refused = backup_module.upgrade_snapshot, []

    def upgrade_beside_a_server(staged):
        upgrade(staged)
        try:
            with site.serving():
                pass
        except RuntimeError as error:
            refused.append(error)

    monkeypatch.setattr(backup_module, "upgrade_snapshot", upgrade_beside_a_server)
    site.run("restore", backup, "--replace")
    assert len(refused) == 1
    assert stored_on(site, range(2)) == {0, 1}


def test_a_restore_writes_nothing_into_the_backup(new_site, tmp_path):
    site, backup = new_site(), tmp_path / "backup"
    back_up(site, backup)
    (backup / "backup.lock").unlink()
    (backup / "blobs" / "tmp").rmdir()
    before = {path: path.stat().st_mtime_ns for path in [backup, *backup.rglob("*")]}
    new_restored(new_site, backup)
    assert {path: path.stat().st_mtime_ns for path in [backup, *backup.rglob("*")]} == before


def test_a_backup_of_nothing_creates_no_database(new_site, tmp_path):
    site = new_site()
    assert "at revision none" in site.run("backup", tmp_path / "backup", status=1)
    assert list(site.directory.glob("*.sqlite3*")) == []
    assert not (tmp_path / "backup").exists()


def test_a_backup_of_a_later_revision_names_it(new_site, tmp_path):
    site, backup = new_site(), tmp_path / "backup"
    site.run("migrate")
    with closing(sqlite3.connect(site.directory / "graphstash.sqlite3")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    assert json.loads(site.run("backup", backup, "--json"))["revision"] == "9999"
    assert "database revision 9999, which release" in new_site().run("restore", backup, status=1)


def test_an_unreadable_record_of_a_restore_is_of_another_one(new_site, tmp_path):
    site, backup = new_site(), tmp_path / "backup"
    back_up(site, backup)
    (site.directory / "restore.json").write_text("")
    assert "a restore of another backup" in site.run("restore", backup, status=1)
    assert "may have replaced rows" in site.run("restore", "--abandon", status=1)
    site.run("restore", backup, "--replace")
    assert stored_on(site, range(2)) == {0, 1}


def test_too_little_space_is_refused_before_a_blob_is_copied(new_site, tmp_path, monkeypatch):
    site, backup = new_site(), tmp_path / "backup"
    with site.serving() as server:
        put(server.url, range(3))
        full = shutil.disk_usage(tmp_path)._replace(free=len(blob_of(0)) * 2)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
        assert "bytes free" in site.run("backup", backup, status=1)
    assert blobs_in(backup) == {}

"""`graphstash backup` and `restore`, beside servers that write, and killed at any step."""

import asyncio
import functools
import hashlib
import json
import shutil
import sqlite3
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from alembic import command
from sqlalchemy.engine import make_url

from graphstash_schema import Digest
from graphstash_server.db.migrate import alembic_config
from graphstash_server.services.maintenance import backup as backup_module
from graphstash_server.services.maintenance import snapshot
from graphstash_server.testing import LiveServer, ServerProcess
from support.api import DEVICE, Api
from support.changes import execute
from support.clocks import HostClock
from support.moto import s3_settings
from support.postgres import EMPTY
from support.processes import graphstash_here, python
from support.tiers import most_extended
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
"""Program that kills a command before it renames or removes a file for the `at`-th time."""


def blob_of(number):
    return f"{number} ".encode() * 5000


def sha256_of(number):
    return Digest.of(blob_of(number)).sha256


class Site:
    """A server's database and blob store, with artifacts named by small numbers."""

    def __init__(self, directory, database_url, jobs, **store):
        url = database_url or f"sqlite+aiosqlite:///{directory / 'graphstash.sqlite3'}"
        self.directory = directory
        self.jobs = jobs
        self.settings = {"database_url": url, **store}

    @contextmanager
    def serving(self):
        with LiveServer(
            self.directory, log_level="error", maintenance_seconds=3600, **self.settings
        ) as server:
            api = Api(server.url)
            yield api
            api.close()

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
        """Return the number of the command's steps, or None if the program killed it."""
        program = self.directory.with_suffix(".py")
        program.write_text(KILLED.format(at=at, arguments=[str(each) for each in arguments]))
        variables = {name: str(value) for name, value in self.variables.items()}
        ran = self.jobs.start(
            self.directory.with_suffix(".jobs"), script=program, under="backup", variables=variables
        )
        status, errors = ran.status(), ran.errors.read_text()
        if at and status < 0:
            return None
        assert status == 0, errors
        return int(errors.rpartition("steps: ")[2])

    def execute(self, statement):
        execute(self.settings["database_url"], statement)

    def unrevoked_tokens(self):
        listed = json.loads(self.run("token", "list", "--json"))["tokens"]
        return {each["id"] for each in listed if each["revoked_at"] is None}

    def put(self, numbers):
        with self.serving() as api:
            for number in numbers:
                assert api.put(blob_of(number), number).status_code == 201

    def stored(self):
        """Return the numbers of the artifacts that a server has. All others must be misses."""
        with self.serving() as api:
            answers = {number: api.get(number) for number in range(15)}
        found = {number for number, answer in answers.items() if answer.status_code == 200}
        assert {answers[number].status_code for number in answers.keys() - found} == {404}
        assert all(answers[number].content == blob_of(number) for number in found)
        return found


@pytest.fixture(scope="module")
def model_of(tmp_path_factory, request, jobs):
    """Return sites with a blob store on disk, filled once for each set of artifacts, for copies."""

    @functools.cache
    def make(database, numbers):
        site = Site(tmp_path_factory.mktemp("model"), new_url(request, database), jobs)
        site.put(numbers)
        return site

    return make


@pytest.fixture
def new_site(tmp_path, request, jobs, model_of):
    """Return empty sites, and copies of sites that have artifacts."""
    numbers = iter(range(100))

    def make(database="sqlite", store="disk", *, stored=()):
        directory = tmp_path / f"site-{next(numbers)}"
        model = model_of(database, tuple(stored)) if stored else None
        if model:
            shutil.copytree(model.directory, directory)
        else:
            directory.mkdir()
        bucket = {}
        if store != "disk":
            s3 = request.getfixturevalue(store)
            bucket = s3_settings(s3.url, s3.new_bucket())
        return Site(directory, new_url(request, database, like=model), jobs, **bucket)

    return make


def new_url(request, database, *, like=None):
    """Return the URL of an empty or copied PostgreSQL database. None means SQLite in the site."""
    if database == "sqlite":
        return None
    template = make_url(like.settings["database_url"]).database if like else EMPTY
    return request.getfixturevalue("postgres").new_database(template=template)


@pytest.fixture
def backup(tmp_path):
    return tmp_path / "backup"


@pytest.fixture
def stored_in(new_site, backup):
    """Return the artifacts of an empty site after a restore."""

    def restored():
        site = new_site()
        site.run("restore", backup)
        return site.stored()

    return restored


def blobs_in(directory):
    return {path.name: path for path in (directory / "blobs").rglob("*") if path.is_file()}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("sqlite", "disk"), ("postgresql", "moto")),
        pytest.param(("postgresql", "moto"), ("sqlite", "disk"), marks=pytest.mark.extended),
    ],
    ids="-".join,
)
def test_backup_under_load_restores_all_uploads_acknowledged_before_it(
    new_site, backup, source, target, writers, connect
):
    site = new_site(*source)
    with site.serving() as api:
        other = connect(api.url, "kept")
        assert other.put(b"an artifact of another namespace").status_code == 201
        site.run("namespace", "set", "team", "--limit", "10GiB")
        with writers([connect(api.url) for _ in range(2)]) as acknowledged:
            until(lambda: len(acknowledged) >= 15)
            site.run("backup", backup)
            before = dict(acknowledged)
            for number in list(before)[:5]:
                assert api.delete(number).status_code == 204
                del before[number]
            taken = json.loads(site.run("backup", backup, "--json"))
        assert taken["left_out"] == 0
        assert taken["copied"] < taken["blobs"]
        policy = site.run("namespace", "show", "team", "--json")

    restored = new_site(*target)
    assert f"{taken['blobs']} blobs" in restored.run("restore", backup)
    assert restored.run("namespace", "show", "team", "--json") == policy
    assert "0 problems found" in restored.run("fsck", "--deep", "--orphans-older-than", "0s")
    with restored.serving() as api:
        assert [n for n, blob in before.items() if api.get(n).content != blob] == []
        assert connect(api.url, "kept").get().content == b"an artifact of another namespace"
        assert api.delete(next(iter(before))).status_code == 204  # adds to the audit log


def test_backup_contains_an_artifact_replaced_while_it_ran(new_site, backup, monkeypatch):
    site = new_site(stored=range(4))
    site.run("namespace", "set", "team", "--mode", "overwrite")
    take, snapshots = backup_module.take_snapshot, []
    with site.serving() as api:

        def take_and_replace(*arguments):
            if snapshots:  # the backup has copied this artifact's blob
                assert api.delete(3).status_code == 204
            take(*arguments)
            snapshots.append(arguments)
            if len(snapshots) == 1:
                assert api.put(b"replaced", 1).status_code == 201
                assert api.delete(2).status_code == 204
                until(lambda: len(blobs_in(site.directory)) == 3)

        monkeypatch.setattr(backup_module, "take_snapshot", take_and_replace)
        taken = json.loads(site.run("backup", backup, "--json"))
    assert len(snapshots) == 2
    assert taken["copied"] == taken["blobs"] == len(blobs_in(backup)) == 2

    restored = new_site()
    restored.run("restore", backup)
    with restored.serving() as api:
        assert [api.get(number).status_code for number in range(4)] == [200, 200, 404, 404]
        assert api.get(1).content == b"replaced"


def chosen(steps, database, *, is_extended):
    """Return the steps before which to kill. On SQLite, whose file is moved, these are all."""
    assert steps > 6
    if is_extended and database == "sqlite":
        return range(1, steps + 1)
    return steps // 2, steps - 3


@pytest.mark.parametrize("database", most_extended(["sqlite", "postgresql"], quick=["sqlite"]))
def test_killed_backup_leaves_the_previous_one_and_can_continue(
    new_site, tmp_path, backup, database, is_extended
):
    site = new_site(database, stored=range(3))
    assert site.run_killed("backup", backup, at=6) is None
    assert "no complete backup" in new_site(database).run("restore", backup, status=1)
    site.run("backup", backup)
    first = shutil.copytree(backup, tmp_path / "first")
    with site.serving() as api:
        assert [api.delete(number).status_code for number in range(2)] == [204, 204]
    site.put(range(10, 13))
    steps = site.run_killed("backup", shutil.copytree(first, tmp_path / "trial"))

    for at in chosen(steps, database, is_extended=is_extended):
        shutil.rmtree(backup)
        shutil.copytree(first, backup)
        assert site.run_killed("backup", backup, at=at) is None
        restored = new_site(database)
        restored.run("restore", backup)
        assert restored.stored() in ({0, 1, 2}, {2, 10, 11, 12})
        site.run("backup", backup)
        assert blobs_in(backup).keys() == {sha256_of(number) for number in (2, 10, 11, 12)}
        assert len(list(backup.glob("database*.sqlite3"))) == 1


@pytest.mark.parametrize(
    ("database", "is_replacing"),
    [
        ("sqlite", True),
        pytest.param("postgresql", True, marks=pytest.mark.extended),
        pytest.param("sqlite", False, marks=pytest.mark.extended),
    ],
)
def test_killed_restore_prevents_servers_from_starting_and_can_continue(
    new_site, backup, database, is_replacing, is_extended
):
    new_site(stored=range(4)).run("backup", backup)
    more = ["--replace"] if is_replacing else []

    def new_target():
        return new_site(database, stored=range(3, 6) if is_replacing else ())

    if is_replacing:
        assert "not empty" in new_target().run("restore", backup, status=1)
    steps = new_target().run_killed("restore", backup, *more)
    for at in chosen(steps, database, is_extended=is_extended and is_replacing):
        site = new_target()
        assert site.run_killed("restore", backup, *more, at=at) is None
        is_unfinished = (site.directory / "restore.json").exists()
        if is_unfinished:
            with pytest.raises(RuntimeError), site.serving():
                pass
            assert "a restore in" in site.run("gc", status=1)
        if is_unfinished or at < steps // 2:  # otherwise the kill came after the restore's end
            site.run("restore", backup, *more)
        assert site.stored() == {0, 1, 2, 3}
        left = {path.name for path in site.directory.iterdir()}
        assert not left & {"restore.json", "restore.sqlite3"}


@pytest.mark.parametrize("ends", [True, False])
def test_session_that_postgresql_is_closing_does_not_count_as_a_server(postgres, monkeypatch, ends):
    url = postgres.new_database()
    monkeypatch.setattr(snapshot, "_CLOSING_SECONDS", 60.0 if ends else 0.1)
    asked = []

    async def ask():
        name = {"application_name": "graphstash"}
        plain = url.replace("postgresql+asyncpg:", "postgresql:")
        session = await asyncpg.connect(plain, server_settings=name)

        def closing_later(_):
            asked.append(1)
            if ends and len(asked) == 2:
                asyncio.run_coroutine_threadsafe(session.close(), loop).result()

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(snapshot, "sleep", closing_later)
        try:
            return await asyncio.to_thread(snapshot.is_in_use, url)
        finally:
            await session.close()

    assert asyncio.run(ask()) is not ends
    assert asked or not ends  # a slow first query may use up the 0.1 s


def test_unusable_source_or_target_of_a_backup_is_refused(new_site, tmp_path, backup, stored_in):
    empty = new_site()
    assert "at revision none" in empty.run("backup", backup, status=1)
    assert list(empty.directory.glob("*.sqlite3*")) == []
    assert not backup.exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    site = new_site(stored=range(2))
    assert "is not empty and is not a backup" in site.run("backup", tmp_path / "home", status=1)
    thesis = tmp_path / "home" / "thesis.tex"
    assert f"{thesis}/x: Not a directory" in site.run("backup", thesis / "x", status=1)
    assert f"{thesis} is a file" in site.run("backup", thesis, status=1)
    untouched = new_site()
    made = sorted(untouched.directory.glob("**"))
    for nowhere in (tmp_path / "home", tmp_path / "nothing"):
        assert "is not a backup" in untouched.run("restore", nowhere, status=1)
    assert sorted(untouched.directory.glob("**")) == made
    site.run("backup", backup)
    with site.serving():
        assert "a server uses" in site.run("restore", backup, "--replace", status=1)
    assert "not empty" in site.run("restore", backup, status=1)
    other = new_site(stored=range(1))
    for more in ([], ["--moved"]):
        assert "is the backup of another cache" in other.run("backup", backup, *more, status=1)
    assert stored_in() == {0, 1}

    manifest = json.loads((backup / "backup.json").read_text())
    for change, named in (
        ({"format": 2}, "has the format 2"),
        ({"revision": "9999"}, "which release"),
        ({"database_sha256": "0" * 64}, "has other bytes than its manifest says"),
        ({"database": "gone.sqlite3"}, "is gone"),
        ({"blobs": "many"}, "is damaged"),
    ):
        (backup / "backup.json").write_text(json.dumps(manifest | change))
        assert named in empty.run("restore", backup, status=1)
        assert not (empty.directory / "restore.json").exists()
    assert empty.stored() == set()


def test_cache_that_lost_everything_does_not_replace_its_backup(new_site, backup, stored_in):
    site = new_site(stored=range(3))
    site.run("backup", backup)
    with site.serving() as api:
        assert [api.delete(number).status_code for number in range(3)] == [204] * 3
    site.put(range(5, 6))
    assert "has lost all that was backed up" in site.run("backup", backup, status=1)
    assert stored_in() == {0, 1, 2}


def test_backup_of_a_damaged_store_reports_the_artifacts_left_out(new_site, backup, stored_in):
    site = new_site(stored=range(3))
    files = blobs_in(site.directory)
    files[sha256_of(0)].write_bytes(b"?" * len(blob_of(0)))
    files[sha256_of(1)].unlink()
    assert "2 artifacts left out" in site.run("backup", backup, status=1)
    assert stored_in() == {2}


def test_damaged_backup_is_restored_only_in_part_on_request_and_repaired(
    new_site, backup, stored_in
):
    site = new_site(stored=range(3))
    site.run("backup", backup)
    file = blobs_in(backup)[sha256_of(1)]
    file.write_bytes(b"?" * len(blob_of(1)))
    other = new_site(stored=range(3, 5))
    assert "there is nothing to do" in other.run("restore", "--abandon", status=1)
    said = other.run("restore", backup, "--replace", status=1)
    assert "1 of 3 blobs are missing or damaged" in said
    assert "graphstash restore --abandon" in other.run("gc", status=1)
    other.run("restore", "--abandon")
    assert other.stored() == {3, 4}
    partial = ("restore", backup, "--replace", "--partial")
    said = other.run(*partial, status=1)
    assert "1 artifact left out" in said
    assert "and 2 blobs (" in said
    assert '"blobs": 2' in other.run(*partial, "--json", status=1)
    assert other.stored() == {0, 2}

    assert '"copied": 1' in site.run("backup", backup, "--deep", "--json")
    assert stored_in() == {0, 1, 2}
    file.write_bytes(b"?")  # its size alone reveals the damage
    assert '"copied": 1' in site.run("backup", backup, "--json")
    assert file.read_bytes() == blob_of(1)

    shutil.rmtree(backup / "blobs")
    said = other.run("restore", backup, "--replace", status=1)
    assert "1 of 3 blobs are missing or damaged" in said  # the target has the other blobs
    assert other.stored() == {0, 2}
    assert "1 artifact left out" in other.run(*partial, status=1)
    assert other.stored() == {0, 2}


def test_backup_is_not_replaced_by_an_earlier_database_of_its_cache(new_site, tmp_path, backup):
    stale, first = new_site(stored=range(1)), tmp_path / "first"
    stale.run("backup", first)
    moved = new_site("postgresql")
    moved.run("restore", first)
    moved.put(range(1, 4))
    moved.run("backup", backup)

    said = stale.run("backup", backup, status=1)
    for named in (moved, stale):
        assert make_url(named.settings["database_url"]).database in said
    assert "--moved" in said
    assert len(blobs_in(backup)) == 4
    moved.run("backup", first, "--moved")
    assert len(blobs_in(first)) == 4
    moved.run("backup", first)


def test_corrupt_database_does_not_replace_a_backup(new_site, backup):
    site = new_site(stored=range(3))
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
    assert site.stored() == {0, 1, 2}


def test_backup_of_an_earlier_revision_is_upgraded_and_of_a_later_one_refused(
    new_site, backup, stored_in
):
    site = new_site(stored=range(2))
    site.run("backup", backup)
    manifest = json.loads((backup / "backup.json").read_text())
    before = backup / manifest["database"]
    command.downgrade(alembic_config(f"sqlite+aiosqlite:///{before}"), "0010")
    with closing(sqlite3.connect(before)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    sha256 = hashlib.sha256(before.read_bytes()).hexdigest()
    manifest |= {"revision": "0010", "database_sha256": sha256}
    (backup / "backup.json").write_text(json.dumps(manifest))
    assert stored_in() == {0, 1}

    with closing(sqlite3.connect(site.directory / "graphstash.sqlite3")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    assert json.loads(site.run("backup", backup, "--json"))["revision"] == "9999"
    assert "database revision 9999, which release" in new_site().run("restore", backup, status=1)


@pytest.mark.parametrize("database", most_extended(["sqlite", "postgresql"], quick=["sqlite"]))
def test_restore_preserves_later_withdrawals_and_revocations(new_site, tmp_path, backup, database):
    """This holds even if the clock of the backup's host was a day ahead."""
    site, host = new_site(database, stored=range(4)), HostClock(tmp_path)
    grant = ("token", "create", "--grant", "read:team", "--description", "ci", "--json")
    tokens = [json.loads(site.run(*grant))["info"]["id"] for _ in range(2)]
    host.set(timedelta(days=1))
    program = "from graphstash.__main__ import main; main()"
    done = python(program, "backup", backup, "--json", **site.variables, **host.environment)
    taken_at = datetime.fromisoformat(json.loads(done.stdout)["taken_at"])
    is_ahead = taken_at > datetime.now(UTC) + timedelta(hours=12)
    assert is_ahead is (database == "sqlite")  # PostgreSQL has its own clock
    with site.serving() as api:
        for number in (0, 1):
            api.withhold(blob_of(number), number)
        site.run("quarantine", "release", f"team/jax/{DEVICE}/{api.fingerprint(1)}")
        assert api.delete(2).status_code == 204
        site.run("token", "revoke", tokens[0])

    site.run("restore", backup, "--replace")
    assert site.stored() == {1, 2, 3}
    steps = site.run_killed("restore", backup, "--replace")
    before_end = steps - 4  # the restore has replaced the rows, but not recorded it
    assert site.run_killed("restore", backup, "--replace", at=before_end) is None
    assert "may have replaced rows" in site.run("restore", "--abandon", status=1)
    site.run("restore", backup, "--replace")
    assert site.stored() == {1, 2, 3}
    listed = json.loads(site.run("token", "list", "--json"))["tokens"]
    revoked_at = {each["id"]: each["revoked_at"] for each in listed}
    assert revoked_at[tokens[0]] is not None
    assert revoked_at[tokens[1]] is None


@pytest.mark.parametrize("database", most_extended(["sqlite", "postgresql"], quick=["sqlite"]))
def test_token_revoked_and_deleted_since_the_backup_stays_revoked(
    new_site, tmp_path, backup, database
):
    site = new_site(database, stored=range(1))
    grant = ("token", "create", "--grant", "read:team", "--description", "ci", "--json")
    tokens = [json.loads(site.run(*grant))["info"]["id"] for _ in range(2)]
    site.run("backup", backup)
    site.run("token", "revoke", tokens[0])
    for chore in ("DELETE FROM audit WHERE at < '2000-01-01'", "DELETE FROM audit"):
        site.execute("DELETE FROM tokens WHERE revoked_at IS NOT NULL")
        site.execute(chore)
        site.run(*grant)  # on SQLite, the numbers of an empty log restart
        site.run("restore", backup, "--replace")
        assert site.unrevoked_tokens() == {tokens[1]}

    other = new_site(database, stored=range(1))  # another cache, which never had the tokens
    other.run("restore", backup, "--replace")
    assert other.unrevoked_tokens() == set(tokens)

    site.run("backup", tmp_path / "first")
    later, leaked = (json.loads(site.run(*grant))["info"]["id"] for _ in range(2))
    site.run("backup", backup)
    site.run("token", "revoke", leaked)
    site.run("restore", tmp_path / "first", "--replace")  # by mistake
    site.put(range(1, 4))
    site.run("restore", backup, "--replace")
    assert site.unrevoked_tokens() == {tokens[1], later}


def test_too_little_space_is_refused_before_a_blob_is_copied(new_site, backup, monkeypatch):
    site = new_site(stored=range(3))
    with monkeypatch.context() as patch:
        full = shutil.disk_usage(site.directory)._replace(free=len(blob_of(0)) * 2)
        patch.setattr(shutil, "disk_usage", lambda _: full)
        assert "bytes free" in site.run("backup", backup, status=1)
    assert blobs_in(backup) == {}

    site.run("backup", backup)
    other = new_site(stored=range(3, 5))
    full = Site(other.directory, jobs=other.jobs, **other.settings, min_free_bytes="1PiB")
    assert "the disk has room for 0" in full.run("restore", backup, "--replace", status=1)
    assert len(blobs_in(other.directory)) == 2
    assert other.stored() == {3, 4}


def test_no_server_starts_while_a_restore_reads_the_replaced_database(
    new_site, backup, monkeypatch
):
    site = new_site(stored=range(2))
    site.run("backup", backup)
    upgrade, refused = backup_module.upgrade_snapshot, []

    def upgrade_beside_a_server(staged):
        upgrade(staged)
        with pytest.raises(RuntimeError), site.serving():
            pass
        refused.append(staged)

    monkeypatch.setattr(backup_module, "upgrade_snapshot", upgrade_beside_a_server)
    site.run("restore", backup, "--replace")
    assert len(refused) == 1
    assert site.stored() == {0, 1}


def test_log_of_the_replaced_database_is_not_applied_to_the_restored_one(new_site, backup):
    """A killed server leaves its log, and an operator removes only the database."""
    site = new_site(stored=range(2))
    site.run("backup", backup)
    database = site.directory / "graphstash.sqlite3"
    with ServerProcess(site.directory, environment={"GRAPHSTASH_MIN_FREE_BYTES": "0"}) as server:
        with closing(Api(server.url)) as api:
            for number in range(2):
                assert api.delete(number).status_code == 204
        server.kill()
    log = database.with_name(f"{database.name}-wal")
    assert log.stat().st_size > 0
    database.unlink()
    site.run("restore", backup, "--replace")
    assert site.stored() == {0, 1}


def test_restore_writes_nothing_into_the_backup(new_site, backup, stored_in):
    new_site(stored=range(2)).run("backup", backup)
    (backup / "backup.lock").unlink()
    (backup / "blobs" / "tmp").rmdir()
    before = {path: path.stat().st_mtime_ns for path in [backup, *backup.rglob("*")]}
    assert stored_in() == {0, 1}
    assert {path: path.stat().st_mtime_ns for path in [backup, *backup.rglob("*")]} == before


def test_unreadable_record_of_a_restore_counts_as_another_restore(new_site, backup):
    site = new_site(stored=range(2))
    site.run("backup", backup)
    (site.directory / "restore.json").write_text("")
    assert "a restore of another backup" in site.run("restore", backup, status=1)
    assert "may have replaced rows" in site.run("restore", "--abandon", status=1)
    site.run("restore", backup, "--replace")
    assert site.stored() == {0, 1}

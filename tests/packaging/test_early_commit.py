"""Jobs, data and servers of an early commit survive upgrade, rollback and killed migrations.

EARLY_SEED=<text>     repeats the kills of an earlier run
EARLY_KILLS=<number>  number of kills in the migrations of each database
"""

import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from graphstash_server.testing import ServerProcess
from support.api import Api
from support.ports import reserved_port
from support.postgres import EMPTY
from support.release_before import python_of_commit
from support.starts import Popen, Zygote
from support.waiting import until

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1800)]

EARLY = "646c43186d1a279562ba3a248520fb82c069e314"
JOB = Path(__file__).parents[1] / "support" / "steady_job.py"
KILLED = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import event
from sqlalchemy.engine import Engine
from graphstash_server.db.migrate import migrate
statements = 0

@event.listens_for(Engine, "before_cursor_execute")
def count(*_):
    global statements
    statements += 1
    if statements == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

migrate(sys.argv[1], lock_path=Path(sys.argv[2]))
print(statements)
"""
"""Script that kills a migration before one of its statements, or prints their number."""

BLOBS = {number: f"blob {number}".encode() * 500 for number in range(5)}
WITHHELD = 4


@pytest.fixture(scope="module")
def early():
    return str(python_of_commit(EARLY, environment="early"))


def graphstash(python, *arguments, **environment):
    return subprocess.run(
        [python, "-m", "graphstash", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


class Site:
    """A data directory and a database, which servers of both releases use in turn."""

    def __init__(self, directory, database):
        self.directory = directory
        self.database = database or f"sqlite+aiosqlite:///{directory / 'graphstash.sqlite3'}"
        self.port = reserved_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "GRAPHSTASH_MIN_FREE_BYTES": "0",
            "GRAPHSTASH_AUTH": "tokens",
            "GRAPHSTASH_DATA_DIR": str(directory),
        }
        if database:
            self.environment["GRAPHSTASH_DATABASE_URL"] = database

    @contextmanager
    def served_by(self, python, *, is_killed=False):
        server = ServerProcess(
            self.directory,
            *("--port", str(self.port)),
            command=(python, "-m", "graphstash", "serve"),
            environment=self.environment | {"GRAPHSTASH_INSECURE": "false"},
        )
        try:
            yield server
        finally:
            if is_killed:
                server.kill(tree=True)
            else:
                assert server.stop() == 0, server.log

    def token(self, python, grant):
        options = ("--grant", grant, "--description", "a test")
        done = graphstash(python, "token", "create", *options, **self.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def fill(self, early):
        """Store artifacts, one of which is withheld, and create tokens, with the early commit."""
        with self.served_by(early):
            self.tokens = {s: self.token(early, f"{s}:*") for s in ("admin", "write", "read")}
            revoked = graphstash(early, "token", "revoke", self.tokens["read"], **self.environment)
            assert revoked.returncode == 0, revoked.stderr
            api = Api(self.url, token=self.tokens["admin"])
            for number, blob in BLOBS.items():
                assert api.put(blob, number, seconds=9).status_code == 201
            api.withhold(BLOBS[WITHHELD], WITHHELD)
            api.http.close()

    def check(self, fresh):
        """Read everything back from the running server, and store a new artifact."""
        api = Api(self.url, token=self.tokens["write"])
        for number, blob in BLOBS.items():
            answer = api.get(number)
            found = answer.content if answer.status_code == 200 else answer.status_code
            assert found == (404 if number == WITHHELD else blob)
        assert api.put(b"stored later", fresh).status_code == 201
        assert api.get(fresh).content == b"stored later"
        assert api.put(BLOBS[0], fresh + 1).status_code == 201
        api.http.close()
        api = Api(self.url, token=self.tokens["read"])
        assert api.get(0).status_code == 401
        api.http.close()

    def require_no_problem(self):
        checked = graphstash(sys.executable, "fsck", "--deep", **self.environment)
        assert (checked.returncode, checked.stdout) == (0, "0 problems found\n"), checked.stderr


class Job:
    """A job of one release that runs across all server changes."""

    def __init__(self, python, name, site, tmp_path):
        self._printed, self._errors = tmp_path / f"job-{name}", tmp_path / f"job-{name}.errors"
        environment = os.environ | {
            "GRAPHSTASH_URL": site.url,
            "GRAPHSTASH_NAMESPACE": "team",
            "GRAPHSTASH_TOKEN": site.tokens["write"],
            "PYTHONPATH": "",
        }
        with self._printed.open("w") as printed, self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [python, "-P", JOB, str(name)],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=errors,
                env=environment,
            )

    @property
    def stored(self):
        return len(self._printed.read_text().splitlines())

    def go_on(self):
        """Return once the job has stored four further artifacts."""
        goal = self.stored + 4
        until(lambda: self._process.poll() is not None or self.stored >= goal)
        assert self._process.poll() is None, self._errors.read_text()

    def end(self):
        self._process.communicate(timeout=120)
        assert self._process.returncode == 0, self._errors.read_text()
        assert json.loads(self._printed.read_text().splitlines()[-1]) == []


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def copied(request, early, tmp_path_factory):
    """Return a function that makes a site with a copy of what the early commit stored."""
    directory = tmp_path_factory.mktemp("early")
    postgres = request.param == "postgresql" and request.getfixturevalue("postgres")
    filled = Site(directory / "filled", postgres and postgres.new_database(template=EMPTY))
    filled.fill(early)

    def copied(name):
        data = directory / name
        shutil.copytree(filled.directory, data)
        template = filled.database.rpartition("/")[2]
        site = Site(data, postgres and postgres.new_database(template=template))
        site.tokens = filled.tokens
        return site

    return copied


def test_jobs_continue_through_upgrade_rollback_and_kills(early, copied, tmp_path):
    now = sys.executable
    site = copied("jobs")
    jobs = [Job(python, name, site, tmp_path) for name, python in enumerate((early, early, now))]
    for step, (python, is_killed) in enumerate(
        [(early, False), (now, False), (early, True), (now, True), (now, False)]
    ):
        with site.served_by(python, is_killed=is_killed):
            for job in jobs:
                job.go_on()
            site.check(100 + 2 * step)
    with site.served_by(now):
        for job in jobs:
            job.end()
    site.require_no_problem()


def test_killed_migration_leaves_a_usable_database(early, copied, tmp_path):
    seed = os.environ.get("EARLY_SEED") or secrets.token_hex(4)
    kills = int(os.environ.get("EARLY_KILLS") or 2)
    print(f"EARLY_SEED={seed} EARLY_KILLS={kills}")
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    zygote = Zygote(sys.executable, "graphstash_server.db.migrate", "alembic.command")

    def migrate(site, killed_at):
        """Return the status and the output of a migration."""
        command = [sys.executable, program, site.database, site.directory / "lock", str(killed_at)]
        with Popen(command, zygote=zygote, stdout=subprocess.PIPE, text=True) as process:
            printed, _ = process.communicate()
        return process.returncode, printed

    with closing(zygote):
        status, statements = migrate(copied("whole"), 0)
        assert status == 0
        for at in sorted(random.Random(seed).sample(range(1, int(statements) + 1), kills)):
            site = copied(f"killed-{at}")
            assert migrate(site, at)[0] == -signal.SIGKILL
            with site.served_by(early):
                site.check(100)
            assert migrate(site, at)[0] in {0, -signal.SIGKILL}
            with site.served_by(sys.executable):
                site.check(200)
            site.require_no_problem()

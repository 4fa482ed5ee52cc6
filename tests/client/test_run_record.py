"""Which records of runs stay on a host."""

import errno
import fcntl
import itertools
import os
import stat
import time
from contextlib import ExitStack

import pytest

from graphstash._compile.stats import Stats
from graphstash._process import run_record
from graphstash._process.run_name import RUN_VARIABLE
from support.processes import started
from support.waiting import until

KEPT = 20

JOB = """
import os, sys
import graphstash
from graphstash_schema import ArtifactKey

session = graphstash.install(url="none")
graphstash.get_or_compile(ArtifactKey.parse("schedule", "cpu", "0" * 64), lambda: b"x")
if "fork" in sys.argv and os.fork():
    os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""


def name(number):
    return f"{number:020d}-1"


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a process of a run, which lives until its input ends."""
    with ExitStack() as stack:

        def start(run, *arguments):
            variables = {RUN_VARIABLE: run, "GRAPHSTASH_CACHE_DIR": tmp_path / "a"}
            process = stack.enter_context(started(JOB, *arguments, **variables))
            assert process.stdout.readline() == "ready\n"
            return process

        yield start


@pytest.fixture
def save(config, tmp_path):
    """Return a function that leaves another run's record and lock, as an exiting process does."""

    def save(run):
        folder = tmp_path / "a" / "records" / run
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "lock").touch()
        run_record.save(config("a"), Stats(), [], run=run, started_at=time.time())

    return save


def runs(tmp_path):
    records = (tmp_path / "a" / "records").iterdir()
    return sorted(each.name for each in records if each.name[0].isdigit())


def test_the_folder_of_a_run_stays_while_one_of_its_processes_lives(start, save, tmp_path):
    process = start(name(1))
    (tmp_path / "a" / "records" / "another tool's").mkdir()
    for number in range(2, KEPT + 4):
        save(name(number))
    assert runs(tmp_path) == [name(1), *(name(number) for number in range(4, KEPT + 4))]

    process.kill()  # it would not release its lock otherwise
    process.wait()
    save(name(KEPT + 4))
    assert runs(tmp_path) == [name(number) for number in range(5, KEPT + 5)]
    records = tmp_path / "a" / "records"
    assert (records / "another tool's").is_dir()
    assert {stat.S_IMODE(each.stat().st_mode) for each in records.glob("*/*.json")} == {0o600}


def test_folder_of_a_run_stays_for_child_that_outlives_its_parent(start, save, tmp_path):
    parent = start(name(1), "fork")
    parent.wait()
    for number in range(2, KEPT + 2):
        save(name(number))
    assert name(1) in runs(tmp_path)
    parent.stdin.close()  # the child reads the same pipe
    numbers = itertools.count(KEPT + 2)

    def is_removed():
        save(name(next(numbers)))
        return name(1) not in runs(tmp_path)

    until(is_removed)


@pytest.mark.parametrize("lock", ["unsupported", "unreadable", "absent"])
def test_folder_of_a_run_whose_lock_fails_stays_for_a_week(save, tmp_path, monkeypatch, lock):
    records = tmp_path / "a" / "records"
    for number in (1, 2):
        save(name(number))
        if lock != "unsupported":
            (records / name(number) / "lock").unlink()
        if lock == "unreadable":
            (records / name(number) / "lock").mkdir()
    if lock == "unsupported":

        def flock(*_):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", flock)
    week_ago = time.time() - 8 * 24 * 3600
    for path in (*(records / name(1)).iterdir(), records / name(1)):
        os.utime(path, (week_ago, week_ago))
    for number in range(3, KEPT + 3):
        save(name(number))
    assert runs(tmp_path) == [name(number) for number in range(2, KEPT + 3)]


def test_exit_of_a_process_tries_to_remove_at_most_twenty_runs(save, tmp_path):
    records = tmp_path / "a" / "records"
    save(name(0))
    for number in range(1, 3 * KEPT):
        (records / name(number)).mkdir()
        (records / name(number) / "lock").touch()
    save(name(3 * KEPT))
    assert len(runs(tmp_path)) == 2 * KEPT + 1


def test_a_run_that_began_while_the_clock_was_ahead_is_not_the_latest(save, tmp_path):
    ahead = f"{time.time_ns() + 200 * 24 * 3600 * 10**9:020d}-1"
    save(ahead)
    for number in range(KEPT):
        save(name(number))
    assert runs(tmp_path) == [name(number) for number in range(KEPT)]

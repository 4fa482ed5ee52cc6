import errno
import fcntl
import math
import os
import stat
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from filelock import FileLock, Timeout

from graphstash._artifacts import local_tier
from graphstash._artifacts.local_tier import LocalTier
from graphstash_schema import ArtifactKey, Namespace
from support.processes import python, started

MIB = 1024**2
NAMESPACE = Namespace("team")


def key(number):
    return ArtifactKey.parse("torch_xla", "cpu-x86_64", f"{number:064x}")


def add(tier, number, content):
    with tier.temporary() as file:
        file.write(content)
        tier.adopt(NAMESPACE, key(number), file)


def read(tier, number):
    file = tier.open(NAMESPACE, key(number))
    if file is None:
        return None
    with file:
        return file.read()


def test_only_adopted_files_are_read_by_another_process(tmp_path):
    add(LocalTier(tmp_path, limit_bytes=10_000), 1, b"one")
    tier = LocalTier(tmp_path, limit_bytes=10_000)
    assert read(tier, 1) == b"one"
    assert read(tier, 2) is None
    assert tier.open(Namespace("other"), key(1)) is None


def test_least_recently_used_artifacts_are_evicted_over_the_limit(tmp_path):
    for number in range(5):
        add(LocalTier(tmp_path, limit_bytes=1000), number, bytes(300))
    tier = LocalTier(tmp_path, limit_bytes=1000)
    for number in range(5):
        os.utime(tier.path(NAMESPACE, key(number)), (1000 + number, 1000 + number))
    assert read(tier, 0) is not None  # just used: no longer the oldest

    with tier.open(NAMESPACE, key(1)) as file:
        os.utime(tier.path(NAMESPACE, key(1)), (1001, 1001))
        assert tier.evict() == 600
        assert file.read() == bytes(300)  # an open artifact survives its eviction
    assert [n for n in range(5) if tier.path(NAMESPACE, key(n)).exists()] == [0, 3, 4]


def test_a_long_job_keeps_to_the_limit_without_ever_closing(tmp_path):
    tier = LocalTier(tmp_path, limit_bytes=1000)
    for number in range(50):
        add(tier, number, bytes(100))
        assert read(tier, number) == bytes(100)
        assert tier.size_bytes() <= 1100


def test_closing_evicts_excess_of_this_process(tmp_path):
    tier = LocalTier(tmp_path, limit_bytes=100)
    add(tier, 1, bytes(90))
    add(tier, 2, bytes(90))
    tier.close()
    assert LocalTier(tmp_path, limit_bytes=100).size_bytes() == 90


def test_one_process_evicts_at_a_time(tmp_path):
    add(LocalTier(tmp_path, limit_bytes=1000), 1, bytes(90))
    tier = LocalTier(tmp_path, limit_bytes=50)
    (locks,) = tmp_path.rglob("locks")
    with FileLock(locks / "evict"):
        assert tier.evict() == 0
    assert tier.evict() == 90


def test_a_forked_child_leaves_the_private_tier_to_its_parent(tmp_path):
    program = """
        import os
        from pathlib import Path
        from graphstash._artifacts.local_tier import LocalTier
        tier = LocalTier(Path("/nowhere"), limit_bytes=0)
        if os.fork() == 0:
            tier.close()
            raise SystemExit
        os.wait()
        print(tier.root.exists(), tier.root)
    """
    words = python(program, check=True).stdout.split()
    assert words[0] == "True"
    assert not os.path.exists(words[1])  # noqa: PTH110 - a string from elsewhere


@pytest.mark.parametrize("limit_bytes", [0, 1000], ids=["a limit of zero", "not a directory"])
def test_private_directory_serves_process_without_cache_directory(tmp_path, limit_bytes):
    place = tmp_path / "tier"
    if limit_bytes:
        place.write_text("not a directory")
    tier = LocalTier(place, limit_bytes=limit_bytes)
    add(tier, 1, b"one")
    assert read(tier, 1) == b"one"
    private = tier.root
    assert private != place
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    tier.close()
    assert not private.exists()
    assert place.exists() == bool(limit_bytes)


def test_private_directory_of_killed_process_is_removed_a_day_or_without_lock_a_week_later(
    tmp_path, monkeypatch
):
    program = """
        import os, signal
        from pathlib import Path
        from graphstash._artifacts.local_tier import LocalTier
        tier = LocalTier(Path("/nowhere"), limit_bytes=0)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    python(program, TMPDIR=tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (killed,) = tmp_path.iterdir()
    living, link = LocalTier(tmp_path, limit_bytes=0), tmp_path / f"{killed.name}-link"
    link.symlink_to(killed)
    early, long_ago = (tmp_path / f"{killed.name}-{name}" for name in ("early", "long-ago"))
    ages = {killed: 2, living.root: 8, early: 2, long_ago: 8}
    for path, days in ages.items():
        path.mkdir(exist_ok=True)
        os.utime(path, (0, time.time() - days * 24 * 3600))

    LocalTier(tmp_path, limit_bytes=0).close()
    assert [path for path in ages if path.exists()] == [living.root, early]
    assert link.is_symlink()
    living.close()


def test_private_directory_is_held_by_a_file_whose_lock_other_hosts_respect(tmp_path, monkeypatch):
    """NFS shares locks of regular files only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tier = LocalTier(tmp_path, limit_bytes=0)
    with (tier.root / "lock").open("r+b") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    tier.close()


def test_file_that_fails_when_it_is_closed_replaces_nothing(tmp_path):
    """NFS reports a full disk or quota when a file is closed."""
    program = """
        import os, sys
        from pathlib import Path
        from graphstash._replacing import replacing
        os.fsync = os.close  # so that the second `close` fails
        try:
            with replacing(Path(sys.argv[1])) as file:
                file.write("new")
        except OSError as error:
            print(error)
    """
    path = tmp_path / "file"
    path.write_text("old")
    assert "Bad file descriptor" in python(program, path, check=True).stdout
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_stale_temporary_files_are_removed_and_files_in_use_kept(tmp_path, monkeypatch):
    """A stale file is removed even if this host's clock is ahead."""
    content = bytes(2 * MIB)
    writer, other = (LocalTier(tmp_path, limit_bytes=100 * MIB) for _ in range(2))
    old, fresh = tmp_path / "tmp" / "old", tmp_path / "tmp" / "fresh"
    old.touch()
    fresh.touch()
    os.utime(old, (0, 0))
    other.evict()
    assert (old.exists(), fresh.exists()) == (False, True)
    with writer.temporary() as file:
        file.write(content)
        monkeypatch.setattr(local_tier, "time", lambda: time.time() + 200 * 24 * 3600)
        other.evict()
        assert writer.adopt(NAMESPACE, key(1), file)
    assert read(other, 1) == content


def test_an_artifact_used_while_the_clock_was_ahead_ages_from_now_on(tmp_path):
    tier = LocalTier(tmp_path, limit_bytes=1000)
    add(tier, 1, b"one")
    path = tier.path(NAMESPACE, key(1))
    os.utime(path, (time.time() + 200 * 24 * 3600,) * 2)
    tier.evict()
    assert path.stat().st_mtime <= time.time() + 60


def test_wait_for_lock_of_an_artifact_is_bounded(tmp_path):
    tier = LocalTier(tmp_path, limit_bytes=1000)
    program = f"""
import sys, time
from pathlib import Path
from graphstash._artifacts.local_tier import LocalTier
from graphstash_schema import ArtifactKey
with LocalTier(Path(sys.argv[1]), limit_bytes=1000).exclusive(
    ArtifactKey.parse(*{str(key(1))!r}.split("/")), timeout_seconds=5
):
    print("held", flush=True)
    time.sleep(60)
"""
    with started(program, tmp_path) as holder:
        assert holder.stdout.readline() == "held\n"
        asked_at = time.monotonic()
        with tier.exclusive(key(1), timeout_seconds=0.3):
            assert time.monotonic() - asked_at >= 0.3  # continues without the lock

        ended = []
        killer = threading.Timer(0.5, lambda: ended.append("holder") or holder.kill())
        killer.start()
        with tier.exclusive(key(1), timeout_seconds=3600):
            assert ended == ["holder"]  # the system releases a killed holder's lock at once


def test_a_forked_child_neither_releases_nor_keeps_the_locks_of_its_parent(tmp_path):
    tier = LocalTier(tmp_path, limit_bytes=1000)
    program = f"""
import os, signal, sys
from pathlib import Path
from graphstash._artifacts.local_tier import LocalTier
from graphstash._artifacts.run_folder import claim
from graphstash_schema import ArtifactKey
tier, key = LocalTier(Path(sys.argv[1]), limit_bytes=1000), {str(key(1))!r}.split("/")
claimed = claim(tier.root / "claim")
with tier.exclusive(ArtifactKey.parse(*key), timeout_seconds=0), tier.downloading():
    if os.fork():
        signal.pause()
claimed.close()
print("left", flush=True)
sys.stdin.read()
"""

    def held():
        found = [tier.is_downloading()]
        for path in (tmp_path / "locks" / f"{key(1).fingerprint[:3]}.lock", tmp_path / "claim"):
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(True)
                else:
                    found.append(False)
        return found

    with started(program, tmp_path) as parent:
        assert parent.stdout.readline() == "left\n"
        assert held() == [True, True, True]
        parent.kill()
        parent.wait()
        assert held() == [False, False, False]


def test_lock_of_an_artifact_excludes_earlier_releases(tmp_path):
    """Earlier releases lock the same file with filelock."""
    tier = LocalTier(tmp_path, limit_bytes=1000)
    path = tmp_path / "locks" / f"{key(1).fingerprint[:3]}.lock"
    with tier.exclusive(key(1), timeout_seconds=60), pytest.raises(Timeout):
        FileLock(path, timeout=0).acquire()
    earlier = FileLock(path, timeout=0, thread_local=False)
    with earlier:
        threading.Timer(0.3, earlier.release, [True]).start()
        with tier.exclusive(key(1), timeout_seconds=60):
            assert not earlier.is_locked


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_file_system_without_locks_does_not_delay_a_download(tmp_path, monkeypatch, code):
    tier = LocalTier(tmp_path, limit_bytes=1000)
    calls = []

    def flock(_descriptor, operation):
        calls.append(operation)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with tier.exclusive(key(1), timeout_seconds=3600, most_seconds=3600) as signal_progress:
        signal_progress()
    assert [each for each in calls if each != fcntl.LOCK_UN] == [fcntl.LOCK_EX | fcntl.LOCK_NB]


def test_temporary_file_is_truncated_only_if_it_has_another_size(tmp_path):
    tier = LocalTier(tmp_path, limit_bytes=1000)
    content = os.urandom(2 * MIB)
    with tier.temporary() as file:
        file.write(content)
        os.utime(file.fileno(), (0, 0))
        assert file.truncate() == file.truncate(2 * MIB) == 2 * MIB
        assert os.fstat(file.fileno()).st_mtime == 0, "ftruncate would change it"
        file.seek(6)
        assert file.truncate() == 6
        file.seek(0)
        assert file.read() == content[:6]


def test_temporary_file_is_on_the_disk_only_while_it_is_large(tmp_path):
    tier = LocalTier(tmp_path, limit_bytes=1000)
    files = tmp_path / "tmp"
    content = os.urandom(MIB)
    for more in (b"", b"more"):
        with tier.temporary() as file:
            file.write(content)
            assert not any(files.iterdir())
            file.seek(MIB)
            file.write(more)
            assert len([*files.iterdir()]) == bool(more)
            file.seek(0)
            assert file.read(MIB + 1) == content + more[:1]
            assert file.read() == more[1:]
            assert (file.truncate(5), file.seek(0, os.SEEK_END)) == (5, 5)
        assert not any(files.iterdir())


def test_process_waits_for_another_that_reports_progress(tmp_path, monkeypatch):
    holder, waiter = (LocalTier(tmp_path, limit_bytes=1000) for _ in range(2))
    got = []
    recent, looked = local_tier._recent, threading.Semaphore(0)

    def look(path, seconds):
        looked.release()
        return recent(path, seconds)

    def wait():
        with waiter.exclusive(key(1), timeout_seconds=0.1, most_seconds=3600):
            got.append("the lock")

    monkeypatch.setattr(local_tier, "_recent", look)
    with holder.exclusive(key(1), timeout_seconds=1) as going_on:
        going_on()
        assert not [*tmp_path.rglob("*.on")], "most downloads end before others look"
        now = time.monotonic() + local_tier._QUIET_SECONDS
        monkeypatch.setattr(local_tier, "monotonic", lambda: now)
        going_on()
        monkeypatch.undo()
        monkeypatch.setattr(local_tier, "_recent", look)
        (said,) = tmp_path.rglob("*.on")
        os.utime(said, (time.time() + 3600,) * 2)  # a signal from the future
        thread = threading.Thread(target=wait)
        thread.start()
        for _ in range(3):
            assert looked.acquire(timeout=60)
        got.append("released")
    thread.join(20)
    assert got == ["released", "the lock"]


def test_process_waits_for_another_at_a_busy_server_while_the_caller_allows_it(tmp_path):
    holder, waiter = (LocalTier(tmp_path, limit_bytes=1000) for _ in range(2))
    answers = []

    def when_busy(seconds):
        answers.append((seconds, len(answers) < 2))
        return answers[-1][1]

    with holder.exclusive(key(1), timeout_seconds=1) as signal:
        for patience in (math.inf, 30.0):
            answers.clear()
            signal(busy_seconds=patience)
            with waiter.exclusive(key(1), timeout_seconds=3600, when_busy=when_busy):
                assert answers == [(patience, True), (patience, True), (patience, False)]
        signal()
        with waiter.exclusive(key(1), timeout_seconds=0, most_seconds=3600, when_busy=when_busy):
            assert len(answers) == 3
        signal(busy_seconds=30.0)
    (said,) = tmp_path.rglob("*.on")
    assert said.stat().st_size == 0, "an earlier release's progress would look busy"


def test_wait_for_a_busy_server_does_not_count_towards_the_limits(tmp_path, monkeypatch):
    holder, waiter = (LocalTier(tmp_path, limit_bytes=1000) for _ in range(2))
    now, slept = [0.0], []
    monkeypatch.setattr(local_tier, "monotonic", lambda: now[0])
    with ExitStack() as held:
        signal = held.enter_context(holder.exclusive(key(1), timeout_seconds=1))
        signal(busy_seconds=30.0)
        (said,) = tmp_path.rglob("*.on")
        wall = time.time()
        monkeypatch.setattr(local_tier, "time", lambda: wall)
        os.utime(said, (wall - 1,) * 2)  # processes signal once per second

        def when_busy(_):
            now[0] += 100.0
            signal()  # the next call
            return True

        def sleep(_):
            slept.append(now[0])
            if len(slept) == 2:
                held.close()

        monkeypatch.setattr(local_tier, "sleep", sleep)
        with waiter.exclusive(key(1), timeout_seconds=0.5, most_seconds=50, when_busy=when_busy):
            assert slept == [100.0, 100.0]


def test_other_processes_detect_a_download_until_it_ends(tmp_path):
    one, other = (LocalTier(tmp_path, limit_bytes=1000) for _ in range(2))
    assert not other.is_downloading()
    with one.downloading():
        assert other.is_downloading()
        with other.downloading():
            pass
        assert other.is_downloading()
    assert not other.is_downloading()


def test_other_processes_detect_a_download_that_is_just_beginning(tmp_path):
    one, other = (LocalTier(tmp_path, limit_bytes=1000) for _ in range(2))
    look = """
import sys
from pathlib import Path
from graphstash._artifacts.local_tier import LocalTier
tier = LocalTier(Path(sys.argv[1]), limit_bytes=1000)
print(flush=True)
while True:
    tier.is_downloading()
"""
    with started(look, tmp_path) as looking:
        looking.stdout.readline()
        for _ in range(300):
            with one.downloading():
                assert other.is_downloading()


def test_secret_that_another_process_has_just_replaced_stays(tmp_path, monkeypatch):
    one, other = (LocalTier(tmp_path, limit_bytes=1000) for _ in range(2))
    (tmp_path / "secret").write_bytes(b"truncated")
    real, made = local_tier._size_of, []

    def slow(path):
        size = real(path)
        if not made:
            made.append(None)
            made.append(other.secret())
        return size

    monkeypatch.setattr(local_tier, "_size_of", slow)
    assert one.secret() == made[1] == other.secret()


def test_envelope_that_has_replaced_a_bad_one_is_not_discarded(tmp_path):
    tier = LocalTier(tmp_path, limit_bytes=1000)
    add(tier, 1, b"bad")
    with tier.open(NAMESPACE, key(1)) as bad:
        add(tier, 1, b"good")
        tier.discard(NAMESPACE, key(1), opened=bad)
        assert read(tier, 1) == b"good"
    with tier.open(NAMESPACE, key(1)) as good:
        tier.discard(NAMESPACE, key(1), opened=good)
        assert read(tier, 1) is None


def test_readers_get_whole_files_only(tmp_path):
    tier = LocalTier(tmp_path, limit_bytes=10**9)
    contents = {bytes([n]) * 200_000 for n in range(4)}
    stop = threading.Event()

    def reading():
        seen = set()
        while not stop.is_set():
            seen.add(read(tier, 1))
        return seen

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(reading) for _ in range(4)]
        for content in [*contents] * 20:
            add(tier, 1, content)
        stop.set()
        assert set().union(*(reader.result(60) for reader in readers)) <= {None, *contents}


def test_lines_of_a_run_are_read_after_other_code_closed_all_files(tmp_path):
    program = """
        import os, sys
        from pathlib import Path
        from graphstash._artifacts.run_folder import SharedLines

        os.chdir(sys.argv[1])
        lines = SharedLines(Path("lines"))
        lines.append("1\\n")
        print(lines.added())
        os.closerange(3, 64)
        Path("other").write_text("of other code")
        others = [os.open("other", os.O_RDONLY) for _ in range(3, 64)]
        lines.append("2\\n")
        print(lines.added())
        del lines
        for each in others:
            os.fstat(each)
    """
    done = python(program, tmp_path, check=True)
    assert (done.stdout, done.stderr) == ("['1']\n['2']\n", "")


def test_pipe_in_place_of_the_lines_of_a_run_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "lines")
    program = """
        import signal, sys
        from pathlib import Path
        from graphstash._artifacts.run_folder import SharedLines

        signal.alarm(30)
        lines = SharedLines(Path(sys.argv[1]))
        print(lines.append("1\\n"), lines.added())
    """
    assert python(program, tmp_path / "lines", check=True).stdout == "False []\n"

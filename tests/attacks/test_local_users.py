"""Another user of the training host, on the server's port and in the cache directories.

Jobs load no bytes of that user, never wait for that user, and send that user no token.
"""

import functools
import itertools
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

from graphstash._http.client import ServerClient
from graphstash_schema.own_files import own_socket_path
from graphstash_server.testing import ServerProcess
from support.ports import reserved_port
from support.processes import graphstash, python
from support.reader_job import OWN, ReaderJob
from support.signing import sealed

POISON = b"what the other user wants to run " * 100
TOKEN = "gst_" + "a" * 16 + "_" + "b" * 43

_STRANGER = 65534

_BECOME = f"""
import os, socket, sys, threading
os.setgroups([])
os.setgid({_STRANGER})
os.setuid({_STRANGER})
os.chdir("/")
"""


def give(path):
    """Make the stranger the owner of a file or a directory. Needs root or sudo."""
    # The path may lead through a file descriptor of this process.
    real = path.parent.resolve() / path.name
    subprocess.run([*as_root(), "chown", f"{_STRANGER}:{_STRANGER}", real], check=True)


@functools.cache
def as_root():
    if os.geteuid() == 0:
        return []
    words = ["sudo", "--non-interactive"]
    if not shutil.which("sudo") or subprocess.run([*words, "true"], check=False).returncode:
        pytest.fail("a second user is needed: run this as root, or with sudo without a password")
    return words


class Stranger:
    """Context manager that runs a program as another user, and ends it.

    Args:
        program: Python text that may use os, socket, sys and threading. The process imports them
            before it changes its user. The program prints a line when it is ready.
        arguments: `sys.argv[1:]` of the program.

    Attributes:
        said: the line that the program printed when it was ready.
    """

    def __init__(self, program, *arguments):
        self._process = subprocess.Popen(
            [*as_root(), sys.executable, "-c", _BECOME + program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._output = None
        self.said = self._process.stdout.readline().strip()
        assert self.said, "the stranger's program failed"

    def finish(self):
        """Close the program's input. Return the output of the program after its first line."""
        if self._output is None:
            self._output, _ = self._process.communicate(timeout=60)
        return self._output

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.finish()


_TAKES_A_PORT = textwrap.dedent("""
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    heard = []
    def listen():
        while True:
            connection, _ = listener.accept()
            connection.settimeout(5)
            heard.append(connection.recv(65536))
            connection.close()
    threading.Thread(target=listen, daemon=True).start()
    print("listening", flush=True)
    sys.stdin.read()
    print(heard)
""")
_TRIES = textwrap.dedent("""
    outcomes = []
    for name in sys.argv[1:]:
        for attempt in (
            lambda: os.listdir(name),
            lambda: open(os.path.join(name, "planted"), "w"),
            lambda: socket.socket(socket.AF_UNIX).connect(os.path.join(name, "socket")),
            lambda: socket.socket(socket.AF_UNIX).bind(os.path.join(name, "other")),
            lambda: os.rename(os.path.join(name, "socket"), os.path.join(name, "gone")),
        ):
            try:
                attempt()
                outcomes.append("done")
            except OSError as error:
                outcomes.append(type(error).__name__)
    print(*sorted(set(outcomes)), flush=True)
""")


@pytest.fixture
def tmp_path():
    """A new directory outside pytest's own, which each run of this user closes to other users."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.fixture
def public(tmp_path):
    """A directory that other users can enter: only the permissions of its contents stop them."""
    for each in (tmp_path, *tmp_path.parents):
        if stat.S_IMODE(each.stat().st_mode) & 0o077 == 0:
            each.chmod(0o711)
    return tmp_path


@pytest.fixture
def state(public, monkeypatch):
    """Path of the socket at which this user's jobs look for a server."""
    monkeypatch.setenv("XDG_STATE_HOME", str(public / "state"))
    return own_socket_path(os.environ)


@pytest.fixture
def serve(tmp_path, state):
    """Start `graphstash serve` with the options in its manual."""
    variables = {"GRAPHSTASH_INSECURE": "", "XDG_STATE_HOME": str(tmp_path / "state")}
    numbers = itertools.count()
    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(
            ServerProcess(tmp_path / f"data-{next(numbers)}", *options, environment=variables)
        )


@pytest.fixture
def job(tmp_path):
    """Start jobs, each on its own host without a server."""
    numbers = itertools.count()
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            ReaderJob(**{"cache_dir": tmp_path / f"host-{next(numbers)}"} | settings)
        )


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_quick_start_needs_no_setting_and_is_closed_to_other_users(serve, state, job, key, workers):
    server = serve("--workers", str(workers))
    assert "jobs of this user on this host find it by themselves" in server.log

    first, second = job(), job()
    assert first.build(key(1)) == OWN
    assert first.stats.published == 1
    assert second.build(key(1)) == OWN
    assert (second.compiles, second.stats.hits) == (0, 1)

    assert stat.S_IMODE(state.parent.stat().st_mode) == 0o700
    with Stranger(_TRIES, state.parent) as stranger:
        assert stranger.said == "PermissionError"
    at_the_port = job(url=server.url)
    assert at_the_port.build(key(1)) == OWN
    assert set(at_the_port.fallbacks) == {"unauthenticated"}
    assert server.stop() == 0
    assert not state.exists()


def test_port_of_a_killed_server_gets_no_job_and_the_next_server_its_socket(serve, state, job, key):
    """A third server does not take the socket from the second one."""
    first = serve("--port", str(reserved_port()))
    first.kill()
    assert state.is_socket()  # jobs find the socket, but no server listens
    with Stranger(_TAKES_A_PORT, first.port) as stranger:
        victim = job(token=TOKEN)
        assert victim.build(key(1)) == OWN
        assert victim.fallbacks.keys() == {"connect"}
        assert stranger.finish().strip() == "[]"

    serve()
    early = job()
    early.build(key(1))
    assert early.stats.published == 1
    third = serve()
    assert "another server of this user listens on" in third.log
    third.stop()
    late = job()
    assert late.build(key(1)) == OWN
    assert late.stats.hits == 1


@pytest.mark.parametrize("theirs", ["owner", "mode", "link"])
def test_socket_in_a_directory_that_others_may_write_is_not_used(
    state, job, key, theirs, tmp_path_factory
):
    state.parent.mkdir(parents=True, mode=0o700)
    listener = socket.socket(socket.AF_UNIX)
    place = tmp_path_factory.mktemp("s")
    listener.bind(str(place / "socket"))
    listener.listen()
    if theirs == "link":
        state.parent.rmdir()
        state.parent.symlink_to(place)
    else:
        (place / "socket").rename(state)
    if theirs == "owner":
        state.parent.chmod(0o755)
        give(state.parent)
    if theirs == "mode":
        state.parent.chmod(0o777)

    victim = job(token=TOKEN)
    assert victim.build(key(1)) == OWN
    assert victim.fallbacks.keys() == {"connect"}
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()


def test_job_without_a_server_names_the_missing_setting_once(tmp_path, state):
    program = tmp_path / "job.py"
    program.write_text(
        "import graphstash, subprocess, sys\n"
        "assert graphstash.install() is not None\n"
        "if len(sys.argv) == 1:\n"
        "    subprocess.run([sys.executable, __file__, 'child'], check=True)\n"
    )
    cache = {"GRAPHSTASH_CACHE_DIR": tmp_path / "cache"}
    runner = ("run", "--", sys.executable, program)
    plain = f"import runpy; runpy.run_path({str(program)!r})"

    for run in (functools.partial(python, plain), functools.partial(graphstash, *runner)):
        assert run(**cache, check=True).stderr.count("no server: set GRAPHSTASH_URL") == 1
    quiet = graphstash(*runner, **cache, GRAPHSTASH_URL="none", check=True)
    assert quiet.stderr == ""


# -- the directories of the cache --


@pytest.fixture
def shared(public):
    """A directory in which every user may do everything, like a scratch disk."""
    place = public / "scratch"
    place.mkdir()
    place.chmod(0o777)
    return place


@pytest.fixture
def signed(publish, key, team, space, fort):
    """Publish a signed artifact. Return the settings of a job that requires signatures."""
    publish(key(1), OWN, signing_key=team.trust("ci"))
    return {
        "url": fort.url,
        "namespace": space,
        "token": fort.token(f"read:{space}"),
        "read_only": True,
        "trusted_keys": team.file,
        "signatures": "require",
    }


@pytest.mark.parametrize("trade", ["a pipe", "another file", "a link"])
def test_file_swapped_after_its_download_is_not_used(
    signed, job, key, monkeypatch, tmp_path, trade
):
    poison = sealed(tmp_path, key(1), POISON, name="poison").path
    download = ServerClient.download

    def swapping(self, wanted, target, **keywords):
        done = download(self, wanted, target, **keywords)
        target._put_on_disk()  # as for a large artifact
        name = Path(f"/proc/self/fd/{target._root}", target.name)
        name.unlink()
        if trade == "a pipe":
            os.mkfifo(name)
        elif trade == "a link":
            name.symlink_to(poison)
        else:
            name.write_bytes(poison.read_bytes())
        return done

    monkeypatch.setattr(ServerClient, "download", swapping)
    victim = job(**signed)
    victim.result = b"compiled"
    assert victim.build(key(1)) == OWN
    assert victim.build(key(1)) == OWN  # the job does not use the adopted file either


@pytest.mark.parametrize("planted", ["pipe", "link", "device", "folder", "theirs", "writable"])
def test_replaced_file_in_the_local_tier_is_not_used(signed, job, key, tmp_path, planted):
    settings = signed | {"cache_dir": tmp_path / "cache"}
    first = job(**settings)
    assert first.build(key(1)) == OWN
    path = first.stash.local.path(
        first.stash.config.namespace, key(1), origin=first.stash.standing.origin
    )
    poison = sealed(tmp_path, key(1), POISON, name="poison").path
    path.unlink()
    match planted:
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(poison)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "theirs":
            path.write_bytes(poison.read_bytes())
            give(path)
        case "writable":
            path.write_bytes(poison.read_bytes())
            path.chmod(0o666)

    second = job(**settings)
    assert second.build(key(1)) == OWN
    assert second.stats.hits_server == 1


@pytest.mark.parametrize("mode", [0o620, 0o602], ids=oct)
def test_unsigned_copy_that_others_may_write_is_not_used(job, key, tmp_path, mode):
    settings = {"url": "none", "cache_dir": tmp_path / "cache"}
    first = job(**settings)
    assert first.build(key(1)) == OWN
    assert first.stats.fallbacks == {}  # waits until the copy is stored
    first.stash.local.path(first.stash.config.namespace, key(1)).chmod(mode)

    second = job(**settings)
    assert second.build(key(1)) == OWN
    assert second.compiles == 1


def test_pipe_in_the_place_of_the_hosts_secret_is_replaced(job, key, team, tmp_path):
    settings = {"trusted_keys": team.file, "url": "none", "cache_dir": tmp_path / "cache"}
    first = job(**settings)
    os.mkfifo(tmp_path / "cache" / "secret")
    assert first.build(key(1)) == OWN
    assert first.stats.compile_seconds >= 0  # waits until the copy is stored
    assert job(**settings).build(key(1)) == OWN
    assert (tmp_path / "cache" / "secret").stat().st_size == 32


_MAKES_A_CACHE = textwrap.dedent("""
    os.umask(0)
    for name in ("v2", "locks", "tmp"):
        os.makedirs(os.path.join(sys.argv[1], name), mode=0o777)
    print("made", flush=True)
""")


def test_cache_directory_of_another_user_is_not_used(signed, job, key, shared, caplog):
    with Stranger(_MAKES_A_CACHE, shared / "cache"):
        victim = job(**signed, cache_dir=shared / "cache")
        assert victim.build(key(1)) == OWN
    assert [path for path in (shared / "cache").rglob("*") if not path.is_dir()] == []
    assert "belongs to another user" in caplog.text
    assert stat.S_IMODE(victim.stash.local.root.stat().st_mode) == 0o700


@pytest.mark.parametrize("part", ["v1", "v2", "locks", "tmp", "servers"])
def test_part_of_the_cache_of_another_user_is_not_used(job, key, shared, part, caplog):
    (shared / "cache").mkdir(mode=0o755)
    (shared / "cache" / part).mkdir()
    give(shared / "cache" / part)
    victim = job(url="none", cache_dir=shared / "cache")
    assert victim.build(key(1)) == OWN
    assert list((shared / "cache" / part).iterdir()) == []
    assert "belongs to another user" in caplog.text


def test_linked_or_foreign_cache_directory_is_not_used(job, key, shared, tmp_path, caplog):
    (tmp_path / "elsewhere").mkdir()
    (shared / "cache").symlink_to(tmp_path / "elsewhere")
    assert job(url="none", cache_dir=shared / "cache").build(key(1)) == OWN
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert "is a symbolic link" in caplog.text

    assert job(url="none", cache_dir=shared).build(key(1)) == OWN
    assert stat.S_IMODE(shared.stat().st_mode) == 0o777
    assert not (shared / "v2").exists()


def test_cache_that_an_older_release_left_open_is_closed(job, key, shared):
    for name in ("v2", "locks", "tmp"):
        (shared / "cache" / name).mkdir(parents=True)
        (shared / "cache" / name).chmod(0o777)
    (shared / "cache").chmod(0o777)
    victim = job(url="none", cache_dir=shared / "cache")
    assert victim.build(key(1)) == OWN
    with Stranger(_TRIES, *(shared / "cache" / name for name in ("", "v2", "tmp"))) as stranger:
        assert stranger.said == "PermissionError"


_TAKES_THE_PLACE = textwrap.dedent("""
    scratch, home = sys.argv[1:]
    cache = os.path.join(scratch, "cache")
    os.rename(cache, os.path.join(scratch, "away"))
    os.umask(0)
    os.makedirs(os.path.join(cache, "v2", "a", "b", "c", "d", "dd"))
    with open(os.path.join(cache, "v2", "a", "b", "c", "d", "dd", "big"), "w") as file:
        file.truncate(2**40)
    os.symlink(home, os.path.join(cache, "v2", "home"))
    os.mkdir(os.path.join(cache, "locks"))
    os.symlink(home, os.path.join(cache, "tmp"))
    print("done", flush=True)
""")


def test_job_whose_cache_directory_is_replaced_deletes_no_other_files(job, key, shared, tmp_path):
    """The new directory links to files of the job's user, which eviction must not delete."""
    home = tmp_path / "home"
    for name in ("thesis.tex", "model/objects/ab/cd"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("years of work")
        os.utime(home / name, (1, 1))
    home.chmod(0o700)
    victim = job(url="none", cache_dir=shared / "cache")
    assert victim.build(key(1)) == OWN

    with Stranger(_TAKES_THE_PLACE, shared, home) as stranger:
        assert stranger.said == "done"
    victim.stash.local.evict()
    victim.result = b"compiled again"

    assert victim.build(key(1)) == OWN
    assert (home / "thesis.tex").exists()
    assert (home / "model/objects/ab/cd").exists()

"""A process installs the cache more than once, or forks."""

import json
import os

import pytest

from support.processes import python
from support.signing import Team
from support.waiting import variables_of

JOB = """
import json, logging, os, sys
import graphstash
from graphstash._compile.request import CompileRequest
from graphstash_schema import ArtifactKey

def key(number):
    return ArtifactKey.parse("schedule", "cpu-x86_64-0123456789abcdef", f"{number:064x}")

def build(number):
    made = []
    graphstash.get_or_compile(key(number), lambda: made.append(1) or b"graph")
    return bool(made)

first = graphstash.install()
"""


@pytest.fixture
def run(config, tmp_path):
    def run(code, **variables):
        variables = {"TMPDIR": str(tmp_path)} | variables_of(config()) | variables
        return python(JOB + code, check=True, **variables)

    return run


def test_other_settings_for_a_running_cache_are_named_and_change_nothing(run):
    code = """
print(graphstash.install() is first is not None, file=sys.stderr)
print(graphstash.install(wait_seconds=1, read_only=True) is first)
"""
    outcome = run(code)
    assert outcome.stdout == "True\n"
    before, _, after = outcome.stderr.partition("True\n")
    assert "already running" not in before
    assert "already running with a different read_only, wait_seconds" in after


def test_running_cache_without_requested_signature_check_is_closed(run, tmp_path):
    trusted = str(Team(tmp_path).file)
    code = f"""
print(build(1))
print(build(1))
print(graphstash.install(trusted_keys={trusted!r}, signatures="require"))
print(build(1))
print(graphstash.install())
if (child := os.fork()) == 0:
    print(build(1))
    sys.exit()
os.waitpid(child, 0)
"""
    outcome = run(code.replace("if (child", "sys.stdout.flush()\nif (child"))

    assert outcome.stdout.split() == ["True", "False", "None", "True", "None", "True"]
    assert "already running without the signature check" in outcome.stderr


def test_a_forked_child_without_a_session_keeps_no_lease(run, tmp_path):
    """The child inherits its parent's hooks, but the file that its own session needs is gone."""
    trusted = str(Team(tmp_path).file)
    code = f"""
cache = first.cache
os.rename({trusted!r}, {trusted!r} + ".gone")
if (child := os.fork()) == 0:
    compilation = cache.fetch_bytes_or_start(CompileRequest(key(1)))
    compilation.publish_bytes(b"graph", compile_seconds=1)
    cache.abandon_all()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
os.rename({trusted!r} + ".gone", {trusted!r})
print(json.dumps(cache.stash.server.acquire(key(1), wait_seconds=0).state))
"""
    outcome = run(code, GRAPHSTASH_TRUSTED_KEYS=trusted)

    assert json.loads(outcome.stdout) == "granted"


def test_child_forked_during_an_import_gets_a_cache(run):
    """A fork right after `install` also comes during imports, because a thread prefetches."""
    code = """
import importlib.abc, signal, threading

importing, forking = threading.Event(), threading.Event()

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "graphstash._compile.cache":
            importing.set()
            forking.wait(60)

sys.modules.pop("graphstash._compile.cache", None)
sys.meta_path.insert(0, Slow())
os.register_at_fork(before=forking.set)
thread = threading.Thread(target=build, args=(1,))
thread.start()
importing.wait(60)
if (child := os.fork()) == 0:
    signal.alarm(30)  # it would never end
    build(2)
    os._exit(0)
print(os.waitpid(child, 0)[1])
thread.join()
"""
    assert run(code).stdout == "0\n"


def test_child_forked_during_the_prefetch_finds_no_lock_held(run):
    code = """
import signal, threading
from graphstash._http.client import ServerClient

lock, has_lock, forking = threading.Lock(), threading.Event(), threading.Event()

def manifest(self, name):
    with lock:
        has_lock.set()
        forking.wait(60)

ServerClient.manifest = manifest
os.register_at_fork(before=forking.set)
first.cache
assert has_lock.wait(60)
if (child := os.fork()) == 0:
    signal.alarm(30)  # it would never end
    with lock:
        os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    assert run(code).stdout == "0\n"


def test_unread_pipe_does_not_block_end_of_job(run, tmp_path):
    os.mkfifo(tmp_path / "stats")
    code = "import signal; signal.alarm(30); build(1)"
    outcome = run(code, GRAPHSTASH_STATS_FILE=tmp_path / "stats")
    assert f"{tmp_path / 'stats'}: " in outcome.stderr


def test_child_forked_during_a_request_gets_its_own_connection():
    program = """
import os, signal, ssl, threading
from graphstash._http.connections import ProcessClient

making, forking = threading.Event(), threading.Event()

def context():
    if not making.is_set():
        making.set()
        forking.wait(60)
    return ssl.create_default_context()

client = ProcessClient("https://127.0.0.1:9", context=context)
os.register_at_fork(before=forking.set)
thread = threading.Thread(target=client.connect)
thread.start()
making.wait(60)
if (child := os.fork()) == 0:
    signal.alarm(30)  # it would never end
    client.connect()
    os._exit(0)
print(os.waitpid(child, 0)[1])
thread.join()
"""
    assert python(program, check=True).stdout == "0\n"


def test_uninstall_does_not_block_other_calls_while_uploads_finish(run):
    code = """
import threading, time
from graphstash.testing import FakeServer

graphstash.uninstall()
with FakeServer() as fake, fake.fail_on("put", fault="hang") as failure:
    session = graphstash.install(url=fake.url)
    build(1)
    failure.wait()
    ending = threading.Thread(target=graphstash.uninstall)
    ending.start()
    while not session.is_closed:
        time.sleep(0.01)
    print(graphstash.stats().misses, ending.is_alive())
ending.join()
print(graphstash.stats().misses)
"""
    assert run(code).stdout.split() == ["1", "True", "0"]

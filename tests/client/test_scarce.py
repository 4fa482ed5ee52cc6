"""A process without free file descriptors or threads continues to train."""

import threading
from contextlib import contextmanager

import pytest

from graphstash._compile.compile_limit import CompileLimit
from graphstash._compile.in_flight import InFlightCompile
from graphstash._compile.packs import Packs
from graphstash_schema import LeaseState
from support.host import Host, key, request
from support.processes import python

PROGRAM = """
import os, resource, tempfile
import graphstash
import graphstash._compile.cache
from graphstash import ClientConfig
from graphstash._http.transport import Transport
from graphstash.errors import TransportError
from graphstash_schema import ArtifactKey

KEY = ArtifactKey.parse("schedule", "cpu-x86_64-0123456789abcdef", "0" * 64)

HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

def leave(count):
    # Leaves this process so many descriptors.
    resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(count + 20)]
    limit = spare[count]  # the lowest that are free are taken first
    for each in spare:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, HARD))

def free():
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return len(taken)
    finally:
        for each in taken:
            os.close(each)
"""


def test_call_that_runs_out_of_descriptors_leaks_none(tmp_path):
    program = f"""
config = ClientConfig.load({{}}, url="unix:{tmp_path}/socket")
def call(transport):
    try:
        transport.call("GET", "/v1/stats")
    except TransportError as error:
        return error.reason.value
call(Transport(config))  # what it imports
for count, transport in enumerate([Transport(config) for _ in range(3)]):
    leave(count)
    print([call(transport), call(transport)], free())
"""
    outcome = python(PROGRAM + program, check=True)

    assert outcome.stdout.splitlines() == [f"['connect', 'connect'] {n}" for n in range(3)]


def test_failed_construction_of_cache_is_counted_and_job_compiles(tmp_path):
    program = """
tempfile.gettempdir()
leave(1)
print(graphstash.get_or_compile(KEY, lambda: b"compiled"), graphstash.stats().fallbacks)
"""
    variables = {"GRAPHSTASH_URL": "none", "GRAPHSTASH_CACHE_DIR": tmp_path / "tier"}
    outcome = python(PROGRAM + program, check=True, TMPDIR=tmp_path, **variables)

    assert outcome.stdout == "b'compiled' {'local_io': 1}\n"
    assert outcome.stderr.count("the job goes on without the cache") == 1
    assert "Traceback" not in outcome.stderr


@contextmanager
def no_thread(name):
    """Refuse to start a thread whose name has this prefix, as at a container's limit."""
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


def test_lease_is_released_if_no_thread_can_renew_it(config):
    with Host(config("a")) as host, Host(config("b")) as other:
        with no_thread("graphstash-lease"):
            compilation = host.cache.fetch_bytes_or_start(request(1))
        assert isinstance(compilation, InFlightCompile)
        assert other.stash.server.acquire(key(1)).state is LeaseState.GRANTED
        assert (host.stats.fallbacks, host.stats.misses) == ({}, 1)


def test_compile_limit_is_watched_from_next_compilation_if_no_thread_starts(config):
    ended = threading.Event()
    with Host(config("a", max_compile_seconds=0.01)) as host:
        host.cache.limit = CompileLimit(host.stash.config, lambda *_, **__: ended.set())
        with no_thread("graphstash-compile-limit"):
            host.cache.begin(request(1))
        host.cache.begin(request(2))
        assert ended.wait(60)


def test_program_of_pack_is_kept_until_exit_if_no_thread_starts(config):
    with Host(config("a")) as host:
        packs = Packs(host.cache, lambda number: request(1000 + number))
        assert packs.get(key(1)) is None
        with no_thread("Thread-"):
            assert packs.put(key(1), b"program") is None
        packs.flush()
        assert host.stats.published == 1


def test_name_lookup_without_thread_fails_as_connection_error(config):
    with Host(config("a", url="http://graphstash.invalid")) as host, no_thread("graphstash-res"):
        assert host.build(key(1)) == b"graph"
        assert list(host.stats.fallbacks) == ["connect"]

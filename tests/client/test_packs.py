"""Packs against a real server: what small programs are found by, and what becomes of bad ones."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from graphstash._compile import packs as module
from graphstash._compile.compile_limit import CompileLimit
from graphstash._compile.packs import Packs
from graphstash.testing import FakeServer
from graphstash_schema import ArtifactMetadata
from support.host import Host, key, request
from support.offline import unplugged
from support.processes import python
from support.waiting import until


class Job(Host):
    """One run of a job; its packs have the names that all runs of it know."""

    def __init__(self, config):
        super().__init__(config)
        self.packs = Packs(self.cache, self.name)

    @staticmethod
    def name(number):
        return request(1000 + number)

    def build(self, numbers):
        """Compiles what is absent; what has been found."""
        found = {number: self.packs.get(key(number)) for number in numbers}
        for number in numbers:
            if found[number] is None:
                self.packs.put(key(number), self.payload(number))
        return {number for number in numbers if found[number] == self.payload(number)}

    def payload(self, number):
        return f"program {number}".encode() * 100

    def end(self):
        self.packs.flush()
        return self.stats


@pytest.fixture(autouse=True)
def _programs_are_quick(monkeypatch):
    """However busy the machine is."""
    monkeypatch.setattr(module, "MAX_PACKED_SECONDS", 3600)


@pytest.fixture
def jobs(config):
    with ExitStack() as stack:
        yield lambda name, **settings: stack.enter_context(Job(config(name, **settings)))


def test_another_host_gets_a_hundred_programs_with_one_download(jobs, server, namespace):
    first, other = jobs("a"), jobs("b")
    assert first.build(range(100)) == set()
    assert first.end().published == 100
    assert server.stats(namespace)["artifacts"] == 1
    assert other.build(range(100)) == set(range(100))
    stats = other.end()
    assert (stats.hits_server, stats.misses, stats.published) == (100, 0, 0)
    assert stats.fallbacks == {}
    assert server.stats(namespace)["artifacts"] == 1


def test_the_same_host_gets_them_without_a_server(jobs):
    first = jobs("a")
    first.build(range(3))
    first.end()
    assert first.publisher.drain(20)
    again = jobs("a", url=unplugged(first.stash.config.cache_dir, first.stash.config.url))
    assert again.build(range(3)) == {0, 1, 2}
    assert again.end().hits_host == 3
    assert again.fallbacks == {}


def test_programs_of_later_run_go_into_the_next_pack(jobs, server, namespace):
    for host, numbers in (("a", (0, 1)), ("b", (0, 1, 2, 3))):
        job = jobs(host)
        job.build(numbers)
        assert job.end().published == 2
    assert server.stats(namespace)["artifacts"] == 2
    assert jobs("c").build((3, 2, 1, 0)) == {0, 1, 2, 3}


def test_of_two_runs_at_once_the_second_adds_what_the_first_lacks(jobs, server, namespace):
    a, b = jobs("a"), jobs("b")
    assert a.build((0, 1)) == b.build((1, 2)) == set()
    assert a.end().published == 2
    assert b.end().published == 1
    assert a.fallbacks == b.fallbacks == {}
    assert jobs("c").build((0, 1, 2)) == {0, 1, 2}


def test_run_that_loses_a_pack_number_takes_the_next(jobs, monkeypatch):
    a, b = jobs("a"), jobs("b")
    a.build((0,))
    b.build((1,))
    read_chain = b.packs._read_chain

    def beaten(*arguments):
        result = read_chain(*arguments)
        monkeypatch.setattr(b.packs, "_read_chain", read_chain)
        a.end()  # between b's look and b's upload
        return result

    monkeypatch.setattr(b.packs, "_read_chain", beaten)
    assert b.end().published == 1
    assert b.fallbacks == {}
    assert jobs("c").build((0, 1)) == {0, 1}


def pack(sizes, payloads):
    """A pack whose table states these sizes."""
    table = json.dumps([(str(key(number)), size) for number, size in enumerate(sizes)]).encode()
    return len(table).to_bytes(4) + table + payloads


def test_slow_program_is_looked_up_alone_from_then_on(jobs, monkeypatch):
    monkeypatch.setattr(module, "MAX_PACKED_SECONDS", -1.0)
    first, other = jobs("a"), jobs("b")
    assert first.packs.get(key(0)) is None
    assert not first.packs.is_alone(key(0))
    seconds = first.packs.put(key(0), b"slow")
    assert seconds is not None
    assert first.packs.is_alone(key(0))
    assert first.end().published == 0  # the hook publishes it
    assert other.packs.get(key(0)) is None
    assert other.packs.is_alone(key(0))
    assert not other.packs.is_alone(key(1))


@pytest.mark.parametrize(
    "noise",
    [
        *(b"", b"\0\0\0", b"\xff\xff\xff\xff[]", b"\0\0\0\2[]and more", b"\0\0\0\4null"),
        b'\0\0\0\x09[["a",1]]',
        b"\0\0\0\x07[[1,2]]",
        b"\0\0\0\6[1,2]\n",
        b"\0\0\x40\0" + b"[" * 0x4000,
        pack([*[1000, -1000] * 1000, 1000], b"x" * 1000),
        pack([1.0], b"x"),
        pack([2**20 + 1], b"x" * (2**20 + 1)),
    ],
)
def test_noise_in_a_sound_pack_is_counted_and_programs_travel_alone(jobs, noise):
    job = jobs("a")
    metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=len(noise))
    job.stash.put(job.name(0).key, noise, metadata)
    assert job.packs.get(key(0)) is None
    assert job.packs.is_alone(key(0))
    assert job.fallbacks == {"corrupt": 1}


def test_unreachable_server_loses_only_packs(jobs):
    job = jobs("a", url="http://127.0.0.1:9")
    assert job.build((0, 1)) == set()
    assert job.build((0, 1)) == {0, 1}
    job.end()
    assert set(job.fallbacks) <= {"connect", "circuit_open"}
    assert jobs("a").build((0, 1)) == {0, 1}  # this host has them


@pytest.mark.parametrize(
    ("url", "status", "counts"), [(None, 86, (1, 0)), ("http://127.0.0.1:9", 75, (0, 1))]
)
def test_a_miss_and_a_server_that_is_gone_end_a_job_with_different_statuses(
    jobs, url, status, counts
):
    job = jobs("a", fail_on_miss=True, **({} if url is None else {"url": url}))
    ends = []
    job.cache.limit = CompileLimit(
        job.stash.config, lambda why, *, status: ends.append((status, why))
    )
    job.packs.get(key(0))
    [(ended_with, why)] = ends
    assert ended_with == status
    assert ("the cache does not have it" in why) == (status == 86)
    [counted] = job.cache.counters.by_kind().values()
    assert (counted.get("misses", 0), counted.get("fallbacks", 0)) == counts


def test_full_chain_accepts_no_pack(jobs, monkeypatch):
    monkeypatch.setattr(module, "_MAX_PACKS", 1)
    first = jobs("a")
    first.build((0,))
    first.end()
    other = jobs("b")
    assert other.build((0,)) == {0}
    assert other.packs.get(key(1)) is None
    assert other.packs.is_alone(key(1))


def test_a_long_job_publishes_before_it_ends(jobs, monkeypatch, server, namespace):
    monkeypatch.setattr(module, "_FLUSH_SECONDS", 0.05)
    jobs("a").build((0,))
    until(lambda: server.stats(namespace)["artifacts"] == 1)


def test_a_pack_that_is_large_enough_is_published_at_once(jobs, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ENTRIES", 2)
    job = jobs("a")
    job.build((0, 1, 2))
    assert job.stats.published == 2


def test_pack_on_local_disk_only_is_found(jobs):
    job = jobs("a")
    metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=4)
    job.stash.put(key(0), b"here", metadata)
    assert job.packs.get(key(0)) is None
    assert job.packs.is_alone(key(0))


def test_equal_packs_of_two_hosts_are_equal_blobs(jobs):
    blobs = set()
    for host in ("a", "b"):
        job = jobs(host, url="none")
        job.build((1, 0) if host == "a" else (0, 1))
        job.end()
        blobs.add(job.stash.get(job.name(0).key))
    assert len(blobs) == 1


def test_a_signal_handler_that_compiles_while_packs_are_read_ends(tmp_path):
    program = f"""
import faulthandler, signal, threading
from pathlib import Path
from graphstash._compile.packs import Packs
from graphstash.testing import FakeServer
from support.host import Host, key, request

faulthandler.dump_traceback_later(30, exit=True)
found = []
with FakeServer() as server, Host(server.config(cache_dir=Path({str(tmp_path)!r}))) as host:
    packs = Packs(host.cache, lambda number: request(1000 + number))
    signal.signal(signal.SIGUSR1, lambda *_: found.append(packs.get(key(2))))
    main = threading.get_ident()
    with server.fail_on("get", fault="hang", times=1) as failure:
        def interrupt():
            failure.wait()
            signal.pthread_kill(main, signal.SIGUSR1)
        threading.Thread(target=interrupt).start()
        found.append(packs.get(key(1)))
    print(found)
"""
    outcome = python(program, check=True, PYTHONPATH=Path(__file__).parents[1])

    assert outcome.stdout == "[None, None]\n"


def test_failed_upload_of_pack_leaves_no_gap_in_chain(tmp_path):
    with FakeServer() as fake:
        first, other = (Job(fake.config(cache_dir=tmp_path / name)) for name in "ab")
        with first, other:
            first.build([1])
            fake.fail_on("put", times=1, fault="reset")
            first.packs.flush()
            assert first.publisher.drain(20)
            first.build([2])
            assert first.end().published == 2
            assert other.build([1, 2]) == {1, 2}

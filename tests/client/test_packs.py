"""Packs against a real server: look-ups of small programs, and damaged packs."""

import json
import signal
from functools import partial
from pathlib import Path

import pytest

from graphstash import ClientConfig
from graphstash._compile import packs as module
from graphstash._compile.compile_limit import CompileLimit
from graphstash._compile.packs import Packs
from graphstash.testing import FakeServer
from graphstash_schema import ArtifactMetadata
from graphstash_server.testing import LiveServer
from support.fault_proxy import Fault, FaultProxy
from support.host import Host, key, request
from support.offline import unplugged
from support.processes import started
from support.waiting import PATIENT, until
from support.withdrawing import withhold


class Job(Host):
    """One run of a job. All runs use the same names of packs."""

    def __init__(self, config):
        super().__init__(config)
        self.packs = Packs(self.cache, self.name)

    @staticmethod
    def name(number):
        return request(1000 + number)

    def build(self, numbers):
        """Compile the absent programs, and return the numbers of those found."""
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
    """Allow programs to take any time on a busy machine."""
    monkeypatch.setattr(module, "MAX_PACKED_SECONDS", 3600)


@pytest.fixture
def jobs(start):
    return partial(start, Job)


def test_another_host_gets_a_hundred_programs_with_one_download_and_then_its_disk(
    jobs, server, namespace
):
    first, other = jobs("a"), jobs("b")
    assert first.build(range(100)) == set()
    assert first.end().published == 100
    assert other.build(range(100)) == set(range(100))
    stats = other.end()
    assert (stats.hits_server, stats.misses, stats.published) == (100, 0, 0)
    assert stats.fallbacks == {}
    assert server.stats(namespace)["artifacts"] == 1
    config = other.stash.config
    again = jobs("b", url=unplugged(config.cache_dir, config.url))
    assert again.build(range(100)) == set(range(100))
    assert again.end().hits_host == 100
    assert again.fallbacks == {}


def test_run_at_the_same_time_or_later_adds_what_the_first_lacks_as_the_next_pack(
    jobs, server, namespace
):
    a, b = jobs("a"), jobs("b")
    assert a.build((0, 1)) == b.build((1, 2)) == set()
    assert a.end().published == 2
    assert b.end().published == 1
    later = jobs("c")
    assert later.build((0, 1, 2, 3)) == {0, 1, 2}
    assert later.end().published == 1
    assert a.fallbacks == b.fallbacks == later.fallbacks == {}
    assert server.stats(namespace)["artifacts"] == 3
    assert jobs("d").build((3, 2, 1, 0)) == {0, 1, 2, 3}


def test_run_that_loses_a_pack_number_takes_the_next(jobs, monkeypatch):
    a, b = jobs("a"), jobs("b")
    a.build((0,))
    b.build((1,))
    read_chain = b.packs._read_chain

    def beaten(*arguments):
        result = read_chain(*arguments)
        monkeypatch.setattr(b.packs, "_read_chain", read_chain)
        a.end()  # between b's look-up and b's upload
        return result

    monkeypatch.setattr(b.packs, "_read_chain", beaten)
    assert b.end().published == 1
    assert b.fallbacks == {}
    assert jobs("c").build((0, 1)) == {0, 1}


def pack(sizes, payloads):
    """Return a pack whose table states these sizes."""
    table = json.dumps([(str(key(number)), size) for number, size in enumerate(sizes)]).encode()
    return len(table).to_bytes(4) + table + payloads


def test_slow_programs_and_programs_on_the_disk_are_later_looked_up_alone(jobs, monkeypatch):
    monkeypatch.setattr(module, "MAX_PACKED_SECONDS", -1.0)
    first, other = jobs("a"), jobs("b")
    assert first.packs.get(key(0)) is None
    assert not first.packs.has_own_artifact(key(0))
    assert first.packs.put(key(0), b"slow") is not None
    assert first.packs.has_own_artifact(key(0))
    assert first.end().published == 0  # the hook publishes it
    first.stash.put(key(1), b"here", ArtifactMetadata(compile_seconds=1, raw_size_bytes=4))
    assert other.packs.get(key(0)) is None
    assert [job.packs.has_own_artifact(key(n)) for job in (other, first) for n in (0, 1)] == [
        *(True, False),
        *(True, True),
    ]


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
    assert job.packs.has_own_artifact(key(0))
    assert job.fallbacks == {"corrupt": 1}


def test_programs_of_job_with_unreachable_server_stay_on_its_host(jobs):
    job = jobs("a", url="http://127.0.0.1:9")
    assert job.build((0, 1)) == set()
    assert job.stats.uncached == sum(job.fallbacks.values()) == 2
    assert job.build((0, 1)) == {0, 1}
    job.end()
    assert set(job.fallbacks) <= {"connect", "circuit_open"}
    assert jobs("a").build((0, 1)) == {0, 1}  # this host has both programs


@pytest.mark.parametrize(
    ("url", "status", "counts"), [(None, 86, (1, 0)), ("http://127.0.0.1:9", 75, (0, 1))]
)
def test_miss_and_unreachable_server_end_a_job_with_different_statuses(jobs, url, status, counts):
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
    assert other.packs.has_own_artifact(key(1))


@pytest.mark.parametrize(("limit", "value"), [("_FLUSH_SECONDS", 0.05), ("_MAX_ENTRIES", 2)])
def test_a_long_job_publishes_in_time_or_a_pack_that_is_large_enough(
    jobs, monkeypatch, server, namespace, limit, value
):
    monkeypatch.setattr(module, limit, value)
    jobs("a").build((0, 1))
    until(lambda: server.stats(namespace)["artifacts"] == 1)


def test_equal_packs_of_two_hosts_are_equal_blobs(jobs):
    blobs = set()
    for host, order in (("a", (1, 0)), ("b", (0, 1))):
        job = jobs(host, url="none")
        job.build(order)
        job.end()
        blobs.add(job.stash.get(job.name(0).key))
    assert len(blobs) == 1


def test_a_signal_handler_that_compiles_while_packs_are_read_ends(tmp_path):
    program = """
import faulthandler, signal
from graphstash import ClientConfig
from graphstash._compile.packs import Packs
from support.host import Host, key, request

faulthandler.dump_traceback_later(60, exit=True)
with Host(ClientConfig.load()) as host:
    packs = Packs(host.cache, lambda number: request(1000 + number))
    signal.signal(signal.SIGUSR1, lambda *_: print(packs.get(key(2)), flush=True))
    print(packs.get(key(1)))
"""
    with FakeServer() as fake, fake.fail_on("get", fault="hang", times=1) as failure:
        variables = fake.environment(cache_dir=tmp_path)
        variables["PYTHONPATH"] = str(Path(__file__).parents[1])
        with started(program, **variables) as process:
            failure.wait(timeout_seconds=60)
            process.send_signal(signal.SIGUSR1)
            assert process.stdout.read() == "None\nNone\n"


def test_withheld_pack_is_not_uploaded_again_and_programs_travel_alone(jobs):
    first, other = jobs("a"), jobs("b")
    first.build((0,))
    first.end()
    withhold(first.stash, 1000)
    for number in (1, 2):
        other.build((number,))
        other.end()
    assert other.fallbacks == {"refused": 1}
    assert other.packs.has_own_artifact(key(3))


def test_pack_that_the_server_never_accepts_is_uploaded_once(tmp_path):
    with FakeServer() as fake, Job(fake.config(cache_dir=tmp_path, **PATIENT)) as job:
        with fake.fail_on("put", status=413) as failure:
            for number in (1, 2):
                job.build((number,))
                job.end()
        assert job.fallbacks == {"refused": 1}
        assert failure.count == 1
        assert job.packs.has_own_artifact(key(3))


def test_read_only_job_whose_disk_refuses_a_pack_keeps_it_for_later(jobs):
    job = jobs("a", read_only=True)
    copies = job.stash.local.root / "v2"
    copies.rename(copies.with_name("tmp") / "aside")
    copies.touch()
    job.build((0,))
    job.end()
    assert set(job.fallbacks) == {"local_io"}
    copies.unlink()
    copies.with_name("tmp").joinpath("aside").rename(copies)
    job.build((1,))
    job.end()
    assert jobs("a").build((0, 1)) == {0, 1}


@pytest.mark.parametrize("where", ["on the way", "on the server"])
def test_damaged_pack_delays_only_its_own_programs(tmp_path, where):
    def job(name):
        settings = {"namespace": "packs", "cache_dir": tmp_path / name, **PATIENT}
        return Job(ClientConfig.load({}, url=link, **settings))

    with (
        LiveServer(tmp_path / "server") as server,
        FaultProxy(int(server.url.rpartition(":")[2])) as proxy,
    ):
        link = proxy.url
        with job("a") as first:
            first.build([1])
            first.end()
        if where == "on the server":
            (blob,) = (path for path in (tmp_path / "server/blobs").rglob("*") if path.is_file())
            blob.chmod(0o600)
            blob.write_bytes(bytes(blob.stat().st_size))
        with job("b") as other:
            proxy.fault = Fault.FLIP if where == "on the way" else Fault.NONE
            assert other.build([1, 2]) == set()
            proxy.fault = Fault.NONE
            assert set(other.fallbacks) == {"digest_mismatch"}
            assert other.end().published == (1 if where == "on the way" else 2)
        with job("c") as third:
            assert third.build([1, 2]) == {1, 2}


def test_lookup_does_not_wait_for_a_hanging_upload(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RECHECK_SECONDS", -1.0)
    with FakeServer() as fake, Job(fake.config(cache_dir=tmp_path, **PATIENT)) as job:
        job.build([1])
        with fake.fail_on("put", fault="hang") as failure:
            job.packs.flush()
            failure.wait()
            assert job.packs.get(key(2)) is None
            assert not job.publisher.drain(0)


@pytest.mark.parametrize("fault", [{"fault": "reset"}, {}], ids=["reset", "refused"])
@pytest.mark.parametrize("recheck_seconds", [module.RECHECK_SECONDS, -1.0])
def test_failed_upload_of_pack_leaves_no_gap_in_chain(
    tmp_path, monkeypatch, fault, recheck_seconds
):
    """The job may read the chain again, which ends before the failed pack."""
    with FakeServer() as fake:
        first, other = (Job(fake.config(cache_dir=tmp_path / name, **PATIENT)) for name in "ab")
        with first, other:
            first.build([1])
            fake.fail_on("put", times=1, **fault)
            first.packs.flush()
            assert first.publisher.drain(20)
            monkeypatch.setattr(module, "RECHECK_SECONDS", recheck_seconds)
            assert first.build([2]) == set()
            assert first.end().published == 2
            assert other.build([1, 2]) == {1, 2}

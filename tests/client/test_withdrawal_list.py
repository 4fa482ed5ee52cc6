"""The list of withdrawals reaches every process of a host: disk, packs, prefetch and memory."""

import io
import os
import re
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import httpx
import pytest

from graphstash import CacheError
from graphstash._artifacts import withdrawals as module
from graphstash._artifacts.prefetch import Prefetch
from graphstash._compile import packs as packs_module
from graphstash._compile.packs import Packs
from graphstash_schema import ManifestEntry
from graphstash_server.testing import LiveServer
from support.fault_proxy import Fault
from support.host import METADATA, Host, key, request
from support.processes import python
from support.waiting import until, variables_of
from support.withdrawing import (
    apply,
    calls,
    delete,
    let_read,
    look_up,
    position,
    publish,
    turn,
    withhold,
)


@pytest.fixture(scope="session")
def server(start_on_sqlite):
    return start_on_sqlite(LiveServer)


@pytest.fixture
def let_overwrite(server, namespace):
    path = f"{server.url}/v1/-/namespaces/{namespace}"
    assert httpx.put(path, json={"mode": "overwrite"}).is_success


def replace(stash, number=1):
    stash.put(key(number), b"right", METADATA)


@pytest.mark.parametrize(
    ("withdraw", "is_read_only"), [(withhold, False), (delete, True), (replace, False)]
)
@pytest.mark.usefixtures("later", "let_overwrite")
def test_own_copy_is_removed_if_its_bytes_were_withdrawn(next_job, withdraw, is_read_only):
    for number, payload in ((1, b"wrong"), (2, b"mine"), (3, b"wrong")):
        next_job(url="none").put(key(number), payload, METADATA)
    publisher = publish(next_job, 1, 2, payload=b"wrong")
    for number in (1, 2):
        withdraw(publisher, number)
        if withdraw is replace:
            delete(publisher, number)  # otherwise its bytes would take precedence

    job = next_job(read_only=is_read_only)
    assert job.get(key(1)) is None
    assert not job.is_on_this_host(key(1))
    assert job.get(key(2)) == b"mine"  # these bytes were not withdrawn
    assert job.get(key(3)) == b"wrong"  # nor was this key
    assert position(job) == (2 if withdraw is not replace else 4)


def test_copy_that_a_host_compiles_after_the_withdrawal_stays(next_job, monkeypatch):
    delete(publish(next_job, 1))
    look_up(first := next_job())
    assert position(first) == 1
    first.put(key(1), b"graph", METADATA, local_only=True)
    turn(monkeypatch)
    assert next_job().get(key(1)) == b"graph"


def test_withdrawn_copies_leave_the_disk_without_being_used(next_job):
    publisher = publish(next_job, 1, 2, 3)
    for number in (1, 2, 3):
        next_job().ensure_local(key(number))
    look_up(next_job())
    delete(publisher, 1)
    withhold(publisher, 2)

    job = next_job()
    assert job.get(key(3)) == b"graph"
    until(lambda: position(job) == 2)
    assert [job.is_on_this_host(key(number)) for number in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize("withdraw", [withhold, delete, replace])
@pytest.mark.usefixtures("let_overwrite")
def test_running_job_applies_withdrawals_at_its_next_look_up(next_job, withdraw):
    publisher = publish(next_job, 1, 2)
    job = next_job()
    for number in (1, 2):
        assert job.get(key(number)) == b"graph"
    look_up(job)
    withdraw(publisher)

    apply(job, 1)
    assert job.get(key(1)) == (b"right" if withdraw is replace else None)
    assert job.fetch(key(2), io.BytesIO()).source == "local"


def test_unchanged_list_costs_no_request(next_job, monkeypatch):
    publish(next_job, 1, 2)
    delete(publish(next_job, 3), 3)
    made = calls(monkeypatch, "lookup", "withdrawals")
    look_up(first := next_job())
    assert position(first) == 1  # without copies, the host starts at the end of the list
    for number in (1, 2):
        next_job().ensure_local(key(number))
    assert "withdrawals" not in made

    job = next_job()
    made.clear()
    for number in (1, 2):
        assert job.fetch(key(number), io.BytesIO()).source == "local"
    assert made == ["lookup"]


@pytest.mark.parametrize("torn", ["1764103232.000001 n torch_xla/cpu-x", "176", None])
def test_torn_line_between_processes_of_a_run_hides_no_withdrawal(
    next_job, namespace, monkeypatch, torn
):
    """A process was killed during a write. With None, the disk is full for a moment."""
    publisher = publish(next_job, 1)
    one, other = next_job(run="one run"), next_job(run="one run")
    for job in (one, other):
        assert job.get(key(1)) == b"graph"
        look_up(job)
    before = other.standing.changes
    if torn is None:
        real = module.os.write
        on_withdrawn = one.standing.on_withdrawn

        def full(*arguments, **named):
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", lambda to, data: real(to, data[:0]))
                on_withdrawn(*arguments, **named)

        monkeypatch.setattr(one.standing, "on_withdrawn", full)
    else:
        with one.standing._shared._path.open("a") as file:
            file.write(torn)
    delete(publisher)
    look_up(one)
    let_read(one)
    assert position(one) == 1
    if torn is None:
        look_up(other)  # only the server reports news
        assert other.standing._withdrawals.is_current(namespace, wait_seconds=60)
    assert other.standing.changes > before
    assert other.standing.stored(namespace, key(1)) is None
    look_up(other)
    assert other.standing._withdrawals.is_current(namespace, wait_seconds=60)


class Job(Host):
    def __init__(self, stash):
        super().__init__(stash)
        self.packs = Packs(self.cache, lambda number: request(1000 + number))


@pytest.mark.parametrize("withdraw", [withhold, delete])
def test_packs_in_memory_and_on_disk_obey_the_list_and_later_look_ups(
    next_job, monkeypatch, withdraw
):
    with Job(next_job("publisher")) as publisher:
        publisher.packs.get(key(1))
        publisher.packs.put(key(1), b"program")
        publisher.packs.flush()
        assert publisher.publisher.drain(20)
        with Job(next_job()) as job:
            assert job.packs.get(key(1)) == b"program"
            if withdraw is delete:
                look_up(job.stash)
            withdraw(publisher.stash, 1000)
            if withdraw is delete:
                apply(job.stash, 1)
            else:
                turn(monkeypatch)
                monkeypatch.setattr(packs_module, "RECHECK_SECONDS", 0.0)
            assert job.packs.get(key(1)) is None
        with Job(next_job()) as job:
            assert job.packs.get(key(1)) is None


def test_prefetch_applies_withdrawals_at_its_look_up(next_job):
    publisher = publish(next_job, 1, 2)
    job = next_job()
    assert job.get(key(1)) == b"graph"
    look_up(job)
    delete(publisher)
    prefetch = Prefetch(job, is_stopped=lambda: False, done=lambda *_: None)
    now = datetime.now(UTC)
    prefetch.fetch_best([ManifestEntry(key=key(n), used_at=now, runs=1) for n in (1, 2)])
    prefetch.close()
    until(lambda: position(job) == 1)
    assert job.get(key(1)) is None
    assert job.fetch(key(2), io.BytesIO()).source == "local"


def test_download_that_began_before_the_withdrawal_is_not_used_again(next_job, proxy):
    """The bytes reach the disk after the host has applied the list."""
    publisher = publish(next_job, 1)
    look_up(next_job())
    slow, beside = (next_job(url=proxy.url, run="one run") for _ in range(2))
    look_up(beside)
    proxy.hold = re.compile(rb"GET /v1/[^/ ]+/artifacts/")
    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(slow.get, key(1))
        assert proxy.held.wait(60)
        delete(publisher)
        apply(beside, 1)
        proxy.hold = None
        proxy.go_on.set()
        assert got.result(60) == b"graph"  # the server had sent it before
    assert [each.get(key(1)) for each in (slow, beside)] == [None, None]


@pytest.mark.parametrize("until_end", [True, False])
def test_download_that_arrives_after_the_deletion_does_not_stay(
    next_job, proxy, monkeypatch, until_end
):
    """Another run has applied the list and has recorded this, or is about to."""
    publisher = publish(next_job, 1, 2)
    slow, beside = next_job(url=proxy.url), next_job(url=proxy.url)
    beside.ensure_local(key(2))
    withdrawals = beside.standing._withdrawals
    adopt, apply = slow.local.adopt, withdrawals._apply
    applied, arrived = threading.Event(), threading.Event()

    def apply_and_wait(*arguments):
        apply(*arguments)
        applied.set()
        if not until_end:
            arrived.wait(60)

    def adopt_late(*arguments, **named):
        delete(publisher)
        look_up(beside)
        assert applied.wait(60)
        if until_end:
            let_read(beside)
        return adopt(*arguments, **named)

    look_up(beside)
    monkeypatch.setattr(withdrawals, "_apply", apply_and_wait)
    monkeypatch.setattr(slow.local, "adopt", adopt_late)
    assert slow.get(key(1)) == b"graph"  # the server had sent it before
    arrived.set()
    let_read(beside)
    assert [slow.is_on_this_host(key(number)) for number in (1, 2)] == [False, True]
    proxy.fault = Fault.RESET
    with pytest.raises(CacheError):
        next_job(url=proxy.url).get(key(1))
    assert next_job(url=proxy.url).get(key(2)) == b"graph"


def test_download_during_the_deletion_of_others_stays(next_job, monkeypatch):
    publisher = publish(next_job, 1, 2, 3)
    slow, beside = next_job(), next_job()
    beside.ensure_local(key(2))
    look_up(beside)
    adopt = slow.local.adopt

    def adopt_late(*arguments, **named):
        delete(publisher, 3)
        apply(beside, 1)
        return adopt(*arguments, **named)

    monkeypatch.setattr(slow.local, "adopt", adopt_late)
    assert slow.get(key(1)) == b"graph"
    assert slow.is_on_this_host(key(1))


def test_download_from_a_server_that_lags_behind_is_looked_up(next_job):
    """For two seconds, another server behind the URL may serve artifacts from its memory."""
    publisher = publish(next_job, 1)
    job = next_job()
    assert job.get(key(1)) == b"graph"
    look_up(job)
    (found,) = job.server.lookup([key(1)]).found
    delete(publisher)
    apply(job, 1)

    namespace, sha256 = job.config.namespace, found.digest.partition(":")[2]
    job.standing.note(namespace, key(1), sha256, asked_at=time.time())
    assert job.standing.stored(namespace, key(1)) is None


KILLED = """
import os, signal, sys
from graphstash import ClientConfig, Stash
from graphstash._artifacts.local_tier import LocalTier
from graphstash._artifacts.withdrawals import HostPositions
from graphstash_schema import ArtifactKey

phase = sys.argv[2]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if phase == "read":
    LocalTier.discard_if = die
if phase == "applied":
    HostPositions.write = die
with Stash(ClientConfig.load(), run="killed") as stash:
    stash.standing._ask(stash.config.namespace, ArtifactKey.parse(*sys.argv[1].split("/")))
    stash.standing._withdrawals._readers[stash.config.namespace].join(60)
"""


@pytest.mark.parametrize("phase", ["read", "applied"])
@pytest.mark.usefixtures("later")
def test_kill_between_reading_and_applying_loses_nothing(next_job, phase):
    own = next_job(url="none")
    own.put(key(1), b"wrong", METADATA)
    delete(publish(next_job, 1, payload=b"wrong"))
    job = next_job()
    done = python(KILLED, key(999), phase, **variables_of(job.config))
    assert done.returncode == -signal.SIGKILL
    assert position(job) is None
    assert job.get(key(1)) is None
    apply(job, 1)


@pytest.mark.parametrize("is_later", [False, True])
def test_imported_copy_is_used_only_if_the_server_confirms_it(
    next_job, command, tmp_path, proxy, monkeypatch, is_later
):
    """The host may have applied a withdrawal of these bytes before the import."""
    bundle = tmp_path / "bundle"
    publisher = publish(next_job, 1, 2)
    command("export", bundle, host="publisher")
    delete(publisher)
    look_up(running := next_job(url=proxy.url))
    assert position(running) == 1
    output = command("import", "--local", bundle, host="host", url=proxy.url).stdout
    assert output.startswith("2 imported")
    if is_later:
        turn(monkeypatch)
    # No server has withdrawn it for a job without a server.
    assert next_job(url="none").get(key(1)) == b"graph"
    for job in (running, next_job(url=proxy.url)):
        assert job.get(key(1)) is None
    proxy.fault = Fault.RESET
    with pytest.raises(CacheError):
        next_job(url=proxy.url).get(key(1))
    proxy.fault = Fault.NONE
    assert next_job(url=proxy.url).fetch(key(2), io.BytesIO()).source == "local"


@pytest.mark.usefixtures("later")
def test_deletion_that_fails_is_repeated(next_job, monkeypatch):
    """The process has no free file descriptors when it applies the list."""
    for number in (1, 2):
        next_job(url="none").put(key(number), b"wrong", METADATA)
    publisher = publish(next_job, 1, 2, payload=b"wrong")
    for number in (1, 2):
        delete(publisher, number)
    job = next_job()
    real = job.local.discard_if

    def short_of_files(namespace, wanted, *arguments, **named):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3 if wanted == key(1) else soft, hard))
        try:
            real(namespace, wanted, *arguments, **named)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    monkeypatch.setattr(job.local, "discard_if", short_of_files)
    look_up(job)
    let_read(job)
    assert position(job) is None
    assert [job.is_on_this_host(key(number)) for number in (1, 2)] == [True, False]
    assert "Too many open files" in str(job.local.troubles[-1])
    again = next_job()
    assert again.get(key(1)) is None
    assert position(again) == 2
    assert not again.is_on_this_host(key(1))


FORKED = """
import os, sys
from graphstash import ClientConfig, Stash
from graphstash_schema import ArtifactKey

key = ArtifactKey.parse(*sys.argv[1].split("/"))
with Stash(ClientConfig.load(), run="forked") as stash:
    stash.get(key)
    reader = stash.standing._withdrawals._readers[stash.config.namespace]
    assert reader.is_alive()
    if os.fork() == 0:
        print(stash.get(key), flush=True)
        stash.standing._ask(stash.config.namespace, key)  # starts a reader of its own
        assert stash.standing._withdrawals._readers[stash.config.namespace] is not reader
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_fork_while_the_list_is_read_leaves_the_child_a_cache(next_job, proxy):
    publisher = publish(next_job, 1, 2)
    job = next_job(url=proxy.url)
    job.ensure_local(key(1))
    delete(publisher, 2)
    proxy.hold = re.compile(rb"GET /v1/[^/ ]+/withdrawals")
    done = python(FORKED, key(1), check=True, **variables_of(job.config))
    assert done.stdout.strip() == "b'graph'"
    proxy.go_on.set()

"""A withdrawn or forbidden artifact also disappears from the disks of hosts."""

import io
import json
import os
import re
import time
from contextlib import nullcontext

import pytest

from graphstash import CacheError
from graphstash.errors import RefusedError
from graphstash.testing import FakeServer
from support.fault_proxy import Fault, FaultProxy
from support.host import METADATA, key
from support.processes import started
from support.refusals import refusal
from support.waiting import until, variables_of
from support.withdrawing import delete, turn, withhold


@pytest.fixture
def publisher(next_job):
    """Publish an artifact, and fetch it on another host, which keeps a copy."""
    publisher = next_job("publisher")
    publisher.put(key(), b"graph", METADATA)
    assert next_job().get(key()) == b"graph"
    return publisher


def lookups(stash, monkeypatch):
    """Record the number of keys in each look-up."""
    asked = []
    real = stash.server.lookup

    def noting(keys, **arguments):
        asked.append(len(keys))
        return real(keys, **arguments)

    monkeypatch.setattr(stash.server, "lookup", noting)
    return asked


@pytest.mark.parametrize(
    ("brought", "withdraw"),
    [
        *(("fetched", withhold), ("fetched", delete)),
        *(("prefetched", withhold), ("compiled", delete)),
    ],
)
def test_a_withdrawn_artifact_is_not_served_to_the_next_job(next_job, brought, withdraw):
    publisher = next_job("host" if brought == "compiled" else "publisher")
    publisher.put(key(), b"graph", METADATA)
    if brought == "fetched":
        assert next_job().get(key()) == b"graph"
    if brought == "prefetched":
        assert next_job().ensure_local(key()).source == "remote"
    assert next_job().fetch(key(), payload := io.BytesIO()).source == "local"
    assert payload.getvalue() == b"graph"

    withdraw(publisher)

    job = next_job()
    assert job.get(key()) is None
    assert not job.is_on_this_host(key())


def test_running_process_applies_withdrawal_that_another_process_of_its_run_has_read(
    next_job, publisher
):
    """The running process has the server's earlier answer in memory."""
    job = next_job(run="one-run")
    assert job.get(key()) == b"graph"
    program = """
        import graphstash, sys
        from graphstash_schema import ArtifactKey
        key = ArtifactKey.parse(*sys.argv[1].split("/"))
        with graphstash.Stash(graphstash.ClientConfig.load(), run="one-run") as stash:
            for line in sys.stdin:
                print(stash.get(key), flush=True)
    """
    with started(program, key(), **variables_of(job.config)) as process:

        def ask():
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert ask() == "b'graph'"
        withhold(publisher)
        assert job.standing._ask(job.config.namespace, key(999))
        until(lambda: ask() == "None")


def test_a_copy_is_not_served_to_a_token_without_rights(next_job, monkeypatch, guarded):
    trusted = {"url": guarded.url, "namespace": "trusted"}
    writer = next_job("publisher", token=guarded.token("write:trusted"), **trusted)
    writer.put(key(), b"graph", METADATA)
    reader = guarded.token("read:trusted")
    assert next_job(token=reader, **trusted).get(key()) == b"graph"

    stranger = {"token": guarded.token("write:team"), "url": guarded.url}
    assert next_job(namespace="trusted", **stranger).get(key()) is None
    both = next_job(namespace="team", read_namespaces="trusted", **stranger)
    assert both.get(key()) is None

    again = next_job(token=reader, run="one run", **trusted)
    assert again.ensure_local(key()).source == "local"
    assert isinstance(refusal(again.put, key(2), b"refused", METADATA), RefusedError)
    beside = next_job(namespace="trusted", run="one run", **stranger)
    assert beside.get(key()) is None

    turn(monkeypatch)
    assert next_job(token=reader, **trusted).get(key(2)) == b"refused"  # no server has it


def test_copy_of_team_namespace_is_not_preferred_to_trusted_one(next_job, namespace, monkeypatch):
    names = {"namespace": namespace, "read_namespaces": f"{namespace}-trusted"}
    for number in range(4):
        next_job("team").put(key(number), b"team", METADATA)
        assert next_job(**names).get(key(number)) == b"team"
    trusted = next_job("trusted", namespace=f"{namespace}-trusted")
    trusted.put(key(1), b"trusted", METADATA)

    job = next_job(**names)
    asked = lookups(job, monkeypatch)
    assert job.get(key(1)) == b"trusted"
    for number in range(2, 4):
        assert job.get(key(number)) == b"team"
    assert asked == [4, 4]  # one request for each namespace


@pytest.mark.usefixtures("publisher")
def test_a_copy_of_one_server_is_not_served_to_a_job_of_another(next_job):
    with FakeServer() as other:
        assert next_job(url=other.url).get(key()) is None
        elsewhere = next_job("elsewhere", url=other.url)
        elsewhere.put(key(), b"graph", METADATA)
        next_job(url=other.url).ensure_local(key())
        delete(elsewhere)
        # Each server decides for its own artifacts.
        assert next_job(run="one run").get(key()) == b"graph"
        assert next_job(run="one run", url=other.url).get(key()) is None
    for nobody in ("none", "http://127.0.0.1:9"):
        with pytest.raises(CacheError) if nobody != "none" else nullcontext():
            assert next_job(url=nobody).get(key()) is None


def test_a_copy_whose_upload_was_not_answered_obeys_the_server(next_job, server, monkeypatch):
    """The process was killed after the server had stored its artifact."""
    program = """
        import graphstash, sys
        from graphstash_schema import ArtifactKey, ArtifactMetadata
        key = ArtifactKey.parse(*sys.argv[1].split("/"))
        metadata = ArtifactMetadata(compile_seconds=3.0, raw_size_bytes=5)
        with graphstash.Stash(graphstash.ClientConfig.load()) as stash:
            stash.put(key, b"graph", metadata)
    """
    with FaultProxy(server.port) as proxy:
        variables = variables_of(next_job(url=proxy.url).config)
        proxy.hold = re.compile(rb"PUT ")
        with started(program, key(), **variables):
            assert proxy.held.wait(60)
        proxy.hold = None
        proxy.go_on.set()
        assert next_job(url=proxy.url).get(key()) == b"graph"  # within the documented time

        turn(monkeypatch)
        proxy.fault = Fault.RESET
        assert next_job(url=proxy.url).get(key()) == b"graph"  # may not have been withdrawn
        proxy.fault = Fault.NONE
        withhold(next_job("administrator"))
        later = next_job(url=proxy.url)
        assert later.get(key()) is None
        assert not later.is_on_this_host(key())


def test_copies_are_used_for_a_limited_time_without_answer(next_job, server, caplog):
    with FaultProxy(server.port) as proxy:
        next_job("publisher").put(key(), b"graph", METADATA)
        assert next_job(url=proxy.url).get(key()) == b"graph"
        for fault in (Fault.RESET, Fault.BUSY, Fault.FAILING):
            proxy.fault = fault
            assert next_job(url=proxy.url).get(key()) == b"graph"
        for late in (next_job(url=proxy.url, offline_seconds=0), next_job(url=proxy.url)):
            (noted,) = late.config.cache_dir.glob(f"servers/*/{late.config.namespace}")
            os.utime(noted, (time.time() - 25 * 3600,) * 2)
            with pytest.raises(CacheError):
                late.get(key())
            assert "has not answered" in caplog.text
            caplog.clear()
        proxy.fault = Fault.NONE
        assert next_job(url=proxy.url).ensure_local(key()).source == "local"


def test_unpublished_result_is_used_without_server(next_job, monkeypatch):
    job = next_job(url="none")
    job.put(key(), b"graph", METADATA)
    assert next_job(url="none").get(key()) == b"graph"
    assert next_job(read_only=True).get(key()) == b"graph"  # the server never had it
    next_job("publisher").put(key(), b"another", METADATA)
    turn(monkeypatch)
    assert next_job(read_only=True).get(key()) == b"another"  # as all other hosts get


def test_processes_of_a_run_share_one_look_up_of_copies(next_job, monkeypatch):
    publisher = next_job("publisher")
    for number in range(3):
        publisher.put(key(number), b"graph", METADATA)
        next_job().ensure_local(key(number))
    asked = []
    for _ in range(3):
        stash = next_job(run="one run")
        noted = lookups(stash, monkeypatch)
        for number in range(3):
            assert stash.fetch(key(number), io.BytesIO()).source == "local"
        asked.append(noted)
    assert asked == [[3], [], []]


def test_run_repeats_its_look_up_after_ten_minutes(next_job, publisher, monkeypatch):
    job = next_job(run="a long run")
    assert job.get(key()) == b"graph"
    withhold(publisher)
    assert job.get(key()) == b"graph"  # within the documented time
    turn(monkeypatch)
    assert job.get(key()) is None


@pytest.mark.usefixtures("publisher")
def test_damaged_note_about_server_is_ignored(next_job):
    (noted,) = next_job().config.cache_dir.glob("servers/*/_origin")
    for text in ("", "../../x", "url-zz"):
        noted.write_text(text)
        assert next_job().get(key()) == b"graph"


def test_forget_removes_every_copy_of_this_host_and_nothing_else(next_job, command):
    job = next_job("publisher")
    for number in (1, 2):
        job.put(key(number), b"graph", METADATA)
        next_job().ensure_local(key(number))
    next_job(url="none").put(key(), b"own", METADATA)
    output = command("forget", str(key()), host="host").stdout
    assert output.count("removed torch_xla/") == 2
    assert "Unchanged: servers" in output.replace("\n", " ")
    assert [next_job().is_on_this_host(key(number)) for number in (1, 2)] == [False, True]
    assert next_job().fetch(key(), io.BytesIO()).source == "remote"  # no server was asked
    again = command("forget", key().fingerprint, "--json", host="host").stdout
    (removed,) = json.loads(again)["removed"]
    expected = {"key": str(key()), "namespace": job.config.namespace, "is_own": False}
    assert removed == expected
    command("forget", str(key()), host="host", status=1)
    command("forget", "../secret", host="host", status=2)
    several = command("forget", "0000", host="publisher", status=1)
    assert "several artifacts begin with" in several.output

"""A stash gets and puts verified artifacts. The real server and its double behave alike."""

import errno
import io
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from graphstash import ClientConfig, LeaseLostError, Reason
from graphstash._artifacts import local_tier
from graphstash._artifacts.envelope import seal
from graphstash_schema import ArtifactMetadata, LeaseOutcome, LeaseState
from support.host import Host, key, request
from support.listener import Listener
from support.refusals import refusal
from support.waiting import PATIENT, until


def metadata(payload=b""):
    return ArtifactMetadata(compile_seconds=3.0, raw_size_bytes=len(payload))


def path_of(stash):
    """Return the path of the local copy of key(1)."""
    return stash.local.path(stash.config.namespace, key(1), origin=stash.standing.origin)


def hits(stash):
    usage = {each.namespace: each.hits for each in stash.server.server_stats().namespaces}
    return usage[stash.config.namespace]


def test_second_get_of_a_host_sends_no_request_and_a_miss_leaves_no_file(hosts, tmp_path):
    hosts("a").put(key(1), b"graph" * 1000, metadata())
    first = hosts("b").fetch(key(1), tmp_path / "one")
    again = hosts("b").fetch(key(1), tmp_path / "two")
    assert (first.source, again.source) == ("remote", "local")
    assert first.compile_seconds == again.compile_seconds == 3.0
    assert (tmp_path / "two").read_bytes() == b"graph" * 1000
    target = tmp_path / "target"
    target.mkdir()
    assert hosts("b").fetch(key(2), target / "file") is None
    assert list(target.iterdir()) == []


def test_sixteen_threads_of_a_host_download_once(hosts):
    hosts("a").put(key(1), b"graph" * 100_000, metadata())
    stash = hosts("b")
    before = hits(stash)
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(stash.get, [key(1)] * 16))
    assert got == [b"graph" * 100_000] * 16
    hosts("c").get(key(1))  # the server writes counts in order
    until(lambda: hits(stash) - before >= 2)
    assert hits(stash) - before == 2


def test_a_damaged_local_file_is_replaced_from_the_server(hosts):
    stash = hosts("a")
    stash.put(key(1), b"graph" * 50, metadata())
    path = path_of(stash)
    sound = path.read_bytes()
    flipped = sound[:-3] + bytes([sound[-3] ^ 1]) + sound[-2:]
    for damaged in (flipped, sound[:-2]):
        path.write_bytes(damaged)
        assert stash.fetch(key(1), into := io.BytesIO()).source == "remote"
        assert into.getvalue() == b"graph" * 50
        assert path.read_bytes() != damaged
        assert stash.ensure_local(key(1)).source == "local"
    path.unlink()
    path.mkdir()  # opening a directory fails for root, too
    assert stash.get(key(1)) == b"graph" * 50


def test_local_file_of_another_key_is_not_returned(hosts, tmp_path):
    stash = hosts("a")
    (tmp_path / "payload").write_bytes(b"wrong graph")
    path = path_of(stash)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        seal(key(2), tmp_path / "payload", file)
    assert stash.get(key(1)) is None
    assert not path.exists()


def test_an_artifact_over_the_limit_is_neither_published_nor_fetched(hosts):
    payload = bytes(3000)
    assert (
        refusal(hosts("a", max_artifact="2kB").put, key(1), payload, metadata(payload)).reason
        is Reason.TOO_LARGE
    )
    hosts("b").put(key(1), payload, metadata(payload))
    assert refusal(hosts("a", max_artifact="2kB").get, key(1)).reason is Reason.TOO_LARGE


def test_look_up_of_many_keys_is_split_into_calls(hosts):
    stash = hosts("a")
    for number in (0, 1500):
        stash.put(key(number), b"x", metadata())
    reply = stash.server.lookup(key(number) for number in range(2001))
    assert [info.key for info in reply.found] == [key(0), key(1500)]
    assert len(reply.missing) == 1999


def test_a_lease_is_granted_once_renewed_and_lost(hosts):
    a, b = hosts("a"), hosts("b")
    mine = a.server.acquire(key(1))
    assert mine.state is LeaseState.GRANTED
    held = b.server.acquire(key(1))
    assert held.state is LeaseState.HELD
    assert "@" in held.holder
    a.server.renew(key(1), mine.token)
    a.server.release(key(1), mine.token, LeaseOutcome.FAILED)
    theirs = b.server.acquire(key(1))
    assert theirs.state is LeaseState.GRANTED
    assert theirs.fencing > mine.fencing
    with pytest.raises(LeaseLostError):
        a.server.renew(key(1), mine.token)


def test_read_error_of_local_file_falls_back_to_the_server(hosts, monkeypatch, tmp_path):
    """The disk has a bad block, or another host has removed the file on NFS."""
    payload = random.Random(0).randbytes(100_000)

    class Failing(io.FileIO):
        def readinto(self, buffer):
            if self.tell() == 0:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return super().readinto(buffer)

    def opened(path, *, directory):
        return io.BufferedReader(Failing(os.open(path, os.O_RDONLY, dir_fd=directory)))

    hosts("a").put(key(1), payload, metadata(payload))
    reader = hosts("b")
    reader.get(key(1))
    with monkeypatch.context() as patch:
        patch.setattr(local_tier, "open_ours", opened)
        assert reader.fetch(key(1), tmp_path / "graph").source == "remote"
    assert (tmp_path / "graph").read_bytes() == payload
    assert reader.fetch(key(1), tmp_path / "graph").source == "local"


@pytest.mark.parametrize("path", ["/cache", "/v1"])
def test_wrong_path_in_url_is_an_error_instead_of_a_miss(hosts, path):
    url = hosts("a").config.url + path
    with Host(hosts("b", url=url)) as host:
        for number in range(3):
            host.build(key(number))
        stats = host.stats
    assert (stats.misses, stats.published) == (0, 0)
    assert stats.fallbacks.keys() <= {"protocol", "refused", "circuit_open"}
    message = str(refusal(hosts("c", url=url).get, key(1)))
    assert f"{path} is a graphstash server, but not with this path" in message


def test_upload_counts_only_with_digest_confirmed_by_server(tmp_path):
    """A proxy may answer 200 to any request."""
    with (
        Listener() as proxy,
        Host(ClientConfig.load({}, url=proxy.url, cache_dir=tmp_path, **PATIENT)) as host,
    ):
        proxy.status = 200
        compilation = host.cache.begin(request(1))
        compilation.publish_bytes(b"graph", compile_seconds=1.0)
        stats = host.stats
    assert (stats.published, stats.fallbacks) == (0, {"protocol": 1})

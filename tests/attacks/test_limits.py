"""A writer of one namespace exceeds no limit and takes nothing from other namespaces.

The limits count the bytes of blobs, metadata and manifests. tests/service/test_leases.py covers the
limit on leases.
"""

from contextlib import ExitStack

import pytest

from graphstash_schema import ArtifactMetadata, Digest
from graphstash_server.keys import StoredKey
from support.guarded_server import GuardedServer, artifact_path, keys
from support.pins import pin
from support.waiting import until
from support.wire import Wire, put_head

_MIB = 1024**2
_STORE_BYTES = 20 * _MIB
_BLOB_BYTES = 2 * _MIB
_VICTIMS = range(7)


class _LimitedServer(GuardedServer):
    """A server with room for ten blobs. Each test fills seven of them for the victim."""

    def __init__(self, directory, **settings):
        limits = dict.fromkeys(("store_limit_bytes", "soft_limit_bytes"), _STORE_BYTES)
        super().__init__(directory, **limits, **settings)
        self._unfinished_at_start = self._unfinished_files()

    def empty(self):
        """Delete everything, and wait until the server has removed the files of broken uploads."""
        admin = self.http(self.admin)
        for row in self.picture().rows["artifacts"]:
            path = f"/v1/{row.namespace}/artifacts/{row.kind}/{row.device_type}/{row.fingerprint}"
            # A test that reaches a limit may have caused its eviction.
            assert admin.delete(path).status_code in {204, 404}
        until(lambda: self._unfinished_files() <= self._unfinished_at_start)

    def _unfinished_files(self):
        return {name for name in self.picture().files if "/sha256/" not in name}

    def blob(self, namespace, number, size=_BLOB_BYTES):
        return f"{namespace} {number} ".encode().ljust(size, b".")

    def fill(self, namespace, *numbers, size=_BLOB_BYTES, seconds=60.0):
        metadata = ArtifactMetadata(compile_seconds=seconds, raw_size_bytes=size)
        return [
            self.put(
                artifact_path(namespace, number),
                self.blob(namespace, number, size),
                metadata=metadata,
            ).status_code
            for number in numbers
        ]

    def kept(self, namespace, numbers):
        admin = self.http(self.admin)
        answers = {number: admin.head(artifact_path(namespace, number)) for number in numbers}
        return [number for number, answer in answers.items() if answer.status_code == 200]

    def used(self, namespace):
        (found,) = (each for each in self.stats()["namespaces"] if each["namespace"] == namespace)
        return found["size_bytes"] + found["metadata_bytes"] + found["manifest_bytes"]

    def pin(self, namespace, numbers):
        named = [StoredKey.parse(namespace=namespace, **each) for each in keys(numbers)]
        pin(self.database_url, named)

    def rows(self, table, namespace):
        return sum(row.namespace == namespace for row in self.picture().rows[table])


@pytest.fixture
def limited(start_once):
    """A server that is emptied after each test."""
    server = start_once(_LimitedServer)
    yield server
    server.empty()


def _announced(fort, space, size_bytes, *, number=0, token=None):
    """Return a head that waits for `100 Continue` before its body."""
    path, announced = artifact_path(space, number), Digest.of(bytes(size_bytes))
    return put_head(path, announced, "Expect: 100-continue", token=token or fort.admin)


def test_heads_without_bodies_evict_nothing_and_block_no_upload(limited, space):
    """An announced size reserves no room: five heads announce 17 MiB each, in a store of 20 MiB."""
    # The soft limit, nine tenths of it, must have room for nine artifacts.
    limited.set_policy(space, limit_bytes=2 * _STORE_BYTES)
    assert limited.fill(space, *_VICTIMS) == [201] * 7
    token = limited.token(f"write:{space}-rogue")
    before = limited.picture()

    with ExitStack() as stack:
        for number in range(5):
            wire = stack.enter_context(Wire(limited.url))
            wire.send(_announced(limited, f"{space}-rogue", 17 * _MIB, number=number, token=token))
            assert wire.begin() == 100
        assert limited.picture().rows == before.rows
        assert limited.fill(space, 7, 8) == [201] * 2
        assert limited.kept(space, range(9)) == list(range(9))
    kept = {path.rpartition("/")[2] for path in limited.picture().files}
    assert kept >= {Digest.of(limited.blob(space, number)).sha256 for number in range(9)}


def test_head_is_refused_if_pinned_artifacts_leave_no_room(limited, space):
    assert limited.fill(space, *_VICTIMS) == [201] * 7
    limited.pin(space, _VICTIMS)

    with limited.withstands() as refused, Wire(limited.url) as wire:
        answer = wire.ask(_announced(limited, f"{space}-rogue", 17 * _MIB))
        assert (answer.status, answer.problem["code"]) == (507, "insufficient_storage")
    assert refused == {"insufficient_storage": 1}


def test_upload_evicts_from_its_own_namespace_first(limited, space):
    """This holds even if the evicted artifacts are worth more, or the upload breaks off."""
    rogue = f"{space}-rogue"
    limited.fill(space, *_VICTIMS, seconds=1.0)
    limited.fill(rogue, 0, 1, seconds=500_000.0)
    assert limited.fill(rogue, 2, size=5 * _MIB, seconds=500_000.0) == [201]
    assert limited.kept(rogue, range(3)) == [2]

    size_bytes = 6 * _MIB - 64 * 1024  # with metadata, it fits beside the victim's artifacts
    with Wire(limited.url) as wire:
        wire.send(_announced(limited, rogue, size_bytes, number=7))
        assert wire.begin() == 100
        wire.send(bytes(5 * _MIB))
        until(lambda: limited.kept(rogue, [2]) == [])
    assert limited.kept(space, _VICTIMS) == list(_VICTIMS)
    assert limited.fill(rogue, 0, 1) == [201] * 2


@pytest.mark.parametrize("seconds", [0.0, 600_000.0])
def test_flood_of_one_namespace_evicts_nothing_from_the_others(limited, space, seconds):
    """The limits fit into the store together. The value that the flood claims has no effect."""
    spaces = [f"{space}-{number}" for number in range(3)]
    for each in spaces:
        limited.set_policy(each, limit_bytes=6 * _MIB)
    for each in spaces[1:]:
        assert limited.fill(each, 0, 1, seconds=1.0) == [201, 201]

    flooded = [limited.fill(spaces[0], n, size=_MIB, seconds=seconds) for n in range(8)]

    assert flooded == [[201]] * 8
    assert limited.used(spaces[0]) <= 6 * _MIB
    for each in spaces[1:]:
        assert limited.kept(each, range(2)) == [0, 1]
    assert sum(map(limited.used, spaces)) <= _STORE_BYTES


def test_manifests_of_made_up_keys_count_against_the_limit(limited, space):
    """Manifests and artifacts together stay below the limit."""
    limited.set_policy(space, limit_bytes=_MIB)
    writer = limited.http(limited.token(f"write:{space}"))
    codes = set()
    for job in range(8):
        named = {"keys": keys(range(job * 1000, job * 1000 + 300))}
        answer = writer.put(f"/v1/{space}/manifests/job-{job}", json=named)
        codes.add(answer.status_code)

    assert codes == {201, 507}
    assert limited.used(space) <= _MIB
    assert limited.rows("manifest_entries", space) == 6 * 300
    with limited.withstands() as refused:
        answer = writer.put(f"/v1/{space}/manifests/job", json={"keys": keys(range(4096))})
        assert (answer.status_code, answer.json()["code"]) == (507, "insufficient_storage")
    assert refused == {"insufficient_storage": 1}


@pytest.mark.parametrize(
    ("parts", "limit_bytes", "count", "rows"), [(90, _MIB // 4, 24, 20), (0, 40 * 1024, 14, 10)]
)
def test_metadata_of_empty_artifacts_counts_against_the_limit(
    limited, space, parts, limit_bytes, count, rows
):
    limited.set_policy(space, limit_bytes=limit_bytes)
    named = {f"part {number}": "x" * 100 for number in range(parts)}
    metadata = ArtifactMetadata(compile_seconds=1.0, raw_size_bytes=0, parts=named)
    assert len(metadata.to_header()) > 145 * parts

    for number in range(count):
        shown = metadata if parts else None
        answer = limited.put(artifact_path(space, number), b"", metadata=shown)
        assert answer.status_code == 201, answer.text

    assert limited.used(space) <= limit_bytes
    assert limited.rows("artifacts", space) <= rows

"""PUT: refusals before and within the body, and many concurrent writers."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from graphstash_schema import Digest
from support.wire import Wire, head, put_head

BLOB = b"an executable" * 1000


def test_malformed_head_is_refused_and_the_connection_stays_usable(api, problem):
    problem(api.http.put(api.path(), content=BLOB * 100), 400, "digest_required", "Repr-Digest")
    other = "md5=:1B2M2Y8AsgTpgAmY7PhCfg==:"
    for value in ("", "sha-256=abc", "sha-256=:abc:", "sha-512=:AAAA:", other):
        problem(api.put(BLOB, Repr_Digest=value), 400, "invalid_digest", "sha-256=:")
    own = Digest.of(BLOB).repr_digest
    answer = api.http.put(api.path(), content=iter([BLOB]), headers={"Repr-Digest": own})
    problem(answer, 411, "length_required", "Content-Length")
    for value in ("%%%", "e30", "bm90IGpzb24", "x" * 16385, "\xff"):
        metadata = (b"Graphstash-Metadata", value.encode("latin-1"))
        headers = [(b"Repr-Digest", own.encode()), metadata]
        answer = api.http.put(api.path(), content=BLOB, headers=headers)
        problem(answer, 400, "invalid_metadata", "metadata header")
    assert api.get().status_code == 404

    assert api.put(BLOB, Repr_Digest=f"{other}, {own}").status_code == 201


def test_expect_100_continue_is_answered_unless_upload_is_refused(api):
    with Wire(api.url) as wire:
        answer = wire.ask(
            head("PUT", api.path(), "Content-Length: 9", "Repr-Digest: no", "Expect: 100-continue")
        )
        assert (answer.status, answer.headers["connection"]) == (400, "close")

    with Wire(api.url) as wire:
        wire.send(put_head(api.path(), Digest.of(BLOB), "Expect: 100-continue"))
        assert wire.begin() == 100
        assert wire.ask(BLOB).status == 201


@pytest.mark.sql
def test_concurrent_uploads_of_equal_bytes_all_succeed(api, connect):
    """Covers one key for all writers, and one key per writer."""
    writers = [connect(api.url, api.namespace) for _ in range(16)]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda writer: writer.put(BLOB).status_code, writers))
        own = list(pool.map(lambda n, writer: writer.put(BLOB, n).status_code, range(16), writers))

    assert sorted(answers) == [200] * 15 + [201]
    assert own == [200] + [201] * 15
    assert all(api.get(number).content == BLOB for number in range(16))
    assert (api.stats()["artifacts"], api.stats()["puts"]) == (16, 16)


@pytest.mark.sql
def test_one_of_many_concurrent_uploads_of_different_bytes_stays(api, connect, files):
    blobs = [f"{api.namespace} {number}".encode() * 30_000 for number in range(16)]
    writers = [connect(api.url, api.namespace) for _ in blobs]
    before = len(files())

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda writer, blob: writer.put(blob), writers, blobs))

    statuses = [answer.status_code for answer in answers]
    assert sorted(statuses) == [201] + [409] * 15
    winner = blobs[statuses.index(201)]
    assert api.get().content == winner
    assert {a.json()["digest"] for a in answers if a.status_code == 409} == {str(Digest.of(winner))}
    assert len(files()) == before + 1

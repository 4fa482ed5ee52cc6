"""GET, HEAD, PUT and DELETE of one artifact."""

import httpx
import pytest

from graphstash_schema import ArtifactMetadata, Digest
from support.api import digest_header
from support.waiting import until

BLOB = b"an executable" * 1000
ETAG = Digest.of(BLOB).etag


def test_stored_artifact_is_served_with_headers_to_verify_it(api):
    stored = api.put(BLOB, seconds=12.5)
    fetched = api.get()

    assert stored.status_code == 201
    assert stored.headers["location"] == api.path()
    assert stored.headers["etag"] == ETAG
    assert (fetched.status_code, fetched.content) == (200, BLOB)
    headers = fetched.headers
    assert headers["etag"] == ETAG
    assert headers["repr-digest"] == Digest.of(BLOB).repr_digest
    assert headers["content-length"] == str(len(BLOB))
    assert headers["content-type"] == "application/octet-stream"
    assert headers["accept-ranges"] == "bytes"
    assert headers["cache-control"] == "private, max-age=31536000, immutable"
    assert headers["graphstash-protocol"] == "1"
    assert headers["x-request-id"]
    metadata = ArtifactMetadata.from_header(headers["graphstash-metadata"])
    assert (metadata.compile_seconds, metadata.raw_size_bytes) == (12.5, len(BLOB))

    head = api.head()
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "repr-digest", "content-length", "graphstash-metadata", "accept-ranges"):
        assert head.headers[name] == headers[name]


def test_absent_artifact_is_404_that_caches_do_not_store(api, problem):
    problem(api.get(), 404, "not_found", api.namespace)
    problem(api.delete(), 404, "not_found")
    head = api.head()
    assert (head.status_code, head.content) == (404, b"")
    assert head.headers["cache-control"] == "no-store"


@pytest.mark.sql
def test_first_upload_of_a_key_stays_with_unknown_metadata(api, problem):
    sent = "eyJjb21waWxlX3NlY29uZHMiOjEsInJhd19zaXplX2J5dGVzIjoyLCJuZXciOjN9"
    api.put(BLOB, Graphstash_Metadata=sent)
    again = api.put(BLOB)
    refused = problem(api.put(b"other"), 409, "conflict", "the first upload is kept")

    assert (again.status_code, again.headers["etag"]) == (200, ETAG)
    assert api.get().headers["graphstash-metadata"] == sent
    assert api.stats()["puts"] == 1
    assert refused["digest"] == str(Digest.of(BLOB))
    assert refused["given_digest"] == str(Digest.of(b"other"))
    assert api.get().content == BLOB
    until(lambda: api.stats()["conflicts"] == 1)
    until(lambda: api.head().headers["graphstash-hits"] == "2")


def test_if_none_match_of_stored_artifact_is_304_for_reads_and_refuses_uploads(api, problem):
    assert api.put(BLOB, If_None_Match="*").status_code == 201
    for blob in (BLOB, b"other"):
        answer = api.put(blob, If_None_Match="*")
        refused = problem(answer, 412, "precondition_failed", "If-None-Match")
        assert refused["digest"] == str(Digest.of(BLOB))
    for listed in (ETAG, f"W/{ETAG}", f'"a" , W/{ETAG}', "*"):
        answer = api.get(If_None_Match=listed)
        assert (answer.status_code, answer.content) == (304, b""), listed
        assert answer.headers["etag"] == ETAG
        assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
        assert api.head(If_None_Match=listed).status_code == 304
    assert api.get(If_None_Match='"sha256:abc", "x"').content == BLOB


@pytest.mark.sql
def test_equal_blobs_are_stored_once_until_the_last_artifact_is_deleted(api, files):
    blob = b"shared" + api.namespace.encode()

    def stored():
        return [path.name for path in files()].count(Digest.of(blob).sha256)

    api.put(blob, 1)
    api.put(blob, 2)
    assert stored() == 1

    assert api.delete(1).status_code == 204
    assert (api.get(1).status_code, api.get(2).content) == (404, blob)
    assert api.delete(2).status_code == 204
    assert api.get(2).status_code == 404
    assert stored() == 0
    stats = api.stats()
    assert (stats["artifacts"], stats["size_bytes"]) == (0, 0)
    assert api.put(b"another", 2).status_code == 201
    assert api.get(2).content == b"another"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_malformed_path_segment_is_named(api, problem, method):
    good = "/v1/team/artifacts/jax/cpu/" + "a" * 64
    for part, given, code in (
        ("team", "Team", "invalid_namespace"),
        ("team", "n" * 65, "invalid_namespace"),
        ("jax", "wasm", "invalid_kind"),
        ("cpu", "CPU", "invalid_device_type"),
        ("cpu", "c" * 129, "invalid_device_type"),
        ("cpu", "cpu%0a", "invalid_device_type"),
        ("a" * 64, "abc", "invalid_fingerprint"),
        ("a" * 64, "A" * 64, "invalid_fingerprint"),
        ("cpu", "..%2f..%2fetc%2fpasswd", "not_found"),
        ("cpu", "", "unknown_path"),
    ):
        url = httpx.URL(api.url + good.replace(f"/{part}", f"/{given}"))
        put = {"headers": digest_header(b"x"), "content": b"x"} if method == "PUT" else {}
        status = 404 if code in {"not_found", "unknown_path"} else 400
        problem(api.http.request(method, url, **put), status, code)


def test_another_protocol_version_is_refused(api, problem):
    for version in ("2", "0", "one", "1.0"):
        problem(api.get(Graphstash_Protocol=version), 400, "unsupported_protocol", "version 1")


def test_artifact_of_lost_or_damaged_blob_is_a_miss_and_can_be_stored_again(
    api, files, file_of, caplog
):
    blob = b"lost" + api.namespace.encode()
    api.put(blob)
    api.get()
    healed = api.http.get("/v1/stats").json()["healed"]
    file_of(blob).unlink()

    assert [api.get().status_code for _ in range(2)] == [404, 404]
    assert api.head().status_code == 404
    absent = f"the blob {Digest.of(blob)} of"
    assert caplog.text.count(absent) == 1
    assert api.http.get("/v1/stats").json()["healed"] == healed
    for damage in (b"", b"short", b"long" * 100):
        assert api.put(blob).status_code == 201
        file_of(blob).write_bytes(damage)
        assert api.head().status_code == 404
        assert api.get().status_code == 404
        assert not [path for path in files() if path.name == Digest.of(blob).sha256]
        assert api.stats()["artifacts"] == 0
    api.put(blob)
    file_of(blob).unlink()
    assert api.put(blob).status_code == 201  # the upload repairs a loss that no request has found
    assert api.get().content == blob

"""GET, HEAD, PUT and DELETE of one artifact."""

import httpx
import pytest

from graphstash_schema import ArtifactMetadata, Digest

pytestmark = pytest.mark.sql

BLOB = b"an executable" * 1000


def test_a_stored_artifact_comes_back_byte_for_byte(api):
    stored = api.put(BLOB, seconds=12.5)
    fetched = api.get()

    assert stored.status_code == 201
    assert stored.headers["location"] == api.path()
    assert stored.headers["etag"] == Digest.of(BLOB).etag
    assert fetched.status_code == 200
    assert fetched.content == BLOB


def test_a_hit_carries_what_a_client_needs_to_check_it(api):
    api.put(BLOB, seconds=12.5)

    headers = api.get().headers

    assert headers["etag"] == Digest.of(BLOB).etag
    assert headers["repr-digest"] == Digest.of(BLOB).repr_digest
    assert headers["content-length"] == str(len(BLOB))
    assert headers["content-type"] == "application/octet-stream"
    assert headers["accept-ranges"] == "bytes"
    assert headers["cache-control"] == "private, max-age=31536000, immutable"
    assert headers["graphstash-protocol"] == "1"
    assert headers["x-request-id"]
    metadata = ArtifactMetadata.from_header(headers["graphstash-metadata"])
    assert (metadata.compile_seconds, metadata.raw_size_bytes) == (12.5, len(BLOB))


def test_an_artifact_without_metadata_has_no_metadata_header(api):
    api.put(BLOB)

    assert "graphstash-metadata" not in api.get().headers


def test_metadata_comes_back_as_it_was_sent_with_fields_unknown_here(api):
    sent = "eyJjb21waWxlX3NlY29uZHMiOjEsInJhd19zaXplX2J5dGVzIjoyLCJuZXciOjN9"

    api.put(BLOB, Graphstash_Metadata=sent)

    assert api.get().headers["graphstash-metadata"] == sent


@pytest.mark.parametrize("blob", [b"", b"x", b"y" * (1024**2), b"z" * (1024**2 + 1)])
def test_every_size_comes_back(api, blob):
    assert api.put(blob).status_code == 201
    assert api.get().content == blob


def test_an_absent_artifact_is_not_found_and_no_cache_keeps_that(api, problem):
    problem(api.get(), 404, "not_found", api.namespace)


def test_head_says_what_get_says_and_sends_no_body(api):
    api.put(BLOB, seconds=1)
    headers = dict(api.get().headers)

    head = api.http.head(api.path())

    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "repr-digest", "content-length", "graphstash-metadata", "accept-ranges"):
        assert head.headers[name] == headers[name]


def test_head_of_an_absent_artifact_is_not_found(api):
    head = api.http.head(api.path())

    assert (head.status_code, head.content) == (404, b"")
    assert head.headers["cache-control"] == "no-store"


def test_head_tells_how_often_it_was_served(api, eventually):
    api.put(BLOB)
    for _ in range(3):
        api.get()

    eventually(lambda: api.http.head(api.path()).headers["graphstash-hits"] == "3")


def test_the_same_bytes_again_are_fine(api):
    api.put(BLOB)

    again = api.put(BLOB)

    assert again.status_code == 200
    assert again.headers["etag"] == Digest.of(BLOB).etag
    assert api.stats()["puts"] == 1


def test_other_bytes_are_a_conflict_and_the_first_ones_stay(api, problem, eventually):
    api.put(BLOB)

    refused = problem(api.put(b"other"), 409, "conflict", "the first upload is kept")

    assert refused["digest"] == str(Digest.of(BLOB))
    assert refused["given_digest"] == str(Digest.of(b"other"))
    assert api.get().content == BLOB
    eventually(lambda: api.stats()["conflicts"] == 1)


@pytest.mark.parametrize("blob", [BLOB, b"other"])
def test_if_none_match_star_refuses_any_second_upload(api, problem, blob):
    api.put(BLOB, If_None_Match="*")

    refused = problem(api.put(blob, If_None_Match="*"), 412, "precondition_failed", "If-None-Match")

    assert refused["digest"] == str(Digest.of(BLOB))


def test_equal_blobs_of_two_artifacts_are_kept_once(api, files):
    blob = b"shared" + api.namespace.encode()
    before = len(files())

    api.put(blob, 1)
    api.put(blob, 2)

    assert len(files()) == before + 1


def test_a_deleted_artifact_is_gone_with_its_blob(api, files, problem):
    blob = b"deleted" + api.namespace.encode()
    api.put(blob)
    api.get()

    assert api.http.delete(api.path()).status_code == 204

    problem(api.get(), 404, "not_found")
    assert not [path for path in files() if path.name == Digest.of(blob).sha256]
    assert api.stats()["artifacts"] == 0
    assert api.stats()["size_bytes"] == 0


def test_deleting_what_is_absent_is_not_found(api, problem):
    problem(api.http.delete(api.path()), 404, "not_found")


def test_a_blob_stays_while_another_artifact_has_it(api):
    api.put(BLOB, 1)
    api.put(BLOB, 2)

    api.http.delete(api.path(1))

    assert api.get(1).status_code == 404
    assert api.get(2).content == BLOB


def test_a_key_can_be_used_again_after_a_deletion(api):
    api.put(b"first")
    api.get()
    api.http.delete(api.path())

    assert api.put(b"second").status_code == 201
    assert api.get().content == b"second"


def test_namespaces_do_not_see_each_other(api, connect):
    api.put(BLOB)

    other = connect(api.url, f"{api.namespace}-other")

    assert other.get().status_code == 404
    assert other.put(b"other bytes").status_code == 201


@pytest.mark.parametrize("listed", ["{etag}", "W/{etag}", '"a", {etag}', '"a" , W/{etag}', "*"])
def test_a_matching_if_none_match_gets_304(api, listed):
    api.put(BLOB)

    answer = api.get(If_None_Match=listed.format(etag=Digest.of(BLOB).etag))

    assert (answer.status_code, answer.content) == (304, b"")
    assert answer.headers["etag"] == Digest.of(BLOB).etag
    assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"


def test_another_etag_gets_the_bytes(api):
    api.put(BLOB)

    assert api.get(If_None_Match='"sha256:abc", "x"').content == BLOB


def test_head_answers_conditions_too(api):
    api.put(BLOB)

    head = api.http.head(api.path(), headers={"If-None-Match": Digest.of(BLOB).etag})

    assert head.status_code == 304


def test_hits_misses_and_saved_seconds_are_counted(api, eventually):
    api.put(BLOB, seconds=2.5)
    api.get(1)
    api.get()
    api.get()
    api.get(Range="bytes=10-19")
    api.get(If_None_Match="*")
    api.get(Graphstash_Copy="1")
    api.get(1, Graphstash_Copy="1")

    def counted() -> bool:
        stats = api.stats()
        return (
            stats["misses"] == 1
            and stats["hits"] == 2
            and stats["saved_seconds"] == 5.0
            and stats["served_bytes"] == 3 * len(BLOB) + 10
        )

    eventually(counted)


def test_a_miss_in_a_namespace_that_nothing_was_stored_in_leaves_no_trace(api, connect, eventually):
    made_up = connect(api.url, f"{api.namespace}-made-up")
    api.put(BLOB)

    made_up.get()
    api.get(1)

    eventually(lambda: api.stats()["misses"] == 1)  # the flush that had the other miss, too
    assert made_up.stats() == {}


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/Team/artifacts/jax/cpu/{f}", "invalid_namespace"),
        ("/v1/../artifacts/jax/cpu/{f}", None),
        ("/v1/%2e%2e/artifacts/jax/cpu/{f}", "invalid_namespace"),
        ("/v1/..%00/artifacts/jax/cpu/{f}", "invalid_namespace"),
        ("/v1/%ff%fe/artifacts/jax/cpu/{f}", "invalid_namespace"),
        ("/v1/" + "n" * 65 + "/artifacts/jax/cpu/{f}", "invalid_namespace"),
        ("/v1/team/artifacts/wasm/cpu/{f}", "invalid_kind"),
        ("/v1/team/artifacts/jax/CPU/{f}", "invalid_device_type"),
        ("/v1/team/artifacts/jax/" + "c" * 129 + "/{f}", "invalid_device_type"),
        ("/v1/team/artifacts/jax/cpu%0a/{f}", "invalid_device_type"),
        ("/v1/team/artifacts/jax/cpu/abc", "invalid_fingerprint"),
        ("/v1/team/artifacts/jax/cpu/{F}", "invalid_fingerprint"),
        ("/v1/team%2fx/artifacts/jax/cpu/{f}", "not_found"),
        ("/v1/team/artifacts/jax/..%2f..%2fetc%2fpasswd/{f}", "not_found"),
        ("/v1/team/artifacts/jax//{f}", "unknown_path"),
        ("/v1/team/artifacts/jax/cpu/{f}/", "unknown_path"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_path_segments_are_validated_and_never_resolved(api, problem, method, path, code):
    path = path.format(f="a" * 64, F="A" * 64)
    headers = {"Repr-Digest": Digest.of(b"x").repr_digest} if method == "PUT" else {}
    content = b"x" if method == "PUT" else None

    answer = api.http.request(method, httpx.URL(api.url + path), headers=headers, content=content)

    if code is None:  # the client itself may resolve the dots
        assert answer.status_code in {400, 404}
    else:
        problem(answer, 404 if code in {"not_found", "unknown_path"} else 400, code)


@pytest.mark.parametrize("version", ["2", "0", "one", "1.0"])
def test_another_protocol_version_is_refused(api, problem, version):
    problem(api.get(Graphstash_Protocol=version), 400, "unsupported_protocol", "version 1")


def test_a_row_whose_blob_was_lost_is_dropped_and_can_be_stored_again(api, file_of, caplog):
    blob = b"lost" + api.namespace.encode()
    api.put(blob)
    api.get()
    healed = api.http.get("/v1/stats").json()["healed"]
    file_of(blob).unlink()

    assert api.get().status_code == 404
    assert api.http.get("/v1/stats").json()["healed"] == healed + 1
    assert f"of {api.namespace}: its blob {Digest.of(blob)} is lost" in caplog.text
    assert api.stats()["artifacts"] == 0
    assert api.put(blob).status_code == 201
    assert api.get().content == blob


@pytest.mark.parametrize("damage", [b"", b"short", b"long" * 100], ids=["empty", "short", "long"])
def test_a_blob_of_another_size_is_never_served(api, files, file_of, damage):
    blob = b"damaged" * 20 + api.namespace.encode()
    api.put(blob)
    file_of(blob).write_bytes(damage)

    assert api.http.head(api.path()).status_code == 404
    assert api.get().status_code == 404
    assert not [path for path in files() if path.name == Digest.of(blob).sha256]


def test_an_upload_of_the_same_bytes_repairs_a_lost_blob(api, file_of):
    blob = b"repaired" + api.namespace.encode()
    api.put(blob)
    file_of(blob).unlink()

    assert api.put(blob).status_code == 201
    assert api.get().content == blob

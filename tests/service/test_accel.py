"""X-Accel-Redirect: nginx sends the blobs, and the answers do not show it.

Every test asks a real server directly and through a real nginx with the configuration of docker/,
and compares.
"""

import base64
import json
import os
from contextlib import closing

import pytest

from graphstash_schema import Digest
from support.api import Api
from support.nginx import in_front_of, seen

BLOB = os.urandom(300_000)
ETAG = Digest.of(BLOB).etag


GETS = {
    "whole": ({}, 200),
    "head of it": ({"Range": "bytes=0-99"}, 206),
    "middle": ({"Range": "bytes=1000-200000"}, 206),
    "open end": ({"Range": "bytes=299990-"}, 206),
    "suffix": ({"Range": "bytes=-100"}, 206),
    "long suffix": ({"Range": "bytes=-999999"}, 206),
    "beyond the end": ({"Range": "bytes=299990-999999"}, 206),
    "spaces": ({"Range": "bytes= 5 - 6"}, 206),
    "upper case": ({"Range": "BYTES=5-6"}, 206),
    "several": ({"Range": "bytes=0-1,5-6"}, 200),
    "backwards": ({"Range": "bytes=9-5"}, 200),
    "no range": ({"Range": "bytes=-"}, 200),
    "other unit": ({"Range": "lines=0-1"}, 200),
    "too many digits": ({"Range": "bytes=" + "9" * 30 + "-"}, 200),
    "unsatisfiable": ({"Range": "bytes=300000-"}, 416),
    "no byte": ({"Range": "bytes=-0"}, 416),
    "if-range, same": ({"Range": "bytes=0-9", "If-Range": ETAG}, 206),
    "if-range, other": ({"Range": "bytes=0-9", "If-Range": '"sha256:other"'}, 200),
    "if-range, weak": ({"Range": "bytes=0-9", "If-Range": "W/" + ETAG}, 200),
    "if-range, date": ({"Range": "bytes=0-9", "If-Range": "Sat, 21 Nov 2026 10:00:00 GMT"}, 200),
    "not modified": ({"If-None-Match": ETAG}, 304),
    "not modified, weak": ({"If-None-Match": f'"x", W/{ETAG}'}, 304),
    "any": ({"If-None-Match": "*"}, 304),
    "modified": ({"If-None-Match": '"sha256:other"'}, 200),
    "not modified, and a range": ({"If-None-Match": ETAG, "Range": "bytes=999999-"}, 304),
    "if-match": ({"If-Match": '"sha256:other"'}, 200),
    "modified since": ({"If-Modified-Since": "Sat, 21 Nov 2099 10:00:00 GMT"}, 200),
    "unmodified since": ({"If-Unmodified-Since": "Sat, 21 Nov 2020 10:00:00 GMT"}, 200),
    "compression is welcome": ({"Accept-Encoding": "gzip, br"}, 200),
}


@pytest.fixture(scope="module")
def reads(live_server, nginx):
    """The same artifact, read from the server and through nginx."""
    with closing(Api(live_server.url, "accel")) as api, closing(Api(nginx.url, "accel")) as through:
        assert api.put(BLOB, seconds=12.5).status_code == 201
        yield api, through


@pytest.mark.parametrize("case", GETS)
def test_get_through_nginx_equals_direct_get(reads, case):
    headers, status = GETS[case]
    direct, behind = (each.http.get(each.path(), headers=headers) for each in reads)

    assert seen(behind) == seen(direct)
    assert behind.status_code == status


@pytest.mark.parametrize("case", ["whole", "middle", "unsatisfiable", "not modified"])
def test_head_through_nginx_equals_direct_head(reads, case):
    direct, behind = (each.http.head(each.path(), headers=GETS[case][0]) for each in reads)

    for answer in (direct, behind):
        answer.headers.pop("graphstash-hits", None)  # counted later
    assert seen(behind) == seen(direct)


def test_nginx_sends_the_bytes_and_the_server_does_not(reads, nginx):
    _, through = reads
    for asked in ({}, {"Range": "bytes=10-19"}, {"If-None-Match": '"other"'}):
        answer = through.get(**asked, X_Request_Id=f"asked.by-{len(str(asked))}")

        assert answer.content == (BLOB[10:20] if "Range" in asked else BLOB)
        assert answer.headers["x-request-id"].startswith("asked.by-")
        assert nginx.has_sent(answer.headers["x-request-id"])
        assert "x-accel-redirect" not in answer.headers


def test_blobs_of_every_size_and_largest_metadata_are_served(api, through):
    for number, blob in enumerate([b"", b"x", b"z" * (8 * 1024**2 + 1)]):
        assert through.put(blob, number).status_code == 201
        assert seen(through.get(number)) == seen(api.get(number))

    text = json.dumps({"compile_seconds": 1, "raw_size_bytes": 2, "note": "n" * 12_000})
    metadata = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")  # nearly 16 KiB
    through.put(BLOB, 9, Graphstash_Metadata=metadata)
    # Before anything is a hit: hits are counted every second, and HEAD tells how many.
    assert seen(through.head(9)) == seen(api.head(9))
    assert seen(through.get(9)) == seen(api.get(9))
    assert api.get(9).headers["graphstash-metadata"] == metadata


def test_blobs_sent_by_nginx_are_counted_as_hits(api, through, eventually):
    api.put(BLOB, seconds=12.5)
    assert through.get().status_code == 200
    assert through.get(Range="bytes=0-9").status_code == 206
    assert through.get(Range="bytes=10-19").status_code == 206
    assert through.get(If_None_Match=ETAG).status_code == 304

    eventually(lambda: api.stats().get("served_bytes") == len(BLOB) + 20)
    assert api.stats()["hits"] == 2


def test_a_file_that_vanished_is_a_miss_and_can_be_stored_again(api, through, file_of, problem):
    unlike = BLOB + api.namespace.encode()
    api.put(unlike)
    assert through.get().status_code == 200
    file_of(unlike).unlink()

    problem(through.get(), 404, "not_found", "there is no artifact", api.namespace)

    assert through.put(unlike).status_code == 201
    assert through.get().content == unlike


def test_a_file_that_nginx_cannot_find_is_sent_by_the_server(live_server, api, connect, tmp_path):
    api.put(BLOB, seconds=12.5)
    (tmp_path / "other").mkdir()
    with in_front_of(
        live_server, tmp_path / "nginx", GRAPHSTASH_BLOB_DIR=str(tmp_path / "other")
    ) as blind:
        through = connect(blind.url, str(api.namespace))
        for asked in ({}, {"Range": "bytes=10-19"}):
            assert seen(through.get(**asked)) == seen(api.get(**asked))
        # What vanished everywhere is what the server says it is.
        assert seen(through.get(7)) == seen(api.get(7))


def test_client_cannot_claim_that_nginx_reads_blobs(live_server, api, connect, tmp_path):
    api.put(BLOB)
    with in_front_of(live_server, tmp_path / "nginx", GRAPHSTASH_ACCEL="") as plain:
        answer = connect(plain.url, str(api.namespace)).get(Graphstash_Accel="1")

        assert (answer.status_code, answer.content) == (200, BLOB)
        assert not plain.has_sent(answer.headers["x-request-id"])


def test_client_cannot_request_internal_path_of_nginx(api, through, problem):
    api.put(BLOB)
    sha256 = Digest.of(BLOB).sha256

    refused = through.http.get(f"/_blobs/sha256/{sha256[:2]}/{sha256}")

    problem(refused, 404, "unknown_path", "/_blobs/")


def test_a_large_blob_is_named_to_a_proxy_and_a_small_one_passed_on(api):
    for number, (size, is_named) in enumerate([(256 * 1024 - 1, False), (256 * 1024, True)]):
        blob = os.urandom(size)
        api.put(blob, number)

        answer = api.get(number, Graphstash_Accel="1")

        sha256 = Digest.of(blob).sha256
        named = f"/_blobs/sha256/{sha256[:2]}/{sha256}" if is_named else None
        assert answer.status_code == 200
        assert answer.headers.get("x-accel-redirect") == named
        assert answer.content == (b"" if is_named else blob)
        assert "x-accel-redirect" not in api.get(number).headers

"""X-Accel-Redirect: nginx sends the blobs, and its answers equal the server's.

Each test sends equal requests to a server, and to nginx with the configuration of docker/.
"""

import base64
import json
import os
from contextlib import closing

import pytest

from graphstash_schema import Digest
from support.api import Api
from support.nginx import in_front_of, seen
from support.waiting import until

# The content of the database does not depend on which process sends the bytes.
pytestmark = pytest.mark.parametrize("start_once", ["sqlite"], indirect=True)

BLOB = os.urandom(300_000)
ETAG = Digest.of(BLOB).etag


RANGES = (
    *("bytes=0-99", "bytes=1000-200000", "bytes=299990-", "bytes=-100", "bytes=-999999"),
    *("bytes=299990-999999", "bytes= 5 - 6", "BYTES=5-6", "bytes=0-1,5-6", "bytes=9-5", "bytes=-"),
    *("lines=0-1", "bytes=" + "9" * 30 + "-", "bytes=300000-", "bytes=-0"),
)
GETS = (
    {},
    *({"Range": each} for each in RANGES),
    *(
        {"Range": "bytes=0-9", "If-Range": each}
        for each in (ETAG, '"sha256:other"', "W/" + ETAG, "Sat, 21 Nov 2026 10:00:00 GMT")
    ),
    *({"If-None-Match": each} for each in (ETAG, f'"x", W/{ETAG}', "*", '"sha256:other"')),
    {"If-None-Match": ETAG, "Range": "bytes=999999-"},
    {"If-Match": '"sha256:other"'},
    {"If-Modified-Since": "Sat, 21 Nov 2099 10:00:00 GMT"},
    {"If-Unmodified-Since": "Sat, 21 Nov 2020 10:00:00 GMT"},
    {"Accept-Encoding": "gzip, br"},
)


@pytest.fixture(scope="module")
def reads(live_server, nginx, new_namespace):
    """Readers of one artifact: from the server, and through nginx."""
    name = new_namespace()
    with closing(Api(live_server.url, name)) as api, closing(Api(nginx.url, name)) as through:
        assert api.put(BLOB, seconds=12.5).status_code == 201
        yield api, through


def test_answer_through_nginx_equals_direct_answer(reads):
    """tests/service/test_ranges.py tests the direct answers."""
    found = set()
    for headers in GETS:
        direct, behind = (each.http.get(each.path(), headers=headers) for each in reads)
        assert seen(behind) == seen(direct), headers
        found.add(direct.status_code)

        direct, behind = (each.http.head(each.path(), headers=headers) for each in reads)
        for answer in (direct, behind):
            answer.headers.pop("graphstash-hits", None)  # counted later
        assert seen(behind) == seen(direct), headers
    assert found == {200, 206, 304, 416}


def test_nginx_sends_the_bytes_and_the_server_does_not(reads, nginx, problem):
    direct, through = reads
    for asked in ({}, {"Range": "bytes=10-19"}, {"If-None-Match": '"other"'}):
        answer = through.get(**asked, X_Request_Id=f"asked.by-{len(str(asked))}")

        assert answer.content == (BLOB[10:20] if "Range" in asked else BLOB)
        assert answer.headers["x-request-id"].startswith("asked.by-")
        assert nginx.has_sent(answer.headers["x-request-id"])
        assert "x-accel-redirect" not in answer.headers
    location = direct.get(Graphstash_Accel="1").headers["x-accel-redirect"]
    problem(through.http.get(location), 404, "unknown_path", "/_blobs/")  # internal path


def test_blobs_of_every_size_and_largest_metadata_are_served(api, through):
    for number, blob in enumerate([b"", b"x", b"z" * (8 * 1024**2 + 1)]):
        assert through.put(blob, number).status_code == 201
        assert seen(through.get(number)) == seen(api.get(number))

    text = json.dumps({"compile_seconds": 1, "raw_size_bytes": 2, "note": "n" * 12_000})
    metadata = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")  # nearly 16 KiB
    through.put(BLOB, 9, Graphstash_Metadata=metadata)
    # Before the first hit: the server counts hits every second, and HEAD returns their number.
    assert seen(through.head(9)) == seen(api.head(9))
    assert seen(through.get(9)) == seen(api.get(9))
    assert api.get(9).headers["graphstash-metadata"] == metadata


def test_blobs_sent_by_nginx_are_counted_as_hits(api, through):
    api.put(BLOB, seconds=12.5)
    assert through.get().status_code == 200
    assert through.get(Range="bytes=0-9").status_code == 206
    assert through.get(Range="bytes=10-19").status_code == 206
    assert through.get(If_None_Match=ETAG).status_code == 304

    until(lambda: api.stats().get("served_bytes") == len(BLOB) + 20)
    assert api.stats()["hits"] == 2


def test_vanished_file_is_a_miss_and_can_be_stored_again(api, through, file_of, problem):
    unlike = BLOB + api.namespace.encode()
    api.put(unlike)
    assert through.get().status_code == 200
    file_of(unlike).unlink()

    problem(through.get(), 404, "not_found", "there is no artifact", api.namespace)

    assert through.put(unlike).status_code == 201
    assert through.get().content == unlike


@pytest.mark.parametrize("why", ["GRAPHSTASH_BLOB_DIR", "GRAPHSTASH_ACCEL"])
def test_server_sends_blob_that_nginx_cannot_read(live_server, api, connect, tmp_path, why):
    """A client cannot claim that nginx has access to the blobs."""
    api.put(BLOB, seconds=12.5)
    directory = str(tmp_path) if why == "GRAPHSTASH_BLOB_DIR" else ""
    with in_front_of(live_server, tmp_path / "nginx", **{why: directory}) as blind:
        through = connect(blind.url, str(api.namespace))
        for asked in ({}, {"Range": "bytes=10-19"}, {"Graphstash-Accel": "1"}):
            answer = through.http.get(api.path(), headers=asked)
            direct = api.http.get(api.path(), headers={"Range": asked.get("Range", "")})
            assert seen(answer) == seen(direct)
            if why == "GRAPHSTASH_ACCEL":
                assert not blind.has_sent(answer.headers["x-request-id"])
        # If the blob is missing everywhere, nginx passes on the server's refusal.
        assert seen(through.get(7)) == seen(api.get(7))


def test_server_names_large_blobs_to_a_proxy_and_sends_small_ones(api):
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

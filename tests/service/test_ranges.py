"""Range and If-Range: valid, ignored and unsatisfiable headers."""

import pytest

from graphstash_schema import Digest
from graphstash_server.reading.conditions import requested_wait

BLOB = bytes(range(256)) * 10  # 2,560 bytes
SIZE = len(BLOB)


def test_one_range_is_served_as_asked(api):
    api.put(BLOB)
    for asked, start, stop in (
        ("bytes=0-0", 0, 1),
        ("bytes=100-199", 100, 200),
        ("bytes=100-", 100, SIZE),
        ("bytes=-100", SIZE - 100, SIZE),
        ("bytes=-99999", 0, SIZE),
        ("bytes=2550-99999", 2550, SIZE),
        (f"bytes={SIZE - 1}-", SIZE - 1, SIZE),
        ("BYTES=5-6", 5, 7),
        ("bytes= 5 - 6", 5, 7),
    ):
        answer = api.get(Range=asked)
        assert (answer.status_code, answer.content) == (206, BLOB[start:stop]), asked
        assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{SIZE}"
        assert answer.headers["content-length"] == str(stop - start)
        assert answer.headers["etag"] == Digest.of(BLOB).etag


def test_header_that_is_not_one_range_returns_the_whole_artifact(api):
    api.put(BLOB)
    for asked in (
        *("bytes=0-1,5-6", "bytes=9-5", "bytes=-", "bytes=a-b", "lines=0-1", "bytes=0x10-"),
        *("bytes", "", "bytes=1-2-3", "bytes=" + "9" * 30 + "-"),
    ):
        answer = api.get(Range=asked)
        assert (answer.status_code, answer.content) == (200, BLOB), asked
        assert "content-range" not in answer.headers


def test_range_without_a_byte_is_not_satisfiable(api, problem):
    api.put(BLOB)
    api.put(b"", 1)
    for asked in (f"bytes={SIZE}-", "bytes=99999-100000", "bytes=-0"):
        answer = api.get(Range=asked)
        refused = problem(answer, 416, "range_not_satisfiable", str(SIZE))
        assert refused["limit"] == SIZE
        assert answer.headers["content-range"] == f"bytes */{SIZE}"
    problem(api.get(1, Range="bytes=0-"), 416, "range_not_satisfiable")


def test_conditions_are_evaluated_before_the_range(api):
    """The server sends a part only of the same version."""
    api.put(BLOB)
    etag = Digest.of(BLOB).etag
    for condition, status in (
        (etag, 206),
        ('"sha256:other"', 200),
        ("W/" + etag, 200),
        ("Sat, 21 Nov 2026 10:00:00 GMT", 200),
    ):
        assert api.get(Range="bytes=0-9", If_Range=condition).status_code == status
    assert api.get(Range="bytes=99999-", If_None_Match=etag).status_code == 304


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [
        *(("wait=5", 5), ("respond-async, wait=10", 10), ("wait = 7 ; x=1", 7), ('wait="3"', 3)),
        ("wait=3600", 60),
        *((prefer, None) for prefer in ("wait=-1", "wait=1.5", "await=5", None)),
    ],
)
def test_wait_header_is_capped_at_the_limit(prefer, seconds):
    assert requested_wait(prefer, at_most_seconds=60) == seconds

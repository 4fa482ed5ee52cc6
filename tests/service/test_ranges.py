"""Which part of an artifact is asked for: Range, If-Range, and what cannot be satisfied."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstash_schema import Digest
from graphstash_server.errors import ServerError
from graphstash_server.reading.conditions import lists_etag, requested_range, requested_wait

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


def test_a_header_that_is_not_one_range_gets_the_whole_artifact(api):
    api.put(BLOB)
    for asked in (
        *("bytes=0-1,5-6", "bytes=9-5", "bytes=-", "bytes=a-b", "lines=0-1", "bytes=0x10-"),
        *("bytes", "", "bytes=1-2-3", "bytes=" + "9" * 30 + "-"),
    ):
        answer = api.get(Range=asked)
        assert (answer.status_code, answer.content) == (200, BLOB), asked
        assert "content-range" not in answer.headers


def test_a_range_without_a_byte_cannot_be_satisfied(api, problem):
    api.put(BLOB)
    api.put(b"", 1)
    for asked in (f"bytes={SIZE}-", "bytes=99999-100000", "bytes=-0"):
        answer = api.get(Range=asked)
        refused = problem(answer, 416, "range_not_satisfiable", str(SIZE))
        assert refused["limit"] == SIZE
        assert answer.headers["content-range"] == f"bytes */{SIZE}"
    problem(api.get(1, Range="bytes=0-"), 416, "range_not_satisfiable")


def test_conditions_come_before_the_range(api):
    """Only the same version is served in part."""
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


@given(
    size=st.integers(0, 50),
    first=st.none() | st.integers(0, 60),
    last=st.none() | st.integers(0, 60),
)
def test_a_range_is_never_outside_the_blob(size, first, last):
    header = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    try:
        span = requested_range(header, None, etag='"e"', size_bytes=size)
    except ServerError as error:
        span, refused_at = None, error.limit
    else:
        refused_at = size
    assert refused_at == size
    assert span is None or 0 <= span[0] < span[1] <= size


@given(st.text(max_size=40))
def test_no_header_breaks_the_parsers(text):
    lists_etag(text, '"e"')
    wait = requested_wait(text, at_most_seconds=60)
    assert wait is None or 0 <= wait <= 60


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [
        ("wait=5", 5),
        ("respond-async, wait=10", 10),
        ("wait = 7 ; x=1", 7),
        ('wait="3"', 3),
        ("wait=3600", 60),
        ("wait=-1", None),
        ("wait=1.5", None),
        ("await=5", None),
        (None, None),
    ],
)
def test_wait_header_is_capped_at_the_limit(prefer, seconds):
    assert requested_wait(prefer, at_most_seconds=60) == seconds

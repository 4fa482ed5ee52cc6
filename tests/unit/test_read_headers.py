"""Request headers that a read may ignore."""

import inspect

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphstash_schema import protocol
from graphstash_server.fast import answers
from graphstash_server.reading import headers
from graphstash_server.reading.headers import READ, relevant_name, unrecognized_headers


def test_no_header_of_protocol_or_of_message_framing_is_ignored():
    own = {
        value.lower().encode()
        for name, value in inspect.getmembers(protocol)
        if name.startswith("HEADER_")
    }
    framing = {
        *(b"content-length", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect"),
        *(b"proxy-connection", b"proxy-authorization", b"content-encoding", b"max-forwards"),
    }
    for name in (*READ, *own, *framing):
        assert relevant_name(name.title()) == name


@pytest.mark.parametrize(
    "name", ["X-Forwarded-For", "CF-Ray", "x-b3-traceid", "X-ENVOY-A-B-1", "Sec-CH-UA", "Cookie"]
)
def test_headers_of_proxies_tracers_and_browsers_are_ignored(name):
    assert relevant_name(name.encode()) is None


@pytest.mark.parametrize(
    "name",
    [
        "X-Forwarded-",
        "X-Forwarded",
        "CF-R ay",
        "X-Forwarded_For",
        "CFO",
        "X-Original-URL",
        "Cookie2",
        "",
    ],
)
def test_similar_names_are_not_ignored(name):
    assert relevant_name(name.encode()) == name.lower().encode()


def test_unknown_and_repeated_headers_are_not_ignored():
    names = b"host via via range if-match x-new range graphstash-job x-new x-other".split()
    assert unrecognized_headers(names) == ["range", "x-new", "x-other"]
    assert not unrecognized_headers([b"host", b"cookie", b"cookie", b"authorization"])


@pytest.mark.parametrize(
    ("header", "are_kept"),
    [
        (b"Range: bytes=7-", True),
        (b"Cookie: " + b"9" * 60_000, True),
        (b"Authorization: Bearer " + b"9" * 60_000, True),
        (b"Range: bytes=7-" + b"9" * 60_000, False),
        (b"Host-" + b"n" * 60_000 + b": 1", False),
        (b"X-Forwarded-" + b"n" * 60_000 + b": 1", True),
    ],
)
def test_long_headers_are_parsed_alike_but_not_kept(header, are_kept):
    answers._meaning.cache_clear()
    headers._kept.cache_clear()
    found = [answers._fields_of(b"\r\nHost: a\r\n" + header + b"\r\n\r\n") for _ in range(2)]
    assert found[0] == found[1]
    assert answers._meaning.cache_info().currsize == are_kept
    long_name = len(header.split(b":")[0]) > 64
    assert headers._kept.cache_info().currsize == 2 - long_name
    assert (found[0] is None) == header.startswith(b"Host-")


VALUES = st.sampled_from([b"a.1", b"Root=1-67-8", b"", b"a b", b"<", b"\xe9", b"1\x00", b"9" * 200])
LINES = st.tuples(
    st.sampled_from(
        [
            *(b"X-Request-Id", b"x-request-id", b"CF-Ray", b"X-Amzn-Trace-Id", b"X-Correlation-ID"),
            *(b"Host", b"Authorization", b"X-New", b" folded", b"CF-Ray ", b""),
        ]
    ),
    st.sampled_from([b":", b": ", b":\t ", b" :", b""]),
    VALUES,
    st.sampled_from([b"", b" "]),
    st.sampled_from([b"\r\n", b"\r\n", b"\n", b"\r\n ", b"\r"]),
)


@given(st.lists(LINES.map(b"".join), max_size=6))
@example([b"CF-Ray: a\r\n", b"X-Request-Id: a.1\r\n", b"X-Amzn-Trace-Id: Root=1\r\n"])
@example([b"X-Request-Id: a.1\r\n", b"X-Request-Id: <\r\n"])
def test_headers_without_ids_mean_the_same(lines):
    head = b"\r\nHost: a\r\n" + b"".join(lines) + b"\r\n"
    expected = answers._fields_of(head)
    rest, request_id = answers._without_ids(head)
    fields = answers._fields_of(rest)
    if fields is not None:
        fields = fields._replace(request_id=request_id or fields.request_id)
    assert fields == expected


def test_requests_with_different_ids_are_parsed_once():
    answers._fields.cache_clear()
    for number in range(3):
        ids = b"X-Request-Id: id-%d\r\nCF-Ray: %d-FRA\r\nX-Amzn-Trace-Id: Root=%d" % ((number,) * 3)
        rest, request_id = answers._without_ids(b"\r\nHost: a\r\n" + ids + b"\r\n\r\n")
        assert answers._fields(rest) is not None
        assert request_id == b"id-%d" % number
    assert answers._fields.cache_info().misses == 1

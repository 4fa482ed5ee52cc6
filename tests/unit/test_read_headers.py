"""Which request headers a read may ignore."""

import inspect

import pytest

from graphstash_schema import protocol
from graphstash_server.reading.headers import READ, relevant_name, strangers


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


def test_strangers_are_unknown_and_repeated_headers():
    names = b"host via via range if-match x-new range graphstash-job x-new x-other".split()
    assert strangers(names) == ["range", "x-new", "x-other"]
    assert not strangers([b"host", b"cookie", b"cookie", b"authorization"])

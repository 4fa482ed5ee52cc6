"""A redirect never carries a token, a namespace or an upload to another server."""

import dataclasses

import pytest

from graphstash import CacheError
from support.http_server import Answer
from support.listener import Listener
from support.reader_job import OWN

PAYLOAD = b"a graph " * 500

_SENT = {"host", "accept-encoding", "connection", "accept"}
"""Headers that every HTTP client sends."""


@pytest.fixture
def elsewhere():
    with Listener() as listener:
        listener.status = 200
        yield listener


def redirecting(location):
    def change(request, answer):
        if request.method != "GET" or "/artifacts/" not in request.path:
            return answer
        return dataclasses.replace(
            answer, status=307, headers=answer.headers | {"location": location}, body=b""
        )

    return change


def heads(listener):
    """Return the received request lines and the header names in lower case."""
    found = []
    for head in listener.heads:
        first, *lines = head.strip().split("\r\n")
        found.append((first, {line.split(":")[0].lower() for line in lines}))
    return found


def assert_nothing_of_ours(listener, space, token):
    received = "".join(listener.heads)
    assert token not in received
    assert space not in received
    assert "graphstash" not in received.lower()
    for _, names in heads(listener):
        assert names <= _SENT


@pytest.fixture
def token(fort, space):
    return fort.token(f"write:{space}")


def attack(fort, job, key, **others):
    """Assert that a job compiles and the server refuses its upload. Return the job's fallbacks."""
    with fort.withstands() as refused:
        assert job.build(key) == OWN
        assert job.compiles == 1
        assert (job.stats.hits, job.stats.conflicts) == (0, 1)
    assert refused == {"conflict": 1} | others
    return job.fallbacks


@pytest.mark.parametrize("user", ["", "user:password@"])
def test_redirect_of_a_download_carries_no_token_to_another_origin(
    fort, space, key, publish, middlebox, victim, elsewhere, token, user
):
    """A server can make its clients send one GET anywhere, such as to a port of the job's host. The
    job passes on no byte of the answer, and uses no credentials from the address.
    """
    publish(key(), PAYLOAD)
    where = elsewhere.url.replace("http://", f"http://{user}")
    box = middlebox(redirecting(f"{where}/latest/meta-data/iam?a=b"))
    elsewhere.body = "the host's own secret"
    job = victim(url=box.url, token=token)

    # The download fails there. The job asks this server once more and accepts no redirect.
    assert attack(fort, job, key()) == {"protocol": 1}
    assert_nothing_of_ours(elsewhere, space, token)
    asked = [request.headers for request in box.to("/artifacts/", method="GET")]
    assert ["graphstash-accept-redirect" in headers for headers in asked] == [True, False]
    sent = b"".join(request.body + request.path.encode() for request in box.requests)
    assert b"secret" not in sent
    assert "secret" not in str(job.stats)
    if not user:
        received = [first for first, _ in heads(elsewhere)]
        assert received == ["GET /latest/meta-data/iam?a=b HTTP/1.1"]


@pytest.mark.parametrize("status", [301, 303, 305, 307, 308])
def test_redirects_of_other_calls_are_not_followed(
    fort, key, middlebox, victim, elsewhere, token, status
):
    """The client follows only a 307, and only for a download that accepts redirects."""

    def change(request, answer):
        if request.method == "GET" and status in {305, 307}:
            return answer
        headers = answer.headers | {"location": f"{elsewhere.url}{request.path}"}
        return dataclasses.replace(answer, status=status, headers=headers, body=b"")

    box = middlebox(change)
    # The box replies itself and forwards nothing to the real server.
    box.ask = lambda request: Answer(
        404 if request.method == "GET" else 200, {"graphstash-protocol": "1"}, b""
    )
    job = victim(url=box.url, token=token)

    with fort.withstands() as refused:
        assert job.build(key()) == OWN
        with pytest.raises(CacheError, match="redirect"):
            job.stash.server.lookup([key()])
        assert set(job.fallbacks) == {"protocol"}
    assert refused == {}
    assert elsewhere.heads == []


def test_redirect_to_itself_is_followed_once(fort, space, key, publish, middlebox, victim, token):
    publish(key(), PAYLOAD)
    box = middlebox()
    box.change = redirecting(f"{box.url}{key().artifact_path(space)}")
    job = victim(url=box.url, token=token)

    assert attack(fort, job, key(), unauthenticated=1) == {"protocol": 1}
    # The job asks, follows the redirect once without the token, and asks again without redirects.
    shown = ["authorization" in request.headers for request in box.to("/artifacts/", method="GET")]
    assert shown == [True, False, True]


_LOCATIONS = (
    *("file:///etc/passwd", "ftp://127.0.0.1/", "data:application/octet-stream,x"),
    *("unix:///run/docker.sock", "//", "/v1/relative", "http://", "http://[::1"),
    *("http://127.0.0.1:99999/", "http://127.0.0.1:0/", "", "a" * 5000),
)


def test_redirect_to_an_invalid_location_is_refused(fort, key, publish, middlebox, victim, token):
    box = middlebox()
    for number, location in enumerate(_LOCATIONS):
        publish(key(number), PAYLOAD)
        box.change = redirecting(location)
        box.requests.clear()
        job = victim(url=box.url, token=token)
        assert attack(fort, job, key(number)) == {"protocol": 1}, location
        # The HTTP library refuses some of them before the job detects a redirect.
        assert len(box.to("/artifacts/", method="GET")) in {1, 2}

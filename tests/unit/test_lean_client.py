"""What LeanClient sends, compared with httpx's own client."""

import httpx
import pytest

from graphstash._http.lean_client import LeanClient

TIMEOUT = httpx.Timeout(5.0)


class Recorder(httpx.BaseTransport):
    """Keeps requests as a transport gets them, with the target that httpcore would send."""

    def __init__(self):
        self.requests = []
        self.closed = 0

    def handle_request(self, request):
        request.read()
        target = request.extensions.get("target", request.url.raw_path)
        self.requests.append((request, target))
        recorder = self

        class Body(httpx.SyncByteStream):
            def __iter__(self):
                yield b"body"

            def close(self):
                recorder.closed += 1

        return httpx.Response(302, headers={"Location": "/x", "Set-Cookie": "a=b"}, stream=Body())


@pytest.mark.parametrize("base_url", ["http://cache:8080", "https://cache/a/b", "https://c/a/"])
@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("GET", "/v1/team/artifacts/jax/cpu-x/00", None),
        ("GET", "/v1/-/audit?after=a%2Fb&limit=10", None),
        ("GET", "/v1/ü/manifests/a b?c=%20#d", None),
        ("POST", "/v1/team/artifacts:lookup", b"{}"),
        ("POST", "/v1/-/tokens", None),
        ("DELETE", "/v1/a", None),
    ],
)
def test_same_target_and_headers_as_from_httpx(base_url, method, path, content):
    headers = {"Graphstash-Protocol": "1", "User-Agent": "graphstash"}
    more = {"Accept-Encoding": "identity", "Graphstash-Copy": "1"}
    recorder = Recorder()
    lean = LeanClient(recorder, base_url=base_url, headers=headers)
    for client in (httpx.Client(transport=recorder, base_url=base_url, headers=headers), lean):
        with client.stream(method, path, headers=more, content=content, timeout=TIMEOUT):
            pass
    (expected, target), (sent, sent_target) = recorder.requests
    assert (sent.method, sent_target, sent.content) == (method, target, expected.content)
    assert {**expected.headers, "connection": ""} == {**sent.headers, "connection": ""}
    assert sent.extensions["timeout"] == expected.extensions["timeout"]
    assert sent.url.host == expected.url.host


def test_redirects_and_cookies_are_left_alone_and_response_is_closed():
    recorder = Recorder()
    client = LeanClient(recorder, base_url="http://cache", headers={})
    for number in (1, 2):
        with client.stream("GET", "/v1/a", timeout=TIMEOUT) as response:
            assert response.status_code == 302
            assert response.request.method == "GET"
            assert b"".join(response.iter_raw()) == b"body"
        assert recorder.closed == number
    with pytest.raises(ZeroDivisionError), client.stream("GET", "/v1/a", timeout=TIMEOUT):
        raise ZeroDivisionError
    assert recorder.closed == 3
    assert not any("cookie" in request.headers for request, _ in recorder.requests)
    assert recorder.requests[0][0].headers["accept-encoding"] == "identity"

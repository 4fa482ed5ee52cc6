"""Tokens that were revoked, have expired, are guessed, or are shown where none is looked for."""

import base64
from datetime import UTC, datetime, timedelta
from functools import partial

import httpx
import pytest

from graphstash_server.testing import LiveServer
from support.guarded_server import artifact_path
from support.waiting import until
from support.wire import Wire, head


@pytest.fixture
def second(any_fort):
    """Another server of the same database and the same blobs."""
    url = any_fort.database_url if "postgresql" in any_fort.database_url else ""
    settings = {"auth": "tokens", "insecure": False} | ({"database_url": url} if url else {})
    with LiveServer(any_fort.data_dir, **settings) as second:
        yield second


def test_a_revoked_token_is_shown_to_a_second_server(any_fort, second, space):
    """That has just seen it good: what it remembers ends by itself."""
    any_fort.fill(space)
    admin = any_fort.http(any_fort.admin)
    grants = [{"scope": "admin", "namespaces": space}]
    issued = admin.post("/v1/-/tokens", json={"description": "stolen", "grants": grants}).json()
    here = any_fort.http(issued["token"])
    thief = partial(
        httpx.request, headers={"Authorization": f"Bearer {issued['token']}"}, trust_env=False
    )
    access = f"{second.url}/v1/-/access"
    assert thief("GET", access).status_code == here.get("/v1/-/access").status_code == 200

    assert admin.delete(f"/v1/-/tokens/{issued['info']['id']}").status_code == 204

    assert here.get("/v1/-/access").status_code == 401  # at once, where it was
    until(lambda: thief("GET", access).status_code == 401)
    with any_fort.withstands():
        answers = [
            thief("PUT", second.url + artifact_path(space, 1), content=b"x"),
            thief("DELETE", second.url + artifact_path(space)),
            thief("GET", f"{second.url}/v1/stats"),
        ]
        assert {answer.status_code for answer in answers} == {401}


def test_an_expired_token_is_shown(any_fort, space):
    any_fort.fill(space)
    past = datetime.now(UTC) - timedelta(hours=1)
    token = any_fort.token(
        f"admin:{space}", clock=lambda: past, expires_at=past + timedelta(minutes=59, seconds=59)
    )

    with any_fort.withstands() as refused:
        answer = any_fort.http(token).delete(artifact_path(space))
        assert answer.status_code == 401
    assert refused == {"unauthenticated": 1}


def _forged(token):
    """What comes near to a token that is good."""
    head, secret = token[:21], token[21:]

    def other(character):
        return "A" if character != "A" else "B"

    return {
        "one character": head + other(secret[0]) + secret[1:],
        "the last character": head + secret[:-1] + other(secret[-1]),
        "the case": head + secret.swapcase(),
        "no secret": head,
        "an empty secret": head + "A" * 43,
        "more of it": token + "A",
        "less of it": token[:-1],
        "a quote": token[:-1] + "'",
        "sql": "gst_' or '1'='1_" + "A" * 43,
        "padding": token + "==",
        "a newline": token + "%0a",
        "a wide letter": token.replace("gst", "\uff47st").encode().decode("latin-1"),
        "nothing": "",
    }


def test_a_token_is_guessed(any_fort, space):
    """The id is no secret: whoever knows it guesses 256 bits, and learns nothing on the way."""
    any_fort.fill(space)
    forged = _forged(any_fort.token(f"admin:{space}"))

    with any_fort.withstands() as refused:
        answers = []
        for text in forged.values():
            with Wire(any_fort.url) as wire:
                answers.append(wire.ask(head("DELETE", artifact_path(space), token=text)))
        assert [answer.status for answer in answers] == [401] * len(forged)
        assert len({answer.problem["detail"] for answer in answers}) == 1
        assert {answer.headers["www-authenticate"] for answer in answers} == {
            'bearer realm="graphstash"'
        }
    assert refused == {"unauthenticated": len(forged)}


def test_a_token_is_shown_where_none_is_looked_for(any_fort, space):
    any_fort.fill(space)
    good = any_fort.token(f"admin:{space}")
    basic = base64.b64encode(f"token:{good}".encode()).decode()
    path = artifact_path(space)
    bearer, wrong = f"Authorization: Bearer {good}", "Authorization: Bearer nothing"
    requests = [
        (f"{path}?access_token={good}", []),
        (f"{path}?token={good}", []),
        (path, [f"Cookie: token={good}; Authorization=Bearer {good}"]),
        *((path, [f"{name}-{bearer}"]) for name in ("X", "Proxy", "X-Forwarded")),
        (path, [f"Graphstash-Token: {good}"]),
        (path, [f"Authorization: Basic {basic}"]),
        (path, [f"Authorization: {good}"]),
        (path, [f"Authorization: Token {good}"]),
        (path, [f"Authorization: Bearer Bearer {good}"]),
        (path, [f"{bearer}, Bearer {good}"]),
        *((path, headers) for headers in ([bearer] * 2, [wrong, bearer], [bearer, wrong])),
    ]

    with any_fort.withstands() as refused:
        for target, headers in requests:
            with Wire(any_fort.url) as wire:
                answer = wire.ask(head("DELETE", target, *headers))
            assert answer.status == 401, headers
            assert good.encode() not in answer.body
    assert refused == {"unauthenticated": len(requests)}
    assert any_fort.http(good).delete(path).status_code == 204


def test_guesses_by_the_hundred_push_out_no_good_token(fort, space):
    """Nor do they leave anything: an id that nobody has is forgotten again."""
    fort.fill(space)
    good = fort.http(fort.token(f"read:{space}"))
    assert good.get(artifact_path(space)).status_code == 200
    letters = "abcdefghijklmnop"

    with fort.withstands() as refused, Wire(fort.url) as wire:
        for number in range(300):
            token_id = "".join(letters[number >> shift & 15] for shift in range(0, 64, 4))
            guess = f"gst_{token_id}_{'A' * 43}"
            assert wire.ask(head("GET", "/v1/-/access", token=guess)).status == 401
        assert good.get(artifact_path(space)).status_code == 200
    assert refused == {"unauthenticated": 300}

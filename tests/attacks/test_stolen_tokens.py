"""The server refuses guessed tokens, and tokens outside the Authorization header."""

import base64

from support.guarded_server import artifact_path
from support.wire import Wire, head


def _forged(token):
    """Return texts that resemble a valid token."""
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


def test_guessed_token_is_refused(fort, space):
    """The id of a token is public. The secret has 256 bits, and no answer reveals a part of it."""
    fort.fill(space)
    forged = _forged(fort.token(f"admin:{space}"))

    with fort.withstands() as refused:
        answers = []
        for text in forged.values():
            with Wire(fort.url) as wire:
                answers.append(wire.ask(head("DELETE", artifact_path(space), token=text)))
        assert [answer.status for answer in answers] == [401] * len(forged)
        assert len({answer.problem["detail"] for answer in answers}) == 1
        assert {answer.headers["www-authenticate"] for answer in answers} == {
            'bearer realm="graphstash"'
        }
    assert refused == {"unauthenticated": len(forged)}


def test_token_outside_the_authorization_header_is_refused(fort, space):
    fort.fill(space)
    good = fort.token(f"admin:{space}")
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

    with fort.withstands() as refused:
        for target, headers in requests:
            with Wire(fort.url) as wire:
                answer = wire.ask(head("DELETE", target, *headers))
            assert answer.status == 401, headers
            assert good.encode() not in answer.body
    assert refused == {"unauthenticated": len(requests)}
    assert fort.http(good).delete(path).status_code == 204

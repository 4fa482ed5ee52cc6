"""Signing in to the dashboard: the cookie, its rights, and its end."""

import html
import re
from contextlib import ExitStack, closing
from datetime import timedelta
from http.cookies import SimpleCookie

import httpx
import pytest

from graphstash_schema import TOKEN_FORM
from graphstash_server.errors import ServerError
from graphstash_server.pages.sign_in import next_path
from graphstash_server.services.identity.sessions import MAX_SESSIONS_OF_TOKEN, SESSION_LIFETIME
from support.services import ACTOR, new_token
from support.sessions import HTML, sign_in

pytestmark = pytest.mark.anyio

SIGNED_IN = "Sign out"


def cookie_of(answer):
    """Return the name and the attributes of the cookie that an answer sets."""
    jar = SimpleCookie(answer.headers["set-cookie"])
    ((name, morsel),) = jar.items()
    return name, morsel


@pytest.fixture
def token(guarded, namespace):
    return guarded.token(f"read:{namespace}", description="a person")


@pytest.fixture
def signed_in(guarded):
    with ExitStack() as stack:
        yield lambda token, **fields: stack.enter_context(
            closing(sign_in(guarded.url, token, **fields))
        )


def test_cookie_is_strict_short_lived_and_opens_pages_only(guarded, token, namespace, signed_in):
    client = signed_in(token)
    answer = client.answer
    name, cookie = cookie_of(answer)

    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    assert answer.headers["cache-control"] == "no-store"
    assert name == "graphstash"
    assert cookie["httponly"]
    assert cookie["samesite"].lower() == "strict"
    assert (cookie["path"], cookie["domain"]) == ("/", "")
    assert 0 < int(cookie["max-age"]) <= SESSION_LIFETIME.total_seconds()
    for part in (token, *TOKEN_FORM.fullmatch(token).groupdict().values()):
        assert part not in answer.headers["set-cookie"]
    assert SIGNED_IN in client.get("/search").text
    for path in ("/v1/stats", "/v1/-/access", f"/v1/{namespace}/manifests/m"):
        assert client.get(path).status_code == 401, path


def test_cookie_over_tls_is_bound_to_the_host(guarded, token, signed_in):
    """A proxy ends TLS, as the browser's Origin or the proxy's header shows. Without TLS, any
    server of the domain can set a cookie, and sign a browser in as another user.
    """
    for headers in (
        {"Origin": guarded.url.replace("http:", "https:")},
        {"Origin": guarded.url.replace("http:", "https:"), "X-Forwarded-Proto": "https"},
    ):
        answer = guarded.http().post("/sign-in", data={"token": token}, headers=headers)
        name, cookie = cookie_of(answer)
        assert name == "__Host-graphstash"
        assert cookie["secure"]
        assert (cookie["path"], cookie["domain"]) == ("/", "")
    session = signed_in(token).cookies["graphstash"]

    def shows(name, **proxied):
        headers = {"Cookie": f"{name}={session}"} | proxied
        return SIGNED_IN in guarded.http().get("/search", headers=headers).text

    assert shows("graphstash")
    for scheme in ("https", "HTTPS, http"):
        assert not shows("graphstash", **{"X-Forwarded-Proto": scheme})
        assert shows("__Host-graphstash", **{"X-Forwarded-Proto": scheme})


def test_invalid_token_form_or_cookie_is_refused(guarded, token, signed_in):
    for wrong in (token[:-1] + ("A" if token[-1] != "A" else "B"), "gst_x", "", "a.b.c"):
        answer = signed_in(wrong).answer
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert 'role="alert"' in answer.text
    assert signed_in("gst_" + "x" * 10_000).answer.status_code == 413
    many = {f"f{number}": "1" for number in range(20)}
    assert signed_in("x", **many).answer.status_code == 400
    for value in ("A" * 43, "x", "A" * 5000, "a; b"):
        cookies = {"Cookie": f"graphstash={value}; __Host-graphstash={value}"}
        page = guarded.http().get("/search", headers=HTML | cookies)
        assert page.status_code == 200
        assert SIGNED_IN not in page.text


@pytest.mark.parametrize("form", ["/sign-in", "/sign-out"])
def test_form_of_another_site_changes_nothing(guarded, token, signed_in, form):
    own = guarded.url
    client = signed_in(token)
    for headers in (
        *({"Origin": origin} for origin in ("http://elsewhere.example", "null", "")),
        {},
        {"Origin": own, "Sec-Fetch-Site": "same-site"},
        {"Origin": own, "Sec-Fetch-Site": "cross-site"},
        {"Origin": f"{own}.elsewhere.example"},
        {"Origin": own.replace("http:", "ftp:")},
        {"Origin": own.replace("http:", "https:"), "X-Forwarded-Proto": "http"},
        {"Origin": own, "X-Forwarded-Proto": "https"},
        {"Origin": own.rpartition(":")[0]},
        {"Origin": own, "Host": "127.0.0.1"},
    ):
        answer = client.post(form, data={"token": token}, headers=headers)
        assert answer.status_code == 403, headers
        assert "set-cookie" not in answer.headers
    assert SIGNED_IN in client.get("/search").text


def test_session_ends_with_sign_out_new_sign_in_or_its_token(guarded, token, signed_in):

    def shows(cookies):
        with httpx.Client(base_url=guarded.url, headers=HTML, cookies=cookies) as thief:
            return SIGNED_IN in thief.get("/search").text

    client = signed_in(token)
    first = dict(client.cookies)
    client.post("/sign-in", data={"token": token}, headers={"Origin": guarded.url})
    second = dict(client.cookies)
    assert second != first
    assert (shows(first), shows(second)) == (False, True)

    answer = client.post("/sign-out", headers={"Origin": guarded.url})
    assert answer.status_code == 303
    assert not client.cookies
    assert not shows(second)

    third = dict(signed_in(token).cookies)
    assert shows(third)
    token_id = TOKEN_FORM.fullmatch(token)["id"]
    guarded.http(guarded.admin).delete(f"/v1/-/tokens/{token_id}").raise_for_status()
    assert not shows(third)


def test_redirect_after_sign_in_keeps_the_search_and_stays_on_this_server(
    guarded, token, signed_in
):
    for elsewhere in ("//evil.example", "/\\evil.example", "https://evil.example", "/a\r\nX: y"):
        assert next_path(elsewhere) == "/"
    assert signed_in(token, next="//evil.example").answer.headers["location"] == "/"
    asked = "/tuning?q=a*+%C3%A9%22&namespace="

    def kept(page):
        return html.unescape(re.search('name="next" value="([^"]*)"', page.text)[1])

    way = kept(guarded.http().get(asked, headers=HTML))
    mistyped = signed_in("gst_x", next=way).answer
    assert mistyped.status_code == 401
    assert way == kept(mistyped) == asked
    assert signed_in(token, next=way).answer.headers["location"] == asked
    assert kept(signed_in("gst_x", next="//evil.example/?q=x").answer) == "/"
    for path in ("//evil.example?q=x", "/%5Cevil.example?q=x", "/sign-in?next=//evil.example"):
        page = guarded.http().get(guarded.url + path, headers=HTML)
        assert "evil" not in "".join(re.findall('name="next" value="([^"]*)"', page.text))


def test_open_server_offers_no_sign_in(live_server):
    """It verifies no token, but a guarded server on its database would accept the session."""
    page = httpx.get(live_server.url + "/search", headers=HTML)
    assert page.status_code == 200
    assert "Sign in" not in page.text

    answer = httpx.post(
        f"{live_server.url}/sign-in",
        data={"token": f"gst_{'a' * 16}_{'A' * 43}"},
        headers=HTML | {"Origin": live_server.url},
    )
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.sql
async def test_session_is_valid_on_every_server_until_it_or_its_token_ends(opened):
    async with opened(auth="tokens") as one, opened(auth="tokens") as other:
        sessions = one.context.sessions
        tokens, soon = one.context.tokens, opened.clock.now + timedelta(seconds=60)
        lasting, revoked = await new_token(tokens), await new_token(tokens)
        ending = await new_token(tokens, expires_at=soon)
        long, short, void = [
            await sessions.begin(each.token) for each in (lasting, ending, revoked)
        ]
        assert long.expires_at == opened.clock.now + SESSION_LIFETIME
        assert short.expires_at == ending.info.expires_at
        found = await other.context.sessions.find(void.id)
        assert found.principal.name == void.principal.name

        await tokens.revoke(revoked.info.id, actor=ACTOR)
        opened.clock.turn(3)  # the other server may have a result that is two seconds old
        assert await other.context.sessions.find(void.id) is None
        opened.clock.turn(58)
        assert await sessions.find(short.id) is None
        assert await sessions.find(long.id) is not None
        opened.clock.turn(SESSION_LIFETIME.total_seconds())
        assert await sessions.find(long.id) is None


@pytest.mark.sql
async def test_stored_sessions_are_limited_and_do_not_sign_in(opened):
    async with opened(auth="tokens") as server:
        sessions = server.context.sessions
        issued = await new_token(server.context.tokens)
        begun = []
        for _ in range(MAX_SESSIONS_OF_TOKEN + 2):
            begun.append(await sessions.begin(issued.token))
            opened.clock.turn(1)
        alive = [await sessions.find(each.id) is not None for each in begun]
        assert alive == [False] * 2 + [True] * MAX_SESSIONS_OF_TOKEN

        opened.clock.turn(2 * SESSION_LIFETIME.total_seconds())
        session = await sessions.begin(issued.token)
        async with server.context.database.reading() as connection:
            row = (await connection.exec_driver_sql("SELECT * FROM sessions")).one()
        assert session.id not in map(str, row)
        assert issued.token.split("_", 2)[2] not in str(row)
        for value in map(str, row):
            assert await sessions.find(value) is None
        for wrong in (issued.token + "x", "Bearer " + issued.token):
            with pytest.raises(ServerError) as refused:
                await sessions.begin(wrong)
            assert refused.value.status == 401

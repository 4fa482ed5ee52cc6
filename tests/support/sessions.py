"""Sign in as a browser does, without a browser."""

import httpx

HTML = {"Accept": "text/html,application/xhtml+xml"}


def sign_in(url: str, token: str, *, origin: str | None = None, **fields: str) -> httpx.Client:
    """Return a client that has sent the form, with the cookies of the session, if there is one.

    The token is `client.token`, and the answer to the form `client.answer`.
    """
    client = httpx.Client(base_url=url, headers=HTML, timeout=60, trust_env=False)
    answer = client.post(
        "/sign-in", data={"token": token, **fields}, headers={"Origin": origin or url}
    )
    client.token, client.answer = token, answer  # type: ignore[attr-defined] # for tests
    return client

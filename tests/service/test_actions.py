"""Actions of the dashboard have the effect and the rights of their calls, on its pages only."""

import re
from contextlib import closing
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from graphstash_schema import TOKEN_FORM
from graphstash_server.pages.visitor import form_token_of
from support.dashboard import JOB, key_of
from support.sessions import HTML, sign_in

# The tests of the calls cover each database.
pytestmark = pytest.mark.parametrize("start_once", ["sqlite"], indirect=True)


def fields_of(client, page, action):
    """Return the hidden fields of an action's first form on a page, or {} if the page has none."""
    text = client.get(page).text.partition(f'action="/actions/{action}"')[2].partition("</form>")[0]
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', text))


def send(client, action, fields, **headers):
    origin = {"Origin": str(client.base_url).rstrip("/")}
    return client.post(f"/actions/{action}", data=fields, headers=origin | headers)


def audited(guarded, namespace):
    log = guarded.http(guarded.admin).get("/v1/-/audit", params={"namespace": namespace}).json()
    names = ("action", "subject", "actor", "detail")
    return [tuple(each[name] for name in names) for each in log["entries"]]


def test_namespace_administrator_withholds_releases_and_deletes_artifact(
    guarded, team, browse, namespace
):
    key = team.put(0)
    path = f"/artifacts/{namespace}/{key}"
    client = browse(f"admin:{namespace}")

    fields = fields_of(client, path, "withhold")
    answer = send(client, "withhold", fields | {"reason": "wrong_key"})
    assert (answer.status_code, answer.headers["location"]) == (
        303,
        f"/?namespace={namespace}#quarantine",
    )
    assert client.get(path).status_code == 404
    page = f"/?namespace={namespace}"
    answer = send(client, "release", fields_of(client, page, "release"))
    assert (answer.status_code, answer.headers["location"]) == (303, path)
    answer = send(client, "delete", fields_of(client, path, "delete"))
    assert (answer.status_code, answer.headers["location"]) == (303, f"{page}#recent")
    assert client.get(path).status_code == 404

    actions = audited(guarded, namespace)
    assert [each[0] for each in actions] == ["delete", "release", "withhold", "put"]
    assert {each[1] for each in actions} == {str(key)}
    (actor,) = {each[2] for each in actions[:3]}
    assert actor != actions[3][2]
    for action in ("delete", "release", "withhold"):
        again = send(client, action, fields | {"reason": "corrupt"})
        assert again.status_code == 404, action


def test_pins_and_limits_apply_and_are_audited(guarded, team, browse, namespace):
    team.work()
    job, owner = f"/jobs/{namespace}/{JOB}", browse("admin:*")
    pinned = send(owner, "pin", fields_of(owner, job, "pin") | {"days": "30"})
    assert (pinned.status_code, pinned.headers["location"]) == (303, job)
    artifact = f"/artifacts/{namespace}/{key_of(0)}"
    assert "Pinned" in owner.get(artifact).text
    assert send(owner, "unpin", fields_of(owner, job, "unpin")).status_code == 303
    assert "Pinned" not in owner.get(artifact).text

    page = f"/?namespace={namespace}"
    guarded.set_policy(namespace, anonymous_read=True)
    fields = fields_of(owner, page, "limit")
    assert send(owner, "limit", fields | {"limit": "10GiB"}).status_code == 303
    policy = guarded.http(guarded.admin).get(f"/v1/-/namespaces/{namespace}").json()["policy"]
    assert (policy["limit_bytes"], policy["anonymous_read"]) == (10 * 1024**3, True)
    assert "10.0 GiB" in owner.get(page).text
    assert send(owner, "limit", fields).status_code == 303
    policy = guarded.http(guarded.admin).get(f"/v1/-/namespaces/{namespace}").json()["policy"]
    assert (policy["limit_bytes"], policy["anonymous_read"]) == (None, True)
    entries = audited(guarded, namespace)
    assert {each[0] for each in entries} <= {"put", "policy_set"}  # known to every release
    assert ("policy_set", namespace) in [each[:2] for each in entries]
    details = [each[3] for each in entries if each[:2] == ("policy_set", f"job {JOB}")]
    assert [detail.partition(" until ")[0] for detail in details] == ["not pinned", "pinned"]


def test_token_is_shown_once_works_and_is_revoked(guarded, browse, namespace):
    owner = browse("admin:*")
    fields = fields_of(owner, "/tokens", "create-token")
    wanted = {
        "description": f"for {namespace}",
        "grants": f"write:{namespace}",
        "days": "7",
        "token": owner.token,
    }
    page = send(owner, "create-token", fields | wanted)
    assert page.status_code == 200
    assert page.headers["cache-control"] == "no-store"
    (token,) = re.findall(r"<code>(gst_[^<]+)</code>", page.text)
    assert TOKEN_FORM.fullmatch(token)
    secret = token.split("_", 2)[2]
    assert secret not in owner.get("/tokens").text
    assert guarded.http(token).get(f"/v1/{namespace}/manifests/x").status_code == 404

    again = send(owner, "create-token", fields | wanted)
    assert (again.status_code, token in again.text) == (409, False)
    token_id = TOKEN_FORM.fullmatch(token)["id"]
    revoked = send(owner, "revoke-token", fields | {"id": token_id})
    assert (revoked.status_code, revoked.headers["location"]) == (303, "/tokens")
    assert guarded.http(token).get(f"/v1/{namespace}/manifests/x").status_code == 401


def test_new_token_requires_the_sessions_token_and_expires_with_it(guarded, browse, namespace):
    """A cookie alone creates no token, and no token outlives the session's token."""
    ends = datetime.now(UTC) + timedelta(minutes=20)
    grants = [{"scope": "admin", "namespaces": "*"}]
    body = {"description": "short", "grants": grants, "expires_at": ends.isoformat()}
    short = guarded.http(guarded.admin).post("/v1/-/tokens", json=body).json()["token"]
    wanted = {"description": namespace, "grants": "admin:*", "days": "3650"}
    with closing(sign_in(guarded.url, short)) as owner:
        fields = fields_of(owner, "/tokens", "create-token") | wanted
        own = TOKEN_FORM.fullmatch(short)
        forged = f"gst_{own['id']}_{TOKEN_FORM.fullmatch(guarded.admin)['secret']}"
        for given in ({}, *({"token": each} for each in ("", "x", guarded.admin, forged))):
            assert send(owner, "create-token", fields | given).status_code == 403, given
        assert namespace not in owner.get("/tokens").text
        page = send(owner, "create-token", fields | {"token": short})
    (token,) = re.findall(r"<code>(gst_[^<]+)</code>", page.text)
    access = guarded.http(token).get("/v1/-/access").json()
    assert datetime.fromisoformat(access["expires_at"]) == ends


def test_stale_page_does_not_delete_replacement(guarded, team, browse, namespace):
    path = f"/artifacts/{namespace}/{team.put(0)}"
    client = browse(f"admin:{namespace}")
    fields = fields_of(client, path, "delete")
    other = {"digest": "sha256:" + "0" * 64}
    assert send(client, "delete", fields | other).status_code == 404
    assert client.get(path).status_code == 200
    assert send(client, "withhold", fields | {"reason": "corrupt"}).status_code == 303
    withheld = fields_of(client, f"/?namespace={namespace}", "delete")
    assert send(client, "delete", withheld | other).status_code == 404
    assert send(client, "delete", withheld).status_code == 303


def attempts(namespace, key, csrf, token=""):
    """Return each action with valid fields, on an artifact of another team."""
    named = {"csrf": csrf, "namespace": namespace, "key": str(key)}
    return {
        "withhold": named | {"reason": "corrupt", "digest": "sha256:" + "0" * 64},
        **dict.fromkeys(("release", "delete"), named),
        "pin": named | {"job": JOB, "days": "1"},
        "unpin": named | {"job": JOB},
        "limit": named | {"limit": "1"},
        "create-token": named
        | {"description": "x", "grants": "admin:*", "days": "1", "token": token},
        "revoke-token": named | {"id": "a" * 16},
    }


def test_visitor_without_right_gets_no_action_and_changes_nothing(guarded, team, browse, namespace):
    key = team.work()
    before = audited(guarded, namespace)
    for grant in (f"read:{namespace}", f"admin:{namespace}-other", "write:*"):
        client = browse(grant)
        for page in (f"/artifacts/{namespace}/{key}", f"/jobs/{namespace}/{JOB}", "/", "/tokens"):
            assert "/actions/" not in client.get(page).text, (grant, page)
        csrf = form_token_of(client.cookies["graphstash"])
        for action, fields in attempts(namespace, key, csrf, client.token).items():
            assert send(client, action, fields).status_code in (403, 404), (grant, action)
    client = browse(f"admin:{namespace}")
    csrf = form_token_of(client.cookies["graphstash"])
    for action in ("limit", "create-token", "revoke-token"):
        fields = attempts(namespace, key, csrf, client.token)[action]
        assert send(client, action, fields).status_code == 403, action
    assert audited(guarded, namespace) == before


def test_form_of_another_page_or_without_a_session_changes_nothing(
    guarded, team, browse, namespace
):
    key = team.work()
    before = audited(guarded, namespace)
    client, other = browse("admin:*"), browse("admin:*")
    page = f"/artifacts/{namespace}/{key}"
    csrf = fields_of(client, page, "delete")["csrf"]
    for action, fields in attempts(namespace, key, csrf).items():
        for wrong in ("", "x", "\u00e9", fields_of(other, page, "delete")["csrf"]):
            assert send(client, action, fields | {"csrf": wrong}).status_code == 403, action
        for headers in (
            {"Origin": "http://elsewhere.example"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
        ):
            assert send(client, action, fields, **headers).status_code == 403, action
        bare = client.post(f"/actions/{action}", data=fields)
        assert bare.status_code == 403
        with httpx.Client(base_url=guarded.url, headers=HTML) as nobody:
            assert send(nobody, action, fields).status_code == 401, action
            bearer = {"Authorization": f"Bearer {guarded.admin}"}
            assert send(nobody, action, fields, **bearer).status_code == 401, action
        assert client.get(f"/actions/{action}").status_code == 405
    assert audited(guarded, namespace) == before
    client.post("/sign-out", headers={"Origin": guarded.url})
    client.cookies = other.cookies
    assert send(client, "delete", attempts(namespace, key, csrf)["delete"]).status_code == 403


def test_invalid_field_is_refused_with_a_page(team, browse, namespace):
    key = team.work()
    owner = browse("admin:*")
    csrf = form_token_of(owner.cookies["graphstash"])
    valid = attempts(namespace, key, csrf, owner.token)
    for action, fields in (
        ("withhold", {"reason": "x"}),
        ("withhold", {"digest": "x"}),
        ("delete", {"digest": ""}),
        ("delete", {"key": "jax/cpu/x"}),
        ("delete", {"namespace": "A B"}),
        ("pin", {"days": "0"}),
        ("pin", {"days": "9" * 5000}),
        ("pin", {"job": "/"}),
        ("limit", {"limit": "much"}),
        ("limit", {"limit": "9" * 400}),
        ("create-token", {"id": "x"}),
        ("create-token", {"grants": "all"}),
        ("create-token", {"description": "a\nb"}),
    ):
        given = {"id": "a" * 16} | valid[action] | fields
        answer = send(owner, action, given)
        assert answer.status_code == 400, (action, fields)
        assert "<h1>" in answer.text

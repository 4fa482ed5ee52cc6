"""A caller gets no more rights than its grants."""

import pytest

from support.guarded_server import artifact_path
from support.wire import Wire, head

TOKEN = {"description": "mine", "grants": [{"scope": "admin", "namespaces": "*"}]}
LEASE = "/v1/{space}/leases/jax/cpu-x86_64-0123456789abcdef/" + "0" * 64


def statuses(answers):
    return [answer.status_code for answer in answers]


def test_administrator_by_pattern_cannot_change_a_trusted_namespace(fort, space):
    """Neither the pattern nor a detour, such as lifting the policy, grants the right."""
    where = f"{space}-prod"
    fort.set_policy(where, trusted=True)
    fort.fill(where, 0)
    many = fort.http(fort.token(f"admin:{space}*", "admin:**", f"read:{where}"))
    key = {"kind": "jax", "device_type": "cpu", "fingerprint": "0" * 64}

    with fort.withstands() as refused:
        answers = [
            many.put(artifact_path(where, 1), content=b"x"),
            many.delete(artifact_path(where, 0)),
            many.post(LEASE.format(space=where), json={}),
            many.put(f"/v1/{where}/manifests/m", json={"keys": [key]}),
            many.post(f"/v1/{where}/artifacts:release", json=key),
            many.put(f"/v1/-/namespaces/{where}", json={"trusted": False}),
            many.delete(f"/v1/-/namespaces/{where}"),
        ]
    assert statuses(answers) == [403] * 7
    assert refused == {"forbidden": 7}
    named = fort.token(f"admin:{where}")
    assert fort.put(artifact_path(where, 1), b"x", token=named).status_code == 201


def test_statistics_of_a_caller_cover_only_its_namespaces(fort, space):
    fort.fill(space, 0)
    lease = LEASE.format(space=space)
    assert fort.http(fort.admin).post(lease, json={}).status_code == 201
    one, every = (fort.http(fort.token(grant)) for grant in (f"read:{space}", "read:*"))
    assert one.put(artifact_path(space, 1), content=b"x").status_code == 403

    seen, all_of_it = one.get("/v1/stats").json(), every.get("/v1/stats").json()

    hidden = ("leases_held", "waiters", "healed", "reported")
    assert [seen[name] for name in hidden] == [0] * 4
    assert seen["refused"] == {}
    assert [each["namespace"] for each in seen["namespaces"]] == [space]
    assert all_of_it["leases_held"] >= 1
    assert all_of_it["refused"]["forbidden"] >= 1


def test_namespace_administrator_cannot_administer_the_server(fort, space):
    """`admin:**` matches the same namespaces as `admin:*`, but does not administer the server."""
    owner = fort.http(fort.token(f"admin:{space}", "admin:attack-*", "write:*", "read:*"))
    almost = fort.http(fort.token("admin:**", "admin:*a*", "write:*"))

    with fort.withstands() as refused:
        answers = [
            owner.post("/v1/-/tokens", json=TOKEN),
            owner.get("/v1/-/tokens"),
            owner.get("/v1/-/audit"),
            owner.get(f"/v1/-/audit?namespace={space}"),
            owner.put(f"/v1/-/namespaces/{space}", json={"trusted": False}),
            owner.get("/v1/-/quarantine"),
            almost.post("/v1/-/tokens", json=TOKEN),
            almost.get("/v1/-/audit"),
        ]
    assert statuses(answers) == [403] * 8
    assert refused == {"forbidden": 8}


_FORWARDED = (
    *("X-Forwarded-For: 127.0.0.1", "X-Forwarded-User: admin", "X-Forwarded-Proto: https"),
    *("X-Forwarded-Host: elsewhere", "X-Forwarded-Prefix: /v1/-", "X-Real-IP: 127.0.0.1"),
    *("Forwarded: for=127.0.0.1;proto=https", "X-Remote-User: admin", "Remote-User: admin"),
    *("X-Original-URL: /v1/-/tokens", "X-Rewrite-URL: /v1/-/tokens"),
    *("X-Accel-Redirect: /v1/-/tokens", "X-Sendfile: /etc/passwd"),
    *("X-HTTP-Method-Override: DELETE", "X-HTTP-Method: DELETE", "X-Method-Override: DELETE"),
    "Graphstash-Principal: admin",
)


@pytest.mark.parametrize("has_token", [True, False])
def test_headers_of_proxies_are_ignored(fort, space, has_token):
    """The response equals the one without these headers, and repeats none of them."""
    fort.fill(space)
    token = fort.token(f"read:{space}")

    with fort.withstands() as refused:
        for header in _FORWARDED:
            for method, path, expected in (
                ("GET", artifact_path(space), 200),
                ("POST", f"{artifact_path(space)}?_method=DELETE", 405),
                ("GET", "/v1/-/tokens", 403),
                ("DELETE", artifact_path(space), 403),
            ):
                with Wire(fort.url) as wire:
                    shown = token if has_token else None
                    answer = wire.ask(head(method, path, header, token=shown))
                assert answer.status == (expected if has_token or expected == 405 else 401)
                assert "x-accel-redirect" not in answer.headers
                assert "elsewhere" not in str(answer.headers)
    if has_token:
        assert refused == {"forbidden": 2 * len(_FORWARDED), "method_not_allowed": len(_FORWARDED)}

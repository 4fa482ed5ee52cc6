"""Rules that somebody wants to be looser than they are."""

import pytest

from graphstash_schema import ArtifactMetadata
from support.guarded_server import artifact_path
from support.reader_job import OWN
from support.signing import sealed
from support.wire import Wire, head

POISON = b"replaced by another writer " * 100


def test_a_signed_artifact_is_replaced_by_another_writers_unsigned_one(
    fort, space, key, victim, team, publish, tmp_path
):
    """Where the last one stays: who requires signatures compiles, and goes on doing so."""
    fort.set_policy(space, mode="overwrite")
    publish(key(), OWN, signing_key=team.trust("ci"))
    job = victim(trusted_keys=team.file)
    assert (job.build(key()), job.compiles) == (OWN, 0)
    envelope = sealed(tmp_path, key(), POISON)
    metadata = ArtifactMetadata(compile_seconds=30, raw_size_bytes=len(POISON))
    replaced = fort.put(
        key().artifact_path(space),
        envelope.path.read_bytes(),
        token=fort.token(f"write:{space}"),
        metadata=metadata,
    )
    assert replaced.status_code == 201

    fresh = victim(trusted_keys=team.file)
    with fort.withstands() as refused:
        assert fresh.build(key()) == OWN
        assert (fresh.compiles, fresh.fallbacks) == (1, {"unsigned": 1})
    assert refused == {}


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
def test_headers_of_proxies_are_obeyed(fort, space, has_token):
    """A caller who sends them gets what it would get without, and no word of them back."""
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

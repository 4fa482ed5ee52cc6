"""JSON bodies: each model equals its copy after writing and parsing, and each error can be sent."""

import json

from harness import instrumented, main
from pydantic import TypeAdapter, ValidationError

with instrumented():
    from graphstash_schema import (
        ArtifactKey,
        LeaseRequest,
        LookupRequest,
        Manifest,
        ManifestUpdate,
        NamespacePolicy,
        ReportRequest,
        TokenExchange,
        TokenRequest,
    )
    from graphstash_server.api.problems import invalid_body

_MODELS = (
    ArtifactKey,
    LookupRequest,
    ManifestUpdate,
    LeaseRequest,
    ReportRequest,
    TokenRequest,
    NamespacePolicy,
    Manifest,
    TokenExchange,
)
_KEY = '{"kind":"jax","device_type":"cpu-x86_64-0123456789abcdef","fingerprint":"%s"}' % ("0" * 64)
SEEDS = tuple(
    bytes([number]) + text.encode()
    for number, text in enumerate(
        (
            _KEY,
            f'{{"keys":[{_KEY}]}}',
            f'{{"keys":[{_KEY},{_KEY}]}}',
            '{"holder":"a@b:1","ttl_seconds":30.5}',
            f'{{"key":{_KEY},"digest":"sha256:{"0" * 64}","reason":"corrupt"}}',
            (
                '{"description":"ci","grants":[{"scope":"write","namespaces":"ci-*"}],'
                '"expires_at":"2027-01-01T00:00:00Z"}'
            ),
            '{"mode":"overwrite","trusted":true,"limit_bytes":1,"requests_per_second":0.5}',
            f'{{"name":"m","entries":[{{"key":{_KEY},"used_at":"2026-01-01T00:00:00Z","runs":1}}]}}',
            '{"grants":[{"scope":"write","namespaces":"ci-*"}],"lifetime_seconds":3600}',
        )
    )
)


def check(data: bytes) -> None:
    if not data:
        return
    model = TypeAdapter(_MODELS[data[0] % len(_MODELS)])
    raw = data[1:]
    try:
        read = model.validate_json(raw)
    except ValidationError as error:
        refusal = invalid_body(error)
        assert refusal.status == 400
        refusal.detail.encode()  # the server can send it
        assert len(refusal.detail) < 1000
        return
    dumped = model.dump_json(read)
    assert model.validate_json(dumped) == read
    assert b"NaN" not in dumped
    assert b"Infinity" not in dumped
    assert isinstance(json.loads(raw), dict)


if __name__ == "__main__":
    main(check, seeds=SEEDS)

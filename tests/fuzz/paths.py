"""Paths: an accepted word round-trips unchanged and stays one segment of its path."""

from harness import instrumented, main

with instrumented():
    from graphstash_schema import (
        Grant,
        InvalidValueError,
        ManifestName,
        Namespace,
        NamespacePattern,
        Scope,
    )
    from graphstash_schema.protocol import ADMIN_PREFIX
    from graphstash_server.keys import StoredKey

SEEDS = (
    b"team/jax/cpu-x86_64-0123456789abcdef/" + b"0" * 64,
    b"ci-7.x_y/torch_xla/tpu-v5e-2x4/" + b"f" * 64,
    b"../triton/cuda-sm_90/" + b"a" * 64,
    b"write:team-*",
    b"*" * 30 + b"a",
)
_SAFE = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def check(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    _check_words(text)
    _check_pattern(text)
    segments = text.split("/")
    if len(segments) != 4:
        return
    namespace, kind, device_type, fingerprint = segments
    try:
        key = StoredKey.parse(
            namespace=namespace, kind=kind, device_type=device_type, fingerprint=fingerprint
        )
    except InvalidValueError as error:
        assert error.code.startswith("invalid_"), error.code
        assert len(str(error)) < 1000
        return
    parts = key.artifact_path.split("/")
    assert parts == ["", "v1", namespace, "artifacts", kind, device_type, fingerprint]
    assert not key.artifact_path.startswith(ADMIN_PREFIX + "/")
    for word in segments:
        assert set(word) <= _SAFE, word
        assert word not in {"", ".", ".."}
    assert StoredKey.of(key.namespace, key.key) == key


def _check_words(text: str) -> None:
    for word in (Namespace, ManifestName, NamespacePattern):
        try:
            assert str(word(text)) == text
        except InvalidValueError:
            continue
        assert 1 <= len(text) <= 128
        assert text.isascii()
        assert text.isprintable()


def _check_pattern(text: str) -> None:
    try:
        grant = Grant.parse(text)
    except InvalidValueError:
        return
    assert Grant.parse(str(grant)) == grant
    assert str(grant) == text
    pattern = grant.namespaces
    plain = pattern.replace("*", "")
    assert grant.namespaces.matches(plain) == _matches(pattern, plain)
    assert pattern.matches(pattern.replace("*", "x"))
    if pattern.is_exact:
        assert not pattern.matches(pattern + "x")
        assert not pattern.matches("x" + pattern)
    assert grant.allows(Scope.READ, pattern.replace("*", "x"))


def _matches(pattern: str, text: str) -> bool:
    """Match by the parts between the stars, independently of the implementation under test."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == text
    if not text.startswith(first):
        return False
    *middle, last = rest
    place = len(first)
    for part in middle:
        found = text.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return len(text) - len(last) >= place and text.endswith(last)


if __name__ == "__main__":
    main(check, seeds=SEEDS)

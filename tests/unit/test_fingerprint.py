"""Equal parts give the same fingerprint everywhere; different parts give different ones."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstash_schema import (
    MAX_PARTS,
    ArtifactKind,
    ErrorCode,
    InvalidValueError,
    fingerprint_of,
    parts_for_display,
)

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
VALUES = st.text(st.characters(codec="utf-8") | st.sampled_from("\0\n\ud800ab"), max_size=12)
PARTS = st.dictionaries(NAMES, VALUES, min_size=1, max_size=6)
KINDS = st.sampled_from(ArtifactKind)


@pytest.mark.parametrize(
    ("kind", "parts", "fingerprint"),
    [
        (
            ArtifactKind.JAX,
            {"compiler_key": "jit_step-0123"},
            "5a1e254bc4dd980b8e5906f76d8c28bff737c834b57fc6ec2dddf7ed9d93285c",
        ),
        (
            ArtifactKind.TORCH_XLA,
            {"compiler_key": "abc", "flags": "--xla", "empty": ""},
            "defe9c51a5bace698ef4a22663c3499219ac59da09b57b43b1a9ff8da99b74d3",
        ),
        (
            ArtifactKind.TRITON,
            {"key": "Überraschung \ud800"},
            "17b8f9aa81af8930f766f10378274b7a4654bd7f30f90184a1777204421d13f5",
        ),
    ],
)
def test_golden_fingerprints_never_change(kind, parts, fingerprint):
    assert fingerprint_of(kind, parts) == fingerprint


@given(KINDS, PARTS, KINDS, PARTS, st.randoms(use_true_random=False))
def test_different_parts_have_different_fingerprints_in_any_order(
    kind, parts, other_kind, other, random
):
    same = (kind, parts) == (other_kind, other)
    shuffled = random.sample(list(other.items()), len(other))

    assert (fingerprint_of(kind, parts) == fingerprint_of(other_kind, dict(shuffled))) == same
    assert fingerprint_of(other_kind, other) == fingerprint_of(other_kind, dict(shuffled))


@given(st.text("ab=\0", max_size=6), st.integers(0, 6), st.integers(0, 6))
def test_shifting_bytes_between_two_values_changes_the_fingerprint(text, cut, other_cut):
    first = {"a": text[:cut], "b": text[cut:]}
    second = {"a": text[:other_cut], "b": text[other_cut:]}

    same = fingerprint_of(ArtifactKind.JAX, first) == fingerprint_of(ArtifactKind.JAX, second)
    assert same == (first == second)


@pytest.mark.parametrize(
    "parts",
    [{}, {f"p{n}": "" for n in range(MAX_PARTS + 1)}, {"": "x"}, {"ä": "x"}, {"a" * 65: "x"}],
    ids=["none", "too many", "no name", "not ASCII", "long name"],
)
def test_malformed_parts_are_refused(parts):
    with pytest.raises(InvalidValueError) as refusal:
        fingerprint_of(ArtifactKind.JAX, parts)
    assert refusal.value.code is ErrorCode.INVALID_FINGERPRINT


@given(PARTS)
def test_long_and_unprintable_values_are_shown_as_their_digest(parts):
    """Two different long values are therefore displayed differently."""
    parts = parts | {"long": "x" * 161, "line": "a\nb", "fits": "x" * 160}
    shown = parts_for_display(parts)

    assert list(shown) == sorted(parts)
    for name, value in parts.items():
        is_whole = len(value) <= 160 and value.isprintable()
        encoded = value.encode("utf-8", "surrogatepass")
        digest = f"sha256:{hashlib.sha256(encoded).hexdigest()}"
        assert shown[name] == (value if is_whole else digest)

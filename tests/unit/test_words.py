"""Words, digests and metadata: valid text survives parsing and formatting, any other is refused."""

import base64
import json
import re
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from graphstash_schema import (
    MAX_COMPILE_SECONDS,
    STATUS,
    ArtifactKey,
    ArtifactKind,
    ArtifactMetadata,
    ArtifactSignature,
    DeviceType,
    Digest,
    DigestHasher,
    ErrorCode,
    Fingerprint,
    InvalidValueError,
    ManifestName,
    Namespace,
    NamespacePattern,
    Problem,
)
from graphstash_schema.envelope import names_key
from graphstash_schema.protocol import MAX_METADATA_BYTES

WORDS = [Namespace, DeviceType, Fingerprint, ManifestName, NamespacePattern]


@pytest.mark.parametrize("word", WORDS)
def test_malformed_text_is_refused(word):
    for text in (
        *("", " ", "a b", "a/b", "..", ".a", "a\n", "\na", "a\0", "ä", "a" * 300, "%2e", "-a"),
        *("(a|b)", "x" * 10_000 + "\n"),
    ):
        with pytest.raises(InvalidValueError) as refusal:
            word(text)
        assert refusal.value.code is word.code
        assert word.what in str(refusal.value)
        assert len(str(refusal.value)) < 250
    with pytest.raises(ValidationError):
        TypeAdapter(word).validate_json("1")


def test_a_pattern_is_as_long_as_a_namespace():
    assert NamespacePattern("a*" * 32) == "a*" * 32
    with pytest.raises(InvalidValueError):
        NamespacePattern("a" * 65)


def test_a_key_reads_its_three_segments_and_writes_them_again():
    key = ArtifactKey.parse("jax", "cpu-x86_64", "a" * 64)

    assert str(key) == f"jax/cpu-x86_64/{'a' * 64}"
    assert key.artifact_path(Namespace("team")) == f"/v1/team/artifacts/{key}"
    assert key.lease_path(Namespace("team")) == f"/v1/team/leases/{key}"
    adapter = TypeAdapter(ArtifactKey)
    assert adapter.validate_json(adapter.dump_json(key)) == key
    with pytest.raises(ValidationError, match="more"):
        adapter.validate_python({**asdict(key), "more": ""})
    # The message lists the valid kinds.
    with pytest.raises(InvalidValueError, match="torch_xla") as refusal:
        ArtifactKind.parse("wasm")
    assert refusal.value.code is ErrorCode.INVALID_KIND


def test_a_key_parses_the_fields_that_are_plain_strings():
    fields = {"kind": "jax", "device_type": "cpu", "fingerprint": "a" * 64}

    key = ArtifactKey(**fields)
    assert key == ArtifactKey.parse(**fields)
    assert [type(each) for each in (key.kind, key.device_type, key.fingerprint)] == [
        *(ArtifactKind, DeviceType, Fingerprint)
    ]
    for name in fields:
        with pytest.raises(InvalidValueError, match=re.escape("../..")):
            ArtifactKey(**fields | {name: "../.."})


def test_device_type_is_built_from_runtime_names_or_a_set_of_features():
    for parts, word in (
        (("TPU", "v5 lite", "2x4"), "tpu-v5_lite-2x4"),
        (("cuda", "sm_90"), "cuda-sm_90"),
        (("cpu", "", "x"), "cpu-x"),
        (("neuron", "Trn1/32xl"), "neuron-trn1_32xl"),
    ):
        assert DeviceType.of(*parts) == word
        assert DeviceType.of(*parts).platform == word.split("-")[0]
    first = DeviceType.cpu("x86_64", ["avx2", "sse", "avx2"])
    assert first == DeviceType.cpu("x86_64", ["sse", "avx2"])
    assert first != DeviceType.cpu("x86_64", ["sse"])


@given(st.binary(max_size=100), st.integers(0, 100))
def test_digest_of_pieces_equals_that_of_the_whole_in_three_spellings(blob, cut):
    digest, hasher = Digest.of(blob), DigestHasher()
    hasher.update(blob[:cut])
    hasher.update(memoryview(blob)[cut:])

    assert (hasher.digest(), hasher.size_bytes) == (digest, len(blob))
    assert Digest.parse(str(digest), size_bytes=len(blob)) == digest
    assert Digest.parse_repr_digest(digest.repr_digest, size_bytes=len(blob)) == digest
    assert digest.etag == f'"{digest}"'


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:" + "A" * 64, "md5:" + "a" * 32, "a" * 64])
def test_malformed_digest_is_refused(text):
    with pytest.raises(InvalidValueError):
        Digest.parse(text, size_bytes=0)
    with pytest.raises(InvalidValueError):
        Digest("a" * 64, -1)


def test_repr_digest_with_other_than_32_bytes_in_canonical_base64_is_refused():
    """The last base64 character has two spare bits, which some decoders ignore."""
    canonical = Digest.of(b"").repr_digest
    assert canonical.endswith("U=:")
    for text in ("", "sha-256=::", "sha-512=:" + "A" * 43 + "=:", canonical.replace("U=:", "=:")):
        with pytest.raises(InvalidValueError):
            Digest.parse_repr_digest(text, size_bytes=0)
    for last in "VWX":
        with pytest.raises(InvalidValueError):
            Digest.parse_repr_digest(canonical.replace("U=:", f"{last}=:"), size_bytes=0)


@pytest.mark.parametrize(
    "part", [{"kind": "triton"}, {"device_type": "cpu-x86_32"}, {"fingerprint": "b" * 64}], ids=str
)
def test_envelope_head_names_a_key_only_if_all_three_segments_are_equal(part):
    key = {"kind": "jax", "device_type": "cpu-x86_64", "fingerprint": "a" * 64}
    named = ArtifactKey(**key)

    assert names_key(key | {"raw_size": 0}, named)
    assert not names_key(key | part, named)
    (name,) = part
    assert not names_key({other: key[other] for other in key if other != name}, named)


def test_metadata_header_has_the_whole_record_unless_it_would_pass_its_limit():
    """tests/fuzz/headers.py searches for other records that do not survive a round trip."""
    for size, is_whole in ((1, True), (50, False), (160, False)):
        metadata = ArtifactMetadata(
            compile_seconds=MAX_COMPILE_SECONDS,
            raw_size_bytes=2**60,
            toolchain="\U0001f600" * 256,
            producer="\U0001f600" * 128,
            signature=ArtifactSignature(key_id="a" * 32, value="A" * 86),
            parts={f"part{number}": "\U0001f600" * size for number in range(256)},
        )
        header = metadata.to_header()
        read = ArtifactMetadata.from_header(header)
        assert header.isascii()
        assert len(header) <= MAX_METADATA_BYTES
        assert (read == metadata) is is_whole
        assert read.model_copy(update={"parts": {}}) == metadata.model_copy(update={"parts": {}})
        assert read.parts.items() <= metadata.parts.items()


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"compile_seconds": MAX_COMPILE_SECONDS + 1, "raw_size_bytes": 0},
        {"compile_seconds": float("nan"), "raw_size_bytes": 0},
        {"compile_seconds": 1, "raw_size_bytes": -1},
        {"compile_seconds": 1, "raw_size_bytes": 1, "version": 2},
        {"compile_seconds": 1, "raw_size_bytes": 1, "toolchain": "x" * 257},
        [],
    ],
)
def test_metadata_out_of_range_is_refused(record):
    header = base64.urlsafe_b64encode(json.dumps(record).encode()).rstrip(b"=").decode()

    with pytest.raises(InvalidValueError) as refusal:
        ArtifactMetadata.from_header(header)
    assert refusal.value.code is ErrorCode.INVALID_METADATA


def test_every_error_code_has_a_status_and_a_document():
    assert set(STATUS) == set(ErrorCode)
    for code, status in STATUS.items():
        assert 400 <= status <= 599
        problem = Problem.of(code, "why", request_id="r1")
        assert Problem.model_validate_json(problem.model_dump_json()) == problem

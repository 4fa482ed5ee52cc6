"""Signatures: no two artifacts share a statement, and files of trusted keys are parsed strictly."""

import io
import json
import struct
import tempfile
from pathlib import Path

from harness import Data, instrumented, main
from pydantic import ValidationError

with instrumented():
    from graphstash._artifacts.envelope import seal, unseal
    from graphstash._trust.trusted_keys import TrustedKeys
    from graphstash.errors import ConfigError, VerificationError
    from graphstash_schema import ArtifactKey, ArtifactKind, Digest, Namespace
    from graphstash_schema.signature import ArtifactSignature, SigningKeyId, key_id_of, statement_of

KEY = ArtifactKey.parse("jax", "cpu-x86_64-0123456789abcdef", "0" * 64)
_DOMAIN = b"graphstash signature v1\n"
_FOLDER = Path(tempfile.mkdtemp(prefix="graphstash-fuzz-"))
_FILE = _FOLDER / "trusted.json"
_LARGEST = 1 << 20


def _envelope() -> bytes:
    (_FOLDER / "payload").write_bytes(b"an executable " * 20)
    into = io.BytesIO()
    seal(KEY, _FOLDER / "payload", into)
    return into.getvalue()


SEEDS = (
    b"\x00" + bytes(range(200)),
    b'\x01{"key_id":"' + b"0" * 32 + b'","value":"' + b"A" * 86 + b'"}',
    b'\x02{"version":1,"keys":[{"public":"' + b"A" * 43 + b'","name":"ci","namespaces":["ci-*"]}],'
    b'"revoked":[{"key_id":"' + b"0" * 32 + b'","reason":"x","at":"2026-05-01T00:00:00Z"}]}',
    b"\x03" + _envelope(),
)


def check(data: bytes) -> None:
    if data:
        _CHECKS[data[0] % len(_CHECKS)](data[1:])


def _check_statement(data: bytes) -> None:
    """A statement can be parsed back, so it is injective."""
    source = Data(data)
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
    word = "".join(
        alphabet[source.ConsumeIntInRange(0, 35)] for _ in range(source.ConsumeIntInRange(1, 64))
    )
    hexadecimal = f"{source.ConsumeIntInRange(0, 2**63):064x}"
    fields = {
        "namespace": Namespace(word),
        "key": ArtifactKey.parse(
            list(ArtifactKind)[source.ConsumeIntInRange(0, len(ArtifactKind) - 1)],
            f"cuda-{word[:20]}",
            hexadecimal,
        ),
        "digest": Digest(hexadecimal[::-1], source.ConsumeIntInRange(0, 2**50)),
        "raw_size_bytes": source.ConsumeIntInRange(0, 2**50),
        "key_id": SigningKeyId(hexadecimal[-32:]),
    }
    statement = statement_of(**fields)
    key, digest = fields["key"], fields["digest"]
    assert _read_back(statement) == [
        fields["namespace"],
        key.kind.value,
        key.device_type,
        key.fingerprint,
        str(digest),
        str(digest.size_bytes),
        str(fields["raw_size_bytes"]),
        fields["key_id"],
    ]


def _read_back(statement: bytes) -> list[str]:
    assert statement.startswith(_DOMAIN)
    rest = statement.removeprefix(_DOMAIN)
    fields = []
    while rest:
        (length,) = struct.unpack(">Q", rest[:8])
        fields.append(rest[8 : 8 + length].decode("ascii"))
        assert len(fields[-1]) == length
        rest = rest[8 + length :]
    return fields


def _check_signature(data: bytes) -> None:
    try:
        signature = ArtifactSignature.model_validate_json(data)
    except ValidationError:
        return
    assert ArtifactSignature.model_validate_json(signature.model_dump_json()) == signature
    assert len(signature.value) == 86
    assert signature.value.isascii()


def _check_trusted(data: bytes) -> None:
    _FILE.write_bytes(data)
    try:
        trusted = TrustedKeys.read(_FILE)
    except ConfigError as error:
        assert str(_FILE) in str(error)
        return
    for key in trusted.keys:
        assert len(key.raw) == 32
        assert key.key_id == key_id_of(key.raw)
    record = json.loads(data)
    assert len(trusted.keys) == len(record.get("keys", ()))
    assert len(trusted.revoked) == len(record.get("revoked", ()))
    trusted.write(_FILE)
    assert TrustedKeys.read(_FILE) == trusted


def _check_envelope(data: bytes) -> None:
    into = io.BytesIO()
    admitted = []
    try:
        done = unseal(io.BytesIO(data), KEY, into, max_bytes=_LARGEST, admit=admitted.append)
    except VerificationError:
        assert into.tell() <= _LARGEST
        assert not into.tell() or into.tell() <= admitted[0]  # never beyond the declared size
        return
    assert admitted == [done.raw_size_bytes] == [into.tell()]
    assert done.compile_seconds >= 0


_CHECKS = (_check_statement, _check_signature, _check_trusted, _check_envelope)


if __name__ == "__main__":
    main(check, seeds=SEEDS)

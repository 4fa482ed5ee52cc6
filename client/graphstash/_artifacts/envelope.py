"""Envelope: what an artifact's blob looks like inside.

    head       see graphstash_schema.envelope: magic, and a JSON header
    the rest   the payload, zstd-compressed

The key stands inside the bytes, so that a sound blob served under another key is told from the one
that was asked for: compilers run whatever they are given (a torch_xla executable of another graph
with equal shapes gives silently wrong numbers). The payload's own size bounds its decompression,
and its SHA-256 is checked before anybody reads it.
"""

import hashlib
import io
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

import zstandard

from graphstash.errors import Reason, VerificationError
from graphstash_schema import MAX_COMPILE_SECONDS, ArtifactKey
from graphstash_schema.envelope import ENVELOPE_MAGIC, names_key, read_envelope_head

__all__ = ["Sealed", "Unsealed", "seal", "unseal"]

_CHUNK_BYTES: Final = 1024**2
_WINDOW_LOG: Final = 27
"""128 MiB: a 51 MB TPU executable shrinks to 5.6 MB with a long window, to 10.6 MB without."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """A payload in its envelope.

    Attributes:
        sha256: hex digest of the whole file.
        size_bytes: size of the whole file.
        raw_size_bytes: size of the payload.
    """

    sha256: str
    size_bytes: int
    raw_size_bytes: int


@dataclass(frozen=True, slots=True)
class Unsealed:
    """What an envelope held.

    Attributes:
        raw_size_bytes: size of the payload.
        compile_seconds: what its compilation took, as publishers of 0.1.0 say here; 0 of others.
    """

    raw_size_bytes: int
    compile_seconds: float


def seal(key: ArtifactKey, payload: Path | bytes, into: IO[bytes]) -> Sealed:
    """Writes `payload` into an envelope; a file is read in constant memory.

    The envelope depends on the payload and its key only, so that two publishers of one executable
    send the same bytes.

    Raises:
        OSError: when a file cannot be read or written, or the payload changes meanwhile: what was
            published first stays, so a blob that nobody can open must not be.
    """
    with _opened(payload) as source:
        read = _Hashing(source)
        while read.read(_CHUNK_BYTES):
            pass
    raw_size, raw_sha256 = read.size_bytes, read.sha256
    header = json.dumps(
        {
            "kind": key.kind,
            "device_type": key.device_type,
            "fingerprint": key.fingerprint,
            "raw_size": raw_size,
            "raw_sha256": raw_sha256,
            "compile_seconds": 0,  # readers of 0.1.0 look for it here, not in the metadata
        }
    ).encode()
    parameters = zstandard.ZstdCompressionParameters.from_level(
        3, source_size=raw_size, window_log=_window_log(raw_size), enable_ldm=True
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    blob_hash = hashlib.sha256()
    size = 0
    with _opened(payload) as source:
        again = _Hashing(source)
        lead = ENVELOPE_MAGIC + struct.pack(">I", len(header)) + header
        try:
            for chunk in _after(
                lead, compressor.read_to_iter(cast("IO[bytes]", again), size=raw_size)
            ):
                into.write(chunk)
                blob_hash.update(chunk)
                size += len(chunk)
        except zstandard.ZstdError as error:
            raise OSError(f"the payload changed while it was read: {error}") from None
    if again.sha256 != raw_sha256:
        raise OSError("the payload changed while it was read")
    return Sealed(blob_hash.hexdigest(), size, raw_size)


def unseal(
    envelope: IO[bytes],
    key: ArtifactKey,
    into: IO[bytes],
    *,
    max_bytes: int,
    admit: Callable[[int], None] | None = None,
) -> Unsealed:
    """Checks an envelope against the key that was asked for and writes its payload.

    What was written must not be used unless this function returns: it may raise at the last byte.

    Args:
        envelope: the blob, positioned at its beginning.
        key: what was asked for.
        into: gets the payload.
        max_bytes: largest payload that is accepted.
        admit: called with the payload's size, which bounds its decompression, before a byte is
            decompressed; what it raises passes through.

    Raises:
        VerificationError: another key, a damaged envelope, or a payload that is not what its
            header says.
    """
    try:
        header = read_envelope_head(envelope.read)
    except ValueError as error:
        raise VerificationError(Reason.CORRUPT, str(error)) from None
    try:
        named = (header["kind"], header["device_type"], header["fingerprint"])
        raw_size = int(header["raw_size"])
        raw_sha256 = str(header["raw_sha256"])
        # In this order, what is not a number becomes 0.
        compile_seconds = min(max(0.0, float(header["compile_seconds"])), MAX_COMPILE_SECONDS)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise VerificationError(Reason.CORRUPT, f"envelope header: {error!r}") from None
    if admit is not None:
        admit(raw_size)
    if not names_key(header, key):
        raise VerificationError(
            Reason.WRONG_KEY, f"asked for {key}, got {'/'.join(map(str, named))}"
        )
    if raw_size > max_bytes:
        raise VerificationError(Reason.TOO_LARGE, f"{raw_size} bytes; at most {max_bytes}")
    raw_hash = hashlib.sha256()
    size = 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
    try:
        with decompressor.stream_reader(envelope, closefd=False) as reader:
            for chunk in _chunks(reader):
                size += len(chunk)
                if size > raw_size:
                    break
                raw_hash.update(chunk)
                into.write(chunk)
    except zstandard.ZstdError as error:
        raise VerificationError(Reason.CORRUPT, f"envelope payload: {error}") from None
    if size != raw_size or raw_hash.hexdigest() != raw_sha256:
        raise VerificationError(
            Reason.CORRUPT, f"payload of {key} is not the {raw_size} bytes that its header names"
        )
    return Unsealed(raw_size, compile_seconds)


def _opened(payload: Path | bytes) -> IO[bytes]:
    return payload.open("rb") if isinstance(payload, Path) else io.BytesIO(payload)


class _Hashing:
    """Reads a file and hashes what passes by."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def read(self, size: int = -1) -> bytes:
        chunk = self._source.read(size)
        self._hash.update(chunk)
        self.size_bytes += len(chunk)
        return chunk


def _window_log(raw_size: int) -> int:
    # The window never needs to be larger than the content; small ones keep the reader's memory low.
    return min(_WINDOW_LOG, max(17, raw_size.bit_length()))


def _chunks(source: "IO[bytes] | zstandard.ZstdDecompressionReader") -> Iterator[bytes]:
    while chunk := source.read(_CHUNK_BYTES):
        yield chunk


def _after(lead: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield lead
    yield from chunks

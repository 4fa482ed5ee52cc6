"""Envelope: the format of an artifact's blob.

    head       magic and a JSON header: see graphstash_schema.envelope
    the rest   the payload, zstd-compressed

The header contains the key, so that a reader detects a valid blob under a wrong key. A compiler
would load it: a torch_xla executable of another graph with equal shapes silently computes wrong
numbers.

The header also contains the payload's size, which bounds decompression, and its SHA-256. A reader
that has verified the blob's digest verifies the checksum of the zstd frame instead of the SHA-256.
"""

import hashlib
import io
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Self, TypeAlias, cast

import zstandard

import graphstash_schema as schema
from graphstash.errors import Reason, VerificationError
from graphstash_schema import ArtifactKey, DigestHasher
from graphstash_schema.envelope import ENVELOPE_MAGIC, names_key, read_envelope_head

__all__ = ["NullFile", "Sealed", "Unsealed", "seal", "unseal"]

_CHUNK_BYTES: Final = 1024**2

_PIECE_BYTES: Final = 256 * 1024
"""Bytes to decompress per call. They are still in the CPU's cache when they are written."""

_MAX_WINDOW_LOG: Final = 27
"""Maximum window that a reader accepts: 128 MiB, because earlier releases wrote such windows."""

_LONG_WINDOW_LOG: Final = 24
"""16 MiB: a TPU executable of 40 MB becomes 3.2 MB, with 4 MiB 5.4 MB. 128 MiB is no better."""

_SHORT_WINDOW_LOG: Final = 20
_WORTHWHILE: Final = 0.9
"""Use the short window, which saves readers memory, unless the long one saves a tenth of size."""

_WINDOWLESS_RATIO: Final = 12
"""From this ratio of payload to blob on, a reader that keeps the payload in memory loads the whole
blob, and needs no window."""

_END: Final = struct.pack("<II", 0x184D2A50, 0)
"""An empty skippable frame (RFC 8878, section 3.1.2) that readers append to the payload's frame. If
the frame's checksum is cut off, the decoder reads these bytes as the checksum and fails."""

_Update: TypeAlias = Callable[[memoryview], object]


@dataclass(frozen=True, slots=True)
class Sealed:
    """Digest and sizes of a new envelope."""

    sha256: str
    size_bytes: int
    raw_size_bytes: int


@dataclass(frozen=True, slots=True)
class Unsealed:
    """Facts from the header of an envelope."""

    raw_size_bytes: int  # of the payload
    compile_seconds: float  # 0 except in envelopes of release 0.1.0


def seal(key: ArtifactKey, payload: Path | bytes, into: IO[bytes]) -> Sealed:
    """Write the envelope of `payload` to `into`. A payload in a file takes constant memory.

    Equal payloads and keys give equal envelopes, so that two publishers of one executable upload
    the same bytes.

    Raises:
        OSError: a file cannot be read or written, or the payload changes meanwhile: no publisher
            could replace an envelope with a wrong digest.
    """
    with _open_payload(payload) as source:
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
            "compile_seconds": 0,  # required by readers; the metadata contains the value
        }
    ).encode()
    lead = ENVELOPE_MAGIC + struct.pack(">I", len(header)) + header

    start = into.tell()

    def write(window_log: int) -> Sealed:
        into.seek(start)
        into.truncate()
        written = DigestHasher()
        with _open_payload(payload) as source:
            again = _Hashing(source)
            try:
                for chunk in chain((lead,), _compress(again, raw_size, window_log)):
                    into.write(chunk)
                    written.update(chunk)
            except zstandard.ZstdError as error:
                raise OSError(f"the payload changed while it was read: {error}") from None
        if again.sha256 != raw_sha256:
            raise OSError("the payload changed while it was read")
        digest = written.digest()
        return Sealed(digest.sha256, digest.size_bytes, raw_size)

    sealed = write(_LONG_WINDOW_LOG)
    if raw_size <= 1 << _SHORT_WINDOW_LOG or sealed.size_bytes * _WINDOWLESS_RATIO <= raw_size:
        return sealed  # the short window would not save readers memory
    shorter = write(_SHORT_WINDOW_LOG)
    is_enough = shorter.size_bytes * _WORTHWHILE <= sealed.size_bytes
    return shorter if is_enough else write(_LONG_WINDOW_LOG)


def unseal(
    envelope: IO[bytes],
    key: ArtifactKey,
    into: IO[bytes],
    *,
    max_bytes: int,
    size_bytes: int | None = None,
    is_proven: Callable[[], bool] = lambda: False,
    admit: Callable[[int], None] | None = None,
) -> Unsealed:
    """Check that an envelope is for `key`, and write its payload to `into`.

    The written bytes are valid only if this function returns: it may raise at the last byte.

    Args:
        envelope: the blob, positioned at its start.
        key: the requested key.
        into: receives the payload.
        max_bytes: maximum size of the payload.
        size_bytes: size of the blob, if known. A small blob is read at once. Into a BytesIO, it is
            also decompressed at once, as is a larger blob that is small for its payload.
        is_proven: called after `admit`; returns whether the blob's digest is verified. If so, only
            the frame's checksum is verified: it detects errors of the decompressor and of memory.
        admit: called with the payload's size before decompression; raises to refuse the envelope.

    Raises:
        VerificationError: the key is wrong, the envelope is damaged, or the payload is too large or
            does not match the header.
    """
    try:
        header = read_envelope_head(envelope.read)
    except ValueError as error:
        raise VerificationError(Reason.CORRUPT, str(error)) from None
    try:
        named = (header["kind"], header["device_type"], header["fingerprint"])
        raw_size = int(header["raw_size"])
        raw_sha256 = str(header["raw_sha256"])
        # max() returns its first argument, 0.0, if the other one is NaN.
        compile_seconds = min(
            max(0.0, float(header["compile_seconds"])), schema.MAX_COMPILE_SECONDS
        )
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
    try:
        is_sound = _unpack(
            envelope, into, raw_size, raw_sha256, size_bytes=size_bytes, is_proven=is_proven()
        )
    except zstandard.ZstdError as error:
        raise VerificationError(Reason.CORRUPT, f"envelope payload: {error}") from None
    if not is_sound:
        raise VerificationError(
            Reason.CORRUPT, f"payload of {key} is not the {raw_size} bytes that its header names"
        )
    return Unsealed(raw_size, compile_seconds)


def _unpack(
    envelope: IO[bytes],
    into: IO[bytes],
    raw_size: int,
    raw_sha256: str,
    *,
    size_bytes: int | None,
    is_proven: bool,
) -> bool:
    """Decompress the payload. Return whether its size and digest match the header."""
    memory = into if isinstance(into, io.BytesIO) else None
    max_whole_bytes = max(_CHUNK_BYTES, raw_size // _WINDOWLESS_RATIO if memory else 0)
    is_whole = size_bytes is not None and size_bytes <= max_whole_bytes
    frame = envelope.read(-1 if is_whole else _PIECE_BYTES)
    if is_whole:
        frame += _END
    source = frame if is_whole else cast("IO[bytes]", _Joined(frame, envelope))
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _MAX_WINDOW_LOG)
    raw_hash = hashlib.sha256()
    is_hashed = not (is_proven and zstandard.get_frame_parameters(frame).has_checksum)
    update = raw_hash.update if is_hashed else _do_nothing
    with decompressor.stream_reader(source, read_size=_PIECE_BYTES, closefd=False) as reader:
        if memory is not None and raw_size > 0:
            # zstd needs no window if it has the whole frame and room for the whole payload.
            piece = raw_size if is_whole else _PIECE_BYTES
            size = _unpack_in_place(reader, memory, raw_size, piece, update)
        else:
            size = _unpack_in_pieces(reader, into, raw_size, update)
    return size == raw_size and not (is_hashed and raw_hash.hexdigest() != raw_sha256)


def _unpack_in_place(
    reader: zstandard.ZstdDecompressionReader,
    into: io.BytesIO,
    raw_size: int,
    piece_bytes: int,
    update: _Update,
) -> int:
    """Decompress into a buffer that has the final size: growing a buffer would copy it."""
    start = into.tell()
    into.seek(start + raw_size - 1)
    into.write(b"\0")
    size = 0
    with into.getbuffer() as buffer, buffer[start:] as room:
        while size < raw_size and (count := reader.readinto(room[size : size + piece_bytes])):
            update(room[size : size + count])
            size += count
    return size + len(reader.read(1))


def _unpack_in_pieces(
    reader: zstandard.ZstdDecompressionReader, into: IO[bytes], raw_size: int, update: _Update
) -> int:
    buffer = memoryview(bytearray(max(1, min(raw_size + 1, _PIECE_BYTES))))
    size = 0
    while size <= raw_size and (count := reader.readinto(buffer)):
        size += count
        if size <= raw_size:
            into.write(buffer[:count])
            update(buffer[:count])
    return size


def _do_nothing(_: memoryview) -> None:
    pass


def _open_payload(payload: Path | bytes) -> IO[bytes]:
    return payload.open("rb") if isinstance(payload, Path) else io.BytesIO(payload)


class _Hashing:
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


class NullFile(io.RawIOBase, BinaryIO):
    """Discards all bytes, to verify a payload without storing it."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes

    def __enter__(self) -> Self:
        return self


class _Joined:
    """File that contains the bytes already read, the rest of the envelope, and `_END`."""

    def __init__(self, lead: bytes, file: IO[bytes]) -> None:
        self._parts: list[IO[bytes]] = [io.BytesIO(lead), file, io.BytesIO(_END)]

    def read(self, size: int) -> bytes:
        while self._parts:
            if part := self._parts[0].read(size):
                return part
            del self._parts[0]
        return b""


def _compress(source: "_Hashing", raw_size: int, window_log: int) -> Iterator[bytes]:
    parameters = zstandard.ZstdCompressionParameters.from_level(
        3,
        source_size=raw_size,
        window_log=min(window_log, max(17, raw_size.bit_length())),
        enable_ldm=True,
        write_checksum=True,
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return compressor.read_to_iter(cast("IO[bytes]", source), size=raw_size)

"""Bundle: artifacts in one tar file, for hosts that cannot reach the server.

    manifest-<its SHA-256>.jsonl    one line about the bundle, then one per artifact, sorted by key
    blobs/<SHA-256>                 the envelopes, in the same order

The manifest and the blobs determine every byte of the file, so two exports of the same artifacts
are identical. A reader therefore does not trust tar headers: from the name and size of each entry,
it computes the only valid header and compares all 512 bytes. This rejects links, other paths,
another order, and missing or extra entries.
"""

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple, Self, TypeVar, cast

from pydantic import Field, ValidationError

from graphstash._artifacts.envelope import NullFile, unseal
from graphstash._bounded_reader import digest_of
from graphstash._regular_file import open_ours
from graphstash._replacing import replacing
from graphstash._trust.policy import Signatures, SignedSubject
from graphstash._trust.proof import Provenance
from graphstash.errors import BundleError, VerificationError
from graphstash_schema import ArtifactKey, ArtifactMetadata, Digest, Namespace
from graphstash_schema.explanation import Description
from graphstash_schema.model import RequestModel
from graphstash_schema.names import printable

__all__ = [
    "Bundle",
    "BundleEntry",
    "BundleHead",
    "BundledArtifact",
    "FileRange",
    "check_blob",
    "line_of",
    "write_bundle",
]

_BLOCK: Final = tarfile.BLOCKSIZE
_COPY_BYTES: Final = 1024**2

_MAX_LINE_BYTES: Final = 256 * 1024
"""Maximum bytes of a manifest line. It holds at most 16 KiB of metadata, and a description of at
most 32 K characters, some of which take six bytes in JSON."""

_MANIFEST: Final = re.compile(r"manifest-([0-9a-f]{64})\.jsonl")


class BundleHead(RequestModel):
    """First line of a manifest."""

    graphstash_bundle: Literal[1] = 1
    namespace: Namespace = Field(description="namespace of the artifacts and their signatures")
    artifacts: int = Field(ge=0, description="number of lines that follow")


class BundleEntry(RequestModel):
    """The manifest line of one artifact."""

    key: ArtifactKey
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the blob")
    size_bytes: int = Field(ge=0, description="of the blob")
    metadata: ArtifactMetadata | None = None
    description: Description | None = None

    @property
    def order(self) -> tuple[str, str, str]:
        """Sort key of the manifest line."""
        return self.key.fingerprint, self.key.kind.value, self.key.device_type

    @property
    def digest(self) -> Digest:
        """Digest of the blob."""
        return Digest(self.sha256, self.size_bytes)

    @property
    def name(self) -> str:
        """Name of the blob in the tar file."""
        return f"blobs/{self.sha256}"

    @property
    def proof(self) -> Provenance:
        """The artifact's signature and compile time."""
        if self.metadata is None:
            return Provenance()
        return Provenance(
            signature=self.metadata.signature, compile_seconds=self.metadata.compile_seconds
        )


class BundledArtifact(NamedTuple):
    """An artifact in a bundle: its number, counted from 1, its manifest line, and its blob."""

    number: int
    entry: BundleEntry
    blob: IO[bytes]


_Line = TypeVar("_Line", BundleHead, BundleEntry)


class Bundle:
    """An open bundle, used as a context manager. Reads the manifest and blobs in constant memory.

    Args:
        path: path of the bundle, which no other user may be able to change.

    Raises:
        BundleError: the file cannot be read, other users can change it, or it does not begin with
            an intact manifest.
        OSError: the path does not exist or is a directory.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = open_ours(path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise
        except OSError as error:
            raise BundleError(
                f"it cannot be read, or other users could change it ({error}): copy it to a "
                "directory that only you can write to"
            ) from None
        self.size_bytes = os.fstat(self._file.fileno()).st_size
        try:
            self._manifest = self._find_manifest()
            self._head = _parsed(BundleHead, next(self._lines(), b""), "the manifest's first line")
        except BaseException:
            self._file.close()
            raise
        self.namespace, self.artifacts = self._head.namespace, self._head.artifacts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def entries(self) -> Iterator[BundledArtifact]:
        """Yield every artifact after checking its header and padding.

        `check_blob` checks the bytes of the blob. The bundle is valid only if the iteration reaches
        its end.

        Raises:
            BundleError: the file differs from the manifest. The message names the entry.
        """
        at = self._manifest.end + _padding(self._manifest.size_bytes)
        lines, before, number = self._lines(), ("", "", ""), 0
        next(lines)
        for number, line in enumerate(lines, start=1):
            what = f"artifact {number} in the manifest"
            entry = _parsed(BundleEntry, line, what)
            if entry.order <= before:
                raise BundleError(f"{what} ({entry.key}) is listed twice or out of order")
            before = entry.order
            yield BundledArtifact(number, entry, self._blob_at(at, number, entry))
            at += _BLOCK + entry.size_bytes + _padding(entry.size_bytes)
        if number != self.artifacts:
            raise BundleError(f"the manifest announces {self.artifacts} artifacts and has {number}")
        end = _whole_size(at)
        if self.size_bytes != end:
            raise BundleError(
                f"the file has {self.size_bytes} bytes and should have {end}: something is cut off "
                f"or added after the last entry (number {number})"
            )
        self._expect_zeros(at, end - at, "after the last entry")

    def _find_manifest(self) -> "FileRange":
        header = self._read(0, _BLOCK)
        try:
            info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
            name, size = info.name, info.size
        except (tarfile.TarError, ValueError):
            name, size = "", 0
        named = _MANIFEST.fullmatch(name)
        if named is None or size < 0 or header != _header(name, size):
            raise BundleError("not a bundle of graphstash: it does not begin with a manifest")
        if _BLOCK + size > self.size_bytes:
            raise BundleError(f"the manifest is cut: it should have {size} bytes")
        manifest = FileRange(self._file, _BLOCK, size)
        found = digest_of(manifest, size).sha256  # type: ignore[arg-type] # reads and seeks
        if found != named[1]:
            raise BundleError(f"the manifest was changed: its SHA-256 is {found}, not {named[1]}")
        self._expect_zeros(manifest.end, _padding(size), "after the manifest")
        return manifest

    def _lines(self) -> Iterator[bytes]:
        again = FileRange(self._file, _BLOCK, self._manifest.size_bytes)
        with io.BufferedReader(again, 64 * 1024) as lines:
            while line := lines.readline(_MAX_LINE_BYTES + 1):
                yield line

    def _blob_at(self, at: int, number: int, entry: BundleEntry) -> IO[bytes]:
        what = f"entry {number} ({entry.name}, {entry.key})"
        found, expected = self._read(at, _BLOCK), _header(entry.name, entry.size_bytes)
        if found != expected:
            raise BundleError(f"{what} is not there: {_describe(found)} is in its place")
        blob = FileRange(self._file, at + _BLOCK, entry.size_bytes)
        if blob.end > self.size_bytes:
            raise BundleError(
                f"{what} is cut: {self.size_bytes - at - _BLOCK} of {entry.size_bytes} bytes are "
                "there"
            )
        self._expect_zeros(blob.end, _padding(entry.size_bytes), f"after {what}")
        return cast("IO[bytes]", blob)  # readers of envelopes use only methods that it has

    def _expect_zeros(self, at: int, count: int, where: str) -> None:
        if self._read(at, count) != bytes(count):
            raise BundleError(f"unexpected bytes {where}, or the file is truncated")

    def _read(self, at: int, count: int) -> bytes:
        try:
            return os.pread(self._file.fileno(), count, at)
        except OSError as error:
            raise BundleError(f"cannot be read at byte {at}: {error.strerror}") from None


class FileRange(io.RawIOBase):
    """A range of a file as a read-only file with its own position."""

    def __init__(self, file: IO[bytes], start: int, size_bytes: int) -> None:
        self._file, self._start, self._at = file, start, 0
        self.size_bytes = size_bytes

    @property
    def end(self) -> int:
        """Offset in the whole file of the first byte after the range."""
        return self._start + self.size_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self.size_bytes)[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        room = memoryview(buffer).cast("B")
        count = max(0, min(room.nbytes, self.size_bytes - self._at))
        data = os.pread(self._file.fileno(), count, self._start + self._at)
        room[: len(data)] = data
        self._at += len(data)
        return len(data)


def check_blob(
    entry: BundleEntry,
    blob: IO[bytes],
    *,
    namespace: Namespace,
    signatures: Signatures,
    max_bytes: int,
) -> int:
    """Verify an artifact as a job does before the compiler receives it.

    Verifies the digest, the signature, the key, and that the payload decompresses to the size and
    hash in the envelope.

    Returns:
        The decompressed size of the payload in bytes.

    Raises:
        BundleError: the artifact must not be used.
        LocalTierError: the file of trusted keys has changed and cannot be used.
        OSError: the blob cannot be read.
    """
    found = digest_of(blob, entry.size_bytes)
    if found != entry.digest:
        raise BundleError(f"its bytes were changed: their digest is {found}, not {entry.digest}")

    def admit(raw_size_bytes: int) -> None:
        subject = SignedSubject(namespace, entry.key, entry.digest, raw_size_bytes)
        signatures.check(subject, entry.proof)

    try:
        unsealed = unseal(
            blob,
            entry.key,
            NullFile(),
            max_bytes=max_bytes,
            size_bytes=entry.size_bytes,
            admit=admit,
        )
    except VerificationError as error:
        raise BundleError(str(error)) from error
    blob.seek(0)
    return unsealed.raw_size_bytes


def write_bundle(
    path: Path,
    *,
    namespace: Namespace,
    lines: IO[bytes],
    artifacts: int,
    blob_of: Callable[[BundleEntry], Path],
    written: Callable[[int], None],
) -> int:
    """Write a bundle atomically. Only its owner can read it.

    Args:
        path: path of the bundle. An existing file is replaced.
        namespace: namespace of the artifacts.
        lines: file with `line_of` each artifact, in the order of the manifest.
        artifacts: number of lines.
        blob_of: returns the path of an artifact's blob.
        written: called after each chunk of a blob with its number of bytes.

    Returns:
        The size of the file.

    Raises:
        BundleError: the bytes of a blob differ from its entry.
        OSError: writing fails.
    """
    head = line_of(BundleHead(namespace=namespace, artifacts=artifacts))
    sha256, size = hashlib.sha256(head), len(head)
    for line in _from_start(lines):
        sha256.update(line)
        size += len(line)
    with replacing(path, is_text=False) as file:
        file.write(_header(f"manifest-{sha256.hexdigest()}.jsonl", size) + head)
        for line in _from_start(lines):
            file.write(line)
        file.write(bytes(_padding(size)))
        for line in _from_start(lines):
            entry = BundleEntry.model_validate_json(line)
            file.write(_header(entry.name, entry.size_bytes))
            _copy(entry, blob_of(entry), file, written)
            file.write(bytes(_padding(entry.size_bytes)))
        end = _whole_size(file.tell())
        file.write(bytes(end - file.tell()))
    return end


def line_of(each: BundleHead | BundleEntry) -> bytes:
    """Return the manifest line of a record."""
    return each.model_dump_json(exclude_defaults=False).encode() + b"\n"


def _copy(
    entry: BundleEntry, source: Path, target: IO[bytes], written: Callable[[int], None]
) -> None:
    sha256, size = hashlib.sha256(), 0
    with source.open("rb") as blob:
        while chunk := blob.read(_COPY_BYTES):
            sha256.update(chunk)
            target.write(chunk)
            size += len(chunk)
            written(len(chunk))
    if (sha256.hexdigest(), size) != (entry.sha256, entry.size_bytes):
        raise BundleError(f"{source} was changed during the export: run the export again")


def _parsed(model: type[_Line], line: bytes, what: str) -> _Line:
    """Parse a line, and reject every form except the one that `line_of` writes."""
    if len(line) > _MAX_LINE_BYTES:
        raise BundleError(f"{what} has more than {_MAX_LINE_BYTES} bytes")
    try:
        parsed = model.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        raise BundleError(f"{what}: {printable(where, most=80)}: {first['msg']}") from None
    if line_of(parsed) != line:
        raise BundleError(f"{what} is not in the form that graphstash writes")
    return parsed


def _from_start(lines: IO[bytes]) -> Iterator[bytes]:
    lines.seek(0)
    yield from lines


def _header(name: str, size_bytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size_bytes, 0o644
    return info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def _padding(size_bytes: int) -> int:
    return -size_bytes % _BLOCK


def _whole_size(content_bytes: int) -> int:
    """Return the size of the tar file, which ends with two empty blocks and padding to a record."""
    least = content_bytes + 2 * _BLOCK
    return least + -least % tarfile.RECORDSIZE


def _describe(header: bytes) -> str:
    if len(header) < _BLOCK:
        return "the end of the file"
    if not any(header):
        return "the end of the archive"
    try:
        info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError):
        return "an invalid header"
    kind = "a file" if info.isfile() else "a link" if info.issym() or info.islnk() else "no file"
    return f"{kind} named {printable(info.name, most=120)!r} of {info.size} bytes"

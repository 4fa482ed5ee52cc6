"""Bundle: artifacts in one file, for hosts that no network connects with a server.

    manifest-<its SHA-256>.jsonl    a line about the bundle, then one for each artifact, by key
    blobs/<SHA-256>                 the envelopes, in the same order

It is a tar file, each byte of which follows from its manifest and its blobs: who exports the same
artifacts twice gets the same file. So a reader does not interpret what others may have written into
a tar file. It computes the header that has to stand in each place and compares all 512 bytes: a
link, a path, another order, an entry too many or too few, all are not what has to stand there.
"""

import hashlib
import io
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, ValidationError

from graphstash._artifacts.envelope import Nowhere, unseal
from graphstash._trust.policy import Signatures
from graphstash._trust.provenance import Provenance, SignedSubject, digest_of, open_ours
from graphstash.errors import BundleError, VerificationError
from graphstash_schema import ArtifactKey, ArtifactMetadata, Digest, Namespace
from graphstash_schema.explanation import Description
from graphstash_schema.model import RequestModel
from graphstash_schema.names import printable

__all__ = [
    "Bundle",
    "BundleEntry",
    "BundleHead",
    "Found",
    "Part",
    "check_blob",
    "line_of",
    "write_bundle",
]

_BLOCK: Final = tarfile.BLOCKSIZE
_COPY_BYTES: Final = 1024**2

_MAX_LINE_BYTES: Final = 256 * 1024
"""Of one artifact in the manifest: its metadata have 16 KiB at most and its description has 32 K
characters, some of which take six bytes in JSON."""

_MANIFEST: Final = re.compile(r"manifest-([0-9a-f]{64})\.jsonl")


class BundleHead(RequestModel):
    """The first line of a manifest."""

    graphstash_bundle: Literal[1] = 1
    namespace: Namespace = Field(description="where the artifacts were; what signatures name")
    artifacts: int = Field(ge=0, description="how many lines follow")


class BundleEntry(RequestModel):
    """One artifact, as a line of the manifest has it."""

    key: ArtifactKey
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the blob")
    size_bytes: int = Field(ge=0, description="of the blob")
    metadata: ArtifactMetadata | None = None
    description: Description | None = None

    @property
    def order(self) -> tuple[str, str, str]:
        """By what the lines are sorted."""
        return self.key.fingerprint, self.key.kind.value, self.key.device_type

    @property
    def digest(self) -> Digest:
        """Of the blob."""
        return Digest(self.sha256, self.size_bytes)

    @property
    def name(self) -> str:
        """Of the blob in the tar file."""
        return f"blobs/{self.sha256}"

    @property
    def proof(self) -> Provenance:
        """Why the artifact may be used, and what it saves."""
        if self.metadata is None:
            return Provenance()
        return Provenance(
            signature=self.metadata.signature, compile_seconds=self.metadata.compile_seconds
        )


class Found(NamedTuple):
    """An artifact of a bundle: what its manifest says, and its blob."""

    number: int
    entry: BundleEntry
    blob: "Part"


_Line = TypeVar("_Line", BundleHead, BundleEntry)


class Bundle:
    """An open bundle; a context manager. Its parts are read with constant memory.

    Args:
        path: a file that nobody else can change while it is read.

    Attributes:
        namespace: where its artifacts were.
        artifacts: how many it has, as its manifest says.
        size_bytes: of the file.

    Raises:
        BundleError: on construction: the file cannot be used, or does not begin with a manifest.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = open_ours(path)
        except FileNotFoundError:
            raise BundleError("there is no such file") from None
        except OSError as error:
            raise BundleError(
                f"it cannot be read, or others could change it meanwhile ({error}): copy it to a "
                "directory of yours"
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

    def entries(self) -> Iterator[Found]:
        """Every artifact, each compared with what has to stand there; the bytes of the blobs are
        not (`check_blob`). Unless it comes to its end, the bundle is not what it should be.

        Raises:
            BundleError: says which entry is not as the manifest says.
        """
        at = self._manifest.end + _padding(self._manifest.size_bytes)
        lines, before, number = self._lines(), ("", "", ""), 0
        next(lines)
        for number, line in enumerate(lines, start=1):
            what = f"artifact {number} in the manifest"
            entry = _parsed(BundleEntry, line, what)
            if entry.order <= before:
                raise BundleError(f"{what} ({entry.key}) is there twice or not in order")
            before = entry.order
            yield Found(number, entry, self._blob_at(at, number, entry))
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

    def _find_manifest(self) -> "Part":
        header = self._read(0, _BLOCK)
        try:
            info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
            name, size = info.name, info.size
        except (tarfile.TarError, ValueError):
            name, size = "", 0
        named = _MANIFEST.fullmatch(name)
        if named is None or size < 0 or header != _header(name, size):
            raise BundleError("this is no bundle of graphstash: it does not begin with a manifest")
        if _BLOCK + size > self.size_bytes:
            raise BundleError(f"the manifest is cut: it should have {size} bytes")
        manifest = Part(self._file, _BLOCK, size)
        found = digest_of(manifest, size).sha256  # type: ignore[arg-type] # reads and seeks
        if found != named[1]:
            raise BundleError(f"the manifest was changed: its SHA-256 is {found}, not {named[1]}")
        self._expect_zeros(manifest.end, _padding(size), "after the manifest")
        return manifest

    def _lines(self) -> Iterator[bytes]:
        again = Part(self._file, _BLOCK, self._manifest.size_bytes)
        with io.BufferedReader(again, 64 * 1024) as lines:
            while line := lines.readline(_MAX_LINE_BYTES + 1):
                yield line

    def _blob_at(self, at: int, number: int, entry: BundleEntry) -> "Part":
        what = f"entry {number} ({entry.name}, {entry.key})"
        found, wanted = self._read(at, _BLOCK), _header(entry.name, entry.size_bytes)
        if found != wanted:
            raise BundleError(f"{what} is not there: {_told(found)} is in its place")
        blob = Part(self._file, at + _BLOCK, entry.size_bytes)
        if blob.end > self.size_bytes:
            raise BundleError(
                f"{what} is cut: {self.size_bytes - at - _BLOCK} of {entry.size_bytes} bytes are "
                "there"
            )
        self._expect_zeros(blob.end, _padding(entry.size_bytes), f"after {what}")
        return blob

    def _expect_zeros(self, at: int, count: int, where: str) -> None:
        if self._read(at, count) != bytes(count):
            raise BundleError(f"there is something {where} where nothing may be, or it is cut")

    def _read(self, at: int, count: int) -> bytes:
        try:
            return os.pread(self._file.fileno(), count, at)
        except OSError as error:
            raise BundleError(f"cannot be read at byte {at}: {error.strerror}") from None


class Part(io.RawIOBase):
    """Some bytes of a file as a file of its own; several parts are read independently."""

    def __init__(self, file: IO[bytes], start: int, size_bytes: int) -> None:
        self._file, self._start, self._at = file, start, 0
        self.size_bytes = size_bytes

    @property
    def end(self) -> int:
        """The place of the byte after it, in the whole file."""
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
    """Verifies an artifact as a job does before it uses one, but for the compiler: digest,
    signature, key, and that the payload unpacks to what the envelope says.

    Args:
        entry: what it is said to be.
        blob: its bytes; at their beginning afterwards.
        namespace: that its signature names.
        signatures: of this host's settings.
        max_bytes: largest payload that is accepted.

    Returns:
        The size of its payload.

    Raises:
        VerificationError: it must not be used.
        OSError: it cannot be read.
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
            Nowhere(),
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
    """Writes a bundle; it appears whole or not at all, and only its owner can read it.

    Args:
        path: takes the place of an older file.
        namespace: where the artifacts were.
        lines: `line_of` each of them, in their order.
        artifacts: how many those are.
        blob_of: the file of an artifact's blob.
        written: is called with the number of bytes after each piece.

    Returns:
        The size of the file.

    Raises:
        BundleError: a blob is not what its entry says.
        OSError: it cannot be written.
    """
    head = line_of(BundleHead(namespace=namespace, artifacts=artifacts))
    sha256, size = hashlib.sha256(head), len(head)
    for line in _from_start(lines):
        sha256.update(line)
        size += len(line)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
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
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    return end


def line_of(each: BundleHead | BundleEntry) -> bytes:
    """A record as a line of a manifest."""
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
        raise BundleError(f"{source} was changed while it was written: run the export again")


def _parsed(model: type[_Line], line: bytes, what: str) -> _Line:
    """Reads a line that has exactly the form in which it is written."""
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
    """Of a file with its end: two empty blocks, and what fills a record."""
    least = content_bytes + 2 * _BLOCK
    return least + -least % tarfile.RECORDSIZE


def _told(header: bytes) -> str:
    """What stands in a place, for people."""
    if len(header) < _BLOCK:
        return "the end of the file"
    if not any(header):
        return "the end of the archive"
    try:
        info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError):
        return "something that is no header"
    kind = "a file" if info.isfile() else "a link" if info.issym() or info.islnk() else "no file"
    return f"{kind} named {printable(info.name, most=120)!r} of {info.size} bytes"

"""Unsent: a record of each artifact that a job on this host should have published, but could not.

    <tier>/servers/<server>/_unsent/<namespace>/<64 hex>    `BundleEntry` as one line of JSON

`<server>` stands for the URL of the job's server. It stands for the empty URL if the job's settings
name no server and the user runs none on this host. The local tier holds the artifact's bytes. The
record holds the rest of the upload: metadata, signature, label and description. `CatchUp` publishes
the artifacts later.

A job writes the record before the upload begins, so that the record survives if the job is killed.
The job locks the file until the upload ends. Readers skip locked records.

A job that publishes nothing (`read_only`, or `none` as its URL) leaves no record.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from graphstash._artifacts.local_tier import LocalTier
from graphstash._regular_file import open_ours
from graphstash.config import ClientConfig
from graphstash.errors import CacheError, LocalTierError
from graphstash_schema import ArtifactKey, Digest

if TYPE_CHECKING:
    from graphstash._artifacts.bundle import BundleEntry
    from graphstash_schema import ArtifactMetadata
    from graphstash_schema.explanation import Description

__all__ = ["Unsent"]

_FOLDER: Final = "_unsent"
"""Name beside the namespaces in a server's folder. No namespace begins with an underscore."""

_MAX_RECORDS: Final = 1000
"""Maximum number of records per server and namespace."""

_MAX_BYTES: Final = 256 * 1024

_MAX_ATTEMPTS: Final = 1_000_000
"""A smaller modification time is a number of attempts."""


class Unsent:
    """Records of one namespace, for one server and of jobs without a server. Thread-safe.

    A record that cannot be written is dropped.

    Attributes:
        added: called after an upload failed, which leaves a record if it may succeed later.
    """

    def __init__(self, tier: LocalTier, config: ClientConfig) -> None:
        self.added: Callable[[], None] = lambda: None
        self._is_enabled = config.unsent_limit > 0
        self._tier = tier
        self._with_server, self._without_server = (
            tier.server_folder(url) / _FOLDER / config.namespace for url in (config.url, "")
        )

    def add(
        self,
        key: ArtifactKey,
        digest: Digest,
        metadata: "ArtifactMetadata",
        description: "Description | None",
    ) -> None:
        """Record an artifact."""
        with self.uploading(key, digest, metadata, description):
            pass

    @contextmanager
    def uploading(
        self,
        key: ArtifactKey,
        digest: Digest,
        metadata: "ArtifactMetadata",
        description: "Description | None",
    ) -> Iterator[None]:
        """Record an artifact, and lock the record until the block ends. The caller removes the
        record unless a later upload may succeed.
        """
        # Not by `BundleEntry`: each job that publishes would import its modules.
        fields = {
            "key": {name: getattr(key, name) for name in ("kind", "device_type", "fingerprint")},
            "sha256": digest.sha256,
            "size_bytes": digest.size_bytes,
            "metadata": metadata.model_dump(mode="json"),
            "description": description and description.model_dump(mode="json"),
        }
        path = self._with_server / _name_of(key)
        try:
            with ExitStack() as stack:
                if self._is_enabled:
                    with suppress(OSError, LocalTierError):  # for example on a full disk
                        file = stack.enter_context(self._tier.temporary())  # locked while open
                        file.write(json.dumps(fields).encode() + b"\n")
                        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                        file.rename(path)
                        _prune(path.parent)
                yield
        except CacheError:
            self.added()
            raise

    def remove(self, key: ArtifactKey, sha256: str) -> None:
        """Remove the records of an artifact, unless another process has recorded other bytes."""
        for path in self._paths(key):
            with suppress(OSError), open_ours(path) as file:
                if sha256.encode() in file.read(_MAX_BYTES):
                    path.unlink()

    def attempts(self, key: ArtifactKey) -> int:
        """Return how many later uploads of an artifact have begun."""
        return max(map(_attempts_of, self._paths(key)))

    def count_attempt(self, key: ArtifactKey) -> None:
        """Count an attempt in the record's modification time, so that earlier releases read the
        record. `_prune` removes records with attempts first.
        """
        for path in self._paths(key):
            with suppress(OSError):
                count = _attempts_of(path) + 1
                os.utime(path, (count, count))

    def _paths(self, key: ArtifactKey) -> tuple[Path, Path]:
        name = _name_of(key)
        return self._with_server / name, self._without_server / name

    def is_empty(self, *, with_any: bool) -> bool:
        """Return whether `entries` has no record to read."""
        return next(self._lines(with_any=with_any), None) is None

    def entries(self, *, with_any: bool) -> "Iterator[BundleEntry]":
        """Yield the recorded artifacts, unordered. Skip records of unknown form, and without
        `with_any` those of jobs that had no server.
        """
        from graphstash._artifacts.bundle import BundleEntry  # few jobs need it

        for line in self._lines(with_any=with_any):
            with suppress(ValueError):
                yield BundleEntry.model_validate_json(line)

    def _lines(self, *, with_any: bool) -> Iterator[bytes]:
        """Yield the records whose upload is not running."""
        for folder in (self._with_server, self._without_server)[: 1 + with_any]:
            for path in _records(folder):
                if line := _line_of(path):
                    yield line


def _attempts_of(path: Path) -> int:
    with suppress(OSError):
        time = path.stat().st_mtime
        return int(time) if time < _MAX_ATTEMPTS else 0
    return 0


def _line_of(path: Path) -> bytes:
    """Return a record, or nothing if it cannot be read now or its upload is running."""
    with suppress(OSError), open_ours(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return b""
        except OSError:  # a file system without locks
            pass
        return file.read(_MAX_BYTES)
    return b""


def _records(folder: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as files:
        yield from (Path(file.path) for file in files if not file.name.startswith("."))


def _prune(folder: Path) -> None:
    """Remove the oldest records, a tenth of the maximum, if there are more than the maximum.

    Raises:
        OSError: another process has removed one of them.
    """
    paths = list(_records(folder))
    if len(paths) > _MAX_RECORDS:
        paths.sort(key=lambda path: path.stat().st_mtime)
        for path in paths[: _MAX_RECORDS // 10]:
            path.unlink()


def _name_of(key: ArtifactKey) -> str:
    return hashlib.sha256(str(key).encode()).hexdigest()

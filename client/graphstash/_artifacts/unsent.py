"""Unsent: a record of each artifact that a job on this host should have published, but could not.

    <tier>/servers/<server>/_unsent/<namespace>/<64 hex>    `BundleEntry` as one line of JSON

`<server>` stands for the URL of the job's server. It stands for the empty URL if the job's settings
name no server and the user runs none on this host. The local tier holds the artifact's bytes. The
record holds the rest of the upload: metadata, signature, label and description. `CatchUp` publishes
the artifacts later.

A job that publishes nothing (`read_only`, or `none` as its URL) leaves no record.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from graphstash._artifacts.local_tier import LocalTier
from graphstash._trust.provenance import open_ours
from graphstash.config import ClientConfig
from graphstash_schema import ArtifactKey, ArtifactMetadata, Digest

if TYPE_CHECKING:
    from graphstash._artifacts.bundle import BundleEntry
    from graphstash_schema.explanation import Description

__all__ = ["Unsent"]

_FOLDER: Final = "_unsent"
"""Name beside the namespaces in a server's folder. No namespace begins with an underscore."""

_MAX_RECORDS: Final = 1000
"""Maximum number of records per server and namespace."""

_MAX_BYTES: Final = 256 * 1024


class Unsent:
    """Records of one namespace, for one server and of jobs without a server. Thread-safe.

    A record that cannot be written is dropped.

    Attributes:
        added: called after a record was added.

    Args:
        tier: local tier that holds the artifacts.
        config: server and namespace.
    """

    def __init__(self, tier: LocalTier, config: ClientConfig) -> None:
        self.added: Callable[[], None] = lambda: None
        self._is_enabled = config.unsent_limit > 0
        self._with_server, self._without_server = (
            tier.server_folder(url) / _FOLDER / config.namespace for url in (config.url, "")
        )

    def add(
        self,
        key: ArtifactKey,
        digest: Digest,
        metadata: ArtifactMetadata,
        description: "Description | None",
    ) -> None:
        """Record an artifact."""
        if not self._is_enabled:
            return
        from graphstash._artifacts.bundle import BundleEntry, line_of  # few jobs need it

        entry = BundleEntry(
            key=key,
            sha256=digest.sha256,
            size_bytes=digest.size_bytes,
            metadata=metadata,
            description=description,
        )
        path = self._with_server / _name_of(key)
        partial = path.with_name(f".{os.getpid()}-{threading.get_ident()}")
        with suppress(OSError):  # for example on a full disk
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
                file.write(line_of(entry))
            partial.replace(path)
            _prune(path.parent)
            self.added()

    def remove(self, key: ArtifactKey) -> None:
        """Remove the records of an artifact."""
        for folder in (self._with_server, self._without_server):
            with suppress(OSError):
                (folder / _name_of(key)).unlink()

    def is_empty(self, *, with_any: bool) -> bool:
        """Return whether `entries` has no record to read."""
        return next(self._files(with_any=with_any), None) is None

    def entries(self, *, with_any: bool) -> "Iterator[BundleEntry]":
        """Yield the recorded artifacts, unordered. Remove damaged records.

        Args:
            with_any: whether to include the records of jobs without a server.
        """
        from graphstash._artifacts.bundle import BundleEntry

        for path in self._files(with_any=with_any):
            with suppress(OSError), open_ours(path) as file:
                try:
                    entry = BundleEntry.model_validate_json(file.read(_MAX_BYTES))
                except ValueError:
                    path.unlink()
                else:
                    yield entry

    def _files(self, *, with_any: bool) -> Iterator[Path]:
        yield from _records(self._with_server)
        if with_any:
            yield from _records(self._without_server)


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

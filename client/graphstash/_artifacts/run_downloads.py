"""RunDownloads: artifacts that this run downloaded, so that statistics count hits by source.

The processes of a run share a disk, so a hit of one process may be a download of another. Each
process appends a line per download to the run's file, `<local tier>/records/<run>/downloads`. Only
statistics use the file, so errors are ignored.
"""

import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, TypeAlias

from graphstash._artifacts import run_folder
from graphstash._artifacts.run_folder import Claim
from graphstash_schema import ArtifactKey

__all__ = ["RunDownloads", "Source"]

Source: TypeAlias = Literal["server", "prefetched", "host"]
"""Source of a hit. server: this run downloaded the artifact on demand. prefetched: this run
downloaded it in advance. host: an earlier run left it on this host, or this run compiled it."""

_MAX_BYTES: Final = 4 * 1024**2


class RunDownloads:
    """Records which artifacts this run has downloaded. Thread-safe.

    Args:
        folder: folder of the run, which the constructor creates and locks against removal. None
            if this process shares no run.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        held = None if folder is None else run_folder.hold(folder)
        if held is not None:
            finalizer = weakref.finalize(self, os.close, held)
            finalizer.atexit = False  # the kernel closes it at process exit
        self._known: dict[str, Source] = {}
        self._read_bytes = 0

    def add(self, key: ArtifactKey, source: Literal["server", "prefetched"]) -> None:
        self._known[str(key)] = source
        if self._folder is None:
            return
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            descriptor = os.open(self._folder / "downloads", flags, 0o600)
            try:
                os.write(descriptor, f"{key} {source}\n".encode())  # one write: whole lines
            finally:
                os.close(descriptor)

    def claim(self, name: str) -> Claim | None:
        """Hold a name of the run, or return None if another process of the run holds it."""
        return Claim() if self._folder is None else run_folder.claim(self._folder / name)

    def source_of(self, key: ArtifactKey) -> Source:
        """Return the source of an artifact that is on this host's disk."""
        known = self._known.get(str(key))
        if known is None and self._folder is not None:
            self._read(self._folder / "downloads")
            known = self._known.get(str(key))
        return known or "host"

    def _read(self, path: Path) -> None:
        """Read the lines that other processes have appended since the last call."""
        with suppress(OSError, ValueError):
            start = self._read_bytes
            if path.stat().st_size in (start, 0):
                return
            with path.open("rb") as file:
                file.seek(start)
                added = file.read(_MAX_BYTES)
            whole = added[: added.rfind(b"\n") + 1]
            self._read_bytes = start + len(whole)  # harmless if two threads read the same lines
            for line in whole.decode("ascii").splitlines():
                key, _, source = line.partition(" ")
                if source in ("server", "prefetched"):
                    self._known.setdefault(key, "server" if source == "server" else "prefetched")

"""RunDownloads: artifacts that this run downloaded, so that statistics count hits by source.

The processes of a run share a disk, so a hit of one process may be a download of another. Each
process appends a line per download to the run's file, `<local tier>/records/<run>/downloads`. Only
statistics use the file, so errors are ignored.
"""

import os
import weakref
from pathlib import Path
from typing import Literal, TypeAlias

from graphstash._artifacts import run_folder
from graphstash._artifacts.run_folder import Claim, SharedLines
from graphstash._held_folder import hold
from graphstash_schema import ArtifactKey

__all__ = ["RunDownloads", "Source"]

Source: TypeAlias = Literal["server", "prefetched", "host"]
"""Source of a hit. server: this run downloaded the artifact on demand. prefetched: this run
downloaded it in advance. host: an earlier run left it on this host, or this run compiled it."""


class RunDownloads:
    """Records which artifacts this run has downloaded. Thread-safe.

    Args:
        folder: folder of the run, which the constructor creates and locks against removal. None
            if this process shares no run.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        held = None if folder is None else hold(folder)
        if held is not None:
            finalizer = weakref.finalize(self, os.close, held)
            finalizer.atexit = False  # the kernel closes it at process exit
        self._known: dict[str, Source] = {}
        self._shared = SharedLines(None if folder is None else folder / "downloads")

    def add(self, key: ArtifactKey, source: Literal["server", "prefetched"]) -> None:
        self._known[str(key)] = source
        self._shared.append(f"{key} {source}\n")

    def claim(self, name: str) -> Claim | None:
        """Hold a name of the run, or return None if another process of the run holds it."""
        return Claim() if self._folder is None else run_folder.claim(self._folder / name)

    def source_of(self, key: ArtifactKey) -> Source:
        """Return the source of an artifact that is on this host's disk."""
        if str(key) not in self._known:
            for line in self._shared.added():
                known, _, source = line.partition(" ")
                if source in ("server", "prefetched"):
                    self._known.setdefault(known, "server" if source == "server" else "prefetched")
        return self._known.get(str(key), "host")

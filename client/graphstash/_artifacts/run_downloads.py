"""RunDownloads: what this run has brought to this host's disk: hits count where bytes came from.

The processes of a run share a disk: what one of them has downloaded, the others find there. Each
notes its downloads in one file per run, `<local tier>/records/<run>/downloads`, a line for each.
The file is for statistics alone: nothing depends on it, and whatever is wrong with it is ignored.
"""

import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, TypeAlias

from graphstash._artifacts import run_folder
from graphstash_schema import ArtifactKey

__all__ = ["RunDownloads", "Source"]

Source: TypeAlias = Literal["server", "prefetched", "host"]
"""Where bytes came from: downloaded by this run when they were needed, downloaded by this run
before that, or on this host for another reason: an earlier run left them, or this one made them."""

_MAX_BYTES: Final = 4 * 1024**2


class RunDownloads:
    """Knows which artifacts this run has downloaded; safe for many threads.

    Args:
        folder: of the run, made when absent, and held; None where this process is alone.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        held = None if folder is None else run_folder.hold(folder)
        if held is not None:
            letting_go = weakref.finalize(self, os.close, held)
            letting_go.atexit = False  # the kernel does it when the process has ended
        self._known: dict[str, Source] = {}
        self._read_bytes = 0

    def add(self, key: ArtifactKey, source: Literal["server", "prefetched"]) -> None:
        """Notes a download of this process."""
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

    def claim(self, name: str) -> bool:
        """Whether this is the first process of the run that claims something."""
        if self._folder is None:
            return True
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            os.close(os.open(self._folder / name, flags, 0o600))
        except FileExistsError:
            return False
        except OSError:  # it does so for itself
            return True
        return True

    def release(self, name: str) -> None:
        """Takes a claim of this process back."""
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / name).unlink()

    def source_of(self, key: ArtifactKey) -> Source:
        """Where the bytes came from that are on this host's disk."""
        known = self._known.get(str(key))
        if known is None and self._folder is not None:
            self._read(self._folder / "downloads")
            known = self._known.get(str(key))
        return known or "host"

    def _read(self, path: Path) -> None:
        """Reads what others have added since the last time."""
        with suppress(OSError, ValueError):
            start = self._read_bytes
            if path.stat().st_size in (start, 0):
                return
            with path.open("rb") as file:
                file.seek(start)
                added = file.read(_MAX_BYTES)
            whole = added[: added.rfind(b"\n") + 1]
            self._read_bytes = start + len(whole)  # two threads may have read the same
            for line in whole.decode("ascii").splitlines():
                key, _, source = line.partition(" ")
                if source in ("server", "prefetched"):
                    self._known.setdefault(key, "server" if source == "server" else "prefetched")

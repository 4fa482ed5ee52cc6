"""Detect when torch_xla has finished a file in its cache directory, and publish the file.

torch_xla creates an empty file, serializes for hundreds of milliseconds, writes the file and closes
it. Only the kernel's close-after-write event proves that torch_xla has finished.
"""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from inotify_simple import INotify, flags

from graphstash._compile.cache import InFlightCompile
from graphstash._forking import unforked

__all__ = ["WrittenFileWatcher", "publish_file"]

_log = logging.getLogger("graphstash")

_FULL_BYTES: Final = 1024**2
"""Free bytes below which a disk counts as full."""


def publish_file(path: Path, compilation: InFlightCompile, *, compile_seconds: float) -> None:
    """Publish a file, removing it after the upload, or abandon it if it may be incomplete."""
    if not _is_whole(path):
        compilation.abandon()
        return
    compilation.publish(
        path,
        compile_seconds=compile_seconds,
        done=lambda: path.unlink(missing_ok=True),
    )


def _is_whole(path: Path) -> bool:
    """Return whether a closed file is likely complete: torch_xla ignores errors of a full disk."""
    try:
        disk = os.statvfs(path)
        return path.stat().st_size > 0 and disk.f_bavail * disk.f_frsize > _FULL_BYTES
    except OSError:
        return False


class WrittenFileWatcher:
    """Calls `on_written(name)` when a process has written and closed a file in a directory.

    Renamed files are not reported. `on_written` runs in a daemon thread, which `close` ends.

    Raises:
        OSError: The kernel refuses the watch.
    """

    def __init__(self, directory: Path, on_written: Callable[[str], None]) -> None:
        self._on_written = on_written
        self._inotify = INotify()
        self._watch = self._inotify.add_watch(directory, flags.CLOSE_WRITE)
        self._thread = threading.Thread(target=self._run, name="graphstash-written", daemon=True)
        self._thread.start()

    def close(self, *, timeout_seconds: float = 5.0) -> None:
        """Report the files finished by now, then wait at most the timeout for the thread to end."""
        with suppress(OSError):  # removing the directory has removed the watch
            self._inotify.rm_watch(self._watch)  # wakes the thread with its last event
        self._thread.join(timeout_seconds)
        self._inotify.close()

    def close_in_child(self) -> None:
        """Close a forked child's copy of the descriptor. The parent keeps the watch."""
        self._inotify.close()

    def _run(self) -> None:
        while True:
            for event in self._inotify.read():
                if event.mask & flags.IGNORED:
                    return
                try:
                    with unforked():
                        self._on_written(event.name)
                except Exception:  # noqa: BLE001 - a thread's outermost frame
                    _log.exception("publishing a compiled graph failed")

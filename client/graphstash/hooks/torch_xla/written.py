"""Tells when torch_xla has finished a file in its cache directory, and publishes it.

torch_xla creates the file empty, serializes for hundreds of milliseconds, writes and closes. The
kernel's close-after-write event is the one sure sign that the file is whole.
"""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from inotify_simple import INotify, flags

from graphstash._compile.cache import InFlightCompile

__all__ = ["WrittenFiles", "publish_file"]

_log = logging.getLogger("graphstash")

_FULL_BYTES: Final = 1024**2
"""With less than this left, a disk counts as full."""


def publish_file(path: Path, compilation: InFlightCompile, *, compile_seconds: float) -> None:
    """Hands a finished file over to its compilation; the file is removed when it was uploaded."""
    if not _is_whole(path):
        compilation.abandon()
        return
    compilation.publish(
        path,
        compile_seconds=compile_seconds,
        done=lambda: path.unlink(missing_ok=True),
    )


def _is_whole(path: Path) -> bool:
    """Whether a file that torch_xla has closed can be trusted to be all of it.

    torch_xla does not look whether its write succeeded: on a full disk the file is cut.
    """
    try:
        disk = os.statvfs(path)
        return path.stat().st_size > 0 and disk.f_bavail * disk.f_frsize > _FULL_BYTES
    except OSError:
        return False


class WrittenFiles:
    """Calls `written(name)` for every file that was written and closed in a directory.

    Files that arrive by rename are not reported. The thread is a daemon; `close` ends it.

    Raises:
        OSError: the kernel grants no watch.
    """

    def __init__(self, directory: Path, written: Callable[[str], None]) -> None:
        self._written = written
        self._inotify = INotify()
        self._watch = self._inotify.add_watch(directory, flags.CLOSE_WRITE)
        self._thread = threading.Thread(target=self._run, name="graphstash-written", daemon=True)
        self._thread.start()

    def close(self, *, timeout_seconds: float = 5.0) -> None:
        """Reports what is finished so far, then ends."""
        try:
            self._inotify.rm_watch(self._watch)  # wakes the thread with its last event
        except OSError:  # the directory is gone, and the watch with it
            return
        self._thread.join(timeout_seconds)
        self._inotify.close()

    def _run(self) -> None:
        while True:
            for event in self._inotify.read():
                if event.mask & flags.IGNORED:
                    return
                try:
                    self._written(event.name)
                except Exception:  # noqa: BLE001 - a thread's outermost frame
                    _log.exception("publishing a compiled graph failed")

"""QuietLog: one line now and then, where a thousand requests a second may fail for one reason."""

import logging
import threading
from time import monotonic

__all__ = ["QuietLog"]

_QUIET_SECONDS = 10.0


class QuietLog:
    """Logs warnings, at most one in ten seconds; safe for many threads."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()  # guards the fields below
        self._quiet_until = 0.0
        self._unsaid_count = 0

    def warning(self, line: str) -> None:
        """Logs a line, or counts it for the next one."""
        with self._lock:
            now = monotonic()
            if now < self._quiet_until:
                self._unsaid_count += 1
                return
            self._quiet_until = now + _QUIET_SECONDS
            unsaid, self._unsaid_count = self._unsaid_count, 0
        more = f" ({unsaid} more since the last line)" if unsaid else ""
        self._logger.warning("%s%s", line, more)

"""RecentRows: the rows of artifacts that were served a moment ago, so that a hot hit asks no SQL.

Why this can never serve wrong bytes: a key's digest and size never change while its row exists, the
bytes are opened by that digest, and their size is compared on every hit. What can be stale is only
the existence of the row. A deletion in this process drops the row here before its blob goes; one
in another process takes its blob along (the open fails, and the database is asked), or leaves it
because an equal artifact has it: then the deleted artifact is served for at most `max_age`.
"""

from collections import OrderedDict
from datetime import datetime, timedelta

from graphstash_server.clock import Clock
from graphstash_server.db.queries.artifacts import ArtifactRow
from graphstash_server.keys import StoredKey

__all__ = ["RecentRows"]

_MAX_ROWS = 1024
"""At most 16 MiB: a row is as large as its metadata header, up to 16 KiB."""

_MAX_AGE = timedelta(seconds=2)


class RecentRows:
    """The least recently used row goes first. Used from the event loop only."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._rows: OrderedDict[StoredKey, tuple[datetime, ArtifactRow]] = OrderedDict()

    def get(self, key: StoredKey) -> ArtifactRow | None:
        """The row, unless it was not there or is too old."""
        kept = self._rows.get(key)
        if kept is None:
            return None
        since, row = kept
        if not timedelta(0) <= self._clock() - since <= _MAX_AGE:
            del self._rows[key]
            return None
        self._rows.move_to_end(key)
        return row

    def add(self, row: ArtifactRow, *, read_at: datetime) -> None:
        """Keeps a row that was read from the database at a time."""
        self._rows[row.key] = (read_at, row)
        if len(self._rows) > _MAX_ROWS:
            self._rows.popitem(last=False)

    def drop(self, key: StoredKey) -> None:
        """Forgets a row: it is being deleted."""
        self._rows.pop(key, None)

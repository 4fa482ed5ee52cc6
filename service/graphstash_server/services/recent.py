"""RecentRows: the rows of artifacts that were served a moment ago, so that a hot hit asks no SQL.

Why this can never serve wrong bytes: the bytes are opened by the row's digest, and their size is
compared on every hit. What can be stale is the row as a whole: it was deleted, withheld, or
replaced where the namespace's policy lets a PUT do that. When this process does it, it drops the
row here before it says so. When another one does, its blob is mostly gone with it (the open fails,
and the database is asked); where it is not (it is withheld, an equal artifact has the blob, a disk
tier keeps a copy), the old artifact is served for at most two seconds (`_MAX_AGE`).
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
        self._rows: OrderedDict[StoredKey, tuple[datetime, ArtifactRow | None]] = OrderedDict()

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
        """Keeps a row that was read from the database at a time, unless it was dropped since."""
        since, kept = self._rows.get(row.key, (read_at, row))
        if kept is None and since >= read_at:
            return
        self._keep(row.key, read_at, row)

    def drop(self, key: StoredKey) -> None:
        """Forgets a row: it is not as it was. One that is being read now may be the old one."""
        self._keep(key, self._clock(), None)

    def _keep(self, key: StoredKey, at: datetime, row: ArtifactRow | None) -> None:
        self._rows[key] = (at, row)
        self._rows.move_to_end(key)
        if len(self._rows) > _MAX_ROWS:
            self._rows.popitem(last=False)

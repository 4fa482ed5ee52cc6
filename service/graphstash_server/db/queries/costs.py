"""Bytes that count against limits: artifacts and manifest entries.

An artifact counts as the bytes of its blob and its metadata header, but at least as 4 KiB, the disk
block of its file. If it shares its file with another artifact, its row and index entries take about
as much.
"""

from typing import Final

from sqlalchemy import ColumnElement, case, func

from graphstash_server.db.tables import artifacts

__all__ = ["MANIFEST_ENTRY_BYTES", "METADATA_BYTES", "metadata_bytes"]

_MIN_ARTIFACT_BYTES: Final = 4096

MANIFEST_ENTRY_BYTES: Final = 512
"""Estimated bytes of a row and its index entries: in SQLite 384 with short names, 1,005 with the
longest."""


def metadata_bytes(size_bytes: int, header: str) -> int:
    """Return the bytes that an artifact counts in addition to its blob."""
    return max(len(header), _MIN_ARTIFACT_BYTES - size_bytes)


METADATA_BYTES: Final[ColumnElement[int]] = case(
    (
        artifacts.c.size_bytes + func.length(artifacts.c.metadata_header) < _MIN_ARTIFACT_BYTES,
        _MIN_ARTIFACT_BYTES - artifacts.c.size_bytes,
    ),
    else_=func.length(artifacts.c.metadata_header),
)
"""`metadata_bytes` of a row, in SQL."""

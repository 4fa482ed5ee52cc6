"""Bytes that count against a limit: blobs, and rows of the database.

A blob counts with its size, and its metadata with theirs. An artifact counts at least one disk
block, because its file occupies that much. If equal blobs share a file, its row and indexes do.
"""

from typing import Final

from sqlalchemy import ColumnElement, case, func

from graphstash_server.db.tables import artifacts

__all__ = ["MANIFEST_ENTRY_BYTES", "METADATA_BYTES", "metadata_bytes"]

_MIN_ARTIFACT_BYTES: Final = 4096

MANIFEST_ENTRY_BYTES: Final = 512
"""Size of a row with two words of 128 characters, and of its three indexes."""


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

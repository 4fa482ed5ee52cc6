"""What counts against a limit: bytes of blobs, and rows of the database for what they take there.

A blob counts with its size. Its metadata count with theirs, and an artifact counts at least a block
of the disk: that is what its file takes, or, where blobs are equal, its row with all its indexes.
"""

from typing import Final

from sqlalchemy import ColumnElement, case, func

from graphstash_server.db.tables import artifacts

__all__ = ["MANIFEST_ENTRY_BYTES", "METADATA_BYTES", "metadata_bytes"]

_MIN_ARTIFACT_BYTES: Final = 4096

MANIFEST_ENTRY_BYTES: Final = 512
"""Of a row with two words of 128 characters, and its three indexes."""


def metadata_bytes(size_bytes: int, header: str) -> int:
    """What an artifact counts beside its blob."""
    return max(len(header), _MIN_ARTIFACT_BYTES - size_bytes)


METADATA_BYTES: Final[ColumnElement[int]] = case(
    (
        artifacts.c.size_bytes + func.length(artifacts.c.metadata_header) < _MIN_ARTIFACT_BYTES,
        _MIN_ARTIFACT_BYTES - artifacts.c.size_bytes,
    ),
    else_=func.length(artifacts.c.metadata_header),
)
"""The same of a row."""

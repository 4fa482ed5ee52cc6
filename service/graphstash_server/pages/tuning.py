"""The page of tuned kernels: which schedules the team has found, and how fast they are."""

import math
from typing import Any, Final

from graphstash_schema import ErrorCode
from graphstash_schema.explanation import SCHEDULE_PART, SPEEDUP_PART
from graphstash_server.artifact import DescribedArtifact
from graphstash_server.errors import ServerError
from graphstash_server.pages.visitor import Visitor

__all__ = ["tuning_of"]

_MAX_ROWS: Final = 200
_MAX_CHARACTERS: Final = 128


async def tuning_of(visitor: Visitor) -> dict[str, Any]:
    """Return the content of the page."""
    query = visitor.request.query_params
    name = query.get("q", "").lstrip()
    if len(name) > _MAX_CHARACTERS or "\0" in name:
        raise ServerError(
            ErrorCode.INVALID_REQUEST, f"a kernel's name has at most {_MAX_CHARACTERS} characters"
        )
    chosen, where, is_partial = await visitor.searched()
    found, is_cut = await visitor.context.catalog.schedules(where, name, limit=_MAX_ROWS)
    return {
        "name": name,
        "namespace": chosen or "",
        "is_partial": is_partial,
        "rows": [_row(entry) for entry in found],
        "is_cut": is_cut,
    }


def _row(entry: DescribedArtifact) -> tuple[DescribedArtifact, str, str]:
    """Return an entry with its schedule and how much faster than the default it is, or ""."""
    parts = entry.program or {}
    try:
        speedup = float(parts.get(SPEEDUP_PART, "nan"))
    except ValueError:
        speedup = math.nan
    is_known = 0 < speedup < math.inf
    return entry, parts.get(SCHEDULE_PART, ""), f"{speedup:,.2f} times" if is_known else ""

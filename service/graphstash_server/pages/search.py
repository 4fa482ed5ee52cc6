"""The search page: artifacts by label, fingerprint, producer and toolchain, and jobs by name."""

from typing import Any, Final

from graphstash_schema import ErrorCode
from graphstash_server.errors import ServerError
from graphstash_server.pages.visitor import Visitor
from graphstash_server.services.artifacts.catalog import MAX_SEARCHED

__all__ = ["search_of"]

_MAX_CHARACTERS: Final = 256
_MIN_CHARACTERS: Final = 2


async def search_of(visitor: Visitor) -> dict[str, Any]:
    """Return the content of the page."""
    query = visitor.request.query_params
    text = query.get("q", "").strip()
    if len(text) > _MAX_CHARACTERS:
        raise ServerError(
            ErrorCode.INVALID_REQUEST,
            f"the text to search for has {len(text)} characters; the limit is {_MAX_CHARACTERS}",
            limit=_MAX_CHARACTERS,
        )
    chosen, where, is_partial = await visitor.searched()
    is_enough = len(text) >= _MIN_CHARACTERS and "\0" not in text
    found = await visitor.context.catalog.search(where, text) if is_enough else []
    return {
        "text": text,
        "namespace": chosen or "",
        "is_partial": is_partial,
        "found": found,
        "is_too_short": bool(text) and not is_enough,
        "searched": MAX_SEARCHED,
        "min_characters": _MIN_CHARACTERS,
    }

"""The page of tokens, for administrators of the server."""

from typing import Any, Final

from graphstash_server.pages.visitor import Visitor
from graphstash_server.services.identity.tokens import new_token_id

__all__ = ["tokens_of"]

_MAX_ROWS: Final = 200


async def tokens_of(visitor: Visitor) -> dict[str, Any]:
    """Return the newest tokens, without their secrets. Raise ServerError with 401 or 403 for a
    visitor who does not administer the server.
    """
    visitor.require_administrator()
    tokens = (await visitor.context.tokens.list_all()).tokens
    return {
        "tokens": tokens[:_MAX_ROWS],
        "more": max(0, len(tokens) - _MAX_ROWS),
        "issued": None,
        "new_id": new_token_id(),
    }

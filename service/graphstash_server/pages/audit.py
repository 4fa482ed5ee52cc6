"""The page of the audit log, for administrators of the server."""

from typing import Any, Final

from graphstash_schema import AuditAction, ErrorCode, Namespace
from graphstash_server.errors import ServerError
from graphstash_server.pages.visitor import Visitor
from graphstash_server.services.identity.audit import MAX_AUDIT_ENTRIES

__all__ = ["audit_of"]

_MAX_ROWS: Final = 100


async def audit_of(visitor: Visitor) -> dict[str, Any]:
    """Return the content of the page. Searches `MAX_AUDIT_ENTRIES` entries with IDs below `before`
    for an action or an actor.
    """
    visitor.require_administrator()
    query = visitor.request.query_params
    namespace = Namespace(query["namespace"]) if query.get("namespace") else None
    before, action = _place(query.get("before", "")), query.get("action", "")
    if action and action not in set(AuditAction):
        raise ServerError(ErrorCode.INVALID_REQUEST, f"{action!r} is no action of the audit log")
    who = query.get("who", "").strip()
    limit = MAX_AUDIT_ENTRIES if action or who else _MAX_ROWS
    log = await visitor.context.audit.read(limit=limit, before=before, namespace=namespace)
    found = [each for each in log.entries if action in ("", each.action) and who in each.actor]
    shown = found[:_MAX_ROWS]
    return {
        "entries": shown,
        "namespace": namespace or "",
        "action": action,
        "who": who,
        "looked_at": len(log.entries),
        "actions": [each.value for each in AuditAction],
        "following": shown[-1].id if len(found) > len(shown) else log.next_before,
        "audit_days": visitor.context.settings.audit_days,
    }


def _place(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and 0 < int(text) < 2**63):
        raise ServerError(ErrorCode.INVALID_REQUEST, f"{text[:40]!r} is no place in the audit log")
    return int(text)

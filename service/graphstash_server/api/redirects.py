"""Redirects: a client that says so fetches large artifacts from the blob store itself."""

from collections.abc import Mapping

from fastapi import Request, Response

from graphstash_schema.protocol import HEADER_ACCEPT_REDIRECT
from graphstash_server.context import ProcessContext
from graphstash_server.services.artifacts import StoredArtifact

__all__ = ["redirect", "takes_link"]


def takes_link(request: Request) -> bool:
    """Whether the caller wants the whole blob, from wherever it may be, and there may be links."""
    context: ProcessContext = request.app.state.context
    asked = request.headers
    return (
        context.settings.s3_redirect_bytes is not None
        and asked.get(HEADER_ACCEPT_REDIRECT) == "1"
        and "range" not in asked
        and "if-none-match" not in asked
    )


def redirect(
    context: ProcessContext, row: StoredArtifact, url: str, *, headers: Mapping[str, str]
) -> Response:
    """A hit that somebody else serves. No cache may keep it: the link ends."""
    context.accounting.count_hit(row.key, saved_seconds=row.compile_seconds)
    sent = {**headers, "Location": url, "Cache-Control": "no-store"}
    return Response(status_code=307, headers=sent)

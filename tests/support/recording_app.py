"""The server's application, noting the type of every message that it sends, for another server."""

import os
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphstash_server.app import create_app
from graphstash_server.settings import load_settings

__all__ = ["recording_app"]


def recording_app() -> ASGIApp:
    """For `granian --factory`; settings and the file for the notes come from the environment."""
    app = create_app(load_settings())
    notes = Path(os.environ["NOTES"])
    seen: list[str] = []

    async def recording(scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            if scope["type"] == "http":
                seen.append(f"{scope['method']} {message['type']}\n")
                notes.write_text("".join(seen))  # noqa: ASYNC240 - a test, a few bytes
            await send(message)

        await app(scope, receive, noting)

    return recording

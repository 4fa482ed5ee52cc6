"""The server's application, noting the type of every message that it sends, for another server."""

import os
from pathlib import Path

from graphstash_server.app import create_app
from graphstash_server.settings import load_settings

__all__ = ["recording_app"]


def recording_app():
    """For `granian --factory`; settings and the file for the notes come from the environment."""
    app = create_app(load_settings())
    notes = Path(os.environ["NOTES"])
    seen = []

    async def recording(scope, receive, send):
        async def noting(message):
            if scope["type"] == "http":
                seen.append(f"{scope['method']} {message['type']}\n")
                notes.write_text("".join(seen))  # noqa: ASYNC240 - a test, a few bytes
            await send(message)

        await app(scope, receive, noting)

    return recording

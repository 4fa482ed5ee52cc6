"""Actor: who makes a change, as recorded in the audit log."""

import getpass
from dataclasses import dataclass
from typing import Final, Self

__all__ = ["MAX_ACTOR_CHARACTERS", "Actor"]

MAX_ACTOR_CHARACTERS: Final = 128
"""Maximum length of an actor's name. Longer names are truncated on construction."""


@dataclass(frozen=True, slots=True)
class Actor:
    """The author of a change.

    Attributes:
        name: a caller's `Access.name`, `local:<user>` for a command on the server's host, or
            `server` for the server's periodic work.
        request_id: ID of the request as in its response, possibly chosen by the caller. None for a
            command and for the server.
        server_request_id: ID that the server itself gave the request.
        address: address from which the request came.
    """

    name: str
    request_id: str | None = None
    server_request_id: str | None = None
    address: str | None = None

    @classmethod
    def server(cls) -> Self:
        """Return the actor for the server's periodic work."""
        return cls("server")

    @classmethod
    def local(cls) -> Self:
        """Return the actor for the user who runs a command on the server's host."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user ID without a name
            user = "unknown"
        return cls(f"local:{user}"[:MAX_ACTOR_CHARACTERS])

"""Actor: who makes a change, as recorded in the audit log."""

import getpass
from dataclasses import dataclass
from typing import Final, Self

__all__ = ["MAX_ACTOR_CHARACTERS", "Actor"]

MAX_ACTOR_CHARACTERS: Final = 128
"""Maximum length of an actor's name. Callers shorten longer names before they create an actor."""


@dataclass(frozen=True, slots=True)
class Actor:
    """The author of a change.

    Attributes:
        name: a caller's `Access.name`, `local:<user>` for a command on the server's host, or
            `server` for the server's periodic work.
        request_id: the response's `X-Request-Id`, which the caller may have chosen.
        server_request_id: ID that the server generated for the request.
        address: address of the request's sender.

    A command and periodic work have no request, so their last three attributes are None.
    """

    name: str
    request_id: str | None = None
    server_request_id: str | None = None
    address: str | None = None

    @classmethod
    def server(cls) -> Self:
        """Return the server as an actor."""
        return cls("server")

    @classmethod
    def local(cls) -> Self:
        """Return the user who runs this command as an actor."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user ID without a name
            user = "unknown"
        return cls(f"local:{user}"[:MAX_ACTOR_CHARACTERS])

"""Actor: who makes a change, as the audit log names them."""

import getpass
from dataclasses import dataclass
from typing import Final, Self

__all__ = ["MAX_ACTOR_CHARACTERS", "Actor"]

MAX_ACTOR_CHARACTERS: Final = 128
"""Longest name of an actor; a longer one is cut where it is made."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who changes something.

    Attributes:
        name: a caller's `Access.name`, `local:<user>` for a command on the server's host, or
            `server` for what a server does by itself.
        request_id: of the request that does it, as in its answer: the caller may have chosen it;
            None for a command and for the server.
        server_request_id: of the same request, by the server alone.
        address: where the request came from.
    """

    name: str
    request_id: str | None = None
    server_request_id: str | None = None
    address: str | None = None

    @classmethod
    def server(cls) -> Self:
        """A server that does its periodic work."""
        return cls("server")

    @classmethod
    def local(cls) -> Self:
        """The user who runs a command on the server's host."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user id that has no name
            user = "unknown"
        return cls(f"local:{user}"[:MAX_ACTOR_CHARACTERS])

"""Withdraw artifacts from a server, as a reporter or an administrator does, and watch a host
that learns of it.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest

from graphstash import Stash
from graphstash._http.client import ServerClient
from graphstash_schema import ArtifactKey, Digest, ReportReason
from graphstash_server.testing import LiveServer
from support.host import METADATA, key
from support.waiting import until


def withhold(stash: Stash, artifact: int | ArtifactKey = 1) -> None:
    """Report an artifact as wrong. The server withholds it at once."""
    wanted = key(artifact) if isinstance(artifact, int) else artifact
    (found,) = stash.server.lookup([wanted]).found
    digest = Digest(found.digest.partition(":")[2], found.size_bytes)
    reply = stash.server.report(wanted, digest=digest, reason=ReportReason.BAD_SIGNATURE)
    assert reply.withheld


def delete(stash: Stash, number: int = 1) -> None:
    stash.server._transport.call("DELETE", str(key(number).artifact_path(stash.config.namespace)))


def turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock of the copies, so that the host asks the server about all of them."""
    for module in ("standing", "withdrawals"):
        monkeypatch.setattr(f"graphstash._artifacts.{module}.time", lambda: time.time() + 601)


def port_of(server: LiveServer) -> int:
    return int(server.url.rpartition(":")[2])


def publish(next_job: Callable[..., Stash], *numbers: int, payload: bytes = b"graph") -> Stash:
    """Store artifacts on the server from another host. Return the stash of that host."""
    publisher = next_job("publisher")
    for number in numbers:
        publisher.put(key(number), payload, METADATA)
    return publisher


def look_up(stash: Stash) -> None:
    """Make a look-up, as the first use of a copy in a run does."""
    stash.standing._ask(stash.config.namespace, key(999))


def position(stash: Stash) -> int | None:
    """Return the position up to which the host has applied the list; None before the first."""
    found = stash.standing._withdrawals._host.read(stash.config.namespace)
    return None if found is None else found.number


def apply(stash: Stash, number: int) -> None:
    """Make a look-up, and wait until the host has applied the list up to a position."""
    look_up(stash)
    until(lambda: position(stash) == number)


def let_read(stash: Stash) -> None:
    """Wait until a job has read the list that it began to read."""
    stash.standing._withdrawals._readers[stash.config.namespace].join(60)


def calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Record the calls that ask the server about copies."""
    made: list[str] = []
    for name in names:
        real = getattr(ServerClient, name)

        def noting(
            client: Any, *arguments: Any, _real: Any = real, _name: str = name, **named: Any
        ) -> Any:
            made.append(_name)
            return _real(client, *arguments, **named)

        monkeypatch.setattr(ServerClient, name, noting)
    return made

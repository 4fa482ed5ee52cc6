"""Withdraw artifacts from a server, as a reporter or an administrator does."""

import time

import pytest

from graphstash import Stash
from graphstash_schema import ArtifactKey, Digest, ReportReason
from support.host import key


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
    later = time.time() + 601
    for module in ("standing", "withdrawals"):
        monkeypatch.setattr(f"graphstash._artifacts.{module}.time", lambda: later)

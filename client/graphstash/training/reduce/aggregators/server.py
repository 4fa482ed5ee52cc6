"""The server loop of an aggregator process: one socket, and an `Aggregator` for each session.

A rank's own aggregator stops when the rank closes its session or exits. A dedicated aggregator,
which serves many jobs, stops on a signal.
"""

import os
import selectors
import socket
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from graphstash._trust.private_file import read_private
from graphstash.errors import ConfigError
from graphstash.training.reduce.aggregators import sockets
from graphstash.training.reduce.aggregators.aggregator import Aggregator, Reply
from graphstash.training.reduce.aggregators.datagrams import Header, Kind, Seal, session_of

__all__ = ["Owner", "Server", "read_secret"]

_MIN_SECRET_BYTES: Final = 32

_MAX_SESSIONS: Final = 64
_REMEMBERED: Final = 4096
"""Number of ended sessions that a replayed OPEN cannot begin again."""
_TICK_SECONDS: Final = 1.0
_LINGER_SECONDS: Final = 2.0
"""Seconds to still answer ranks that miss the last sums, after the end of a session or a stop."""


def read_secret(path: Path) -> bytes:
    """Return the secret that ranks and aggregators share, without white space at its ends.

    Raises:
        ConfigError: the file cannot be read, other users may read it, or the secret is short.
    """
    secret = read_private(path, "the aggregators' secret").strip()
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"the aggregators' secret {path} has {len(secret)} bytes without white space at its "
            f"ends: take {_MIN_SECRET_BYTES} or more, as `openssl rand -hex 32` makes them"
        )
    return secret


@dataclass
class Owner:
    """The rank that started this aggregator, and its process id."""

    rank: int
    process: int


@dataclass
class _Session:
    seal: Seal
    aggregator: Aggregator
    over_since: float | None = None


class Server:
    """Serves sessions until it is told to stop.

    Args:
        at: Bound, non-blocking socket.
        secret: Key material for seals, 32 bytes or more.
        end: File descriptor that tells the server to stop by becoming readable.
        owner: Rank with whose process the server stops. None: none.
    """

    def __init__(
        self, at: socket.socket, secret: bytes, *, end: int, owner: Owner | None = None
    ) -> None:
        self._socket = at
        self._secret = secret
        self._owner = owner
        self._clock = sockets.AwakeClock()
        self._sessions: dict[int, _Session] = {}
        self._over: deque[int] = deque(maxlen=_REMEMBERED)
        self._selector = selectors.DefaultSelector()
        self._selector.register(at, selectors.EVENT_READ)
        self._selector.register(end, selectors.EVENT_READ)
        self._stopped_since: float | None = None

    def run(self) -> None:
        """Serve until the server has stopped."""
        next_tick = self._clock() + _TICK_SECONDS
        while not self._has_ended(now := self._clock()):
            is_busy = bool(self._sessions) or self._owner is not None
            for key, _ in self._selector.select(_TICK_SECONDS if is_busy else None):
                if key.fileobj is self._socket:
                    for datagram, source in sockets.received(self._socket):
                        self._send(self._answer(datagram, source, self._clock()))
                else:
                    self._selector.unregister(key.fd)
                    self._stop()
            if now >= next_tick:
                next_tick = now + _TICK_SECONDS
                self._tick(now)

    def _answer(self, datagram: bytes, source: sockets.Name, now: float) -> list[Reply]:
        number = session_of(datagram)
        if number is None:
            return []
        session = self._sessions.get(number)
        seal = session.seal if session is not None else Seal(self._secret, number)
        message = seal.open(datagram)
        if message is None:
            return []
        if session is None:
            is_over, is_full = number in self._over, len(self._sessions) >= _MAX_SESSIONS
            if message.header.kind != Kind.OPEN or is_over or is_full:
                return _unknown(seal, message.header, source, is_over=is_over)
            aggregator = Aggregator(
                seal,
                number=message.header.aggregator,
                world=message.header.filled,
                now=now,
                lost_after_seconds=message.header.round / 1000,
                buffer_bytes=sockets.receive_buffer_of(self._socket),
            )
            session = self._sessions[number] = _Session(seal, aggregator)
        return session.aggregator.receive(message, source, now)

    def _tick(self, now: float) -> None:
        for number, session in list(self._sessions.items()):
            self._send(session.aggregator.tick(now))
            if not session.aggregator.is_over:
                continue
            session.over_since = session.over_since or now
            if now - session.over_since > _LINGER_SECONDS:
                del self._sessions[number]
                self._over.append(number)
        if self._owner is not None and os.getppid() != self._owner.process:
            self._stop()

    def _stop(self) -> None:
        """Begin to stop: fail all sessions, except those that the owner has left."""
        if self._stopped_since is not None:
            return
        self._stopped_since = self._clock()
        for session in self._sessions.values():
            if self._owner is None:
                self._send(session.aggregator.fail("an aggregator was stopped"))
            elif not session.aggregator.has_left(self._owner.rank):
                self._send(
                    session.aggregator.fail(f"the process of rank {self._owner.rank} has ended")
                )

    def _has_ended(self, now: float) -> bool:
        if self._stopped_since is None:
            return False
        is_needed = any(not session.aggregator.is_over for session in self._sessions.values())
        return not is_needed or now - self._stopped_since > _LINGER_SECONDS

    def _send(self, replies: list[Reply]) -> None:
        for name, datagram in replies:
            sockets.send(self._socket, datagram, name)


def _unknown(seal: Seal, header: Header, source: sockets.Name, *, is_over: bool) -> list[Reply]:
    """Answer an authenticated datagram of a session that is over or unknown here."""
    if header.kind == Kind.LEAVE:
        kind, text = Kind.LEFT, ""
    elif is_over:  # perhaps a replay
        kind, text = Kind.FAILED, "has ended that aggregation session"
    elif header.kind == Kind.OPEN:
        kind = Kind.FAILED
        text = (
            f"has {_MAX_SESSIONS} sessions, and takes no more: wait until one of them ends, or "
            "start another aggregator"
        )
    else:
        kind, text = Kind.FAILED, "was restarted"
    body = f"aggregator {header.aggregator} {text}".encode() if text else b""
    return [Reply(source, seal.close(header._replace(kind=kind, filled=0), body))]

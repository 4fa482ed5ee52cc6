"""Credentials: the token that a job shows to its server, and to nobody else.

    GRAPHSTASH_TOKEN         or
    GRAPHSTASH_TOKEN_FILE    read again whenever the file changes: those of Kubernetes rotate; or
    netrc                    the password that `$NETRC` or `~/.netrc` has for the server's host

A token that was refused is not shown again for a minute, unless another one has taken its place.
Without a token nothing rests: what one call is refused, the next may get (anonymous readers).
"""

import ipaddress
import logging
import netrc
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Final
from urllib.parse import urlsplit

from graphstash._config import TOKEN, ClientConfig, netrc_path
from graphstash._errors import CacheError, Reason

__all__ = ["Credentials"]

_log = logging.getLogger("graphstash")

_REFUSED_SECONDS: Final = 60.0
"""How long a refused token rests."""

_MAX_TOKEN_FILE_BYTES: Final = 16 * 1024


class Credentials:
    """Finds the token; safe for many threads.

    Args:
        config: where the token is, and the server's URL.
        clock: seconds that never run backwards.
    """

    def __init__(self, config: ClientConfig, *, clock: Callable[[], float] = monotonic) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()  # guards the fields below
        self._stamp: tuple[int, ...] = ()
        self._from_file = ""
        self._from_netrc: str | None = None  # not looked for yet
        self._refused: tuple[str, float] | None = None
        self._is_warned = False

    def token(self) -> str:
        """What goes behind `Bearer`; empty when nobody gave one.

        Raises:
            CacheError: the token's file cannot be read, or the token was refused lately.
        """
        with self._lock:
            token = self._find()
            if self._refused is not None:
                refused, until = self._refused
                if refused == token and self._clock() < until:
                    raise CacheError(Reason.UNAUTHENTICATED, f"{self._config.url}: {self._advice}")
            if token and not self._is_warned:
                self._is_warned = True
                self._warn_where_others_read_along()
            return token

    @property
    def is_anonymous(self) -> bool:
        """Whether nobody gave a token; known once it was asked for."""
        config = self._config
        return config.token is None and config.token_file is None and not self._from_netrc

    def refused(self, token: str) -> str:
        """The server does not accept it; says what to do about that."""
        with self._lock:
            if token:
                self._refused = (token, self._clock() + _REFUSED_SECONDS)
            return self._advice

    @property
    def _advice(self) -> str:
        if self._config.token is not None:
            return "it does not accept GRAPHSTASH_TOKEN; was the token revoked, or has it expired?"
        if self._config.token_file is not None:
            return f"it does not accept the token in {self._config.token_file}"
        if self._from_netrc:
            return f"it does not accept the token that {netrc_path()} has for it"
        return "it wants a token: set GRAPHSTASH_TOKEN (an administrator makes one)"

    def _find(self) -> str:
        if self._config.token is not None:
            return self._config.token.get_secret_value()
        if self._config.token_file is not None:
            return self._read(self._config.token_file)
        if self._from_netrc is None:
            self._from_netrc = _from_netrc(urlsplit(self._config.url).hostname or "")
        return self._from_netrc

    def _read(self, path: Path) -> str:
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            if stamp != self._stamp:
                with path.open("rb") as file:
                    token = file.read(_MAX_TOKEN_FILE_BYTES).decode("ascii", "replace").strip()
                if TOKEN.fullmatch(token) is None:
                    raise CacheError(
                        Reason.UNAUTHENTICATED, f"GRAPHSTASH_TOKEN_FILE={path} holds no token"
                    )
                self._stamp, self._from_file = stamp, token
        except OSError as error:
            raise CacheError(
                Reason.UNAUTHENTICATED, f"GRAPHSTASH_TOKEN_FILE={path}: {error.strerror}"
            ) from None
        return self._from_file

    def _warn_where_others_read_along(self) -> None:
        # Teams on private networks live well without TLS, so it is allowed, and said.
        parts = urlsplit(self._config.url)
        if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
            _log.warning(
                "graphstash: the token goes to %s unencrypted: whoever reads the network has it; "
                "use https://",
                self._config.url,
            )


def _from_netrc(host: str) -> str:
    path = netrc_path()
    if path is None:
        return ""
    try:
        # Only an entry of this very host: netrc's `default` would show it to any server.
        entry = netrc.netrc(str(path)).hosts.get(host)
    except OSError:  # most users have none
        return ""
    except (netrc.NetrcParseError, UnicodeDecodeError) as error:
        # Its message may hold a part of a password.
        line = getattr(error, "lineno", None)
        _log.warning("graphstash: %s is not understood (line %s); going on without", path, line)
        return ""
    token = (entry[2] or "") if entry else ""
    if token and TOKEN.fullmatch(token) is None:
        _log.warning("graphstash: the password of %s in %s cannot be a token", host, path)
        return ""
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")

"""Bearer token for the server, from the first source that is configured.

    GRAPHSTASH_TOKEN         the token
    GRAPHSTASH_TOKEN_FILE    a file with the token, read again when it changes
    graphstash init          the user's config file, for the server that it names
    netrc                    the password for the server's host in `$NETRC` or `~/.netrc`

After the server refuses a token, the client does not send it for one minute. A changed token is
sent at once. Anonymous clients do not pause: the server may refuse one call and allow the next.
"""

import logging
import netrc
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Final
from urllib.parse import urlsplit

from graphstash._trust.file_stamp import file_stamp
from graphstash.config import TOKEN, ClientConfig, is_on_this_host, netrc_path
from graphstash.errors import CacheError, Reason

__all__ = ["Credentials"]

_log = logging.getLogger("graphstash")

_REFUSED_SECONDS: Final = 60.0

_MAX_TOKEN_FILE_BYTES: Final = 16 * 1024


class Credentials:
    """Finds the bearer token. Thread-safe."""

    def __init__(self, config: ClientConfig, *, clock: Callable[[], float] = monotonic) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()  # guards the fields below
        self._stamp: tuple[int, ...] = ()
        self._from_file = ""
        self._from_netrc: str | None = None  # None until netrc has been read
        self._refused: tuple[str, float] | None = None
        self._has_warned = False

    def token(self) -> str:
        """Return the bearer token, or "" if none is configured.

        Raises:
            CacheError: the token file cannot be read or holds no valid token, or the server refused
                this token within the last minute.
        """
        with self._lock:
            token = self._find()
            if self._refused is not None:
                refused, until = self._refused
                if refused == token and self._clock() < until:
                    raise CacheError(Reason.UNAUTHENTICATED, f"{self._config.url}: {self._advice}")
            if token and not self._has_warned:
                self._has_warned = True
                self._warn_of_unencrypted_token()
            return token

    @property
    def is_anonymous(self) -> bool:
        """Whether the client sends no token. Valid after the first call of `token`."""
        config = self._config
        return config.token is None and config.token_file is None and not self._from_netrc

    def record_refusal(self, token: str) -> str:
        """Record that the server refused a token, and return advice for the user."""
        with self._lock:
            if token:
                self._refused = (token, self._clock() + _REFUSED_SECONDS)
            return self._advice

    @property
    def _advice(self) -> str:
        if source := self._config.token_source:
            return f"the server rejected the token from {source}"
        if self._from_netrc:
            return f"the server rejected the token from {netrc_path()}"
        advice = "the server requires a token: set GRAPHSTASH_TOKEN (an administrator creates one)"
        if is_on_this_host(self._config.url):
            advice += ", or unset GRAPHSTASH_URL to use your own server on this host"
        return advice

    def _find(self) -> str:
        if self._config.token is not None:
            return self._config.token.reveal()
        if self._config.token_file is not None:
            return self._read(self._config.token_file)
        if self._from_netrc is None:
            self._from_netrc = _from_netrc(urlsplit(self._config.url).hostname or "")
        return self._from_netrc

    def _read(self, path: Path) -> str:
        try:
            stamp = file_stamp(path)
            if not stamp or stamp != self._stamp:
                with path.open("rb") as file:
                    token = file.read(_MAX_TOKEN_FILE_BYTES).decode("ascii", "replace").strip()
                if TOKEN.fullmatch(token) is None:
                    raise CacheError(
                        Reason.UNAUTHENTICATED,
                        f"GRAPHSTASH_TOKEN_FILE={path} does not hold a valid token",
                    )
                self._stamp, self._from_file = stamp, token
        except OSError as error:
            raise CacheError(
                Reason.UNAUTHENTICATED, f"GRAPHSTASH_TOKEN_FILE={path}: {error.strerror}"
            ) from None
        return self._from_file

    def _warn_of_unencrypted_token(self) -> None:
        # Teams on private networks may run without TLS, so log a warning instead of failing.
        if self._config.url.startswith("http:") and not is_on_this_host(self._config.url):
            _log.warning(
                "graphstash: the token is sent to %s unencrypted; use https://",
                self._config.url,
            )


def _from_netrc(host: str) -> str:
    path = netrc_path()
    if path is None:
        return ""
    try:
        # Use only the entry for this host: netrc's `default` entry would go to any server.
        entry = netrc.netrc(str(path)).hosts.get(host)
    except OSError:  # most users have no netrc file
        return ""
    except (netrc.NetrcParseError, UnicodeDecodeError) as error:
        # Do not log the error's message: it may contain part of a password.
        line = getattr(error, "lineno", None)
        _log.warning("graphstash: cannot parse %s (line %s); ignoring it", path, line)
        return ""
    token = (entry[2] or "") if entry else ""
    if token and TOKEN.fullmatch(token) is None:
        _log.warning("graphstash: the password for %s in %s is not a valid token", host, path)
        return ""
    return token

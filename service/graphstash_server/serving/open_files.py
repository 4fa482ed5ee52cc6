"""Limit connections and TLS handshakes to what the limit of open files allows."""

import logging
import resource
from typing import Final

from graphstash_server.settings import ListenSettings, Settings

__all__ = ["max_handshakes", "within_open_files"]

_LOGGER = logging.getLogger(__name__)

_PER_CONNECTION: Final = 4
"""Open files per connection: its socket, the blob and a duplicate of the socket during a download,
and the socket of a further connection that waits for a place."""

_OWN: Final = 256
"""Open files for everything else: listeners, the database, the store, workers."""

_BURST: Final = 1024
"""Handshakes for which there is room even if fewer connections are allowed. A job's processes
connect at once, and a process whose handshake the server ends compiles instead of waiting."""


def within_open_files(settings: Settings) -> Settings:
    """Raise the soft limit of open files (often 1,024) to what `max_connections` needs. Reduce
    `max_connections` if the hard limit is lower. With TLS, add an open file for each handshake.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    has_tls = settings.tls_cert_file is not None
    needed = _PER_CONNECTION * settings.max_connections + _OWN
    if has_tls:
        needed += max(settings.max_connections, _BURST)
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    most = max(1, (needed - _OWN) // (_PER_CONNECTION + has_tls))
    if most >= settings.max_connections:
        return settings
    _LOGGER.log(
        logging.WARNING if "max_connections" in settings.model_fields_set else logging.INFO,
        "GRAPHSTASH_MAX_CONNECTIONS is %d, but the limit of %d open files allows only %d",
        settings.max_connections,
        hard,
        most,
    )
    return settings.model_copy(update={"max_connections": most})


def max_handshakes(settings: ListenSettings) -> int:
    """Return the maximum number of TLS handshakes: as many as connections, and at least 1,024 if
    the soft limit of open files leaves room.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = soft - _OWN - _PER_CONNECTION * settings.max_connections
    return max(settings.max_connections, min(_BURST, room))

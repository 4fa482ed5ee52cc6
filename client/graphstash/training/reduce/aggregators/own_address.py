"""The address by which the other ranks know this host."""

import socket
from typing import Any

from torch import distributed

__all__ = ["own_host"]

_ANY_PORT = 9
"""Nothing is sent there: connecting a UDP socket only asks which way the datagrams would go."""


def own_host() -> str:
    """Where this host is on the way to the one with torch's store, which every rank has reached;
    without such a host, what its own name means; at the worst `127.0.0.1`.
    """
    store = _store_host()
    for name in (store, socket.gethostname()) if store else (socket.gethostname(),):
        try:
            (family, kind, protocol, _, at), *_ = socket.getaddrinfo(
                name, _ANY_PORT, type=socket.SOCK_DGRAM
            )
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(at)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def _store_host() -> str | None:
    """None for a store in files or in memory."""
    store: Any = distributed.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return host if isinstance(host, str) and host else None

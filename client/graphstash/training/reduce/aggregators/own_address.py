"""Finds the address by which the other ranks reach this host."""

import socket
from typing import Any

from torch import distributed

__all__ = ["own_host"]

_ANY_PORT = 9
"""Any port will do: connecting a UDP socket sends nothing and only selects a route."""


def own_host() -> str:
    """Return the address of the interface that routes to the host of torch's store.

    Every rank has reached that host. If the store has no host, use the address of this host's own
    name. As a last resort, return `127.0.0.1`.
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
    """Return the store's host, or None for a store in files or in memory."""
    store: Any = distributed.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return host if isinstance(host, str) and host else None

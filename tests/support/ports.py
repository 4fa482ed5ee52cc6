"""Ports for programs that need a fixed number, such as nginx and PostgreSQL."""

import atexit
import socket


def reserved_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port that stays reserved until this process ends.

    A socket that is bound with SO_REUSEADDR and does not listen keeps the port. As long as the
    socket exists, Linux assigns the port to no other socket that asks for any free port, and to no
    outgoing connection. A program that names the port and sets SO_REUSEADDR, as servers do, can
    listen on it, even after a restart. While no program listens, connections are refused.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    atexit.register(held.close)
    return int(held.getsockname()[1])

"""A program listens on a reserved port as often as it likes."""

import socket

import pytest

from support.ports import reserved_port


def test_a_program_listens_on_a_reserved_port_again_and_again():
    port = reserved_port()
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port)).close()

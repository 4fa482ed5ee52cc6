"""The chaos tests report a server that stays down, and do not mistake a busy one for a loss."""

import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from chaos.audit import read_everything
from chaos.cluster import Cluster

BLOB = b"acknowledged"


class _BusyOnce(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.server.has_refused:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BLOB)
            return
        self.server.has_refused = True
        self.send_response(503)
        self.send_header("Retry-After", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_artifact_of_a_busy_server_is_not_lost(capsys):
    with ThreadingHTTPServer(("127.0.0.1", 0), _BusyOnce) as server:
        server.has_refused = False
        thread = Thread(target=server.serve_forever)
        thread.start()
        cluster = SimpleNamespace(url=lambda _number: f"http://127.0.0.1:{server.server_port}")
        digest = f"sha256:{hashlib.sha256(BLOB).hexdigest()}"
        try:
            wrong = read_everything(cluster, {1: digest})
        finally:
            server.shutdown()
            thread.join()
    assert wrong == []
    assert "{503: 1, 200: 1}" in capsys.readouterr().out


def test_server_that_never_starts_is_reported_with_its_output(tmp_path, monkeypatch):
    def fail(_cluster, _number):
        raise RuntimeError("the output of the server")

    cluster = Cluster(tmp_path, s3=None)
    monkeypatch.setattr(Cluster, "_start", fail)
    cluster.servers = [SimpleNamespace(kill=lambda **_: None)]
    cluster.restart(0, is_killed=True)
    with pytest.raises(AssertionError, match="the output of the server"):
        cluster.wait_for_starts()

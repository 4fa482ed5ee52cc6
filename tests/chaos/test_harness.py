"""The chaos tests report a server that stays down, and do not mistake a busy one for a loss."""

import hashlib
from types import SimpleNamespace

import pytest

from chaos.audit import read_everything
from chaos.cluster import Cluster
from support.http_server import Answer, HttpServer

BLOB = b"acknowledged"


class _BusyOnce(HttpServer):
    has_refused = False

    def answer_to(self, request):
        if self.has_refused:
            return Answer(200, body=BLOB)
        self.has_refused = True
        return Answer(503, {"retry-after": "0"})


def test_artifact_of_a_busy_server_is_not_lost(capsys):
    with _BusyOnce() as server:
        cluster = SimpleNamespace(url=lambda _number: server.url)
        wrong = read_everything(cluster, {1: f"sha256:{hashlib.sha256(BLOB).hexdigest()}"})
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

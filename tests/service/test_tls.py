"""TLS of the server: versions, client certificates, limits, and errors for unusable files."""

import socket
import ssl
import sys
import threading
from contextlib import ExitStack, nullcontext

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization as forms

from graphstash_schema import Digest
from graphstash_schema.protocol import HEADER_PROTOCOL
from graphstash_server.api import connection
from graphstash_server.errors import StartError
from graphstash_server.serving.tls import tls_context
from graphstash_server.settings import load_settings
from graphstash_server.testing import LiveServer, ServerProcess
from support.nginx import in_front_of
from support.sessions import sign_in
from support.tokens import issue
from support.waiting import until
from support.wire import head


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    """Settings of a server with a certificate for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    authority.cert_pem.write_to_path(folder / "authority.pem")
    return {"tls_cert_file": folder / "server.pem", "tls_key_file": folder / "server.pem"}


@pytest.fixture
def trusting(authority):
    """The TLS context of a client that trusts the authority."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture(scope="module")
def server(files, tmp_path_factory):
    with LiveServer(tmp_path_factory.mktemp("server"), **files, log_level="error") as server:
        yield server


def test_only_the_secure_cookie_signs_a_browser_in(files, trusting, tmp_path):
    with LiveServer(tmp_path, **files, auth="tokens", insecure=False, log_level="error") as server:
        token = issue(load_settings(data_dir=tmp_path).database_url, "read:*").token
        with httpx.Client(base_url=server.url, verify=trusting, trust_env=False) as client:
            headers = {"Origin": server.url}
            client.post("/sign-in", data={"token": token}, headers=headers)
            (cookie,) = client.cookies.jar
            assert "Sign out" in client.get("/search").text
            client.cookies.clear()
            planted = client.get("/search", headers={"Cookie": f"graphstash={cookie.value}"})
    assert (cookie.name, cookie.secure) == ("__Host-graphstash", True)
    assert planted.status_code == 200
    assert "Sign out" not in planted.text


def test_nginx_tells_the_server_that_the_browser_used_tls(files, trusting, guarded, tmp_path):
    variables = {
        "GRAPHSTASH_TLS_CERTIFICATE": str(files["tls_cert_file"]),
        "GRAPHSTASH_TLS_KEY": str(files["tls_key_file"]),
    }
    client = sign_in(guarded.url, guarded.token("read:*"))
    client.close()
    planted = {"Cookie": f"graphstash={client.cookies['graphstash']}"}
    with in_front_of(guarded.server, tmp_path / "nginx", tls=True, **variables) as nginx:
        pages = [
            httpx.get(url + "/search", headers=planted, verify=trusting, trust_env=False)
            for url in (guarded.url, nginx.url)
        ]
        plain = nginx.url.replace("https:", "http:")
        forms = [
            httpx.post(
                nginx.url + "/sign-out",
                headers={"Origin": origin},
                verify=trusting,
                trust_env=False,
            )
            for origin in (nginx.url, plain, "https://127.0.0.1")
        ]
    assert [(page.status_code, "Sign out" in page.text) for page in pages] == [
        *((200, True), (200, False))
    ]
    assert [form.status_code for form in forms] == [303, 403, 403]


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_port_serves_current_tls_to_clients_that_trust_the_authority(server, trusting):
    trusting.set_ciphers("ALL:@SECLEVEL=0")
    for version in ("TLSv1_1", "TLSv1_2", "TLSv1_3"):
        trusting.minimum_version = ssl.TLSVersion.TLSv1_1
        trusting.maximum_version = ssl.TLSVersion[version]
        with pytest.raises(httpx.ConnectError) if version == "TLSv1_1" else nullcontext():
            answer = httpx.get(server.url + "/healthz", verify=trusting, trust_env=False)
            assert answer.status_code == 200
            assert answer.headers["strict-transport-security"] == "max-age=31536000"

    assert server.url.startswith("https://")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(server.url + "/healthz", trust_env=False)
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/healthz", trust_env=False)


def test_silent_connection_ends_before_its_handshake(files, tmp_path):
    with LiveServer(tmp_path, **files, header_seconds=0.5, log_level="error") as server:
        host, port = server.url.removeprefix("https://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as silent:
            assert silent.recv(1) == b""


def test_burst_of_connections_completes_its_handshakes(files, trusting, tmp_path):
    with LiveServer(tmp_path, **files, max_connections=4, log_level="error") as server:
        host, port = server.url.removeprefix("https://").split(":")
        burst = [socket.create_connection((host, int(port)), timeout=60) for _ in range(40)]
        assert httpx.get(f"{server.url}/metrics", verify=trusting, trust_env=False).is_success
        for each in burst:
            with trusting.wrap_socket(each, server_hostname=host) as connection:
                connection.sendall(head("GET", "/healthz"))
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_handshake_beyond_the_limit_ends_the_oldest_one(files, trusting, tmp_path):
    command = ("prlimit", "--nofile=300:300", sys.executable, "-m", "graphstash_server")
    environment = {f"GRAPHSTASH_{name.upper()}": str(path) for name, path in files.items()}
    environment |= {"GRAPHSTASH_MIN_FREE_BYTES": "0", "GRAPHSTASH_MAX_CONNECTIONS": "9"}
    with (
        ServerProcess(tmp_path / "data", command=command, environment=environment) as server,
        ExitStack() as stack,
    ):
        assert "allows only 8" in server.log
        host, port = server.url.removeprefix("https://").split(":")
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            for _ in range(14)
        ]
        assert [each.recv(1) for each in silent[:2]] == [b"", b""]
        answer = httpx.get(f"{server.url}/metrics", verify=trusting, trust_env=False)
        assert 'refused_total{code="too_many_connections"} 3.0' in answer.text
        assert silent[2].recv(1) == b""


def test_slow_reader_is_cut_only_if_it_stops(server, trusting, monkeypatch):
    blob, path = bytes(range(256)) * 2**15, f"/v1/slow/artifacts/jax/cpu/{1:064x}"
    headers = {"Repr-Digest": Digest.of(blob).repr_digest, HEADER_PROTOCOL: "1"}
    with httpx.Client(base_url=server.url, verify=trusting, trust_env=False) as client:
        assert client.put(path, content=blob, headers=headers).is_success
    blocked, pause = [], connection.Connection.pause_writing

    def noting(self):
        pause(self)
        blocked.append(self)

    def come_late():
        ended = threading.Event()
        writer = blocked[-1]
        writer.loop.call_soon_threadsafe(lambda: (writer._write_is_late(), ended.set()))
        assert ended.wait(60)
        return writer.transport.is_closing()

    monkeypatch.setattr(connection.Connection, "pause_writing", noting)
    monkeypatch.setattr(connection, "_MOVING_SECONDS", 0.1)
    host, port = server.url.removeprefix("https://").split(":")
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        plain.settimeout(60)
        plain.connect((host, int(port)))
        with trusting.wrap_socket(plain, server_hostname=host) as wire:
            wire.sendall(head("GET", path))
            for _ in range(2):
                until(lambda: blocked and blocked[-1].is_stalled)
                left = 256 * 1024  # less than the server writes at once
                while left:
                    left -= len(wire.recv(left))
                until(lambda: not blocked[-1].is_stalled)
                assert not come_late()
            until(lambda: blocked[-1].is_stalled)
            assert come_late()


def test_unusable_or_missing_file_is_named(files, tmp_path):
    path = tmp_path / "wrong.pem"
    for field, content in (
        ("tls_cert_file", None),
        ("tls_key_file", None),
        *((field, b"nothing") for field in (*files, "tls_client_ca_file")),
    ):
        if content is not None:
            path.write_bytes(content)
        settings = load_settings(data_dir=tmp_path, **files | {field: path})
        with pytest.raises(StartError, match="PEM") as refused:
            tls_context(settings)
        assert str(path) in str(refused.value)
        with pytest.raises(StartError, match="GRAPHSTASH_TLS_CERT_FILE"):
            load_settings(**{field: files["tls_cert_file"]})  # alone


def test_workers_serve_https_and_refuse_a_key_with_a_password(authority, files, trusting, tmp_path):
    options = ("--workers", "2", "--min-free-bytes", "0")
    environment = {f"GRAPHSTASH_{name.upper()}": str(path) for name, path in files.items()}
    with ServerProcess(tmp_path / "data", *options, environment=environment) as server:
        answers = [
            httpx.get(server.url + "/healthz", verify=trusting, trust_env=False) for _ in range(4)
        ]
    assert server.url.startswith("https://127.0.0.1:")
    assert {answer.status_code for answer in answers} == {200}

    plain = authority.issue_cert("127.0.0.1").private_key_pem.bytes()
    locked = forms.load_pem_private_key(plain, None).private_bytes(
        forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.BestAvailableEncryption(b"secret")
    )
    (tmp_path / "key.pem").write_bytes(locked)
    environment["GRAPHSTASH_TLS_KEY_FILE"] = str(tmp_path / "key.pem")
    with pytest.raises(RuntimeError, match=r"exited with 1(.|\n)*password") as refused:
        ServerProcess(tmp_path / "data", environment=environment)
    assert "Traceback" not in str(refused.value)

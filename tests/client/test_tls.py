"""HTTPS with real certificates. The client checks the server's, and shows its own only to it."""

import datetime as dt
import os
import re
import select
import socket
import ssl
import sys
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from textwrap import dedent

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from graphstash import ClientConfig, ConfigError, Reason, Stash
from graphstash._http.client import ServerClient
from graphstash._http.deadline import Deadline
from graphstash._http.sockets import connect_tcp
from support.authority import Authority
from support.host import METADATA, key
from support.listener import Listener
from support.processes import captured, python, started
from support.refusals import refusal
from support.waiting import PATIENT, PATIENT_VARIABLES

KEY = key()


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secure(authority, tmp_path_factory):
    with authority.server(tmp_path_factory.mktemp("secure")) as server:
        yield server


@pytest.fixture(scope="module")
def mutual(authority, tmp_path_factory):
    """A server that requires a client certificate of the same authority."""
    with authority.server(tmp_path_factory.mktemp("mutual"), is_mutual=True) as server:
        yield server


@pytest.fixture
def connect(tmp_path):
    with ExitStack() as stack:

        def make(url, name="host", **settings):
            settings = PATIENT | {"url": url, "cache_dir": tmp_path / name} | settings
            return stack.enter_context(Stash(ClientConfig.load({}, **settings)))

        yield make


def test_artifact_round_trips_over_tls(connect, secure, authority):
    connect(secure.url, "a", ca_file=authority.file).put(KEY, b"graph", METADATA)
    assert connect(secure.url, "b", ca_file=authority.file).get(KEY) == b"graph"


def test_background_client_reads_no_certificate_file(connect, secure, authority, tmp_path):
    copy = tmp_path / "ca.pem"
    copy.write_bytes(authority.file.read_bytes())
    stash = connect(secure.url, ca_file=copy)
    copy.unlink()
    with closing(stash.server.with_own_connections()) as background:
        assert background.server_stats().version


def test_configured_authorities_replace_those_of_the_system(
    connect, secure, authority, tmp_path_factory, monkeypatch
):
    stranger = Authority(tmp_path_factory.mktemp("stranger"))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    assert connect(secure.url, "a").get(KEY) in (b"graph", None)
    stash = connect(secure.url, "b", ca_file=stranger.file)
    assert refusal(stash.server.server_stats).reason is Reason.TLS


@pytest.mark.parametrize(
    ("name", "days", "advice"),
    [("cache.internal", 9, r"GRAPHSTASH_URL"), ("127.0.0.1", -1, r"expired.*clock")],
)
def test_certificate_of_other_host_or_time_is_refused_with_advice(
    connect, authority, name, days, advice
):
    ends = dt.datetime.now(dt.UTC) + dt.timedelta(days=days)
    with Listener(context=authority.context(name, not_after=ends)) as listener:
        error = refusal(connect(listener.url, ca_file=authority.file).server.server_stats)
    assert error.reason is Reason.TLS
    assert re.search(advice, str(error))
    assert listener.heads == []


def test_untrusted_server_gets_no_token_and_is_refused_with_advice(connect, tmp_path_factory):
    stranger = Authority(tmp_path_factory.mktemp("stranger"))
    with Listener(context=stranger.context()) as listener:
        error = refusal(connect(listener.url, token="t0ken-canary").server.server_stats)
    assert error.reason is Reason.TLS
    assert "GRAPHSTASH_CA_FILE" in str(error)
    assert "canary" not in str(error)
    assert listener.heads == []


def test_http_and_https_are_not_confused(connect, server, secure):
    error = refusal(connect(server.url.replace("http:", "https:")).server.server_stats)
    assert error.reason is Reason.TLS
    assert "http://" in str(error)
    plain = connect(secure.url.replace("https:", "http:"), "b")
    assert refusal(plain.server.server_stats).reason in (Reason.PROTOCOL, Reason.RESET)


@pytest.mark.parametrize("in_one_file", [True, False])
def test_client_certificate_is_accepted_by_server_that_requires_it(
    connect, mutual, authority, tmp_path, in_one_file
):
    cert, key = authority.issue("job.internal")
    settings = {"client_cert": cert, "client_key": key}
    if in_one_file:
        both = tmp_path / "both.pem"
        both.write_bytes(cert.read_bytes() + key.read_bytes())
        settings = {"client_cert": both}
    stash = connect(mutual.url, ca_file=authority.file, **settings)
    stash.put(KEY, b"graph", METADATA)
    assert stash.server.lookup([KEY]).found


@pytest.fixture(params=["ours", "with alerts"])
def demanding(request, authority, mutual):
    """The URL of a server that requires a client certificate. Only one reports its absence."""
    if request.param == "ours":
        yield mutual.url
        return
    with Listener(context=authority.demanding_context()) as listener:
        yield listener.url
        assert listener.heads == []


@pytest.mark.parametrize("is_shown", [False, True], ids=["none", "a stranger's"])
def test_missing_client_certificate_is_reported_with_setting(
    connect, demanding, authority, tmp_path_factory, is_shown
):
    shown = {}
    if is_shown:
        cert, key = Authority(tmp_path_factory.mktemp("stranger")).issue("job.internal")
        shown = {"client_cert": cert, "client_key": key}
    error = refusal(connect(demanding, ca_file=authority.file, **shown).server.server_stats)
    assert error.reason in (Reason.TLS, Reason.RESET)
    assert "GRAPHSTASH_CLIENT_CERT" in str(error)


@pytest.mark.parametrize("setting", ["ca_file", "client_cert", "client_key"])
def test_unusable_file_is_named_before_anything_is_sent(authority, tmp_path, setting):
    cert, key = authority.issue("job.internal")
    files = {"client_cert": cert, "client_key": key} if setting != "ca_file" else {}
    absent, nonsense, locked = (tmp_path / name for name in ("absent", "nonsense", "locked"))
    nonsense.write_bytes(b"nonsense")
    private = load_pem_private_key(key.read_bytes(), None)
    password = BestAvailableEncryption(b"secret")
    locked.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, password))
    for path in (absent, nonsense, locked):
        with pytest.raises(ConfigError) as caught:
            ServerClient(ClientConfig.load({}, **(files | {setting: path})))
        assert str(path) in str(caught.value)
        assert f"GRAPHSTASH_{setting.upper()}" in str(caught.value)


def test_a_key_without_its_certificate_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="GRAPHSTASH_CLIENT_CERT"):
        ClientConfig.load({}, client_key=tmp_path / "key.pem")


def test_job_with_wrong_certificate_trains_without_cache(secure, tmp_path):
    program = """
        import graphstash
        from graphstash_schema import ArtifactKey
        key = ArtifactKey.parse("jax", "cpu-x86_64", 64 * "1")
        print(graphstash.get_or_compile(key, lambda: b"trained").decode())
        print(graphstash.stats().fallbacks)
    """
    variables = PATIENT_VARIABLES | {"GRAPHSTASH_URL": secure.url}
    result = python(program, check=True, GRAPHSTASH_CACHE_DIR=tmp_path, **variables)
    assert result.stdout.splitlines()[0] == "trained"
    assert "'tls': " in result.stdout
    assert result.stderr.count("GRAPHSTASH_CA_FILE") == 1


@contextmanager
def silent(context):
    """Yield the URL of a server for one connection that answers no request, and an event that is
    set once a request has arrived.
    """
    asked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
                while secure.recv(4096):
                    asked.set()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}", asked
        thread.join()


def test_timeout_is_waited_once(authority, tmp_path):
    context = authority.context()
    context.num_tickets = 0  # they would end the first wait
    program = """
        import os
        from graphstash import CacheError, ClientConfig
        from graphstash._http.client import ServerClient
        try:
            ServerClient(ClientConfig.load(os.environ)).server_stats()
        except CacheError as error:
            print(error.reason)
    """
    log = tmp_path / "calls"
    with silent(context) as (url, _):
        variables = {
            "GRAPHSTASH_URL": url,
            "GRAPHSTASH_CA_FILE": str(authority.file),
            "GRAPHSTASH_CONNECT_SECONDS": "30",
            "GRAPHSTASH_FIRST_BYTE_SECONDS": "0.3",
        }
        command = ("strace", "-e", "poll,ppoll", "-o", log, sys.executable, "-c", dedent(program))
        outcome = captured(command, check=True, env=os.environ | variables)
    assert outcome.stdout == "timeout\n"
    assert log.read_text().count("(Timeout)") == 1


def test_fork_does_not_wait_for_an_answer_over_a_new_connection(authority):
    """The server sends session tickets, which are no answer."""
    program = """
        import os, threading
        from graphstash import ClientConfig
        from graphstash._forking import _slow, unforked
        from graphstash._http.client import ServerClient

        client = ServerClient(ClientConfig.load(os.environ))

        def ask():
            with unforked():
                client.server_stats()

        threading.Thread(target=ask, daemon=True).start()
        input()
        for _ in range(20):  # the first ones may meet the end of a wait
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
        print(len(_slow), flush=True)
        os._exit(0)
    """
    with silent(authority.context()) as (url, asked):
        variables = {"GRAPHSTASH_URL": url, "GRAPHSTASH_CA_FILE": authority.file}
        with started(program, **PATIENT_VARIABLES | variables) as process:
            assert asked.wait(60)
            output, _ = process.communicate("\n")
    assert output == "0\n"


def test_connection_is_closed_if_the_deadline_passes_before_its_handshake():
    class Ending(Deadline):
        """Ends once the kernel has connected."""

        def bound(self, seconds):
            if select.select([listener], [], [], 0)[0]:
                self.shorten(0)
            return super().bound(seconds)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(httpx.ReadTimeout) as caught:  # whose traceback holds the socket
            connect_tcp(
                "127.0.0.1",
                port,
                context=ssl.create_default_context(),
                seconds=30,
                deadline=Ending(60),
            )
        listener.settimeout(60)
        with listener.accept()[0] as connection:
            connection.settimeout(60)
            assert connection.recv(1) == b""
        assert caught.traceback

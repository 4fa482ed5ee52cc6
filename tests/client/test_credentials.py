"""Only the configured server receives the token, and a job handles each of its answers."""

from functools import partial

import pytest
from typer.testing import CliRunner

from graphstash import CacheError, ClientConfig, ConfigError, Reason
from graphstash._cli.main import complete_app
from graphstash._http.credentials import Credentials
from graphstash._http.transport import Transport
from graphstash_schema import ErrorCode, Problem
from support.host import METADATA, Host, key
from support.listener import Listener
from support.processes import python
from support.refusals import refusal
from support.waiting import PATIENT, PATIENT_VARIABLES

CANARY = "gst_canarycanary2345_c4n4ryc4n4ryc4n4ryc4n4ryc4n4ryc4n4ryc4n4r7"


def problem(code):
    return Problem.of(code, "from the server", request_id="r1").model_dump_json()


@pytest.fixture
def listener():
    with Listener() as listener:
        yield listener


def asked(listener, **settings):
    """Return the head of the only request with these settings."""
    listener.heads.clear()
    transport = Transport(ClientConfig.load({}, url=listener.url, **PATIENT, **settings))
    transport.call("GET", "/v1/stats")
    transport.close()
    (head,) = listener.heads
    return [line for line in head.splitlines() if line.lower().startswith("authorization")]


def test_a_token_file_is_read_again_when_it_changes(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{CANARY}\n")
    credentials = Credentials(ClientConfig.load({}, token_file=path))
    assert credentials.token() == CANARY
    (tmp_path / "next").write_text("another")
    (tmp_path / "next").rename(path)
    assert credentials.token() == "another"


@pytest.mark.parametrize("content", [None, "", "two words", "\xff\xfe", "x" * 20_000, "a\nb"])
def test_a_file_without_a_token_is_named_and_nothing_is_sent(tmp_path, listener, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    transport = Transport(ClientConfig.load({}, url=listener.url, token_file=path))
    with pytest.raises(CacheError) as caught:
        transport.call("GET", "/v1/stats")
    transport.close()
    assert caught.value.reason is Reason.UNAUTHENTICATED
    assert str(path) in str(caught.value)
    assert listener.heads == []


def test_one_bearer_header_has_the_token_or_the_password_of_the_servers_host_in_netrc(
    listener, monkeypatch, tmp_path, caplog
):
    path = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(path))
    assert asked(listener, token=CANARY) == [f"Authorization: Bearer {CANARY}"]
    assert asked(listener) == []
    for of_others in (
        f"machine other login me password {CANARY}\n",
        f"default login me password {CANARY}\n",
        f"machine 127.0.0.1 login me password {CANARY} and {CANARY}\n",
        f'machine 127.0.0.1 login me password "{CANARY} two"\n',
    ):
        path.write_text(of_others)
        assert asked(listener) == [], of_others
    path.write_text(f"machine other login me password wrong\nmachine 127.0.0.1 password {CANARY}\n")
    assert asked(listener) == [f"Authorization: Bearer {CANARY}"]
    assert asked(listener, token="mine") == ["Authorization: Bearer mine"]
    assert CANARY not in caplog.text


@pytest.mark.parametrize(
    ("variable", "value", "secret"),
    [
        *(("TOKEN", value, value) for value in ("two words", "line\r\nX-Evil: 1", "tökén")),
        ("TOKEN", "x" * 9000, "x" * 9000),
        ("URL", "http://me:s3cret@host:1", "s3cret"),
        ("URL", "me:s3cret@host", "s3cret"),
        ("URL", "http://s3cret@h", "s3cret"),
    ],
)
def test_malformed_token_or_url_with_a_password_is_refused_without_being_shown(
    variable, value, secret
):
    with pytest.raises(ConfigError, match="GRAPHSTASH_TOKEN") as caught:
        ClientConfig.load({f"GRAPHSTASH_{variable}": value})
    assert secret not in str(caught.value)
    assert caught.value.__context__ is None  # pydantic's error holds the value


@pytest.mark.parametrize(
    ("url", "warns"),
    [
        ("http://cache.internal:8077", True),
        ("http://10.1.2.3:8077", True),
        ("https://cache.internal", False),
        ("http://127.0.0.1:8077", False),
        ("http://localhost:8077", False),
        ("http://[::1]:8077", False),
    ],
)
def test_unencrypted_token_is_logged_once(caplog, url, warns):
    credentials = Credentials(ClientConfig.load({}, url=url, token=CANARY))
    for _ in range(3):
        credentials.token()
    assert len(caplog.records) == warns
    assert CANARY not in caplog.text


def test_refused_token_is_retried_after_a_minute_or_with_a_new_one(tmp_path):
    path, now = tmp_path / "token", [0.0]
    path.write_text("first")
    credentials = Credentials(ClientConfig.load({}, token_file=path), clock=lambda: now[-1])
    credentials.record_refusal(credentials.token())
    now.append(59.0)
    with pytest.raises(CacheError, match="rejected the token from GRAPHSTASH_TOKEN_FILE="):
        credentials.token()
    now.append(61.0)
    assert credentials.token() == "first"
    credentials.record_refusal("first")
    path.write_text("second.")
    assert credentials.token() == "second."


def test_unauthenticated_job_asks_once_and_compiles(listener, tmp_path, caplog):
    listener.status, listener.body = 401, problem(ErrorCode.UNAUTHENTICATED)
    settings = {"token": CANARY, "cache_dir": tmp_path, **PATIENT}
    with Host(ClientConfig.load({}, url=listener.url, **settings)) as host:
        for number in range(4):
            host.build(key(number))
            assert set(host.fallbacks) == {"unauthenticated"}
    assert len(listener.heads) == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.count("GRAPHSTASH_TOKEN") == 1
    assert CANARY not in message


@pytest.fixture
def connect(guarded, hosts):
    return partial(hosts, url=guarded.url)


def test_server_grants_writers_and_readers_their_rights_only(guarded, connect, namespace):
    writer = connect("writer", token=guarded.token(f"write:{namespace}"))
    writer.put(key(), b"graph", METADATA)
    reader = connect("reader", token=guarded.token(f"read:{namespace}"))
    assert reader.get(key()) == b"graph"
    error = refusal(reader.put, key(2), b"graph", METADATA)
    assert error.reason is Reason.FORBIDDEN
    assert "publishes nothing from now on" in str(error)
    assert reader.server.is_read_only
    assert reader.put(key(3), b"graph", METADATA) == 0
    stranger = connect("stranger", token=guarded.token("write:elsewhere"))
    assert stranger.get(key()) is None
    with pytest.raises(CacheError, match=rf"{namespace}.*set GRAPHSTASH_NAMESPACE"):
        stranger.server.acquire(key())
    assert stranger.server.is_read_only  # the job stops acquiring leases
    error = refusal(connect("nobody").get, key())
    assert error.reason is Reason.UNAUTHENTICATED
    assert str(error).count("set GRAPHSTASH_TOKEN") == 1


@pytest.mark.parametrize("elsewhere", [False, True])
def test_job_without_token_reads_anonymous_namespaces(
    guarded, connect, namespace, monkeypatch, tmp_path, elsewhere
):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    guarded.set_policy(namespace, anonymous_read=True)
    writer = connect("writer", token=guarded.token(f"write:{namespace}"))
    for number in range(2):
        writer.put(key(number), b"graph", METADATA)
    where = {"namespace": "closed", "read_namespaces": namespace} if elsewhere else {}
    reader = connect("reader", **where)
    host = Host(reader)
    for number in (0, 7, 1, 8):  # 7 and 8 are compiled here
        host.build(key(number))
        assert host.publisher.drain(20)
    assert host.stats.hits_server == 2
    host.close()
    assert reader.server.is_read_only


# The token appears in no log, traceback or repr.

PROGRAM = """
import dataclasses, logging, sys, traceback
logging.basicConfig(level=logging.DEBUG, format="%(name)s %(message)s")
logging.getLogger("graphstash").debug("the most verbose log is on")
import graphstash
from graphstash_schema import ArtifactKey
session = graphstash.install()
def compile_payload():
    return b"graph"
for number in range(3):
    key = ArtifactKey.parse("jax", "cpu-x86_64", f"{number:064x}")
    graphstash.get_or_compile(key, compile_payload)
print(session.config, repr(session.config), dataclasses.asdict(session.config))
server = session.cache.stash.server
print(repr(server), vars(server))
print(graphstash.stats())
print(open("/proc/self/cmdline").read())
for call in (lambda: session.cache.stash.get(key), session.cache.stash.server.server_stats):
    session.cache.stash.forget(key)
    try:
        call()
    except graphstash.GraphstashError:
        traceback.print_exc()
"""


@pytest.mark.parametrize(("source", "status"), [("variable", 200), ("file", 401), ("netrc", 500)])
def test_token_appears_in_no_log_and_no_repr(tmp_path, listener, server, namespace, status, source):
    variables = PATIENT_VARIABLES | {
        "GRAPHSTASH_URL": server.url if status == 200 else listener.url,
        "GRAPHSTASH_NAMESPACE": namespace,
        "GRAPHSTASH_CACHE_DIR": str(tmp_path / "cache"),
        "GRAPHSTASH_STATS_FILE": str(tmp_path / "stats"),
        "NETRC": str(tmp_path / "netrc"),
    }
    listener.status = status
    listener.body = problem(ErrorCode.INTERNAL if status == 500 else ErrorCode.UNAUTHENTICATED)
    match source:
        case "variable":
            variables["GRAPHSTASH_TOKEN"] = CANARY
        case "file":
            (tmp_path / "token").write_text(CANARY)
            variables["GRAPHSTASH_TOKEN_FILE"] = str(tmp_path / "token")
        case "netrc":
            (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login x password {CANARY}")
    result = python(PROGRAM, check=True, **variables)
    # The header that must contain it.
    assert status == 200 or any(CANARY in head for head in listener.heads)
    seen = result.stdout + result.stderr + (tmp_path / "stats").read_text()
    assert "the most verbose log is on" in seen
    assert "graphstash: " in seen
    assert "c4n4ry" not in seen


def test_the_commands_never_show_the_token(server, listener):
    listener.status, listener.body = 401, problem(ErrorCode.UNAUTHENTICATED)
    for url in (server.url, listener.url):
        for command in (("status", "--json"), ("status",), ("prefetch", "job")):
            result = CliRunner().invoke(
                complete_app(), [*command, "--url", url], env={"GRAPHSTASH_TOKEN": CANARY}
            )
            assert result.output
            assert "c4n4ry" not in result.output

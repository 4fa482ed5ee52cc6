"""Large artifacts may come from the bucket itself; what fails there comes from the server."""

import os

import httpx
import pytest

from graphstash import ClientConfig
from graphstash._http.client import ServerClient
from graphstash.errors import VerificationError
from graphstash_schema import ArtifactMetadata
from graphstash_schema.protocol import HEADER_ACCEPT_REDIRECT
from graphstash_server.testing import LiveServer
from support.host import key
from support.moto import s3_settings
from support.s3_proxy import S3Fault, S3Proxy
from support.signing import Team
from support.waiting import until

LARGE = os.urandom(3_000_000)
SMALL = os.urandom(10_000)
KEY = key()
METADATA = ArtifactMetadata(compile_seconds=30.0, raw_size_bytes=len(LARGE))


def is_linked(seen):
    return "X-Amz-Signature" in seen.target


@pytest.fixture
def proxy(moto):
    """Before the bucket, for the server and for those who follow its links; strikes only these."""
    with S3Proxy(moto.port) as proxy:
        proxy.strikes = is_linked
        yield proxy


@pytest.fixture
def bucket(moto):
    return moto.new_bucket()


@pytest.fixture
def server(tmp_path, proxy, bucket, s3_credentials):
    settings = s3_settings(proxy.url, bucket, s3_redirect_bytes=1_000_000, flush_seconds=0.05)
    with LiveServer(tmp_path / "server", log_level="error", **settings) as server:
        yield server


@pytest.fixture
def namespace():
    return "default"


def linked(proxy):
    return [seen for seen in proxy.seen if is_linked(seen)]


def answer_of(server, **headers):
    url = server.url + KEY.artifact_path("default")
    return httpx.get(url, headers=headers, trust_env=False)


def counts(server):
    (row,) = httpx.get(f"{server.url}/v1/stats", trust_env=False).json()["namespaces"]
    return row


def test_a_large_artifact_comes_from_the_bucket(hosts, proxy):
    hosts("a").put(KEY, LARGE, METADATA)

    assert hosts("b").get(KEY) == LARGE

    (seen,) = linked(proxy)
    assert set(seen.headers) == {"host", "accept-encoding"}
    assert seen.headers["accept-encoding"] == "identity"


def test_no_credential_follows_a_redirect(hosts, proxy, tmp_path, monkeypatch):
    """Neither the token nor netrc's password for the very host that the bucket is on."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password net-canary\n")
    monkeypatch.setenv("NETRC", str(netrc))
    hosts("a", token="put-canary").put(KEY, LARGE, METADATA)

    assert hosts("b", token="get-canary").get(KEY) == LARGE
    assert hosts("c").get(KEY) == LARGE

    assert len(linked(proxy)) == 2
    for seen in linked(proxy):
        assert set(seen.headers) == {"host", "accept-encoding"}
        assert "canary" not in f"{seen.target} {seen.headers}"


def test_a_redirected_artifact_is_checked_as_any_other(hosts, proxy, tmp_path):
    """Who controls the bucket has neither the digest nor a key that is trusted."""
    team = Team(tmp_path)
    hosts("a", signing_key=team.trust("ci")).put(KEY, LARGE, METADATA)
    assert hosts("b", trusted_keys=team.file).get(KEY) == LARGE
    assert len(linked(proxy)) == 1
    team.revoke("ci")
    with pytest.raises(VerificationError):
        hosts("c", trusted_keys=team.file).get(KEY)


def test_a_small_one_comes_from_the_server(hosts, proxy):
    hosts("a").put(KEY, SMALL, METADATA)

    assert hosts("b").get(KEY) == SMALL
    assert linked(proxy) == []


@pytest.mark.parametrize(
    "fault",
    [
        S3Fault.FAILING,
        S3Fault.FORBIDDEN,
        S3Fault.STRANGER,
        S3Fault.RESET,
        S3Fault.HANG,
        S3Fault.CUT,
        S3Fault.FLIP,
    ],
)
def test_whatever_fails_there_comes_from_the_server_from_then_on(
    hosts, server, proxy, tmp_path, fault
):
    hosts("a").put(KEY, LARGE, METADATA)
    proxy.fault = fault
    remote = ServerClient(ClientConfig.load({}, url=server.url))

    sizes = []
    for name in ("one", "two"):
        with (tmp_path / name).open("w+b") as file:
            sizes.append(remote.download(KEY, file).digest.size_bytes)
    remote.close()

    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sizes == 2 * [(tmp_path / "one").stat().st_size]
    assert len(linked(proxy)) == 1
    assert remote._transport._breaker._failures == 0


def test_a_lost_object_is_a_miss(hosts, moto, bucket, proxy):
    hosts("a").put(KEY, LARGE, METADATA)
    for found in moto.client.list_objects_v2(Bucket=bucket)["Contents"]:
        moto.client.delete_object(Bucket=bucket, Key=found["Key"])

    assert hosts("b").get(KEY) is None


def test_the_answer_says_where_and_what(hosts, server):
    hosts("a").put(KEY, LARGE, METADATA)

    whole = answer_of(server)
    answer = answer_of(server, **{HEADER_ACCEPT_REDIRECT: "1"})

    assert answer.status_code == 307
    assert answer.headers["cache-control"] == "no-store"
    for name in ("etag", "repr-digest", "graphstash-metadata"):
        assert answer.headers[name] == whole.headers[name]
    assert httpx.get(answer.headers["location"], trust_env=False).content == whole.content


def test_a_redirect_is_a_hit(hosts, server):
    hosts("a").put(KEY, LARGE, METADATA)
    for _ in range(3):
        answer_of(server, **{HEADER_ACCEPT_REDIRECT: "1"})
    until(lambda: counts(server)["hits"] == 3)
    assert counts(server)["served_bytes"] == 0


@pytest.mark.parametrize(
    "headers",
    [{}, {HEADER_ACCEPT_REDIRECT: "0"}, {HEADER_ACCEPT_REDIRECT: "1", "Range": "bytes=5-"}],
)
def test_nobody_else_is_redirected(hosts, server, headers):
    hosts("a").put(KEY, LARGE, METADATA)

    assert answer_of(server, **headers).status_code in (200, 206)


def test_a_caller_who_has_it_is_not_redirected(hosts, server):
    hosts("a").put(KEY, LARGE, METADATA)
    etag = answer_of(server).headers["etag"]

    headers = {HEADER_ACCEPT_REDIRECT: "1", "If-None-Match": etag}
    assert answer_of(server, **headers).status_code == 304

"""Large artifacts may come from the bucket; if the bucket fails, the server sends them."""

import os

import httpx
import pytest

from graphstash.errors import Reason
from graphstash_schema import ArtifactMetadata
from graphstash_schema.protocol import HEADER_ACCEPT_REDIRECT
from graphstash_server.testing import LiveServer
from support.host import key
from support.moto import CREDENTIALS, s3_settings
from support.refusals import refusal
from support.s3_proxy import S3Fault, S3Proxy
from support.waiting import until

LARGE = os.urandom(3_000_000)
SMALL = os.urandom(10_000)
KEY = key()
REDIRECTED = {HEADER_ACCEPT_REDIRECT: "1"}
METADATA = ArtifactMetadata(compile_seconds=30.0, raw_size_bytes=len(LARGE))


def is_linked(seen):
    return "X-Amz-Signature" in seen.target


@pytest.fixture(scope="module")
def bucket(moto):
    return moto.new_bucket()


@pytest.fixture(scope="module")
def one_proxy(moto):
    """A proxy before the bucket, for the server and for clients. Faults affect only links."""
    with S3Proxy(moto.port) as proxy:
        proxy.strikes = is_linked
        yield proxy


@pytest.fixture(scope="module")
def server(tmp_path_factory, one_proxy, bucket):
    settings = s3_settings(one_proxy.url, bucket, s3_redirect_bytes=1_000_000, flush_seconds=0.05)
    directory = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        with LiveServer(directory, log_level="error", **settings) as server:
            yield server


@pytest.fixture
def proxy(one_proxy):
    """The proxy with an empty record. A fault lasts for one test."""
    one_proxy.seen.clear()
    yield one_proxy
    one_proxy.fault = S3Fault.NONE


@pytest.fixture
def answer_of(server, namespace):
    url = server.url + KEY.artifact_path(namespace)
    return lambda **headers: httpx.get(url, headers=headers, trust_env=False, timeout=30)


def linked(proxy):
    return [seen for seen in proxy.seen if is_linked(seen)]


def test_redirected_artifact_is_verified_and_no_credential_follows(
    hosts, proxy, team, tmp_path, monkeypatch
):
    """The bucket receives neither the token nor netrc's password for its host.

    An attacker who controls the bucket has neither the digest nor a trusted key.
    """
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password net-canary\n")
    monkeypatch.setenv("NETRC", str(netrc))
    hosts("a", token="put-canary", signing_key=team.trust("ci")).put(KEY, LARGE, METADATA)

    assert hosts("b", token="get-canary", trusted_keys=team.file).get(KEY) == LARGE
    assert hosts("c").get(KEY) == LARGE

    assert len(linked(proxy)) == 2
    for seen in linked(proxy):
        assert set(seen.headers) == {"host", "accept-encoding"}
        assert seen.headers["accept-encoding"] == "identity"
        assert "canary" not in f"{seen.target} {seen.headers}"
    team.revoke("ci")
    assert refusal(hosts("d", trusted_keys=team.file).get, KEY).reason is Reason.REVOKED_KEY


@pytest.mark.parametrize(
    "fault",
    [
        *(S3Fault.FAILING, S3Fault.STRANGER, S3Fault.RESET),
        *(S3Fault.HANG, S3Fault.CUT, S3Fault.FLIP),
    ],
)
def test_failed_redirect_falls_back_to_the_server(hosts, proxy, fault):
    hosts("a").put(KEY, LARGE, METADATA)
    proxy.fault = fault
    reader = hosts("b", first_byte_seconds=5 if fault is S3Fault.HANG else 30)
    for _ in range(2):
        assert reader.get(KEY) == LARGE
        reader.forget(KEY)
    assert len(linked(proxy)) == 1
    assert reader.server._transport._breaker._failures == 0


def test_small_artifact_is_sent_by_the_server_and_a_lost_object_is_a_miss(
    hosts, proxy, moto, bucket
):
    def objects():
        return {each["Key"] for each in moto.client.list_objects_v2(Bucket=bucket)["Contents"]}

    hosts("a").put(KEY, SMALL, METADATA)
    assert hosts("b").get(KEY) == SMALL
    assert linked(proxy) == []
    before = objects()
    hosts("a").put(key(2), os.urandom(2_000_000), METADATA)
    (lost,) = objects() - before
    moto.client.delete_object(Bucket=bucket, Key=lost)
    assert hosts("b").get(key(2)) is None


def test_accepted_redirect_names_location_and_digest_and_counts_as_hit(
    hosts, server, answer_of, namespace
):
    hosts("a").put(KEY, LARGE, METADATA)
    answer = answer_of(**REDIRECTED)
    hits = hosts("b").server.server_stats
    until(lambda: [each.hits for each in hits().namespaces if each.namespace == namespace] == [1])
    assert [each.served_bytes for each in hits().namespaces if each.namespace == namespace] == [0]
    whole = answer_of()
    assert answer.status_code == 307
    assert answer.headers["cache-control"] == "no-store"
    for name in ("etag", "repr-digest", "graphstash-metadata"):
        assert answer.headers[name] == whole.headers[name]
    location = answer.headers["location"]
    assert httpx.get(location, trust_env=False, timeout=30).content == whole.content
    etag = whole.headers["etag"]
    assert answer_of(**REDIRECTED, **{"If-None-Match": etag}).status_code == 304
    for headers in ({}, {HEADER_ACCEPT_REDIRECT: "0"}, REDIRECTED | {"Range": "bytes=5-"}):
        assert answer_of(**headers).status_code in (200, 206)

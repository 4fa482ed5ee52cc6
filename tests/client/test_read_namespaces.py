"""A job reads from a list of namespaces in order, and writes to one."""

import re

import pytest

from graphstash import ClientConfig, ConfigError
from graphstash.errors import VerificationError
from graphstash_schema import LeaseState, ManifestName
from support.host import METADATA, Host, key
from support.offline import unplugged
from support.refusals import refusal
from support.signing import plant, sealed, signature_of


@pytest.fixture
def names(namespace):
    return [f"{namespace}-{name}" for name in ("trusted", "shared", "own")]


@pytest.fixture
def hosts(hosts, names):
    defaults = {"namespace": names[2], "read_namespaces": ",".join(names[:2])}
    return lambda name="host", **settings: hosts(name, **defaults | settings)


@pytest.fixture
def fill(hosts):
    def put(namespace, payload, number=1):
        hosts(f"writer-{namespace}", namespace=namespace, read_namespaces="").put(
            key(number), payload, METADATA
        )

    return put


@pytest.fixture
def fill_signed(hosts, team, tmp_path):
    """Return a function that publishes an artifact with the CI's signature for a namespace."""

    def put(namespace):
        config = hosts(f"signer-{namespace}", namespace=namespace, read_namespaces="").config
        envelope = sealed(tmp_path, key(), b"graph")
        signature = signature_of(team.key("ci"), config.namespace, key(), envelope)
        plant(config, key(), envelope, signature)

    return put


def asked(stash, monkeypatch):
    """Record the namespace of every artifact request."""
    paths = []
    real = stash.server._transport.download

    def noting(path, **keywords):
        paths.append(re.match("/v1/([^/]+)/", path).group(1))
        return real(path, **keywords)

    monkeypatch.setattr(stash.server._transport, "download", noting)
    return paths


def test_namespaces_are_read_in_order_and_write_namespace_last():
    config = ClientConfig.load(
        {"GRAPHSTASH_READ_NAMESPACES": "trusted, shared,trusted", "GRAPHSTASH_NAMESPACE": "own"}
    )
    assert config.readable == ("trusted", "shared", "own")
    listed = ClientConfig.load({}, read_namespaces="own,trusted", namespace="own")
    assert listed.readable == ("own", "trusted")
    assert ClientConfig.load({}).readable == ("default",)
    with pytest.raises(ConfigError, match=r"GRAPHSTASH_READ_NAMESPACES.*at most 8"):
        ClientConfig.load({}, read_namespaces=",".join(f"n{n}" for n in range(9)))


@pytest.mark.parametrize("place", [0, 2])
def test_first_namespace_with_the_artifact_serves_it_and_later_ones_are_asked_once(
    hosts, fill, names, monkeypatch, place
):
    for name in reversed(names[place:]):
        fill(name, name.encode())
    stash = hosts()
    paths = asked(stash, monkeypatch)
    assert stash.get(key()) == names[place].encode()
    assert paths == names[: place + 1]
    fetched = stash.ensure_local(key())
    assert (fetched.source, fetched.namespace) == ("local", names[place])
    assert len(paths) == place + 1
    offline = hosts(url=unplugged(stash.config.cache_dir, stash.config.url))
    assert offline.get(key()) == names[place].encode()


def test_miss_in_all_namespaces_counts_once_and_asks_each_once(hosts, names, monkeypatch):
    stash = hosts(read_only=True)
    paths = asked(stash, monkeypatch)
    with Host(stash) as host:
        assert host.build(key()) == b"graph"
        stats = host.stats
    assert paths == names
    assert (stats.misses, stats.fallbacks) == (1, {})


def test_artifacts_leases_and_manifests_go_to_write_namespace(hosts, fill, names):
    stash = hosts()
    stash.put(key(), b"graph", METADATA)
    assert stash.server.acquire(key(2)).state is LeaseState.GRANTED
    stash.server.update_manifest(ManifestName("job"), [key()])
    for name in names[:2]:
        other = hosts(f"other-{name}", namespace=name, read_namespaces="")
        assert other.get(key()) is None
        assert other.server.acquire(key(2)).state is LeaseState.GRANTED
        assert other.server.manifest(ManifestName("job")) is None
    own = hosts("other-own", read_namespaces="")
    assert own.get(key()) == b"graph"
    assert own.server.acquire(key(2)).state is LeaseState.HELD


def test_artifact_that_compiler_rejects_is_dropped_in_all_namespaces(hosts, fill, names):
    fill(names[0], b"graph")
    fill(names[2], b"graph")
    stash = hosts()
    for reads in ("", names[0]):
        hosts(read_namespaces=reads).ensure_local(key())
    stash.forget(key())
    assert stash.local.size_bytes() == 0


def test_signature_is_checked_for_namespace_of_origin(hosts, names, team, fill_signed):
    """The key may sign only for the first namespace; the same bytes in the second are refused."""
    team.trust("ci", namespaces=[names[0]])
    for name in names[:2]:
        fill_signed(name)
    assert hosts("a", trusted_keys=team.file).get(key()) == b"graph"
    error = refusal(hosts("b", trusted_keys=team.file, read_namespaces=names[1]).get, key())
    assert error.reason == "unknown_key"
    assert error.namespace == names[1]


def test_bad_artifact_is_counted_and_next_namespace_serves(
    hosts, names, team, tmp_path, fill, fill_signed
):
    team.trust("ci")
    fill(names[0], b"unsigned")
    fill_signed(names[1])

    stash = hosts("reader", trusted_keys=team.file)
    fetched = stash.fetch(key(), tmp_path / "payload")

    assert (tmp_path / "payload").read_bytes() == b"graph"
    assert fetched.namespace == names[1]
    assert [error.reason for error in fetched.refused] == ["unsigned"]


def test_bad_artifacts_in_other_namespaces_are_named_and_do_not_prevent_publishing(
    hosts, names, team, fill
):
    team.trust("ci")
    for name in names[:2]:
        fill(name, b"unsigned")
    settings = {"trusted_keys": team.file}
    error = refusal(hosts("a", **settings, namespace=names[1]).get, key())
    assert error.namespace == names[1]  # the namespace to which the job would publish
    assert [each.namespace for each in error.earlier] == names[:1]
    assert isinstance(error.__cause__, VerificationError)
    with Host(hosts("builder", **settings, signing_key=team.key("ci"))) as host:
        assert host.build(key()) == b"graph"
        stats = host.stats
    assert stats.fallbacks == {"unsigned": 2}
    assert (stats.published, stats.misses, stats.uncached) == (1, 0, 1)
    assert hosts("other", **settings).get(key()) == b"graph"

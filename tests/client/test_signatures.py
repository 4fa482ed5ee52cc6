"""A compiler receives only artifacts that a trusted key has signed, unchanged."""

import dataclasses
import hashlib
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial

import httpx
import pytest

from graphstash import Reason
from graphstash._trust.proof import Provenance
from graphstash._trust.provenance import read_provenance
from graphstash.errors import TransportError, VerificationError
from graphstash_schema import ArtifactMetadata, ArtifactSignature
from support.bombs import count_decompressors
from support.host import Host, key
from support.processes import python
from support.refusals import refusal
from support.signing import plant, sealed, signature_of, trust_json

PAYLOAD = b"graph" * 1000


def metadata(**fields):
    return ArtifactMetadata(compile_seconds=3.0, raw_size_bytes=len(PAYLOAD), **fields)


@pytest.fixture
def cached(config):
    """Return a function that makes hosts which compile on a miss."""
    with ExitStack() as stack:

        def make(name, **settings):
            host = stack.enter_context(Host(config(name, **settings)))
            host.result = PAYLOAD
            return host

        yield make


@pytest.fixture
def unpacked(monkeypatch):
    return count_decompressors(monkeypatch)


@pytest.fixture
def reader(hosts, team):
    """A host that fetched CI's artifact without checks and now checks signatures."""
    hosts("ci", signing_key=team.trust("ci")).put(key(), PAYLOAD, metadata())
    assert hosts("reader").get(key()) == PAYLOAD
    reader = hosts("reader", trusted_keys=team.file)
    assert reader.ensure_local(key()).source == "local"
    return reader


# Artifacts of attackers and accidents under key(1). Each function gets (team, config, directory).


def signed(team, config, directory, *, by="ci"):
    envelope = sealed(directory, key(), PAYLOAD)
    return envelope, signature_of(team.key(by), config.namespace, key(), envelope)


def unsigned(team, config, directory):
    return sealed(directory, key(), PAYLOAD), None


by_a_stranger = partial(signed, by="stranger")


def by_a_revoked_key(team, config, directory):
    team.trust("gone")
    team.revoke("gone")
    return signed(team, config, directory, by="gone")


def by_a_key_whose_time_is_over(team, config, directory):
    team.trust("other", not_after=datetime.now(UTC) - timedelta(seconds=1))
    return signed(team, config, directory, by="other")


def with_the_id_of_a_trusted_key_on_a_strangers_signature(team, config, directory):
    envelope, signature = signed(team, config, directory)
    _, stranger = by_a_stranger(team, config, directory)
    return envelope, ArtifactSignature(key_id=signature.key_id, value=stranger.value)


def resealed(envelope, blob):
    envelope.path.write_bytes(blob)
    sha256 = hashlib.sha256(blob).hexdigest()
    return dataclasses.replace(envelope, sha256=sha256, size_bytes=len(blob))


def changed(change):
    """Return a function that signs an envelope and then changes its bytes."""

    def make(team, config, directory):
        envelope, signature = signed(team, config, directory)
        return resealed(envelope, change(envelope.path.read_bytes())), signature

    return make


padded = changed(lambda blob: blob + b"\0")
BAD = {
    "unsigned": (unsigned, Reason.UNSIGNED),
    "by a stranger": (by_a_stranger, Reason.UNKNOWN_KEY),
    "by a revoked key": (by_a_revoked_key, Reason.REVOKED_KEY),
    "by a key whose time is over": (by_a_key_whose_time_is_over, Reason.UNKNOWN_KEY),
    "stranger's signature with a trusted id": (
        with_the_id_of_a_trusted_key_on_a_strangers_signature,
        Reason.BAD_SIGNATURE,
    ),
    "padded": (padded, Reason.BAD_SIGNATURE),
    "with another raw size": (
        changed(lambda blob: blob.replace(b'"raw_size": 5000', b'"raw_size": 9999')),
        Reason.BAD_SIGNATURE,
    ),
}
"""tests/attacks/test_replayed_signatures.py covers moved, truncated and stripped signatures."""


@pytest.mark.parametrize(
    ("bad", "policy"),
    [
        *((bad, "require") for bad in BAD),
        *((bad, "prefer") for bad in ("by a stranger", "by a revoked key", "padded")),
    ],
)
def test_artifact_refused_by_policy_is_neither_decompressed_nor_stored(
    team, config, hosts, tmp_path, unpacked, bad, policy
):
    artifact, reason = BAD[bad]
    team.trust("ci")
    plant(config(), key(), *artifact(team, config(), tmp_path))
    stash = hosts("reader", trusted_keys=team.file, signatures=policy)
    unpacked.clear()
    assert refusal(stash.get, key()).reason is reason
    assert unpacked == []
    assert stash.local.open(stash.config.namespace, key(), origin=stash.standing.origin) is None


@pytest.mark.parametrize(
    ("artifact", "policy"),
    [
        *((signed, policy) for policy in ("require", "prefer", "off")),
        *((unsigned, policy) for policy in ("prefer", "off")),
        (by_a_stranger, "off"),
    ],
)
def test_artifact_allowed_by_policy_is_decompressed(
    team, config, hosts, tmp_path, artifact, policy
):
    team.trust("ci")
    plant(config(), key(), *artifact(team, config(), tmp_path))
    assert hosts("reader", trusted_keys=team.file, signatures=policy).get(key()) == PAYLOAD


@pytest.mark.parametrize(
    ("size", "policy"), [(0, "require"), (2**20, "prefer"), (2**20 + 1, "off")]
)
def test_bytes_behind_payload_on_disk_are_ignored(hosts, team, policy, size):
    """The payload is random, so pieces of the payload and of the file end at the same offsets."""
    payload = os.urandom(size)
    hosts("ci", signing_key=team.trust("ci")).put(key(), payload, metadata())
    reader = hosts("reader", trusted_keys=team.file, signatures=policy)
    assert reader.get(key()) == payload
    assert reader.ensure_local(key()).source == "local"
    assert reader.get(key()) == payload


def test_copy_stays_while_its_key_looks_expired_or_the_trusted_keys_cannot_be_read(reader, team):
    """The clock may be ahead, or an editor may be writing the file."""
    sound = team.file.read_text()
    team.file.write_text(trust_json())
    team.trust("ci", not_after=datetime.now(UTC) - timedelta(days=1))
    expired = team.file.read_text()
    for text, reason in ((expired, Reason.UNKNOWN_KEY), (sound[:-30], Reason.LOCAL_IO)):
        team.file.write_text(text)
        error = refusal(reader.get, key())
        assert error.reason is reason
        assert reason is Reason.UNKNOWN_KEY or str(team.file) in str(error)
        team.file.write_text(sound)
        assert reader.ensure_local(key()).source == "local"  # neither deleted nor reported


def test_unsigned_result_of_this_host_is_used_by_this_host_only(hosts, team):
    writer = hosts("writer", trusted_keys=team.file)
    writer.put(key(), PAYLOAD, metadata())
    assert writer.fetch(key(), writer.local.root / "x").source == "local"

    assert refusal(hosts("other", trusted_keys=team.file).get, key()).reason is Reason.UNSIGNED


@pytest.mark.parametrize("theft", ["another key", "another namespace", "another host", "bytes"])
def test_mac_of_one_host_is_invalid_on_another(hosts, team, theft):
    settings = {"trusted_keys": team.file, "url": "http://127.0.0.1:9"}
    writer = hosts("writer", **settings)
    writer.put(key(), PAYLOAD, metadata(), local_only=True)
    blob = bytearray(writer.local.path(writer.config.namespace, key()).read_bytes())
    wanted = key(2) if theft == "another key" else key()
    if theft == "another namespace":
        settings["namespace"] = "elsewhere"
    if theft == "bytes":
        blob[20] ^= 1
    thief = hosts("other" if theft == "another host" else "writer", **settings)
    path = thief.local.path(thief.config.namespace, wanted)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(blob)
    path.chmod(0o600)

    assert refusal(thief.get, wanted).reason is Reason.CONNECT
    assert not path.exists()


def test_secret_readable_by_others_is_not_used(hosts, team):
    writer = hosts("writer", trusted_keys=team.file, url="http://127.0.0.1:9")
    writer.put(key(), PAYLOAD, metadata(), local_only=True)
    assert writer.get(key()) == PAYLOAD
    secret = writer.local.root / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.chmod(0o644)
    assert refusal(writer.get, key()).reason is Reason.CONNECT


def test_threads_agree_on_one_secret_and_an_empty_one_is_replaced(hosts):
    tier = hosts().local
    secret = tier.root / "secret"
    for _ in range(10):  # all threads must look before the first one creates the file
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(tier.secret) for _ in range(8)]
        (found,) = {each.result() for each in asked}
        assert (len(found), secret.read_bytes()) == (32, found)
        assert list((tier.root / "tmp").iterdir()) == []
        secret.unlink()
    secret.touch(mode=0o600)
    made = tier.secret()
    assert len(made) == 32
    assert tier.secret() == secret.read_bytes() == made


def test_malformed_provenance_is_ignored(tmp_path):
    path = tmp_path / "envelope"
    for stated, size in (
        *((b"", None), (b"", 2**31), (b"", 400)),
        *((b'{"code": 5}', 11), (b"\xff\xfe", 2)),
    ):
        length = b"" if size is None else struct.pack(">I", size)
        blob = b"x" * 100 + stated + length + b"GSPROOF\n"
        path.write_bytes(blob)
        with path.open("rb") as file:
            assert read_provenance(file) == (Provenance(), len(blob))
            assert file.tell() == 0


def test_keys_rotate_without_a_gap_and_local_copies_of_the_old_key_expire(hosts, team):
    hosts("old", signing_key=team.trust("old")).put(key(1), PAYLOAD, metadata())
    team.trust("new")
    reader = hosts("reader", trusted_keys=team.file)
    hosts("new", signing_key=team.key("new")).put(key(2), PAYLOAD, metadata())
    assert reader.get(key(1)) == reader.get(key(2)) == PAYLOAD
    assert reader.ensure_local(key(1)).source == "local"

    team.revoke("old")

    assert reader.get(key(2)) == PAYLOAD
    assert refusal(reader.get, key(1)).reason is Reason.REVOKED_KEY
    copy = reader.local.open(reader.config.namespace, key(1), origin=reader.standing.origin)
    assert copy is None


def test_a_refused_artifact_is_counted_and_compiled_and_not_uploaded(
    cached, hosts, team, config, tmp_path
):
    team.trust("ci")
    plant(config(), key(), *by_a_stranger(team, config(), tmp_path))
    host = cached("a", trusted_keys=team.file)

    assert host.build(key()) == PAYLOAD
    assert host.compiles == 1
    assert host.stats.fallbacks == {"unknown_key": 1}
    assert (host.stats.published, host.stats.conflicts) == (0, 0)

    assert host.build(key()) == PAYLOAD  # its own result, from its disk
    assert host.compiles == 1
    assert host.stats.hits_host == 1


def withheld(server, namespace):
    answer = httpx.get(f"{server.url}/v1/-/quarantine?namespace={namespace}", trust_env=False)
    assert answer.status_code == 200, answer.text
    return [(entry["key"]["fingerprint"], entry["reason"]) for entry in answer.json()["artifacts"]]


def of_another_key(_team, _config, directory):
    return sealed(directory, key(2), PAYLOAD), None


def garbage(_team, _config, directory):
    return resealed(sealed(directory, key(), PAYLOAD), b"not an envelope"), None


@pytest.mark.parametrize(
    ("artifact", "reason"),
    [
        (by_a_revoked_key, "revoked_key"),
        (padded, "bad_signature"),
        (of_another_key, "wrong_key"),
        (garbage, "corrupt"),
    ],
)
def test_wrong_artifact_is_reported_to_server_with_reason(
    hosts, team, config, tmp_path, server, namespace, artifact, reason
):
    team.trust("ci")
    plant(config(), key(), *artifact(team, config(), tmp_path))
    policy = "off" if artifact in (of_another_key, garbage) else "prefer"
    with pytest.raises(VerificationError):
        hosts("reader", trusted_keys=team.file, signatures=policy).get(key())
    assert withheld(server, namespace) == [(key().fingerprint, reason)]


@pytest.mark.parametrize(
    ("trouble", "reported"), [(Reason.RESET, [0, 1]), (Reason.TIMEOUT, [0])], ids=["lost", "late"]
)
def test_wrong_artifact_is_reported_once_and_no_report_follows_a_timeout(
    hosts, team, config, tmp_path, trouble, reported
):
    for number in range(2):
        plant(config(), key(number), *by_a_stranger(team, config(), tmp_path))
    stash = hosts("reader", trusted_keys=team.file)
    reasons = []

    def failing(wanted, **keywords):
        reasons.append((wanted, keywords["reason"]))
        raise TransportError(trouble, "the report gets lost")

    stash.server.report = failing
    for number in (0, 0, 1, 1):
        assert refusal(stash.get, key(number)).reason is Reason.UNKNOWN_KEY
    assert reasons == [(key(number), "unknown_key") for number in reported]


def test_artifact_damaged_on_local_disk_is_not_reported(reader, server, namespace):
    path = reader.local.path(namespace, key(), origin=reader.standing.origin)
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 1
    path.write_bytes(damaged)
    assert reader.get(key()) == PAYLOAD
    assert withheld(server, namespace) == []


def test_one_refused_artifact_does_not_end_a_prefetch(hosts, team, command):
    ci = hosts("ci", signing_key=team.trust("ci"))
    hosts("writer").put(key(1), PAYLOAD, metadata())
    ci.put(key(2), PAYLOAD, metadata())
    ci.server.update_manifest("job", [key(2), key(1)])
    output = command("prefetch", "job", trusted_keys=team.file).output
    assert "1 fetched" in output
    assert "1 rejected" in output


def test_unsigned_hits_are_counted_under_prefer(cached, team):
    cached("writer").build(key())
    assert cached("writer").stats.unsigned == 0
    signer = cached("signer", signing_key=team.trust("ci"))
    signer.build(key(2))
    signer.stats  # noqa: B018 - waits for the upload
    reader = cached("reader", trusted_keys=team.file, signatures="prefer")
    for number in (1, 1, 2, 2):
        reader.build(key(number))
    stats = reader.stats
    assert (stats.hits_server, stats.hits_host, stats.unsigned) == (4, 0, 2)
    assert "2 unsigned" in stats.summary()
    assert stats.fallbacks == {}


def test_policy_that_cannot_be_enforced_disables_the_cache(tmp_path, team):
    program = """
        import graphstash, sys
        for settings in ({"trusted_keys": "/nowhere/keys.json"}, {"signatures": "require"}):
            print(graphstash.install(**settings))
        for name in [name for name in sys.modules if name.startswith("cryptography")]:
            del sys.modules[name]
        sys.modules["cryptography"] = None
        print(graphstash.install(trusted_keys=sys.argv[1]), "trained")
    """
    result = python(program, team.file, check=True, GRAPHSTASH_CACHE_DIR=tmp_path)
    assert result.stdout.split() == ["None", "None", "None", "trained"]
    lines = result.stderr.splitlines()
    named = ("/nowhere/keys.json", "GRAPHSTASH_TRUSTED_KEYS", "graphstash[signing]")
    for line, text in zip(lines, named, strict=True):
        assert line.startswith("graphstash: disabled: ")
        assert text in line

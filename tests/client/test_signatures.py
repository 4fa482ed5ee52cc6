"""What may reach a compiler: only what somebody who is trusted has signed, as it was signed."""

import dataclasses
import hashlib
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import zstandard
from typer.testing import CliRunner

from graphstash import CacheError, Reason
from graphstash._cli.main import app
from graphstash._trust.provenance import Provenance, read_provenance
from graphstash.errors import TransportError, VerificationError
from graphstash_schema import ArtifactMetadata, ArtifactSignature, Namespace
from graphstash_schema.protocol import MAX_METADATA_BYTES
from support.bombs import count_decompressors, envelope_of
from support.host import Host, key
from support.processes import python
from support.signing import Sealed, flipped, plant, sealed, signature_of

PAYLOAD = b"graph" * 1000


def metadata(**fields):
    return ArtifactMetadata(compile_seconds=3.0, raw_size_bytes=len(PAYLOAD), **fields)


@pytest.fixture
def cached(config):
    """Makes hosts that compile what they do not get."""
    with ExitStack() as stack:

        def make(name, **settings):
            host = stack.enter_context(Host(config(name, **settings)))
            host.result = PAYLOAD
            return host

        yield make


@pytest.fixture
def unpacked(monkeypatch):
    return count_decompressors(monkeypatch)


# What attackers and accidents publish under key(1): each gets (team, config, directory).


def signed(team, config, directory, *, by="ci"):
    envelope = sealed(directory, key(), PAYLOAD)
    namespace = config.namespace
    return envelope, signature_of(team.key(by), namespace, key(), envelope)


def unsigned(team, config, directory):
    return sealed(directory, key(), PAYLOAD), None


def by_a_stranger(team, config, directory):
    return signed(team, config, directory, by="stranger")


def by_a_revoked_key(team, config, directory):
    team.trust("gone")
    team.revoke("gone")
    return signed(team, config, directory, by="gone")


def by_a_key_whose_time_is_over(team, config, directory):
    team.trust("old", not_after=datetime.now(UTC) - timedelta(seconds=1))
    return signed(team, config, directory, by="old")


def by_a_key_of_another_namespace(team, config, directory):
    team.trust("foreign", namespaces=["elsewhere-*"])
    return signed(team, config, directory, by="foreign")


def with_a_flipped_bit_in_the_signature(team, config, directory):
    envelope, signature = signed(team, config, directory)
    return envelope, flipped(signature)


def with_the_id_of_a_trusted_key_on_a_strangers_signature(team, config, directory):
    envelope, signature = signed(team, config, directory)
    _, stranger = signed(team, config, directory, by="stranger")
    return envelope, ArtifactSignature(key_id=signature.key_id, value=stranger.value)


def moved_from_another_key(team, config, directory):
    envelope = sealed(directory, key(2), PAYLOAD)
    return envelope, signature_of(team.key("ci"), config.namespace, key(2), envelope)


def moved_and_named_anew(team, config, directory):
    """The envelope names the key that is asked for; the signature is of the other one."""
    other = sealed(directory, key(2), PAYLOAD, name="other")
    signature = signature_of(team.key("ci"), config.namespace, key(2), other)
    return sealed(directory, key(), PAYLOAD), signature


def replayed_from_another_namespace(team, config, directory):
    envelope = sealed(directory, key(), PAYLOAD)
    return envelope, signature_of(team.key("ci"), Namespace("elsewhere"), key(), envelope)


def resealed(envelope, blob):
    envelope.path.write_bytes(blob)
    sha256 = hashlib.sha256(blob).hexdigest()
    return dataclasses.replace(envelope, sha256=sha256, size_bytes=len(blob))


def cut(team, config, directory):
    envelope, signature = signed(team, config, directory)
    return resealed(envelope, envelope.path.read_bytes()[:-1]), signature


def padded(team, config, directory):
    envelope, signature = signed(team, config, directory)
    return resealed(envelope, envelope.path.read_bytes() + b"\0"), signature


def with_another_raw_size(team, config, directory):
    envelope, signature = signed(team, config, directory)
    blob = envelope.path.read_bytes()
    changed = blob.replace(b'"raw_size": 5000', b'"raw_size": 9999')
    assert changed != blob
    return resealed(envelope, changed), signature


@pytest.mark.parametrize("policy", ["require", "prefer", "off"])
@pytest.mark.parametrize(
    ("artifact", "reason"),
    [
        (signed, None),
        (unsigned, Reason.UNSIGNED),
        (by_a_stranger, Reason.UNKNOWN_KEY),
        (by_a_revoked_key, Reason.REVOKED_KEY),
        (by_a_key_whose_time_is_over, Reason.UNKNOWN_KEY),
        (by_a_key_of_another_namespace, Reason.UNKNOWN_KEY),
        (with_a_flipped_bit_in_the_signature, Reason.BAD_SIGNATURE),
        (with_the_id_of_a_trusted_key_on_a_strangers_signature, Reason.BAD_SIGNATURE),
        (moved_from_another_key, Reason.BAD_SIGNATURE),
        (moved_and_named_anew, Reason.BAD_SIGNATURE),
        (replayed_from_another_namespace, Reason.BAD_SIGNATURE),
        (cut, Reason.BAD_SIGNATURE),
        (padded, Reason.BAD_SIGNATURE),
        (with_another_raw_size, Reason.BAD_SIGNATURE),
    ],
)
def test_only_what_the_policy_allows_is_unpacked(
    team, config, hosts, tmp_path, unpacked, artifact, reason, policy
):
    team.trust("ci")
    plant(config(), key(), *artifact(team, config(), tmp_path))
    stash = hosts("reader", trusted_keys=team.file, signatures=policy)
    unpacked.clear()

    refuses = policy == "require" or (policy == "prefer" and artifact is not unsigned)
    if reason is not None and refuses:
        with pytest.raises(VerificationError) as caught:
            stash.get(key())
        assert caught.value.reason is reason
        assert unpacked == []
        assert stash.local.open(stash.config.namespace, key(), origin=stash.standing.origin) is None
    elif artifact in (signed, unsigned) or policy == "off":
        try:
            assert stash.get(key()) == PAYLOAD
        except VerificationError as error:  # the policy is off, the envelope still knows its key
            assert error.reason in (Reason.WRONG_KEY, Reason.CORRUPT)  # noqa: PT017
            assert policy == "off"


def test_a_signed_artifact_is_checked_again_from_this_hosts_disk(hosts, team):
    hosts("ci", signing_key=team.trust("ci")).put(key(), PAYLOAD, metadata())
    reader = hosts("reader", trusted_keys=team.file)
    assert reader.ensure_local(key()).source == "remote"
    assert reader.ensure_local(key()).source == "local"
    assert reader.get(key()) == PAYLOAD

    team.revoke("ci")

    with pytest.raises(VerificationError) as caught:
        reader.get(key())
    assert caught.value.reason is Reason.REVOKED_KEY
    assert reader.local.open(reader.config.namespace, key(), origin=reader.standing.origin) is None


def test_what_a_job_with_the_policy_off_has_fetched_serves_one_that_requires_signatures(
    hosts, team
):
    hosts("ci", signing_key=team.trust("ci")).put(key(), PAYLOAD, metadata())
    assert hosts("shared").get(key()) == PAYLOAD
    reader = hosts("shared", trusted_keys=team.file)
    assert reader.ensure_local(key()).source == "local"


@pytest.mark.parametrize("policy", ["require", "prefer", "off"])
@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20])
def test_a_payload_ends_where_it_ends_whatever_lies_behind_it_on_disk(hosts, team, policy, size):
    """Random, so that pieces of the payload and of the file end at the same places."""
    payload = os.urandom(size)
    hosts("ci", signing_key=team.trust("ci")).put(key(), payload, metadata())
    reader = hosts("reader", trusted_keys=team.file, signatures=policy)
    assert reader.get(key()) == payload
    assert reader.ensure_local(key()).source == "local"
    assert reader.get(key()) == payload


def test_an_unsigned_envelope_on_disk_is_replaced_by_the_signed_one(hosts, team, tmp_path):
    hosts("ci", signing_key=team.trust("ci")).put(key(), PAYLOAD, metadata())
    reader = hosts("reader", trusted_keys=team.file)
    path = reader.local.path(reader.config.namespace, key(), origin=reader.standing.origin)
    path.parent.mkdir(parents=True)
    sealed(tmp_path, key(), b"poison").path.rename(path)

    assert reader.get(key()) == PAYLOAD
    assert reader.ensure_local(key()).source == "local"


def test_what_this_host_compiled_without_a_key_serves_this_host_only(hosts, team):
    writer = hosts("writer", trusted_keys=team.file)
    writer.put(key(), PAYLOAD, metadata())
    assert writer.fetch(key(), writer.local.root / "x").source == "local"

    with pytest.raises(VerificationError) as caught:
        hosts("other", trusted_keys=team.file).get(key())
    assert caught.value.reason is Reason.UNSIGNED


@pytest.mark.parametrize("theft", ["another key", "another namespace", "another host", "bytes"])
def test_a_hosts_own_proof_is_worth_nothing_elsewhere(hosts, team, tmp_path, theft):
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

    with pytest.raises(CacheError) as caught:
        thief.get(wanted)
    assert caught.value.reason is Reason.CONNECT
    assert not path.exists()


def test_a_file_that_others_can_change_while_it_is_checked_is_not_used(hosts, team):
    writer = hosts("writer", trusted_keys=team.file, url="http://127.0.0.1:9")
    writer.put(key(), PAYLOAD, metadata(), local_only=True)
    writer.local.path(writer.config.namespace, key()).chmod(0o666)
    with pytest.raises(CacheError):
        writer.get(key())


def test_a_secret_that_others_can_read_proves_nothing(hosts, team):
    writer = hosts("writer", trusted_keys=team.file, url="http://127.0.0.1:9")
    secret = writer.local.root / "secret"
    writer.put(key(), PAYLOAD, metadata(), local_only=True)
    assert secret.stat().st_mode & 0o777 == 0o600
    assert writer.get(key()) == PAYLOAD
    secret.chmod(0o644)
    with pytest.raises(CacheError):
        writer.get(key())


def test_a_secret_that_a_power_cut_left_empty_is_made_anew(hosts):
    tier = hosts().local
    secret = tier.root / "secret"
    secret.touch(mode=0o600)
    made = tier.secret()
    assert len(made) == 32
    assert tier.secret() == secret.read_bytes() == made


def test_threads_agree_on_one_secret(hosts):
    tier = hosts().local
    for _ in range(30):  # the first look of all of them has to come before the first one's file
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(tier.secret) for _ in range(8)]
        (found,) = {each.result() for each in asked}
        assert len(found) == 32
        assert list((tier.root / "tmp").iterdir()) == []
        (tier.root / "secret").unlink()


def test_an_envelope_goes_with_its_proof(hosts, team):
    stash = hosts("ci", signing_key=team.trust("ci"), trusted_keys=team.file)
    stash.put(key(), PAYLOAD, metadata())
    with stash.local.open(stash.config.namespace, key(), origin=stash.standing.origin) as file:
        proof, size = read_provenance(file)
    path = stash.local.path(stash.config.namespace, key(), origin=stash.standing.origin)
    assert proof.signature is not None
    assert proof.code is not None
    assert size < path.stat().st_size == stash.local.size_bytes()
    stash.local.discard(stash.config.namespace, key(), origin=stash.standing.origin)
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b"GSPROOF\n",
        struct.pack(">I", 2**31) + b"GSPROOF\n",
        struct.pack(">I", 400) + b"GSPROOF\n",
        b'{"code": 5}' + struct.pack(">I", 11) + b"GSPROOF\n",
        b"\xff\xfe" + struct.pack(">I", 2) + b"GSPROOF\n",
    ],
)
def test_what_is_no_proof_is_none(tmp_path, tail):
    path = tmp_path / "envelope"
    path.write_bytes(b"x" * 100 + tail)
    with path.open("rb") as file:
        assert read_provenance(file) == (Provenance(), 100 + len(tail))
        assert file.tell() == 0


def test_a_signed_bomb_unfolds_no_further_than_the_signed_size(
    hosts, team, config, tmp_path, unpacked
):
    raw = bytes(300 * 1024**2)
    blob = envelope_of(key(), zstandard.ZstdCompressor().compress(raw))
    path = tmp_path / "bomb"
    path.write_bytes(blob)
    envelope = Sealed(path, hashlib.sha256(blob).hexdigest(), len(blob), 10)
    plant(
        config(),
        key(),
        envelope,
        signature_of(team.trust("ci"), config().namespace, key(), envelope),
    )
    stash = hosts("reader", trusted_keys=team.file)
    written = []

    class Counting:
        def write(self, data):
            written.append(len(data))

        def seekable(self):
            return False

    with pytest.raises(VerificationError) as caught:
        stash._reader.read(key(), Counting())
    assert caught.value.reason is Reason.CORRUPT
    assert sum(written) <= 1024**2


def test_keys_rotate_without_a_gap_and_the_old_one_ends(hosts, team):
    old = hosts("old", signing_key=team.trust("old"))
    old.put(key(1), PAYLOAD, metadata())
    team.trust("new")
    reader = hosts("reader", trusted_keys=team.file)
    new = hosts("new", signing_key=team.key("new"))
    new.put(key(2), PAYLOAD, metadata())
    assert reader.get(key(1)) == reader.get(key(2)) == PAYLOAD

    team.revoke("old")

    assert reader.get(key(2)) == PAYLOAD
    with pytest.raises(VerificationError):
        reader.get(key(1))


def test_nothing_is_trusted_while_the_trusted_keys_cannot_be_read(hosts, team, server, namespace):
    hosts("ci", signing_key=team.trust("ci")).put(key(), PAYLOAD, metadata())
    reader = hosts("reader", trusted_keys=team.file)
    assert reader.get(key()) == PAYLOAD
    text = team.file.read_text()
    team.file.write_text(text[:-30])

    with pytest.raises(CacheError) as caught:
        reader.get(key())
    assert caught.value.reason is Reason.LOCAL_IO
    assert str(team.file) in str(caught.value)

    team.file.write_text(text)
    assert reader.ensure_local(key()).source == "local"  # it was neither forgotten nor reported


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

    assert host.build(key()) == PAYLOAD  # its own, from its disk
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
def test_what_is_wrong_is_reported_to_the_server_with_its_reason(
    hosts, team, config, tmp_path, server, namespace, artifact, reason
):
    team.trust("ci")
    plant(config(), key(), *artifact(team, config(), tmp_path))
    policy = "off" if artifact in (of_another_key, garbage) else "prefer"
    with pytest.raises(VerificationError):
        hosts("reader", trusted_keys=team.file, signatures=policy).get(key())
    assert withheld(server, namespace) == [(key().fingerprint, reason)]


def test_a_wrong_artifact_is_reported_once_by_a_process(hosts, team, config, tmp_path):
    team.trust("ci")
    plant(config(), key(), *by_a_stranger(team, config(), tmp_path))
    stash = hosts("reader", trusted_keys=team.file)
    reported = []

    def failing(wanted, **keywords):
        reported.append((wanted, keywords["reason"]))
        raise TransportError(Reason.RESET, "the report gets lost")

    stash.server.report = failing
    for _ in range(3):
        with pytest.raises(VerificationError):
            stash.get(key())
    assert reported == [(key(), "unknown_key")]


def test_a_server_that_lets_a_report_wait_is_told_nothing_more(hosts, team, config, tmp_path):
    for number in range(3):
        envelope, signature = by_a_stranger(team, config(), tmp_path)
        plant(config(), key(number), envelope, signature)
    stash = hosts("reader", trusted_keys=team.file)
    reported = []

    def hanging(wanted, **_):
        reported.append(wanted)
        raise TransportError(Reason.TIMEOUT, "no answer")

    stash.server.report = hanging
    for number in range(3):
        with pytest.raises(VerificationError):
            stash.get(key(number))
    assert reported == [key(0)]


def test_what_this_hosts_disk_has_damaged_is_not_reported(hosts, team, server, namespace):
    hosts("ci", signing_key=team.trust("ci")).put(key(), PAYLOAD, metadata())
    reader = hosts("reader", trusted_keys=team.file)
    reader.ensure_local(key())
    path = reader.local.path(reader.config.namespace, key(), origin=reader.standing.origin)
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 1
    path.write_bytes(damaged)
    assert reader.get(key()) == PAYLOAD
    assert withheld(server, namespace) == []


def test_one_refused_artifact_does_not_end_a_prefetch(hosts, team, server, namespace, tmp_path):
    ci = hosts("ci", signing_key=team.trust("ci"))
    hosts("writer").put(key(1), PAYLOAD, metadata())
    ci.put(key(2), PAYLOAD, metadata())
    ci.server.update_manifest("job", [key(2), key(1)])
    result = CliRunner().invoke(
        app,
        ["prefetch", "job", "--url", server.url, "--namespace", namespace],
        env={
            "GRAPHSTASH_TRUSTED_KEYS": str(team.file),
            "GRAPHSTASH_CACHE_DIR": str(tmp_path / "c"),
        },
    )
    assert result.exit_code == 0, result.output
    assert "1 fetched" in result.output
    assert "1 rejected" in result.output


def test_where_signatures_are_preferred_unsigned_hits_are_counted(cached, team):
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


def test_the_header_keeps_the_signature_whatever_else_it_must_drop(team, config, tmp_path):
    _, signature = signed(team, config(), tmp_path)
    parts = {f"part-{number}": "x" * 2000 for number in range(30)}
    full = metadata(parts=parts, toolchain="ü" * 256, producer="ü" * 128, signature=signature)
    header = full.to_header()
    assert len(header) <= MAX_METADATA_BYTES
    read = ArtifactMetadata.from_header(header)
    assert read.signature == signature
    assert len(read.parts) < 30


TRAIN = "import graphstash; print(graphstash.install()); print('trained')"


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"GRAPHSTASH_TRUSTED_KEYS": "/nowhere/keys.json"}, "/nowhere/keys.json"),
        ({"GRAPHSTASH_SIGNING_KEY": "/nowhere/key.pem"}, "/nowhere/key.pem"),
        ({"GRAPHSTASH_SIGNATURES": "require"}, "GRAPHSTASH_TRUSTED_KEYS"),
        ({"GRAPHSTASH_SIGNATURES": "maybe"}, "GRAPHSTASH_SIGNATURES='maybe'"),
    ],
)
def test_a_policy_that_cannot_be_kept_switches_the_cache_off_not_the_check(
    tmp_path, variables, told
):
    result = python(TRAIN, GRAPHSTASH_CACHE_DIR=tmp_path, **variables)
    assert result.stdout.split() == ["None", "trained"]
    assert "graphstash: disabled: " in result.stderr
    assert told in result.stderr


def test_without_cryptography_a_policy_switches_the_cache_off(tmp_path, team):
    program = f"import sys; sys.modules['cryptography'] = None; {TRAIN}"
    result = python(program, GRAPHSTASH_CACHE_DIR=tmp_path, GRAPHSTASH_TRUSTED_KEYS=team.file)
    assert result.stdout.split() == ["None", "trained"]
    assert "graphstash[signing]" in result.stderr


def test_who_neither_signs_nor_checks_never_loads_cryptography(server, namespace, tmp_path):
    program = (
        "import sys, graphstash\n"
        "from graphstash_schema import ArtifactKey, ArtifactMetadata\n"
        f"key = ArtifactKey.parse('jax', 'cpu-x86_64', '{1:064x}')\n"
        "session = graphstash.install()\n"
        "stash = session.cache.stash\n"
        "stash.put(key, b'graph', ArtifactMetadata(compile_seconds=1, raw_size_bytes=5))\n"
        "assert stash.get(key) == b'graph'\n"
        "print([name for name in sys.modules if name.startswith('cryptography')])\n"
    )
    variables = {"GRAPHSTASH_URL": server.url, "GRAPHSTASH_NAMESPACE": namespace}
    result = python(program, GRAPHSTASH_CACHE_DIR=tmp_path, **variables)
    assert result.stdout.strip() == "[]", result.stderr


def test_the_server_hands_the_signature_on_as_it_came(hosts, team, server, namespace):
    stash = hosts("ci", signing_key=team.trust("ci"))
    stash.put(key(), PAYLOAD, metadata(parts={"flags": "-O3"}))
    answer = httpx.head(server.url + key().artifact_path(namespace), trust_env=False)
    sent = ArtifactMetadata.from_header(answer.headers["graphstash-metadata"])
    assert sent.signature is not None
    assert sent.parts == {"flags": "-O3"}

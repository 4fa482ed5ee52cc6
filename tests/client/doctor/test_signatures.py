"""The doctor's findings about signing keys, trusted keys and trusted writers."""

from datetime import UTC, datetime, timedelta

import pytest

from graphstash._cli.doctor.findings import State
from graphstash._trust.signing_keys import SigningKey
from graphstash._trust.trusted_keys import RevokedKey, TrustedKey, TrustedKeys
from support.doctor import diagnose, expect, line


@pytest.fixture
def keys(tmp_path):
    """Return a function that writes a file of trusted keys. `own` is this host's key."""
    own = SigningKey.generate(tmp_path / "own.pem")

    def write(*, trusted=(), revoked=(), **terms):
        keys = tuple(TrustedKey(public=public, **terms) for public in trusted)
        at = datetime.now(UTC)
        gone = tuple(RevokedKey(key_id=each, at=at, reason="lost") for each in revoked)
        TrustedKeys(keys=keys, revoked=gone).write(tmp_path / "trusted.json")
        return {
            "trusted_keys": tmp_path / "trusted.json",
            "signing_key": tmp_path / "own.pem",
            "namespace": "team",
        }

    write.own = own
    return write


def test_namespace_without_trusted_key_is_a_failure_under_require(keys):
    settings = keys(trusted=[keys.own.public_text], namespaces=("other",))
    found, advice = "no key is trusted for namespace 'team'", "graphstash keys trust"
    expect(diagnose(**settings), "signatures", State.FAIL, found=found, advice=advice)
    preferred = diagnose(**settings, signatures="prefer")
    expect(preferred, "signatures", State.WARN, found="only unsigned artifacts")


def test_sound_keys_pass_and_one_that_ends_soon_is_a_warning(keys):
    findings = diagnose(**keys(trusted=[keys.own.public_text]))
    expect(findings, "signatures", State.OK, found="policy require")
    assert line(findings, "signing key").state == State.OK
    soon = datetime.now(UTC) + timedelta(days=3)
    settings = keys(trusted=[keys.own.public_text], name="ci", not_after=soon)
    found = "the trusted key 'ci' expires on"
    expect(diagnose(**settings), "signatures", State.WARN, found=found)


def test_signing_key_that_is_revoked_untrusted_or_readable_by_others_is_reported(keys, tmp_path):
    trusting = keys(trusted=[keys.own.public_text], revoked=[keys.own.key_id])
    found, advice = f"{keys.own.key_id} was revoked", "graphstash keys generate"
    expect(diagnose(**trusting), "signing key", State.FAIL, found=found, advice=advice)
    other = SigningKey.generate(tmp_path / "other.pem")
    findings = diagnose(**keys(trusted=[other.public_text]))
    expect(findings, "signing key", State.WARN, advice="graphstash keys show")
    (tmp_path / "own.pem").chmod(0o644)
    expect(diagnose(**keys()), "signing key", State.FAIL, found="chmod 600")
    file = tmp_path / "trusted.json"
    file.write_text("{}}")
    findings = diagnose(**trusting)
    expect(findings, "signatures", State.FAIL, found=str(file), advice="without the cache")


@pytest.mark.parametrize(
    ("url", "state"), [("http://127.0.0.1:9", State.OK), ("http://192.0.2.1:9", State.WARN)]
)
def test_without_signatures_the_writers_of_each_namespace_are_trusted(url, state):
    findings = diagnose(url, read_namespaces="trusted", namespace="team", connect_seconds=0.1)
    trust_findings = [each for each in findings if each.name == "trust"]
    assert [each.state for each in trust_findings] == [state, state]
    for finding, namespace in zip(trust_findings, ("trusted", "team"), strict=True):
        assert f"{namespace!r}: signatures are not checked: everyone who can write" in finding.found


@pytest.mark.parametrize("policy", ["require", "prefer"])
def test_with_signatures_the_owners_of_keys_are_trusted(keys, policy):
    settings = keys(trusted=[keys.own.public_text], name="ci", namespaces=("trusted",))
    findings = diagnose(**settings, read_namespaces="trusted", signatures=policy)
    text = line(findings, "trust").found
    assert text.startswith("'trusted': signed by ci")
    assert ("or unsigned" in text) == (policy == "prefer")

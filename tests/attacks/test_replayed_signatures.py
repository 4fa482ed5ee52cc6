"""Jobs refuse replayed, revoked and removed signatures."""

import base64
import json

import pytest

from graphstash_schema import ArtifactMetadata
from support.reader_job import OWN

POISON = b"what was signed for another place " * 200
_METADATA = "graphstash-metadata"


@pytest.fixture
def stolen(fort, space, key, publish, team):
    """A signed artifact of the attacker's own namespace, as every reader of it can download it."""
    mine = f"{space}-mine"
    publish(key(1), POISON, signing_key=team.trust("ci"), namespace=mine)
    answer = fort.http(fort.token(f"read:{mine}")).get(key(1).artifact_path(mine))
    assert "signature" in ArtifactMetadata.from_header(answer.headers[_METADATA]).model_fields_set
    return answer


def refuses(fort, job, key, reason):
    """Assert that the job refuses the stored artifact for this reason and compiles."""
    with fort.withstands() as refused:
        assert job.build(key) == OWN
        assert job.compiles == 1
        assert job.fallbacks == {reason: 1}
        assert job.stats.hits == 0
    assert refused == {}


@pytest.mark.parametrize(
    "place",
    [{}, {"kind": "torch_xla"}, {"device": "cuda-sm_90"}, {"number": 2}],
    ids=["namespace", "kind", "device-type", "fingerprint"],
)
def test_artifact_replayed_elsewhere_is_refused(fort, space, key, stolen, victim, team, place):
    target = key(**{"number": 1} | place)
    writer = fort.token(f"write:{space}")
    metadata = stolen.headers[_METADATA]
    answer = fort.put(target.artifact_path(space), stolen.content, metadata=metadata, token=writer)
    assert answer.status_code == 201

    job = victim(trusted_keys=team.file, signatures="require")
    refuses(fort, job, target, "bad_signature")


def by_a_key_of_ci_namespaces(team):
    return team.trust("ci", namespaces=["ci-*"])


def by_a_key_that_was_trusted_again_after_its_revocation(team):
    team.trust("gone")
    team.revoke("gone")
    return team.trust("gone")


@pytest.mark.parametrize(
    ("signer", "reason"),
    [
        (by_a_key_of_ci_namespaces, "unknown_key"),
        (by_a_key_that_was_trusted_again_after_its_revocation, "revoked_key"),
    ],
)
def test_untrusted_signer_is_refused(fort, space, key, victim, team, publish, signer, reason):
    publish(key(1), POISON, signing_key=signer(team))

    for policy in ("require", "prefer"):
        refuses(fort, victim(trusted_keys=team.file, signatures=policy), key(1), reason)


def stripped(request, answer):
    """Remove the signature from the metadata."""
    if _METADATA in answer.headers:
        metadata = ArtifactMetadata.from_header(answer.headers[_METADATA])
        header = metadata.model_copy(update={"signature": None}).to_header()
        answer.headers[_METADATA] = header
    return answer


def without_metadata(request, answer):
    answer.headers.pop(_METADATA, None)
    return answer


def with_words_that_loosen(request, answer):
    """Add headers and metadata that ask the client for a looser policy."""
    answer = stripped(request, answer)
    answer.headers |= {
        "graphstash-signatures": "off",
        "graphstash-policy": "off",
        "graphstash-trusted": "1",
        "cache-control": "no-verify",
    }
    if _METADATA in answer.headers:
        metadata = ArtifactMetadata.from_header(answer.headers[_METADATA])
        assert metadata.signature is None
        loose = {"signatures": "off", "policy": "off", "trusted": True, "code": "0" * 64}
        raw = json.dumps(json.loads(metadata.model_dump_json()) | loose).encode()
        answer.headers[_METADATA] = base64.urlsafe_b64encode(raw).decode().rstrip("=")
    return answer


@pytest.mark.parametrize("change", [stripped, without_metadata, with_words_that_loosen])
def test_artifact_whose_signature_was_removed_is_unsigned(
    fort, space, key, victim, team, publish, middlebox, change
):
    publish(key(1), POISON, signing_key=team.trust("ci"))
    settings = {"url": middlebox(change).url, "trusted_keys": team.file}

    refuses(fort, victim(**settings), key(1), "unsigned")
    # The policy "prefer" accepts an unsigned artifact and counts it.
    job = victim(**settings, signatures="prefer")
    assert job.build(key(1)) == POISON
    assert (job.compiles, job.stats.unsigned, job.fallbacks) == (0, 1, {})

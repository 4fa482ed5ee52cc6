"""A good signature where it does not belong, and none where one belongs."""

import base64
import json

import pytest

from graphstash_schema import ArtifactMetadata
from support.guarded_server import DEVICE
from support.reader_job import OWN
from support.signing import flipped, sealed

POISON = b"what was signed for another place " * 200
_METADATA = "graphstash-metadata"


@pytest.fixture
def stolen(fort, space, key, publish, team):
    """A signed artifact of the attacker's own namespace, as anybody who reads there has it."""
    mine = f"{space}-mine"
    publish(key(1), POISON, signing_key=team.trust("ci"), namespace=mine)
    answer = fort.http(fort.token(f"read:{mine}")).get(key(1).artifact_path(mine))
    assert "signature" in ArtifactMetadata.from_header(answer.headers[_METADATA]).model_fields_set
    return answer


def refuses(fort, job, key, reason):
    """Whether a job compiles by itself what lies there, and says why."""
    with fort.withstands() as refused:
        assert job.build(key) == OWN
        assert job.compiles == 1
        assert job.fallbacks == {reason: 1}
        assert job.stats.hits == 0
    assert refused == {}


_OTHER_DEVICE = "cuda-sm_90"


@pytest.mark.parametrize(
    ("place", "policy"),
    [
        ({}, "require"),
        ({"kind": "torch_xla"}, "require"),
        ({"device": _OTHER_DEVICE}, "require"),
        ({"number": 2}, "require"),
    ],
    ids=["namespace", "kind", "device-type", "fingerprint"],
)
def test_a_signed_artifact_is_replayed_in_another(
    fort, space, key, stolen, victim, team, place, policy
):
    target = key(**{"number": 1} | place)
    writer = fort.token(f"write:{space}")
    metadata = stolen.headers[_METADATA]
    answer = fort.put(target.artifact_path(space), stolen.content, metadata=metadata, token=writer)
    assert answer.status_code == 201

    job = victim(trusted_keys=team.file, signatures=policy)
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
def test_an_artifact_is_signed(fort, space, key, victim, team, publish, signer, reason):
    publish(key(1), POISON, signing_key=signer(team))

    for policy in ("require", "prefer"):
        refuses(fort, victim(trusted_keys=team.file, signatures=policy), key(1), reason)


def stripped(request, answer):
    """The metadata without the signature."""
    if _METADATA in answer.headers:
        metadata = ArtifactMetadata.from_header(answer.headers[_METADATA])
        header = metadata.model_copy(update={"signature": None}).to_header()
        answer.headers[_METADATA] = header
    return answer


def without_metadata(request, answer):
    answer.headers.pop(_METADATA, None)
    return answer


def with_words_that_loosen(request, answer):
    """Whatever a server might say about policies, in headers and metadata."""
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


def with_one_bit_changed(request, answer):
    if _METADATA in answer.headers:
        metadata = ArtifactMetadata.from_header(answer.headers[_METADATA])
        changed = metadata.model_copy(update={"signature": flipped(metadata.signature)})
        answer.headers[_METADATA] = changed.to_header()
    return answer


_CHANGES = stripped, without_metadata, with_words_that_loosen, with_one_bit_changed


@pytest.mark.parametrize("change", _CHANGES)
def test_a_signature_is_taken_off_or_changed_on_the_way(
    fort, space, key, victim, team, publish, middlebox, change
):
    publish(key(1), POISON, signing_key=team.trust("ci"))
    settings = {"url": middlebox(change).url, "trusted_keys": team.file}

    if change is with_one_bit_changed:
        refuses(fort, victim(**settings, signatures="prefer"), key(1), "bad_signature")
        return
    refuses(fort, victim(**settings), key(1), "unsigned")
    # Where signatures are only preferred, that is what the policy lets pass: it is counted.
    job = victim(**settings, signatures="prefer")
    assert job.build(key(1)) == POISON
    assert (job.compiles, job.stats.unsigned, job.fallbacks) == (0, 1, {})


def test_another_users_envelope_is_planted_on_the_disk(fort, space, key, victim, team, tmp_path):
    """Whoever may write to the tier's folder has no secret and no key."""
    team.trust("ci")
    disk = tmp_path / "disk"
    job = victim(trusted_keys=team.file, cache_dir=disk)
    path = job.stash.local.path(space, key(1, device=DEVICE))
    path.parent.mkdir(parents=True)
    sealed(path.parent, key(1), POISON, name=path.name)

    with fort.withstands() as refused:
        assert job.build(key(1)) == OWN
        assert job.compiles == 1
    assert refused == {"not_found": 1}

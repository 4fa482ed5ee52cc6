"""A writer without the right to delete cannot remove the artifacts of others by reports."""

from dataclasses import asdict

import pytest

from graphstash_schema import Digest
from support.guarded_server import artifact_path, fingerprint, keys

pytestmark = pytest.mark.sql

PAYLOAD = b"an executable"


@pytest.fixture
def writer(any_fort, space):
    def make():
        return any_fort.http(any_fort.token(f"write:{space}"))

    return make


@pytest.fixture
def report(any_fort, space, key):
    """Report an artifact of the namespace, by default the only one."""

    def send(caller, reason="corrupt", number=0):
        answer = caller.post(
            f"/v1/{space}/artifacts:report",
            json={
                "key": asdict(key(number)),
                "digest": any_fort.digest_of(space),
                "reason": reason,
            },
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    return send


def test_reports_of_one_writer_withhold_no_sound_artifact(
    any_fort, space, key, publish, writer, report
):
    publish(key(), PAYLOAD, server=any_fort)
    attacker = writer()
    reasons = ("wrong_key", "bad_signature", "revoked_key", "unsigned")

    first = report(attacker, "corrupt")
    with any_fort.withstands():  # the server stores only the first report
        again = [report(attacker, reason) for reason in reasons]

    assert [first, *again] == [{"found": True, "withheld": False}] * 5
    assert attacker.get(artifact_path(space)).status_code == 200
    listed = any_fort.http(any_fort.admin).get("/v1/-/quarantine", params={"namespace": space})
    assert listed.json()["artifacts"] == []


def test_two_reporters_withhold_an_artifact(any_fort, space, key, publish, writer, report):
    """Two independent reporters withhold an artifact. Only an administrator releases it."""
    publish(key(), PAYLOAD, server=any_fort)
    named = asdict(key())
    release = f"/v1/{space}/artifacts:release"
    callers = [writer(), writer()]

    assert [report(caller)["withheld"] for caller in callers] == [False, True]
    with any_fort.withstands() as refused:
        assert callers[0].post(release, json=named).status_code == 403
        assert callers[0].delete(artifact_path(space)).status_code == 403
    assert refused == {"forbidden": 2}

    admin = any_fort.http(any_fort.token(f"admin:{space}"))
    assert admin.post(release, json=named).status_code == 204
    assert [report(caller)["withheld"] for caller in (writer(), admin)] == [False, True]


def test_report_of_a_wrong_artifact_withholds_it_at_once(
    any_fort, space, key, publish, writer, report
):
    """Covers a blob that is no envelope, and the envelope of another key."""
    any_fort.fill(space)
    assert report(writer())["withheld"] is True

    any_fort.http(any_fort.admin).delete(artifact_path(space))
    envelope = publish(key(1), PAYLOAD, server=any_fort, namespace=f"{space}-other")
    assert any_fort.put(artifact_path(space), envelope.path.read_bytes()).status_code == 201
    assert report(writer(), "wrong_key")["withheld"] is True


def test_report_of_a_blob_damaged_on_disk_removes_the_artifact(fort, space, key, publish, tmp_path):
    envelope = publish(key(), PAYLOAD)
    digest = Digest.of(envelope.path.read_bytes())
    (blob,) = (path for path in fort.data_dir.rglob(digest.sha256) if path.is_file())
    blob.write_bytes(bytes(digest.size_bytes))
    caller = fort.http(fort.token(f"write:{space}"))

    answer = caller.post(
        f"/v1/{space}/artifacts:report",
        json={"key": asdict(key()), "digest": str(digest), "reason": "corrupt"},
    )

    assert answer.json() == {"found": True, "withheld": False}
    assert caller.get(artifact_path(space)).status_code == 404
    publish(key(), PAYLOAD)


def test_manifest_entries_of_one_writer_evict_none_of_other_writers(any_fort, space, writer):
    """This holds even if the attacker names the entries before or after the other writer."""
    path = f"/v1/{space}/manifests/train"

    def put(caller, numbers):
        answer = caller.put(path, json={"keys": keys(numbers)})
        assert answer.status_code in {200, 201}, answer.text

    honest, attacker = writer(), writer()
    own, taken, claimed = range(300), range(300, 400), range(400, 500)
    put(attacker, claimed)
    put(honest, [*own, *taken, *claimed])
    put(attacker, taken)

    put(attacker, range(10_000, 14_096))

    entries = honest.get(path).json()["entries"]
    kept = {entry["key"]["fingerprint"] for entry in entries}
    assert len(kept) == 4096
    assert kept >= {fingerprint(number) for number in (*own, *taken, *claimed)}


def test_report_by_a_reader_or_of_an_absent_artifact_withholds_nothing(fort, space, key, publish):
    """A report for another digest, another key or another namespace withholds nothing."""
    publish(key(1), PAYLOAD, server=fort)
    fort.fill(f"{space}-other")
    reader, writer = (fort.http(fort.token(f"{scope}:{space}")) for scope in ("read", "write"))
    digest, other = fort.digest_of(space), fort.digest_of(f"{space}-other")

    def report(caller, number, digest, where=space):
        body = {"key": asdict(key(number)), "digest": digest, "reason": "corrupt"}
        return caller.post(f"/v1/{where}/artifacts:report", json=body)

    with fort.withstands() as refused:
        for _ in range(20):
            assert report(reader, 1, digest).json() == {"found": True, "withheld": False}
        for number, wrong in ((1, f"sha256:{'0' * 64}"), (2, digest), (0, other)):
            answer = report(writer, number, wrong)
            assert answer.json() == {"found": False, "withheld": False}
        assert report(writer, 0, other, f"{space}-other").status_code == 404
    assert refused == {"not_found": 1}
    assert reader.get(key(1).artifact_path(space)).status_code == 200

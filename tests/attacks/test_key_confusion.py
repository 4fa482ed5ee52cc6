"""A sound artifact under another key: it runs, and the numbers are wrong."""

import pytest

from support.reader_job import OWN

POISON = b"another graph " * 500


def swapped(box, wanted, given, space):
    """Answers the wanted key with the artifact of the given one, headers and all."""

    def change(request, answer):
        if request.method == "GET" and request.path == wanted.artifact_path(space):
            return box[0].ask(request, path=given.artifact_path(space))
        return answer

    return change


@pytest.mark.parametrize(("is_signed", "reason"), [(False, "wrong_key"), (True, "bad_signature")])
def test_a_hostile_server_answers_with_the_artifact_of_another_key(
    fort, space, key, publish, middlebox, victim, team, is_signed, reason
):
    """It is reported once; the report names a digest that the store does not have there."""
    signing_key = team.trust("ci") if is_signed else None
    publish(key(1), POISON, signing_key=signing_key)
    publish(key(2), OWN, signing_key=signing_key)
    box = []
    box.append(middlebox(swapped(box, key(2), key(1), space)))
    trusted = {"trusted_keys": team.file} if is_signed else {}
    writer = fort.token(f"write:{space}")

    with fort.withstands() as refused:
        job = victim(url=box[0].url, token=writer, **trusted)
        assert job.build(key(2)) == OWN
        assert job.compiles == 1
        assert job.fallbacks == {reason: 1}
        assert (job.stats.hits, job.stats.published) == (0, 0)
        assert len(box[0].to("artifacts:report")) == 1
    assert refused == {}
    assert fort.http(writer).get(key(2).artifact_path(space)).status_code == 200


@pytest.mark.parametrize(("is_signed", "reason"), [(False, "wrong_key"), (True, "bad_signature")])
def test_a_writer_publishes_an_artifact_under_another_key(
    any_fort, space, key, publish, victim, team, is_signed, reason
):
    """The first writer that finds it has it withheld; nobody else gets it, or can put it back."""
    signing_key = team.trust("ci") if is_signed else None
    envelope = publish(key(1), POISON, signing_key=signing_key, server=any_fort)
    trusted = {"trusted_keys": team.file} if is_signed else {}
    admin, path = any_fort.http(any_fort.admin), key(2).artifact_path(space)
    sound = admin.get(key(1).artifact_path(space))
    header = sound.headers["graphstash-metadata"]
    blob = envelope.path.read_bytes()
    assert any_fort.put(path, blob, metadata=header).status_code == 201
    writer = any_fort.token(f"write:{space}")

    reader = any_fort.token(f"read:{space}")
    job = victim(url=any_fort.url, token=writer, **trusted)
    assert job.build(key(2)) == OWN
    assert job.fallbacks == {reason: 1}
    assert any_fort.stats()["reported"] >= 1

    with any_fort.withstands() as refused:
        again = victim(url=any_fort.url, token=reader, read_only=True, **trusted)
        assert again.build(key(2)) == OWN
        assert (again.stats.misses, again.fallbacks) == (1, {})
        assert admin.get(path).status_code == 404
        assert any_fort.put(path, blob, metadata=header, token=writer).status_code == 409
        assert any_fort.put(path, b"other", token=writer).status_code == 409
    assert refused == {"not_found": 2, "withheld": 2}
    (listed,) = admin.get(f"/v1/-/quarantine?namespace={space}").json()["artifacts"]
    assert listed["reason"] == reason
    assert admin.get(key(1).artifact_path(space)).status_code == 200


def test_readers_take_an_artifact_from_the_others_by_reporting_it(
    any_fort, space, key, publish, victim
):
    publish(key(1), OWN, server=any_fort)
    reader = any_fort.http(any_fort.token(f"read:{space}"))
    digest = any_fort.digest_of(space)
    report = {"key": key(1).model_dump(mode="json"), "digest": digest, "reason": "corrupt"}

    with any_fort.withstands() as refused:
        for _ in range(20):
            answer = reader.post(f"/v1/{space}/artifacts:report", json=report)
            assert answer.json() == {"found": True, "withheld": False}
    assert refused == {}
    job = victim(url=any_fort.url, token=any_fort.token(f"read:{space}"), read_only=True)
    assert job.build(key(1)) == OWN
    assert job.compiles == 0


def test_a_writer_reports_what_is_not_there(any_fort, space, key, publish):
    """Of another digest, another key or another namespace: nothing is withheld."""
    publish(key(1), OWN, server=any_fort)
    any_fort.fill(f"{space}-other")
    writer = any_fort.http(any_fort.token(f"write:{space}"))
    digest, other = any_fort.digest_of(space), f"sha256:{'0' * 64}"
    call = f"/v1/{space}/artifacts:report"

    def report(key, digest):
        return {"key": key.model_dump(mode="json"), "digest": digest, "reason": "wrong_key"}

    with any_fort.withstands() as refused:
        for body in (report(key(1), other), report(key(2), digest)):
            assert writer.post(call, json=body).json() == {"found": False, "withheld": False}
        foreign = report(key(0), any_fort.digest_of(f"{space}-other"))
        assert writer.post(call, json=foreign).json() == {"found": False, "withheld": False}
        elsewhere = writer.post(f"/v1/{space}-other/artifacts:report", json=foreign)
        assert elsewhere.status_code == 404
    assert refused == {"not_found": 1}


def test_a_writer_releases_a_withheld_artifact(any_fort, space, key, publish):
    publish(key(1), OWN, server=any_fort)
    writer = any_fort.http(any_fort.token(f"write:{space}"))
    named = key(1).model_dump(mode="json")
    report = {"key": named, "digest": any_fort.digest_of(space), "reason": "wrong_key"}
    other = any_fort.http(any_fort.token(f"write:{space}"))
    answers = [each.post(f"/v1/{space}/artifacts:report", json=report) for each in (writer, other)]
    assert [answer.json()["withheld"] for answer in answers] == [False, True]

    with any_fort.withstands() as refused:
        assert writer.post(f"/v1/{space}/artifacts:release", json=named).status_code == 403
        assert writer.delete(key(1).artifact_path(space)).status_code == 403
        lease = writer.post(key(1).lease_path(f"{space}x"), json={})
        assert lease.status_code == 404
    assert refused == {"forbidden": 2, "not_found": 1}

"""A sound artifact under another key: it runs, and the numbers are wrong."""

from dataclasses import asdict

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
    fort, space, key, publish, victim, team, is_signed, reason
):
    """The first writer that finds it has it withheld; nobody else gets it, or can put it back."""
    signing_key = team.trust("ci") if is_signed else None
    envelope = publish(key(1), POISON, signing_key=signing_key, server=fort)
    trusted = {"trusted_keys": team.file} if is_signed else {}
    admin, path = fort.http(fort.admin), key(2).artifact_path(space)
    sound = admin.get(key(1).artifact_path(space))
    header = sound.headers["graphstash-metadata"]
    blob = envelope.path.read_bytes()
    assert fort.put(path, blob, metadata=header).status_code == 201
    writer = fort.token(f"write:{space}")

    reader = fort.token(f"read:{space}")
    job = victim(url=fort.url, token=writer, **trusted)
    assert job.build(key(2)) == OWN
    assert job.fallbacks == {reason: 1}
    assert fort.stats()["reported"] >= 1

    with fort.withstands() as refused:
        again = victim(url=fort.url, token=reader, read_only=True, **trusted)
        assert again.build(key(2)) == OWN
        assert (again.stats.misses, again.fallbacks) == (1, {})
        assert admin.get(path).status_code == 404
        assert fort.put(path, blob, metadata=header, token=writer).status_code == 409
        assert fort.put(path, b"other", token=writer).status_code == 409
    assert refused == {"not_found": 2, "withheld": 2}
    (listed,) = admin.get(f"/v1/-/quarantine?namespace={space}").json()["artifacts"]
    assert listed["reason"] == reason
    assert admin.get(key(1).artifact_path(space)).status_code == 200


def test_a_report_names_what_is_not_there_or_comes_from_a_reader(fort, space, key, publish):
    """Of another digest, another key or another namespace: nothing is withheld."""
    publish(key(1), OWN, server=fort)
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

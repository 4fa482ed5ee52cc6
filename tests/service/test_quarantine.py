"""Artifacts reported as wrong: no caller gets them, and only an administrator releases them."""

import asyncio
import json
from datetime import timedelta

import pytest
import sqlalchemy as sa

from graphstash_schema import ArtifactMetadata, Digest, ErrorCode, ReportReason, ReportRequest
from graphstash_server.commands.quarantine import quarantine as quarantine_command
from graphstash_server.db.tables import artifacts
from graphstash_server.errors import ServerError
from support.services import ACTOR, key_of
from support.signing import sealed

pytestmark = pytest.mark.anyio

BLOB = b"wrong " * 1000


def release(api, number=0):
    return api.http.post(f"/v1/{api.namespace}/artifacts:release", json=api.key(number))


def withheld(api):
    answer = api.http.get("/v1/-/quarantine", params={"namespace": api.namespace})
    assert answer.status_code == 200, answer.text
    return answer.json()["artifacts"]


def without_request(answer):
    return {name: value for name, value in answer.json().items() if name != "instance"}


def test_reported_artifact_is_absent_for_all_callers(api, problem):
    absent = without_request(api.get())
    api.put(BLOB)
    assert api.get().status_code == 200

    reported = api.report(BLOB, reason="bad_signature")

    assert (reported.status_code, reported.json()) == (200, {"found": True, "withheld": True})
    assert without_request(api.get()) == absent
    problem(api.get(), 404, "not_found")
    assert api.http.head(api.path()).status_code == 404
    assert api.get(If_None_Match="*").status_code == 404
    looked_up = api.http.post(f"/v1/{api.namespace}/artifacts:lookup", json={"keys": [api.key()]})
    reply = looked_up.json()
    assert (reply["found"], reply["missing"]) == ([], [api.key()])
    assert [each["key"] for each in reply["withdrawn"]] == [api.key()]
    verified = api.http.post(f"/v1/{api.namespace}/artifacts:verify", json=api.key())
    assert verified.json() == {"found": False, "healed": False}
    assert api.acquire().json()["state"] == "granted"


def test_upload_to_the_key_of_a_withheld_artifact_is_refused(api, problem, files):
    api.put(BLOB)
    api.report(BLOB)
    before = files()

    for blob in (b"other", BLOB):
        refused = problem(api.put(blob), 409, "withheld", "graphstash quarantine")
        assert refused["digest"] == str(Digest.of(BLOB))
        assert refused["retryable"] is False
    api.http.put(f"/v1/-/namespaces/{api.namespace}", json={"mode": "overwrite"})
    problem(api.put(b"other"), 409, "withheld")
    assert files() == before
    assert api.stats()["conflicts"] == 0


def test_withheld_artifact_is_listed_counted_released_and_audited(api, problem):
    metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=1, producer="eve@host")
    api.put(BLOB, 1, Graphstash_Metadata=metadata.to_header())
    api.put(b"right", 2)
    before = api.http.get("/v1/stats").json()["reported"]
    for reason in ("unsigned", "unknown_key"):  # depends on the reporter's keys
        assert api.report(BLOB, 1, reason=reason).json() == {"found": True, "withheld": False}
    assert withheld(api) == []

    api.report(BLOB, 1, reason="revoked_key", X_Request_Id="the-report")
    assert api.report(BLOB, 1, reason="corrupt").json() == {"found": True, "withheld": True}

    (listed,) = withheld(api)
    assert listed | {"reported_at": None} == {
        "namespace": api.namespace,
        "key": api.key(1),
        "digest": str(Digest.of(BLOB)),
        "size_bytes": len(BLOB),
        "producer": "eve@host",
        "reason": "revoked_key",
        "reported_by": "everybody",
        "reported_at": None,
    }
    assert listed in api.http.get("/v1/-/quarantine").json()["artifacts"]
    stats = api.stats()
    assert (stats["artifacts"], stats["size_bytes"], stats["withheld"]) == (2, len(BLOB) + 5, 1)
    assert api.http.get("/v1/stats").json()["reported"] == before + 4
    assert api.get(2).content == b"right"

    assert release(api, 1).status_code == 204
    assert api.get(1).content == BLOB
    assert api.put(BLOB, 1).status_code == 200
    assert (withheld(api), api.stats()["withheld"]) == ([], 0)
    problem(release(api, 1), 404, "not_found")
    audit = api.http.get("/v1/-/audit", params={"namespace": api.namespace}).json()["entries"]
    assert [(each["action"], each["subject"], each["detail"]) for each in audit[:2]] == [
        ("release", "/".join(api.key(1).values()), str(Digest.of(BLOB))),
        ("withhold", "/".join(api.key(1).values()), f"revoked_key {Digest.of(BLOB)}"),
    ]
    assert audit[1]["request_id"] == "the-report"
    assert [each["action"] for each in audit[2:]] == ["put", "put"]


async def withhold(server, number=0, blob=BLOB):
    wanted = ReportRequest(
        key=key_of(number).key, digest=str(Digest.of(blob)), reason=ReportReason.CORRUPT
    )
    return await server.context.quarantine.report(
        key_of(number), wanted, actor=ACTOR, party=ACTOR.name, may_withhold=True
    )


@pytest.mark.sql
async def test_withheld_artifact_is_neither_evicted_nor_retired_until_released(opened):
    async with opened() as server:
        await server.put(BLOB, 1, seconds=0)
        await server.put(BLOB[:-1], 2, seconds=100)
        await withhold(server, 1)
        opened.clock.turn(10**7)

        assert await server.evict_one() is True
        unused = [
            candidate.key
            async for page in server.context.retention.unused(timedelta(0))
            for candidate in page
        ]
        assert unused == []
        assert (await server.used()).artifacts == 1
        with server.context.wait_queue.joined(key_of(1)) as ticket:
            assert await server.context.quarantine.release(key_of(1), actor=ACTOR)
            assert ticket.digest == Digest.of(BLOB)
        assert await server.get(1) == BLOB
        assert await server.evict_one() is True


@pytest.mark.sql
async def test_report_is_removed_with_the_row_or_blob_of_its_artifact(opened):
    async with opened() as server:
        await server.put(BLOB)
        await withhold(server)
        opened.blobs.blobs.clear()
        for blob in (BLOB, b"right"):  # the blob may be absent for a while
            with pytest.raises(ServerError, match="is withheld"):
                await server.put(blob)
        row = await server.context.artifacts.find_row(key_of())
        assert await server.context.artifacts.heal_all([row]) == [row]
        assert await server.put(b"right") is True
        assert (await server.context.quarantine.list_withheld()).artifacts == ()
        assert await server.get() == b"right"

        await withhold(server, blob=b"right")
        assert (await server.used()).withheld == 1
        async with server.context.database.writing() as connection:
            await connection.execute(sa.delete(artifacts))  # like a release without reports
        assert (await server.used()).withheld == 0
        await server.put(BLOB)
        assert (await server.used()).withheld == 0


async def test_another_server_withholds_artifact_within_two_seconds(opened):
    async with opened() as one, opened() as two:
        await one.put(BLOB)
        assert await two.get() == BLOB

        await withhold(one)

        assert await one.get() is None
        opened.clock.turn(2.1)
        assert await two.get() is None


@pytest.mark.sql
async def test_concurrent_report_and_overwrite_end_in_one_of_two_states(opened):
    async with opened() as one, opened() as two:
        for number in range(12):
            await one.put(BLOB, number)

            reported, stored = await asyncio.gather(
                withhold(one, number), two.put(b"new", number), return_exceptions=True
            )

            opened.clock.turn(3)
            if reported.withheld:
                assert isinstance(stored, ServerError)
                assert stored.code is ErrorCode.WITHHELD
                assert await one.get(number) is None
            else:
                assert stored is True
                assert await one.get(number) == b"new"


@pytest.mark.parametrize(("flips", "is_withheld"), [(1, False), (2, True)])
async def test_bit_flipped_on_the_way_confirms_no_report(opened, tmp_path, flips, is_withheld):
    """A second wrong read stands for an envelope that is wrong in the store."""
    blob = sealed(tmp_path, key_of(1).key, b"payload").path.read_bytes()
    request = ReportRequest(
        key=key_of(1).key, digest=str(Digest.of(blob)), reason=ReportReason.BAD_SIGNATURE
    )
    async with opened() as server:
        await server.put(blob, 1)
        artifacts, looks = server.context.artifacts, []
        read_start = artifacts.read_start

        async def flipped_start(row, *, most_bytes):
            start = await read_start(row, most_bytes=most_bytes)
            looks.append(row)
            return bytes([start[0] ^ 1]) + start[1:] if len(looks) <= flips else start

        artifacts.read_start = flipped_start
        reply = await server.context.quarantine.report(
            key_of(1), request, actor=ACTOR, party=ACTOR.name, may_withhold=True
        )
        assert (reply.found, reply.withheld, len(looks)) == (True, is_withheld, 2)
        assert await server.get(1) == (None if is_withheld else blob)


def test_withholding_in_a_trusted_namespace_needs_an_exact_grant(guarded, connect, namespace):
    def caller(*grants):
        api = connect(guarded.url, namespace)
        api.http.headers["Authorization"] = f"Bearer {guarded.token(*grants)}"
        return api

    named, wide = caller(f"write:{namespace}"), caller("write:*")
    guarded.set_policy(namespace, trusted=True)
    named.put(BLOB)

    assert wide.report(BLOB).json() == {"found": True, "withheld": False}
    assert named.report(BLOB).json() == {"found": True, "withheld": True}
    refused = caller("admin:elsewhere")
    assert release(refused).status_code == 404
    where, policy = f"/v1/-/quarantine?namespace={namespace}", f"/v1/-/namespaces/{namespace}"
    assert [refused.http.get(path).status_code for path in (where, policy)] == [404, 404]
    own = caller(f"admin:{namespace}")
    assert own.http.get("/v1/-/quarantine").status_code == 403
    assert own.http.get(where).json()["artifacts"]
    assert own.http.get(policy).json()["policy"]["trusted"] is True
    assert named.http.get(policy).status_code == 403
    assert release(own).status_code == 204


@pytest.fixture
def command(command_on):
    return command_on(quarantine_command)


def test_command_lists_releases_and_deletes(command, connect):
    api = connect(command.url)
    assert command("list") == "nothing is withheld\n"
    for number in (1, 2):
        api.put(BLOB, number)
        api.report(BLOB, number, reason="bad_signature")
    names = [f"team/{'/'.join(api.key(number).values())}" for number in (1, 2)]

    shown = command("list")
    assert all(name in shown for name in names)
    assert "bad_signature" in shown
    assert command("list", "--namespace", "other") == "nothing is withheld\n"
    assert len(json.loads(command("list", "--json"))["artifacts"]) == 2

    command("release", names[0])
    decided = json.loads(command("delete", names[1], "--json"))
    assert decided == {"artifact": names[1], "decision": "delete"}

    assert api.get(1).content == BLOB
    assert api.put(b"right", 2).status_code == 201
    assert "is not withheld" in command("delete", names[0], status=1)
    assert "is not withheld" in command("release", names[0], status=1)
    assert api.get(1).content == BLOB
    log = api.http.get("/v1/-/audit").json()["entries"]
    assert {each["actor"].partition(":")[0] for each in log[1:3]} == {"local"}

    assert "expected <namespace>/<kind>" in command("release", "team/jax", status=2)
    assert "fingerprint" in command("delete", "team/jax/cpu/short", status=2)
    assert "namespace" in command("list", "--namespace", "No", status=2)

"""If the cache or its server causes a miss, `graphstash explain` names this cause."""

import json
import re
from types import SimpleNamespace

import httpx
import pytest

from graphstash.testing import FakeServer
from support.build_job import BUILD_PROGRAM
from support.hostile import Middlebox
from support.http_server import Answer
from support.processes import graphstash_here
from support.server import Server
from support.signing import Team
from support.tokens import Guarded
from support.waiting import PATIENT, PATIENT_VARIABLES

JOB = (
    BUILD_PROGRAM
    + """
import json, sys
from pathlib import Path

for label, parts in json.loads(sys.argv[2]).items():
    build(label, **parts)
Path(sys.argv[1]).write_text("{}")
"""
)


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """A server without artifacts of other tests, and its directory."""
    directory = tmp_path_factory.mktemp("team")
    with Server(directory) as server:
        yield SimpleNamespace(url=server.url, data=directory / "data")


@pytest.fixture
def run(jobs, team, namespace, tmp_path):
    """Return a function that runs a job on a host. Parts of its programs are unique to the test."""
    script = tmp_path / "train.py"
    script.write_text(JOB)

    def run(host, *labels, **settings):
        programs = {f"{label}_{namespace}": {"program": namespace + label} for label in labels}
        settings = {"url": team.url, "namespace": namespace} | PATIENT | settings
        parts = settings.pop("parts", {})
        named = {label: program | parts for label, program in programs.items()}
        return jobs.start(
            tmp_path / host, json.dumps(named), script=script, under="tuning", **settings
        ).finish()

    return run


@pytest.fixture
def explain(team, namespace, tmp_path):
    def explain(host, **settings):
        variables = {"GRAPHSTASH_URL": team.url, "GRAPHSTASH_NAMESPACE": namespace}
        variables |= PATIENT_VARIABLES | {"GRAPHSTASH_CACHE_DIR": tmp_path / host / "tier"}
        variables |= {f"GRAPHSTASH_{name.upper()}": value for name, value in settings.items()}
        return graphstash_here("explain", check=True, **variables).stdout

    return explain


def test_evicted_artifact_is_named_with_time_and_actor(run, explain, team, namespace):
    run("a", "step")
    variables = {"GRAPHSTASH_DATA_DIR": team.data, "GRAPHSTASH_NAMESPACE": namespace}
    graphstash_here("gc", "--unused-for=0s", f"--namespace={namespace}", check=True, **variables)
    run("b", "step")
    explanation = explain("b")
    assert re.search(
        r"1 miss: it was evicted on \d{4}-\d\d-\d\d \d\d:\d\d UTC by local:\S+: ", explanation
    ), explanation


def test_deleted_and_withheld_artifacts_are_named(run, explain, team, namespace):
    run("a", "step", "loss")
    with httpx.Client(base_url=f"{team.url}/v1/{namespace}") as http:
        for each in http.get("/artifacts").json()["artifacts"]:
            key = each["key"]
            if each["label"].startswith("step"):
                path = f"/artifacts/{key['kind']}/{key['device_type']}/{key['fingerprint']}"
                assert http.delete(path).status_code == 204
            else:
                wrong = {"key": key, "digest": each["digest"], "reason": "wrong_key"}
                assert http.post("/artifacts:report", json=wrong).json()["withheld"]
    run("b", "step", "loss")
    explanation = explain("b")
    assert re.search(r"it was deleted on .* UTC by \S+\n    step_", explanation), explanation
    assert re.search(
        r"it is withheld since it was reported on .* UTC by \S+: .*\n    loss", explanation
    )


def test_failed_upload_is_named_by_this_run_and_by_the_next(run, explain, tmp_path):
    with FakeServer() as server:
        server.fail_on("put", status=403, times=1)
        run("a", "step", url=server.url)
        explanation = explain("a", url=server.url)
        assert "1 upload failed (forbidden: " in explanation
        assert "so other hosts compile again" in explanation
        (artifact,) = (tmp_path / "a/tier/v2").glob("*/*/schedule/cpu/??/*")
        artifact.unlink()
        run("a", "step", url=server.url)
        explanation = explain("a", url=server.url)
    assert (
        "an earlier run on this host compiled it, but its upload failed (forbidden" in explanation
    )


def test_failed_upload_is_not_named_of_another_namespace_or_after_a_later_cause(
    run, explain, team, namespace, tmp_path
):
    class ReadOnly(Middlebox):
        def ask(self, request):
            if request.method != "PUT":
                return super().ask(request)
            return Answer(403, {"graphstash-protocol": "1"}, b"")

    def again(**settings):
        for artifact in (tmp_path / "a/tier/v2").glob("*/*/schedule/cpu/??/*"):
            artifact.unlink()
        run("a", "step", url=box.url, **settings)
        return explain("a", url=box.url, **settings)

    failed = "an earlier run on this host compiled it, but its upload failed (forbidden"
    with ReadOnly(team.url) as box, httpx.Client(base_url=team.url) as http:
        run("a", "step", url=box.url)
        assert failed in again()
        assert failed not in again(namespace=f"{namespace}-other")
        run("b", "step", url=team.url)
        (each,) = http.get(f"/v1/{namespace}/artifacts").json()["artifacts"]
        key = "/".join(each["key"][part] for part in ("kind", "device_type", "fingerprint"))
        assert http.delete(f"/v1/{namespace}/artifacts/{key}").status_code == 204
        explanation = again()
        assert "it was deleted on " in explanation, explanation
        assert failed in again()  # of the run after the removal


def test_namespace_that_is_not_read_is_named(run, explain, namespace):
    run("a", "step", namespace=f"{namespace}-theirs")
    run("b", "step")
    assert f"it is stored in the namespace {namespace}-theirs, which was not read" in explain("b")


def test_unsigned_artifact_of_a_trusted_namespace_is_named(run, explain, namespace, tmp_path):
    run("a", "step", namespace=f"{namespace}-theirs")
    team = Team(tmp_path)
    team.trust("ci")
    signed = {"signatures": "require", "trusted_keys": team.file}
    run("b", "step", read_namespaces=f"{namespace}-theirs", **signed)
    explanation = explain("b", read_namespaces=f"{namespace}-theirs")
    assert ": 0 hits, 0 misses, 1 compiled without the cache\n" in explanation, explanation
    assert "it is stored, but a signature is required and it has none" in explanation


def test_disk_explains_misses_if_the_server_is_down(run, explain):
    with FakeServer() as server:
        run("b", "step", url=server.url)
        run("b", "step", url=server.url, parts={"flags": "--fast"})
        url = server.url
    explanation = explain("b", url=url)
    assert (
        "flags: --fast here, not set there (compared with earlier runs on this host" in explanation
    )


def test_namespace_that_the_token_does_not_cover_is_named(run, explain, tmp_path):
    with Guarded(tmp_path / "server") as server:
        token = server.token("write:other")
        settings = {"url": server.url, "token": token}
        run("a", "step", **settings)
        explanation = explain("a", **settings)
    assert "the token does not grant this access to the namespace" in explanation, explanation
    assert "refused" not in explanation


def test_programs_compiled_without_the_server_are_not_listed_as_misses(run, explain):
    with FakeServer() as server:
        url = server.url
    run("a", "step", url=url)
    explanation = explain("a", url=url)
    assert ": 0 hits, 0 misses, 1 compiled without the cache\n" in explanation
    assert "1 compiled: the cache could not help (connect)" in explanation
    assert "1 miss" not in explanation


@pytest.mark.parametrize(
    ("call", "failure", "named"),
    [
        ("put", {"status": 507}, "1 upload failed (store_full: "),
        ("get", {"fault": "hang"}, "(timeout): the server did not answer in time"),
    ],
    ids=["full store", "frozen server"],
)
def test_failing_server_is_named(run, explain, call, failure, named):
    with FakeServer() as server:
        server.fail_on(call, **failure)
        run("a", "step", url=server.url, first_byte_seconds=0.2)
        assert named in explain("a", url=server.url)


def test_read_only_job_is_named_as_the_cause(run, explain):
    run("a", "step", read_only=True)
    explanation = explain("a")
    assert "the job only reads (GRAPHSTASH_READ_ONLY)" in explanation
    assert "1 miss: new program" in explanation


def test_cause_is_named_though_the_token_only_reads(run, explain):
    with FakeServer() as server:
        run("a", "step", url=server.url, parts={"flag": "on"})
        server.fail_on("acquire", status=403)
        run("b", "step", url=server.url, parts={"flag": "off"})
        explanation = explain("b", url=server.url)
    assert ": 0 hits, 1 miss\n" in explanation
    assert "the token may not write to the namespace: the results stay on this host" in explanation
    assert "1 miss: flag: off here, on there" in explanation

"""`graphstash explain` after real runs with misses."""

import json
import re
import shutil
import sys

import pytest

from graphstash import ClientConfig
from graphstash._compile.compile_limit import STATUS_NO_CACHE
from graphstash._compile.misses import MissLog
from graphstash.errors import Reason, RefusedError, TransportError
from support.build_job import BUILD_PROGRAM
from support.host import key, request
from support.processes import graphstash, graphstash_here
from support.waiting import PATIENT, PATIENT_VARIABLES, variables_of


def job(programs):
    """Return the script of a job that compiles programs with these parts."""
    lines = (f"build('jit({name})', **{parts!r})" for name, parts in programs.items())
    return "\n".join([BUILD_PROGRAM, *lines])


@pytest.fixture
def run(config, namespace, tmp_path):
    """Return a function that runs a job on a host of its own.

    Program names are unique to the test, because jobs may read all namespaces of the server.
    """

    def run(host, programs, **settings):
        script = tmp_path / f"{host}.py"
        named = {f"{name}_{namespace}": parts for name, parts in programs.items()}
        script.write_text(job(named))
        variables = variables_of(config(host, **settings))
        return graphstash("run", "--explain", "--", sys.executable, script, check=True, **variables)

    return run


@pytest.fixture(scope="module")
def recorded(server, tmp_path_factory):
    """The local tier of a host on which a job missed one program."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "train.py").write_text(job({"step_recorded": {}}))
    config = ClientConfig.load(
        {}, url=server.url, namespace="recorded", cache_dir=folder / "tier", **PATIENT
    )
    command = ("run", "--", sys.executable, folder / "train.py")
    assert lines_of(graphstash(*command, check=True, **variables_of(config))) == []
    return folder / "tier"


@pytest.fixture
def host(recorded, tmp_path):
    """A copy of the recorded tier, which a test may damage."""
    return shutil.copytree(recorded, tmp_path / "host")


@pytest.fixture
def explain(server, namespace, tmp_path):
    def explain(host, *arguments, **variables):
        settings = {"GRAPHSTASH_URL": server.url} | PATIENT_VARIABLES | variables
        settings |= {"GRAPHSTASH_CACHE_DIR": tmp_path / host}
        return graphstash_here("explain", *arguments, **settings)

    return explain


def lines_of(outcome):
    """Return the output of a run without the parts that depend on other tests."""
    prefix = "graphstash: "
    varying = r"(_test-\d+(?=\))| in the namespaces that were looked through, which are not all)"
    return [
        re.sub(varying, "", line.removeprefix(prefix))
        for line in outcome.stderr.splitlines()
        if line.startswith(prefix)
        and not re.match(r"\d+ hits?, |missed \d+", line.removeprefix(prefix))
    ]


def test_misses_are_grouped_by_their_difference_from_the_teams_artifacts(run, explain, namespace):
    programs = {"step": {"jax": "0.10.2"}, "init": {"jax": "0.10.2"}}
    assert lines_of(run("cold", programs)) == [
        "2 misses: new program: nothing like it is stored",
        "    jit(step), jit(init)",
    ]
    assert lines_of(run("warm", programs)) == []
    assert "2 hits, 0 misses" in explain("warm").stdout
    upgraded = run("new", {name: {"jax": "0.11.0"} for name in ("step", "init", "other")})
    lines = lines_of(upgraded)
    assert lines[:2] == ["2 misses: jax: 0.11.0 here, 0.10.2 there", "    jit(step), jit(init)"]
    assert lines[2].startswith(f"    nearest: jit(step) in {namespace}, made by ")
    assert lines[3:] == ["1 miss: new program: nothing like it is stored", "    jit(other)"]

    last = explain("new", "last")
    assert last.returncode == 0, last.stderr
    assert "0 hits, 3 misses" in last.stdout
    assert "2 misses: jax: 0.11.0 here, 0.10.2 there" in last.stdout

    chosen = json.loads(explain("new", "jit(other", "--json").stdout)
    assert [each["labels"] for each in chosen] == [[f"jit(other_{namespace})"]]
    assert chosen[0]["nearest"] is None


REFUSING_JOB = """
import graphstash
from graphstash._compile.request import CompileRequest
from graphstash_schema import ArtifactKind, DeviceType

request = CompileRequest.of(
    ArtifactKind.TRITON, DeviceType("gpu"), {"group": "scale.json"}, toolchain="", label="scale"
)
graphstash.install(hooks=()).cache.refuse(request, "SIZES of scale: a set of other values")
"""


def test_unshareable_program_is_named_with_its_cause_by_run_explain_and_doctor(
    config, explain, tmp_path
):
    (tmp_path / "train.py").write_text(REFUSING_JOB)
    variables = variables_of(config("host")) | {"GRAPHSTASH_FAIL_ON_MISS": "1"}
    command = ("run", "--explain", "--", sys.executable, tmp_path / "train.py")
    ended = graphstash(*command, **variables)
    assert ended.returncode == STATUS_NO_CACHE
    cause = "unshareable: SIZES of scale: a set of other values"
    line = f"1 compiled: the cache could not help ({cause})"
    assert f"graphstash: {line}" in ended.stderr
    assert f"{line}\n    scale\n" in explain("host").stdout
    assert f"1 program {cause}" in graphstash_here("doctor", **variables).stdout


def test_explanation_without_server_names_the_reason_and_a_hostile_label_in_one_line(run, explain):
    alone = run("alone", {"step\x1b]0;owned\x07": {}}, url="http://127.0.0.1:9")
    cause = "the cache could not help (connect): the server was down or unreachable"
    assert lines_of(alone)[-2:] == [f"1 compiled: {cause}", "    jit(step ]0;owned )"]
    asked = explain("alone", GRAPHSTASH_URL="http://127.0.0.1:9")
    assert "the cache could not help (connect)" in asked.stdout
    assert "\x1b" not in alone.stderr + asked.stdout


def test_another_servers_record_and_records_open_to_others_are_not_used(host, explain):
    """Only the server that this user has set gets the request, because it contains the token."""
    other = explain("host", GRAPHSTASH_URL="http://127.0.0.1:9", GRAPHSTASH_TOKEN="secret")
    assert other.returncode == 1
    assert "the last run used http://" in other.stderr
    assert "GRAPHSTASH_URL" in other.stderr
    (host / "records").chmod(0o777)
    outcome = explain("host")
    assert outcome.returncode == 1
    assert "open to other users" in outcome.stderr


def test_each_process_of_a_run_leaves_a_record_if_it_can_be_written(host, tmp_path):
    (first,) = (host / "records").iterdir()
    script = tmp_path / "job.py"
    script.write_text(job({"step": {}}))
    again = f"subprocess.run([sys.executable, {str(script)!r}])"
    both = f"import subprocess, sys; [{again} for _ in 'ab']"
    settings = {"GRAPHSTASH_CACHE_DIR": host, "GRAPHSTASH_URL": "none"}
    graphstash("run", "--", sys.executable, "-c", both, check=True, **settings)
    runs = sorted((host / "records").iterdir())
    assert runs[0] == first
    assert [len(list(each.glob("*.json"))) for each in runs] == [1, 2]
    shutil.rmtree(host / "records")
    (host / "records").write_text("a file")
    outcome = graphstash("run", "--", sys.executable, script, check=True, **settings)
    assert "Traceback" not in outcome.stderr


def test_damaged_record_is_left_out_and_unknown_miss_or_run_is_named(host, explain):
    (run_directory,) = (host / "records").iterdir()
    for content in ("", "{", "[]", '{"misses": 1}', '{"misses": [[{}, null, 0]]}'):
        (run_directory / "1.json").write_text(content)
        assert "1 miss" in explain("host").stdout, content
    for arguments, text in (
        (("host", "jit(nothing"), "'jit(nothing'"),
        (("nowhere",), "no run is recorded"),
    ):
        outcome = explain(*arguments)
        assert outcome.returncode == 1
        assert text in outcome.stderr


@pytest.mark.parametrize(
    ("error", "sent"),
    [
        (RefusedError("unknown path", code=None, status=404), [1]),  # of an earlier release
        (RefusedError("the disk fails", code=None, status=500), [1, 2, 3]),
        (TransportError(Reason.CONNECT, "down"), [1, 2, 3]),
    ],
)
def test_descriptions_are_sent_again_unless_the_server_refuses_them(error, sent):
    """An earlier release answers 404 to an unknown path. This is not a fallback of the job."""
    asked = []

    class Failing:
        def describe(self, descriptions):
            asked.append(len(descriptions))
            raise error

    log = MissLog()
    for number in range(3):
        log.add(request(number), reason=None)
        log.record_compilation(key(number), seconds=1, is_published=True)
        log.send(Failing())
    assert asked == sent

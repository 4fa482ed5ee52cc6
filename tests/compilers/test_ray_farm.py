"""`graphstash farm` compiles with the real libtpu on the hosts of a real Ray cluster."""

import re
from types import SimpleNamespace

import pytest

from support.compiler_jobs import CompilerJobs
from support.processes import python
from support.server import Server

KEY = re.compile(r"jax/tpu-v5_lite-2x2x1/[0-9a-f]{64}")


@pytest.fixture(scope="module")
def farmed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("farm")
    with (
        Server(folder / "server") as server,
        CompilerJobs(folder, cases="ray_farm", environment="ray", under="python") as jobs,
    ):
        options = {"folder": folder, "url": server.url}
        report = jobs.run("host", "farmed", options, timeout_seconds=600).report
        names = ("unproved", "other", "farm", "two", "death")
        yield SimpleNamespace(report=report, stats={each: server.stats(each) for each in names})


def states(outcomes):
    return [each["state"] for each in outcomes]


@pytest.mark.extended
def test_program_without_a_proof_is_not_compiled(farmed):
    status, (outcome,) = farmed.report["without a job"]
    assert (status, outcome["state"], outcome["key"]) == (1, "unproved", "")
    assert "no job with a tpu-v5_lite-2x2x1 has published jit(step)" in outcome["reason"]
    assert farmed.stats["unproved"]["puts"] == 0


@pytest.mark.extended
def test_job_with_another_libtpu_proves_nothing(farmed):
    status, (outcome,) = farmed.report["other libtpu"]
    assert (status, outcome["state"]) == (1, "unproved")
    assert "differs in libtpu (0.0.42.1 here, 0.0.1 there)" in outcome["reason"]
    assert farmed.stats["other"]["puts"] == 1  # the job's own


@pytest.mark.extended
def test_proved_program_is_compiled_although_other_requests_fail(farmed):
    status, outcomes = farmed.report["several"]
    assert status == 1
    assert states(outcomes) == ["compiled", "failed", "failed", "failed"]
    assert KEY.fullmatch(outcomes[0]["key"])
    assert outcomes[0]["compile_seconds"] > 0
    assert outcomes[0]["host"]
    assert "not divisible" in outcomes[1]["reason"]
    assert "gave str; expected (jitted function" in outcomes[2]["reason"]


@pytest.mark.extended
def test_second_farm_compiles_nothing(farmed):
    status, (outcome,) = farmed.report["again"]
    assert (status, outcome["state"]) == (0, "present")
    assert outcome["key"] == farmed.report["several"][1][0]["key"]


@pytest.mark.extended
def test_two_farms_at_once_compile_a_program_once(farmed):
    results = farmed.report["two"]
    assert [status for status, _ in results] == [0, 0]
    assert sorted(states(outcomes[0] for _, outcomes in results)) == ["compiled", "present"]
    assert farmed.stats["two"]["puts"] == 2  # with the job's own


@pytest.mark.extended
def test_compilation_of_a_killed_host_is_repeated_on_another(farmed):
    status, (outcome,) = farmed.report["after a death"]["result"]
    assert (status, outcome["state"]) == (0, "compiled")
    assert farmed.report["after a death"]["tries"] == 2


def test_without_ray_the_error_names_the_extra():
    ended = python(
        """
        import sys
        sys.modules["ray"] = None
        sys.argv = ["graphstash", "farm", "--topology", "v5e:2x2", "train.py:step"]
        from graphstash.__main__ import main
        main()
        """
    )
    assert re.search(r"farm needs Ray: .*graphstash\[ray\]", ended.stderr)
    assert ended.returncode == 2

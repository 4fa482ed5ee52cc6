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
    """The reports of all farms, and the server."""
    folder = tmp_path_factory.mktemp("farms")
    with (
        Server(folder / "server") as server,
        CompilerJobs(folder, cases="ray_farm", environment="ray", under="python") as jobs,
    ):
        report = jobs.run("host", "farmed", {"folder": folder, "url": server.url}).report
        yield SimpleNamespace(report=report, server=server)


@pytest.mark.extended
def test_job_with_another_libtpu_proves_nothing(farmed):
    status, (outcome,) = farmed.report["other libtpu"]
    assert (status, outcome["state"], outcome["key"]) == (1, "unproved", "")
    assert "differs in libtpu (0.0.42.1 here, 0.0.1 there)" in outcome["reason"]
    assert farmed.server.stats("other")["puts"] == 1  # the job's own


@pytest.mark.extended
def test_only_proved_program_is_compiled_and_other_requests_say_why_not(farmed):
    status, outcomes = farmed.report["several"]
    assert status == 1
    assert [each["state"] for each in outcomes] == ["compiled", "unproved", "failed", "failed"]
    assert KEY.fullmatch(outcomes[0]["key"])
    assert outcomes[0]["compile_seconds"] > 0
    assert outcomes[0]["host"]
    assert "no job with a tpu-v5_lite-2x4x1 has published jit(step)" in outcomes[1]["reason"]
    assert "gave str; expected (jitted function" in outcomes[2]["reason"]


@pytest.mark.extended
def test_two_farms_at_once_compile_a_program_once(farmed):
    *results, key = farmed.report["two"]
    outcomes = [outcome for _, (outcome,) in results]
    assert [status for status, _ in results] == [0, 0]
    assert sorted(each["state"] for each in outcomes) == ["compiled", "present"]
    assert {each["key"] for each in outcomes} == {key}  # as `prewarm` computes it
    assert farmed.server.stats("two")["puts"] == 2  # with the job's own


@pytest.mark.extended
def test_compilation_of_a_killed_worker_is_repeated(farmed):
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


def test_farm_publishes_nothing_if_the_settings_are_read_only():
    ended = python(
        """
        import os, sys, types
        os.environ["GRAPHSTASH_READ_ONLY"] = "true"
        sys.modules["ray"] = types.ModuleType("ray")  # never used
        sys.argv = ["graphstash", "farm", "--topology", "v5e:2x2", "train.py:step"]
        from graphstash.__main__ import main
        main()
        """
    )
    assert "GRAPHSTASH_READ_ONLY is set: nothing could be published" in ended.stderr
    assert ended.returncode == 2

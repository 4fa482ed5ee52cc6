"""Real torch.compile jobs on fresh hosts, in both ends of the versions that are tried."""

import re
import subprocess
from typing import ClassVar

import pytest

from support.compiler_jobs import INDUCTOR_VERSIONS, InductorJobs
from support.hook_contract import HookContract
from support.tiers import each_of

GRAPHS = 2  # forward and backward


@pytest.fixture(scope="module", params=each_of(INDUCTOR_VERSIONS))
def torch(request, jobs, server, tmp_path_factory):
    """Starts jobs of one version; all of them share."""
    directory = tmp_path_factory.mktemp("inductor")
    namespace = f"inductor-{request.param}"
    settings = {"url": server.url, "namespace": namespace, "jobs": jobs}
    with InductorJobs(directory, request.param, **settings) as made:
        yield made


@pytest.fixture(scope="module")
def cold(torch):
    """The first job of all: it has compiled everything."""
    return torch.run("cold", "training", under="graphstash run")


@pytest.mark.extended
def test_a_script_that_installs_the_cache_itself_finds_the_same_beside_compile_workers(torch, cold):
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    options = {"under": "python", "variables": variables}
    outcome = torch.run("installing", "training", {"install": True}, **options)
    assert outcome.report["losses"] == cold.report["losses"]
    assert outcome.report["fx"] == {"fxgraph_cache_hit": GRAPHS}
    assert torch.compiled("installing") == []
    assert "Unable to create" not in outcome.errors


@pytest.mark.extended
def test_another_graph_is_built_by_two_threads_with_a_fetched_header(torch, cold):
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    options = {"under": "graphstash run", "variables": variables}
    outcome = torch.run("wide", "training", {"width": 48}, **options)
    assert outcome.report["fx"]["fxgraph_cache_miss"] == GRAPHS
    assert outcome.stats["fallbacks"] == {}
    built = torch.compiled("wide")
    assert built
    assert not any(re.search(r"\.gch$", line) for line in built)
    # Since 2.8 there is a precompiled header. g++ marks one that it can use by "!".
    with_header = [line for line in built if "-include" in line]
    assert bool(with_header) == (torch.version != "2.7.0")
    for line in with_header[:1]:
        command = ["g++", "-H", *line.split()]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert re.search(r"^! .*\.h\.gch$", told, re.MULTILINE)


@pytest.mark.extended
def test_another_number_of_threads_is_another_artifact(torch, cold):
    outcome = torch.run("threads", "training", {"threads": 1})
    assert outcome.report["fx"] == {"fxgraph_cache_miss": GRAPHS}
    assert outcome.report["losses"] == pytest.approx(cold.report["losses"])


@pytest.mark.extended
def test_a_user_who_switched_the_remote_caches_off_is_not_overruled(torch):
    names = ("TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE", "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE")
    off = dict.fromkeys(names, "0")
    outcome = torch.run("off", "training", {"matmul": True}, under="graphstash run", variables=off)
    assert outcome.report["fx"]["fxgraph_cache_miss"] > 0
    assert outcome.report["has_hook"]
    assert outcome.stats == {}  # nothing was asked for


@pytest.mark.extended
def test_graphs_that_differ_in_their_guards_are_all_found(torch):
    first = torch.run("shapes", "products", {"sizes": [8, 32]})
    assert first.stats["misses"] > 0
    again = torch.run("shapes-again", "products", {"sizes": [32, 8]})
    assert sorted(again.report["losses"]) == sorted(first.report["losses"])
    assert again.report["fx"] == {"fxgraph_cache_hit": 2}
    assert again.stats["misses"] == again.stats["conflicts"] == 0


@pytest.mark.extended
def test_hook_with_missing_name_logs_once_and_torch_compiles(torch):
    lacking = {"matmul": True, "without": "RemoteBundledAutotuneCache"}
    outcome = torch.run("lacking", "training", lacking, under="graphstash run")
    assert outcome.report["fx"]["fxgraph_cache_miss"] > 0
    assert outcome.errors.count("RemoteBundledAutotuneCache.backend_override_cls") == 1


class TestInductor(HookContract):
    case = "inductor:training"
    programs = GRAPHS
    cannot: ClassVar = dict.fromkeys(
        (
            "test_hook_steps_aside_with_one_warning_on_an_unsupported_version",
            "test_forked_child_shares_as_its_parent_does",
            "test_another_host_compiles_for_a_lease_holder_that_was_ended",
        ),
        "has not been tried with jobs of torch.compile",
    )
    version = "2.7.0"

    @classmethod
    def open(cls, directory, **settings):
        return InductorJobs(directory, cls.version, **settings)

    @pytest.mark.extended
    def test_hosts_that_start_at_once_compile_each_program_once(self, hosts, empty):
        super().test_hosts_that_start_at_once_compile_each_program_once(hosts, empty)

    def compiled(self, outcome):
        return outcome.report["fx"].get("fxgraph_cache_miss", 0)

    def result(self, outcome):
        return outcome.report["losses"]

    def test_another_host_runs_no_compiler(self, hosts, cold, warm):
        assert cold.report["torch"].startswith(self.version)
        assert cold.stats["published"] > 2 * GRAPHS
        assert len(hosts.compiled("cold")) > GRAPHS
        assert hosts.compiled("warm") == []
        assert warm.report["fx"] == {"fxgraph_cache_hit": GRAPHS}
        assert warm.report["aot"]["autograd_cache_hit"] == 1
        assert warm.hits >= GRAPHS + 1

    def test_saved_time_does_not_exceed_time_of_the_first_job(self, cold, warm):
        assert 0 < warm.stats["saved_compile_seconds"] < 1.5 * cold.report["seconds"]


@pytest.mark.extended
class TestNewestInductor(TestInductor):
    version = "2.15.0"

"""Real torch.compile jobs on fresh hosts, in both ends of the versions that are tried."""

import re
import subprocess
from pathlib import Path

import pytest

from support.compiler_jobs import INDUCTOR_VERSIONS, InductorJobs
from support.tiers import each_of

ISA_JOB = Path(__file__).parents[1] / "support" / "inductor_isa_job.py"
QUICK = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}  # for two objects it does not pay

GRAPHS = 2  # forward and backward


@pytest.fixture(scope="module", params=each_of(INDUCTOR_VERSIONS))
def torch(request, server, tmp_path_factory):
    """Starts jobs of one version; all of them share."""
    directory = tmp_path_factory.mktemp("inductor")
    namespace = f"inductor-{request.param}"
    with InductorJobs(directory, request.param, url=server.url, namespace=namespace) as jobs:
        yield jobs


@pytest.fixture(scope="module")
def cold(torch):
    """The first job of all: it has compiled everything."""
    return torch.run("cold")


@pytest.fixture(scope="module")
def warm(torch, cold):
    """The same job on another host."""
    return torch.run("warm")


@pytest.fixture(scope="module")
def lengths(torch, tmp_path_factory):
    """A job that meets code for another vector length, with the hook and without."""
    namespace = f"isa-{torch.version}"
    options = {"script": ISA_JOB, "variables": QUICK}
    hooked = torch.start("isa", namespace=namespace, **options)
    files = tmp_path_factory.mktemp("files")
    plain = torch.run("isa-plain", "--plain", files, under="python", **options)
    return {"plain": plain, "hooked": hooked.finish()}


def test_the_first_job_publishes_all_that_it_compiled(torch, cold):
    assert cold.report["torch"].startswith(torch.version)
    assert cold.report["fx"]["fxgraph_cache_miss"] == GRAPHS
    assert cold.stats["hits_host"] == cold.stats["hits_server"] == 0
    assert cold.stats["published"] == cold.stats["misses"] > 2 * GRAPHS
    assert cold.stats["fallbacks"] == {}


def test_another_host_finds_every_graph_and_computes_the_same(cold, warm):
    assert warm.report["losses"] == cold.report["losses"]
    assert warm.report["fx"] == {"fxgraph_cache_hit": GRAPHS}
    assert warm.report["aot"]["autograd_cache_hit"] == 1
    assert warm.stats["misses"] == warm.stats["published"] == 0
    assert warm.stats["fallbacks"] == {}


def test_another_host_runs_no_compiler(torch, cold, warm):
    assert warm.hits >= GRAPHS + 1
    assert len(torch.compiled("cold")) > GRAPHS
    assert torch.compiled("warm") == []


def test_no_more_is_called_saved_than_the_first_job_took(cold, warm):
    assert 0 < warm.stats["saved_compile_seconds"] < 1.5 * cold.report["seconds"]


@pytest.mark.extended
def test_a_script_that_installs_the_cache_itself_finds_the_same_beside_compile_workers(torch, cold):
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    outcome = torch.run("installing", "--install", under="python", variables=variables)
    assert outcome.report["losses"] == cold.report["losses"]
    assert outcome.report["fx"] == {"fxgraph_cache_hit": GRAPHS}
    assert torch.compiled("installing") == []
    assert "Unable to create" not in outcome.errors


@pytest.mark.extended
def test_another_graph_is_built_by_two_threads_with_a_fetched_header(torch, cold):
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    outcome = torch.run("wide", "--width", "48", variables=variables)
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
    outcome = torch.run("threads", "--threads", "1")
    assert outcome.report["fx"] == {"fxgraph_cache_miss": GRAPHS}
    assert outcome.report["losses"] == pytest.approx(cold.report["losses"])


@pytest.mark.extended
def test_a_user_who_switched_the_remote_caches_off_is_not_overruled(torch):
    names = ("TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE", "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE")
    off = dict.fromkeys(names, "0")
    outcome = torch.run("off", "--matmul", variables=off)
    assert outcome.report["fx"]["fxgraph_cache_miss"] > 0
    assert outcome.report["has_hook"]
    assert outcome.stats == {}  # nothing was asked for


@pytest.mark.extended
def test_graphs_that_differ_in_their_guards_are_all_found(torch):
    first = torch.run("shapes", "--sizes", "8", "32")
    assert first.stats["misses"] > 0
    again = torch.run("shapes-again", "--sizes", "32", "8")
    assert sorted(again.report["losses"]) == sorted(first.report["losses"])
    assert again.report["fx"] == {"fxgraph_cache_hit": 2}
    assert again.stats["misses"] == again.stats["conflicts"] == 0


@pytest.mark.extended
def test_where_a_name_is_missing_the_hook_says_so_once_and_torch_compiles(torch):
    outcome = torch.run("lacking", "--matmul", "--without", "RemoteBundledAutotuneCache")
    assert outcome.report["fx"]["fxgraph_cache_miss"] > 0
    assert outcome.errors.count("RemoteBundledAutotuneCache.backend_override_cls") == 1


@pytest.mark.extended
def test_without_the_hook_code_for_another_vector_length_computes_wrong_numbers(lengths):
    outcome = lengths["plain"]
    first, second = outcome.report["first"], outcome.report["second"]
    assert not outcome.report["has_hook"]
    assert (first["isa"], second["isa"]) == ("avx512", "avx2")
    assert second["fx"]["fxgraph_cache_hit"] == 1
    assert not second["error"] < 1e-3  # it is huge, or no number


@pytest.mark.extended
def test_with_the_hook_code_for_another_vector_length_is_another_artifact(lengths):
    outcome = lengths["hooked"]
    first, second = outcome.report["first"], outcome.report["second"]
    assert outcome.report["has_hook"]
    assert (first["isa"], second["isa"]) == ("avx512", "avx2")
    assert second["fx"] == {"fxgraph_cache_miss": 1}
    assert second["error"] < 1e-3
    assert outcome.hits == 0

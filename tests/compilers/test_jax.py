"""Real jobs of JAX, each a process and a host of its own, against a real server."""

import json
from typing import ClassVar

import pytest

from support.compiler_jobs import JaxJobs
from support.hook_contract import HookContract
from support.offline import unplugged

PROGRAMS = 3  # the step, and the norms of two parameters, which are small
STEP = '"jit_step"'
WITHOUT_ZSTANDARD = {"without_zstandard": True, "install": True}


@pytest.fixture
def fresh(jobs, server, namespace, tmp_path):
    """Starts jobs where nothing is published."""
    with JaxJobs(tmp_path, jobs=jobs, url=server.url, namespace=namespace) as made:
        yield made


@pytest.fixture(scope="module")
def cold(server, tmp_path_factory):
    """What the newest JAX has compiled and published: the namespace `jax-warm`."""
    directory = tmp_path_factory.mktemp("cold")
    options = {"under": "graphstash run"}
    with JaxJobs(directory, url=server.url, namespace="jax-warm") as jobs:
        outcome = jobs.run("cold", "training", {"stats_url": server.url}, **options)
    assert len(outcome.report["compiled"]) == PROGRAMS
    assert outcome.stats["misses"] == outcome.stats["published"] == PROGRAMS
    assert outcome.stats["fallbacks"] == {}
    assert outcome.report["leases_held"] == 0
    return outcome


@pytest.fixture
def warm(jobs, cold, server, tmp_path):
    """Starts jobs where `cold` has published."""
    with JaxJobs(tmp_path, jobs=jobs, url=server.url, namespace="jax-warm") as made:
        yield made


def compiles_of(reports, program):
    return sum(report["compiled"].count(program) for report in reports)


def assert_is_warm(outcome, cold):
    assert outcome.report["compiled"] == []
    assert outcome.hits == PROGRAMS
    assert outcome.stats["misses"] == 0
    assert outcome.stats["fallbacks"] == {}
    assert outcome.report["losses"] == cold.report["losses"]


def assert_is_cold(outcome):
    assert len(outcome.report["compiled"]) == PROGRAMS
    assert outcome.hits == 0


@pytest.mark.extended
def test_entry_point_installs_the_hook(warm, cold):
    assert_is_warm(warm.run("b", "training", under="python -I"), cold)


@pytest.mark.extended
def test_oldest_supported_jax_shares(fresh):
    cold = fresh.run("a", "training", environment="jax-oldest")
    assert_is_cold(cold)
    assert cold.stats["published"] == PROGRAMS
    assert_is_warm(fresh.run("b", "training", environment="jax-oldest"), cold)
    entry_point = fresh.run("c", "training", environment="jax-oldest", under="python -I")
    assert_is_warm(entry_point, cold)


@pytest.mark.extended
def test_install_by_hand_after_the_first_compiles_is_in_time_for_the_next(warm, cold):
    late = {"install": True, "late": True}
    assert_is_warm(warm.run("b", "training", late, under="python"), cold)


@pytest.mark.extended
def test_the_same_host_needs_the_server_only_once(warm, cold, server):
    first = warm.start("b", "training")
    first.finish()
    url = unplugged(first.report.parent / "tier", server.url)
    again = warm.run("b", "training", url=url)
    assert_is_warm(again, cold)
    assert again.stats["hits_host"] == PROGRAMS


@pytest.mark.extended
def test_a_host_with_other_cpu_features_misses(warm):
    features = {"pretend_features": "sse2 avx2"}
    assert_is_cold(warm.run("b", "training", features))


@pytest.mark.extended
def test_programs_are_shared_with_and_without_zstandard(warm, cold):
    assert_is_warm(warm.run("b", "training", WITHOUT_ZSTANDARD, under="python"), cold)


@pytest.mark.extended
def test_program_published_without_zstandard_is_found_by_all(fresh):
    cold = fresh.run("a", "training", WITHOUT_ZSTANDARD, under="python")
    assert cold.stats["published"] == PROGRAMS
    assert_is_warm(fresh.run("b", "training"), cold)


@pytest.mark.extended
def test_cache_directory_of_user_stays_empty_and_changes_no_key(warm, cold, tmp_path):
    outcome = warm.run("b", "training", {"cache_dir": tmp_path / "own"})
    assert_is_warm(outcome, cold)
    assert outcome.errors.count("nothing is written to jax_compilation_cache_dir") == 1
    assert not (tmp_path / "own").exists()


@pytest.mark.extended
def test_settings_of_user_take_precedence_and_unwritten_programs_hold_no_lease(
    fresh, server, tmp_path
):
    outcome = fresh.run(
        "a",
        "training",
        {"stats_url": server.url},
        variables={
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "own"),
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "all",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "60",
        },
        under="graphstash run",
    )
    assert outcome.stats["misses"] == PROGRAMS
    assert outcome.stats["published"] == 0
    assert outcome.report["leases_held"] == 0
    state = outcome.report["state"]
    assert state["jax_compilation_cache_dir"] == str(tmp_path / "own")
    assert state["jax_persistent_cache_enable_xla_caches"] == "all"
    assert state["jax_persistent_cache_min_compile_time_secs"] == 60


@pytest.mark.extended
def test_a_process_that_jax_does_not_let_write_holds_no_lease(fresh, server):
    outcome = fresh.run("a", "training", {"rank": 1, "stats_url": server.url})
    assert outcome.stats["misses"] == PROGRAMS
    assert outcome.stats["published"] == 0
    assert outcome.stats["fallbacks"] == {}
    assert outcome.report["leases_held"] == 0


@pytest.mark.extended
def test_failed_compilation_releases_its_lease_and_raises_its_error(fresh, server):
    broken = {"break_compiler": True, "stats_url": server.url}
    outcome = fresh.run("a", "training", broken)
    assert outcome.report["error"] == "the compiler fails"
    assert outcome.stats["misses"] == PROGRAMS + 1
    assert outcome.stats["published"] == PROGRAMS
    assert outcome.stats["fallbacks"] == {}
    assert outcome.report["leases_held"] == 0


@pytest.mark.extended
def test_program_that_calls_back_is_not_shared_and_is_counted(warm):
    outcome = warm.run("b", "training", {"callback": True})
    assert outcome.stats["fallbacks"] == {"unshareable": 1}
    assert outcome.report["callback"] == 6
    assert outcome.report["compiled"] == ['"jit_calls"']
    assert outcome.hits == PROGRAMS
    assert outcome.stats["misses"] == 0


@pytest.mark.extended
@pytest.mark.parametrize("environment", ["jax-oldest", ""])
def test_uninstall_puts_everything_back(fresh, environment):
    both = {"install": True, "uninstall": True}
    report = fresh.run("a", "training", both, under="python", environment=environment).report
    assert report["state_inside"] != report["state_before"]
    assert all("graphstash" in owner for owner in report["state_inside"]["owners"])
    assert report["state"] == report["state_before"]
    # without the hook, and without any cache
    assert len(report["compiled"]) == 2 * report["compiled_inside"]
    assert report["losses_after"] == report["losses"]


@pytest.mark.extended
def test_forked_children_share_with_all_others_and_wait_for_each_other(fresh):
    forked = fresh.start("a", "training_in_children", {"count": 2})
    reports = forked.finish().report
    children = [json.loads(line) for line in forked.stats.read_text().splitlines()]
    assert compiles_of(reports, STEP) == 1  # who compiles a small one waits for nobody
    assert sum(child["published"] for child in children) >= PROGRAMS
    assert all(child["fallbacks"] == {} for child in children)
    assert fresh.run("b", "training").report["compiled"] == []


@pytest.mark.extended
def test_untested_version_is_logged_once_and_shares(fresh):
    newer = {"pretend_version": "0.99.1", "install": True}
    outcome = fresh.run("a", "training", newer, under="python")
    assert outcome.errors.count("tested with jax 0.4.31 to 0.10.2, not 0.99.1") == 1
    assert outcome.stats["published"] == PROGRAMS


@pytest.mark.extended
def test_hook_with_missing_private_name_logs_once_and_is_not_installed(fresh):
    gone = {"rename": "get_file_cache", "install": True}
    outcome = fresh.run("a", "training", gone, under="python", environment="jax-oldest")
    assert outcome.errors.count("get_file_cache") == 1
    assert len(outcome.errors.splitlines()) == 1
    assert len(outcome.report["compiled"]) == PROGRAMS
    assert outcome.stats == {}
    assert outcome.report["state"]["jax_compilation_cache_dir"] is None


def test_job_with_fail_on_miss_ends_before_compiling(fresh):
    ended = fresh.start("a", "training", fail_on_miss=True)
    assert ended.status() == 86
    errors = ended.errors.read_text()
    assert "the job ends: " in errors
    assert "would be compiled: the cache does not have it" in errors
    assert ended.report.read_text() == ""


@pytest.mark.extended
def test_job_with_fail_on_miss_runs_with_full_cache(warm, cold):
    assert_is_warm(warm.run("b", "training", fail_on_miss=True), cold)


class TestJax(HookContract):
    case = "jax_programs:training"
    programs = PROGRAMS
    herd_programs = 1  # the step: jobs do not wait for small programs
    cannot: ClassVar = {
        "test_hook_steps_aside_with_one_warning_on_an_unsupported_version": "it runs on every "
        "version and warns: test_untested_version_is_logged_once_and_shares"
    }

    @classmethod
    def open(cls, directory, **settings):
        return JaxJobs(directory, **settings)

    def compiled(self, outcome):
        return len(outcome.report["compiled"])

    def result(self, outcome):
        return outcome.report["losses"]

    def compiled_by_herd(self, outcomes):
        assert sum(outcome.stats["published"] for outcome in outcomes) >= PROGRAMS
        assert all(self.compiled(outcome) + outcome.hits == PROGRAMS for outcome in outcomes)
        return compiles_of((outcome.report for outcome in outcomes), STEP)

"""Real JAX jobs, each a process and a host of its own, against a real server."""

import json
from typing import ClassVar

import numpy as np
import pytest

from graphstash import ClientConfig, Stash
from graphstash_schema import ArtifactMetadata
from support.compiler_jobs import JaxJobs
from support.hook_contract import HookContract
from support.waiting import PATIENT

PROGRAMS = 3  # the step, and the norms of two parameters, which are small
STEP = '"jit_step"'
WITHOUT_ZSTANDARD = {"without_zstandard": True, "install": True}
WAYS = {
    "entry point": ({}, {"under": "python -I"}),
    "install after the first compiles": ({"install": True, "late": True}, {"under": "python"}),
    "other compressor": (WITHOUT_ZSTANDARD, {"under": "python"}),
    "nothing may be compiled": ({}, {"fail_on_miss": True}),
}
OF_USER = {
    "JAX_COMPILATION_CACHE_DIR": "/nonexistent/own",
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "all",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "60.0",
}


def compiles_of(reports, program):
    return sum(report["compiled"].count(program) for report in reports)


def assert_is_warm(outcome, cold):
    assert outcome.report["compiled"] == []
    assert outcome.hits == PROGRAMS
    assert outcome.stats["misses"] == 0
    assert outcome.stats["fallbacks"] == {}
    assert outcome.report["losses"] == cold.report["losses"]


class TestJax(HookContract):
    case = "jax_programs:training"
    programs = PROGRAMS
    herd_programs = 1  # only the step, because jobs do not wait for small programs
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

    def test_hosts_that_start_at_once_compile_each_program_once(self, hosts, empty):
        super().test_hosts_that_start_at_once_compile_each_program_once(hosts, empty)

    def compiled_by_herd(self, outcomes):
        assert sum(outcome.stats["published"] for outcome in outcomes) >= PROGRAMS
        assert all(self.compiled(outcome) + outcome.hits == PROGRAMS for outcome in outcomes)
        return compiles_of((outcome.report for outcome in outcomes), STEP)

    def test_job_with_fail_on_miss_ends_before_compiling(self, hosts, empty):
        ended = hosts.start("ended", "training", fail_on_miss=True, namespace=empty)
        assert ended.status() == 86
        errors = ended.errors.read_text()
        assert "the job ends: " in errors
        assert "would be compiled: the cache does not have it" in errors
        assert ended.report.read_text() == ""

    @pytest.mark.extended
    @pytest.mark.parametrize("way", WAYS)
    def test_every_way_to_run_a_job_finds_all_programs(self, hosts, cold, way):
        keywords, options = WAYS[way]
        assert_is_warm(hosts.run(way, "training", keywords, **options), cold)

    @pytest.mark.extended
    def test_cache_directory_of_user_stays_empty_and_changes_no_key(self, hosts, cold):
        own = hosts.directory / "own"
        outcome = hosts.run("with-own", "training", {"cache_dir": own})
        assert_is_warm(outcome, cold)
        assert outcome.errors.count("nothing is written to jax_compilation_cache_dir") == 1
        assert not own.exists()

    @pytest.mark.extended
    @pytest.mark.parametrize("environment", ["", "jax-oldest"])
    def test_program_published_without_zstandard_is_found_by_all(self, hosts, empty, environment):
        settings = {"namespace": empty, "environment": environment}
        cold = hosts.run(
            f"a-{environment}", "training", WITHOUT_ZSTANDARD, under="python", **settings
        )
        assert len(cold.report["compiled"]) == cold.stats["published"] == PROGRAMS
        for under in ("fork:jax", "python -I"):
            warm = hosts.run(f"{under}-{environment}", "training", under=under, **settings)
            assert_is_warm(warm, cold)

    @pytest.mark.extended
    def test_host_with_other_cpu_features_misses(self, hosts, cold):
        outcome = hosts.run("other-cpu", "training", {"pretend_features": "sse2 avx2"})
        assert len(outcome.report["compiled"]) == PROGRAMS
        assert outcome.hits == 0

    @pytest.mark.extended
    @pytest.mark.parametrize(
        ("keywords", "variables"), [({"rank": 1}, {}), ({}, OF_USER)], ids=["rank", "settings"]
    )
    def test_programs_that_jax_does_not_write_hold_no_lease(
        self, hosts, server, empty, keywords, variables
    ):
        keywords = {"stats_url": server.url} | keywords
        settings = {"namespace": empty, "variables": variables, "under": "graphstash run"}
        outcome = hosts.run("unwritten", "training", keywords, **settings)
        assert outcome.stats["misses"] == PROGRAMS
        assert outcome.stats["published"] == 0
        assert outcome.stats["fallbacks"] == {}
        assert outcome.report["leases_held"] == 0
        for name, value in variables.items():  # settings of the user take precedence
            assert str(outcome.report["state"][name.lower()]) == value

    @pytest.mark.extended
    def test_failed_compilation_releases_its_lease_and_raises_its_error(self, hosts, server, empty):
        broken = {"break_compiler": True, "stats_url": server.url}
        outcome = hosts.run("broken", "training", broken, namespace=empty)
        assert outcome.report["error"] == "the compiler fails"
        assert outcome.stats["misses"] == PROGRAMS + 1
        assert outcome.stats["published"] == PROGRAMS
        assert outcome.stats["fallbacks"] == {}
        assert outcome.report["leases_held"] == 0

    @pytest.mark.extended
    def test_program_that_calls_back_is_not_shared_and_is_counted(self, hosts, cold):
        outcome = hosts.run("calls-back", "training", {"callback": True})
        assert outcome.stats["fallbacks"] == {"unshareable": 1}
        assert outcome.report["callback"] == 6
        assert outcome.report["compiled"] == ['"jit_calls"']
        assert outcome.hits == PROGRAMS
        assert outcome.stats["misses"] == 0

    @pytest.mark.extended
    @pytest.mark.parametrize("environment", ["", "jax-oldest"])
    def test_uninstall_puts_everything_back(self, hosts, empty, environment):
        options = {"under": "python", "environment": environment, "namespace": empty}
        report = hosts.run(
            "uninstalled", "training", {"install": True, "uninstall": True}, **options
        ).report
        assert report["state_inside"] != report["state_before"]
        assert all("graphstash" in owner for owner in report["state_inside"]["owners"])
        assert report["state"] == report["state_before"]
        # The first run has no hook, and the last has no cache at all.
        assert len(report["compiled"]) == 2 * report["compiled_inside"]
        assert report["losses_after"] == report["losses"]

    @pytest.mark.extended
    def test_forked_children_share_with_all_others_and_wait_for_each_other(self, hosts, empty):
        forked = hosts.start("forks", "training_in_children", {"count": 2}, namespace=empty)
        reports = forked.finish().report
        children = [json.loads(line) for line in forked.stats.read_text().splitlines()]
        # Children do not wait for each other's small programs.
        assert compiles_of(reports, STEP) == 1
        assert sum(child["published"] for child in children) >= PROGRAMS
        assert all(child["fallbacks"] == {} for child in children)
        after = hosts.run("after-forks", "training", namespace=empty)
        assert after.report["compiled"] == []

    @pytest.mark.extended
    def test_untested_version_is_logged_once_and_shares(self, hosts, empty):
        options, chosen = self.options("on_other_version", package="jax", version="0.99.1")
        outcome = hosts.run("newer", *options, **chosen, namespace=empty)
        assert outcome.errors.count("tested with jax 0.4.31 to 0.10.2, not 0.99.1") == 1
        assert outcome.stats["published"] == PROGRAMS

    @pytest.mark.extended
    @pytest.mark.parametrize("environment", ["", "jax-oldest"])
    def test_hook_with_missing_private_name_logs_once_and_is_not_installed(
        self, start_program, environment
    ):
        outcome = start_program(
            """
            import jax
            from jax._src import compilation_cache
            import graphstash

            del compilation_cache.get_file_cache
            graphstash.install()
            print(jax.jit(lambda x: x + 1)(1.0), jax.config.jax_compilation_cache_dir)
            """,
            under="jax",
            environment=environment,
            url="none",
        ).finish()
        assert outcome.report == ["2.0 None"]
        assert outcome.errors.count("get_file_cache") == 1
        assert len(outcome.errors.splitlines()) == 1
        assert outcome.stats == {}

    @pytest.mark.extended
    def test_noise_in_valid_envelope_is_detected_by_jax_and_counted(
        self, hosts, cold, server, empty, tmp_path
    ):
        noise = b"\0\0\0\1" + np.random.default_rng(0).bytes(5000)
        metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=len(noise))
        keys = hosts.artifacts("cold")
        assert len(keys) == 2  # the step, and the pack with the two norms
        settings = {"namespace": empty, "cache_dir": tmp_path, **PATIENT}
        with Stash(ClientConfig(url=server.url, **settings)) as stash:
            for key in keys:
                stash.put(key, noise, metadata)
        noisy = hosts.run("noisy", "training", namespace=empty)
        assert noisy.report["losses"] == cold.report["losses"]
        assert len(noisy.report["compiled"]) == PROGRAMS
        printed = "Error reading persistent compilation cache entry for 'jit_step'"
        assert noisy.errors.count(printed) == 1
        assert noisy.stats["fallbacks"] == {"corrupt": 1, "rejected": 1}
        assert noisy.stats["conflicts"] == 1  # the first published artifact stays

    @pytest.mark.extended
    def test_fault_of_the_hook_itself_is_counted_and_jax_compiles(self, hosts, cold):
        sabotaged = hosts.run("sabotaged", "training", {"sabotage": True})
        assert sabotaged.report["losses"] == cold.report["losses"]
        assert len(sabotaged.report["compiled"]) == PROGRAMS
        assert sabotaged.stats["fallbacks"] == {"internal": 2 * PROGRAMS}
        assert "persistent compilation cache" not in sabotaged.errors

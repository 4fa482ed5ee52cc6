"""The framework gets a right executable despite any fault or interrupt around a compile call."""

from functools import cache

import pytest

from support.fault_proxy import Fault, FaultProxy
from support.run_case import RUN_CASE, case_arguments
from support.tiers import each_of

REASONS = {
    Fault.FLIP: "digest_mismatch",
    "noise": "rejected",
    "get raises": "internal",
    "publish raises": "internal",
}


@pytest.fixture(scope="module")
def report_of(jobs, server, tmp_path_factory):
    """Return a function that runs one process per environment and returns its report."""

    @cache
    def report_of(environment):
        directory = tmp_path_factory.mktemp("pjrt-faults")
        settings = {"namespace": f"pjrt-faults-{environment}", "hooks": "pjrt"}
        with FaultProxy(server.port) as proxy:
            proxy.fault = Fault.FLIP
            urls = {"sound": server.url, Fault.FLIP: proxy.url}
            running = jobs.start(
                directory / "job",
                *case_arguments("pjrt_jax:faults", urls=urls),
                script=RUN_CASE,
                under="graphstash run",
                environment=environment,
                **settings,
            )
            return running.finish().report

    return report_of


@pytest.fixture(params=each_of({"": "", "jax-pjrt": "jax-pjrt"}))
def report(request, report_of):
    return report_of(request.param)


@pytest.mark.parametrize("fault", REASONS)
def test_result_is_right_and_reason_is_counted(report, fault):
    met = report[fault]
    assert met["results"] == [report["plain"]] * 2
    assert met["stats"]["fallbacks"].get(REASONS[fault], 0) >= 1
    if fault == Fault.FLIP:  # damaged artifacts are never loaded
        assert met["stats"]["hits_server"] == 0


def test_already_loaded_plug_in_is_hooked(report):
    sound = report["sound"]
    assert (sound["stats"]["misses"], sound["stats"]["hits_host"]) == (1, 1)
    assert sound["results"] == [report["plain"]] * 2


def test_uninstalling_puts_the_functions_of_the_plug_in_back(report):
    for name in ("sound", *REASONS):
        assert report[name]["restored"] == report["untouched"]
        assert not set(report[name]["patched"]) & set(report["untouched"])


def test_programs_of_jax_are_left_to_active_jax_hook(report):
    assert report["beside the jax hook"]["patched"] == report["untouched"]


def test_threads_that_compile_at_once_share_their_programs(report):
    cold, warm = report["threads"]
    assert cold["results"] == warm["results"]
    assert len(set(warm["results"])) == 6
    assert (cold["stats"]["misses"], cold["stats"]["published"]) == (6, 6)
    fetched = warm["stats"]["hits_server"] + warm["stats"]["hits_prefetched"]
    assert (fetched, warm["stats"]["misses"]) == (6, 0)


def test_compilation_outlives_the_cache_it_began_with(report):
    early = report["early"]
    assert early["slots"] == report["untouched"]
    assert early["result"] == early["afterwards"] == report["plain"]


def test_interrupt_during_compilation_is_raised_afterwards_and_repeats_no_compilation(report):
    before, after, handled = report["interrupts"]
    assert before["raised"] == after["raised"] == "KeyboardInterrupt()"
    assert handled["raised"] == "SystemExit('stopped')"
    for case in report["interrupts"]:
        assert case["result"] == report["plain"]
        assert (case["stats"]["misses"], case["stats"]["hits_host"]) == (1, 1)
    assert (after["compiled"], handled["compiled"]) == (1, 1)
    # The main thread handles signals. On some machines, JAX 0.10 compiles in another thread.
    assert before["compiled"] == (2 if before["in_main_thread"] else 1)

"""Whatever happens around a compile call, the framework gets a right executable."""

from contextlib import ExitStack

import pytest

from graphstash._artifacts.stash import Stash
from graphstash.config import ClientConfig
from graphstash_schema import ArtifactKey, ArtifactMetadata
from support.fault_proxy import Fault, FaultProxy
from support.run_case import RUN_CASE, case_arguments
from support.tiers import each_of

STRANGER = ArtifactKey.parse("pjrt", "cpu-other", "0" * 64)
REASONS = {
    "absent": "connect",
    Fault.FLIP: "digest_mismatch",
    Fault.TRUNCATE: "truncated",
    Fault.SWAP: "wrong_key",
    "noise": "rejected",
    "get raises": "internal",
    "publish raises": "internal",
}


def run(jobs, environment, directory, case, **keywords):
    return (
        jobs.start(
            directory,
            *case_arguments(f"pjrt_jax:{case}", **keywords),
            script=RUN_CASE,
            under="graphstash run",
            environment=environment,
            namespace=f"pjrt-{case}-{environment}",
            hooks="pjrt",
        )
        .finish()
        .report
    )


@pytest.fixture(scope="module", params=each_of({"": "", "jax-pjrt": "jax-pjrt"}))
def environment(request):
    return request.param


@pytest.fixture(scope="module")
def faults(jobs, environment, server, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pjrt-faults")
    config = ClientConfig(
        url=server.url, namespace=f"pjrt-faults-{environment}", cache_dir=directory / "here"
    )
    with Stash(config) as stash:
        stash.put(STRANGER, b"sound", ArtifactMetadata(compile_seconds=1, raw_size_bytes=5))
    urls = {"sound": server.url, "absent": "http://127.0.0.1:9"}
    with ExitStack() as stack:
        for fault in (Fault.FLIP, Fault.TRUNCATE, Fault.SWAP):
            proxy = stack.enter_context(FaultProxy(server.port))
            proxy.fault, proxy.swap_to = fault, str(STRANGER)
            urls[fault] = proxy.url
        return run(jobs, environment, directory / "job", "faults", urls=urls)


@pytest.fixture(scope="module")
def process(jobs, environment, server, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pjrt")
    return run(jobs, environment, directory, "process", url=server.url)


@pytest.mark.parametrize("fault", REASONS)
def test_the_result_is_right_and_the_reason_is_counted(faults, fault):
    assert faults[fault]["results"] == [faults["plain"]] * 2
    assert faults[fault]["stats"]["fallbacks"].get(REASONS[fault], 0) >= 1


def test_already_loaded_plug_in_is_hooked(faults):
    sound = faults["sound"]
    assert (sound["stats"]["misses"], sound["stats"]["hits_host"]) == (1, 1)
    assert sound["results"] == [faults["plain"]] * 2


def test_damaged_artifacts_are_never_loaded(faults):
    for fault in (Fault.FLIP, Fault.TRUNCATE, Fault.SWAP):
        assert faults[fault]["stats"]["hits_server"] == 0


def test_uninstalling_puts_the_functions_of_the_plug_in_back(faults):
    for name in ("sound", *REASONS):
        assert faults[name]["restored"] == faults["untouched"]
        assert not set(faults[name]["patched"]) & set(faults["untouched"])


def test_programs_of_jax_are_left_to_active_jax_hook(faults):
    assert faults["beside the jax hook"]["patched"] == faults["untouched"]


def test_threads_that_compile_at_once_share_their_programs(jobs, environment, server, tmp_path):
    cold, warm = run(jobs, environment, tmp_path, "threads", url=server.url)
    assert cold["results"] == warm["results"]
    assert len(set(warm["results"])) == 6
    assert (cold["stats"]["misses"], cold["stats"]["published"]) == (6, 6)
    fetched = warm["stats"]["hits_server"] + warm["stats"]["hits_prefetched"]
    assert (fetched, warm["stats"]["misses"]) == (6, 0)


@pytest.mark.extended
def test_a_compilation_outlives_the_cache_it_began_with(process):
    early = process["early"]
    assert early["slots"] == process["untouched"]
    assert early["result"] == early["afterwards"] == process["plain"]


@pytest.mark.extended
def test_interrupt_during_compilation_is_raised_after_return_to_python(process):
    before, after, handled = process["interrupts"]
    assert before["raised"] == after["raised"] == "KeyboardInterrupt()"
    assert handled["raised"] == "SystemExit('stopped')"
    for case in process["interrupts"]:
        assert case["result"] == process["plain"]
        assert (case["stats"]["misses"], case["stats"]["hits_host"]) == (1, 1)


@pytest.mark.extended
def test_finished_compilation_is_not_repeated_after_interrupt(process):
    before, after, handled = process["interrupts"]
    assert (after["compiled"], handled["compiled"]) == (1, 1)
    # Signals are handled in the main thread. JAX 0.10 compiles in another one, on some machines.
    assert before["compiled"] == (2 if before["in_main_thread"] else 1)

"""Real torch_xla jobs, each a process and a host of its own, against a real server."""

import json
import sys
from typing import ClassVar

import pytest

from support.compiler_jobs import CompilerJobs
from support.hook_contract import HookContract

WAYS_TO_STEP = [
    *((mode, "exact") for mode in ("compile", "dynamo", "item")),
    *((mode, "hint") for mode in ("lazy", "dynamo")),
]
WAYS_TO_INSTALL = {
    "by hand": ["--install"],
    "where look-ups cannot be caught": ["--install", "--no-gate"],
}
OTHER_CPU = ("--pretend-features", "sse2 avx2")


class TestTorchXla(HookContract):
    programs = 2
    cold_under = "fork"
    unsupported = "3.0.1"
    cannot: ClassVar = {
        "test_forked_child_shares_as_its_parent_does": "its children report by themselves: "
        "test_forked_children_share_with_all_others_and_with_each_other"
    }

    @classmethod
    def open(cls, directory, **settings):
        return CompilerJobs(directory, under="fork", **settings)

    @classmethod
    def options(cls, wrapper="", **keywords):
        if wrapper:
            return ("--pretend-version", keywords["version"], "--install"), {"under": ""}
        return ("--steps", 12), {}

    def compiled(self, outcome):
        return outcome.report["compiles"]

    def result(self, outcome):
        return outcome.report["losses"][:4]

    def assert_shared(self, cold, warm):
        assert cold.stats["misses"] == cold.stats["published"] == cold.report["compiles"] >= 2
        assert warm.hits == cold.report["compiles"]
        assert warm.report["compiles"] == warm.stats["published"] == 0
        assert warm.report["losses"] == cold.report["losses"]
        assert f"{warm.hits} hits" in warm.errors

    def test_warm_step_makes_no_cache_call(self, hosts, cold, warm):
        bare = self.run(hosts, "bare", under="")
        for outcome in (cold, warm):
            # After the first two steps, hits, misses and fallbacks do not change.
            assert len({tuple(counts) for counts in outcome.report["counts"][2:]}) == 1
            # Steps call torch_xla's own entry point without a wrapper.
            for what in ("step_marker", "executions", "device_reads", "losses"):
                assert outcome.report[what] == bare.report[what], what
        assert bare.stats == {}
        assert cold.report["environment"] is None  # children inherit no variable

    def test_hook_logs_once_and_is_not_installed_on_versions_that_cannot_load(self, hosts):
        outcome = hosts.run("2.9.0", "--pretend-version", "2.9.0", "--install", under="")
        assert outcome.errors.count("pytorch/xla#9094") == 1
        assert len(outcome.errors.splitlines()) == 1
        assert outcome.report["losses"]
        assert outcome.stats == {}

    @pytest.mark.extended
    @pytest.mark.parametrize(("mode", "look_up"), WAYS_TO_STEP)
    def test_every_way_to_run_a_step_shares(self, hosts, empty, mode, look_up):
        settings = {"torch_xla_mode": look_up, "namespace": empty}
        cold, warm = (
            hosts.run(f"{host}-{mode}-{look_up}", "--mode", mode, **settings) for host in "ab"
        )
        self.assert_shared(cold, warm)
        assert cold.stats["fallbacks"] == warm.stats["fallbacks"] == {}

    @pytest.mark.extended
    @pytest.mark.parametrize("way", WAYS_TO_INSTALL)
    def test_every_way_to_install_the_cache_shares(self, hosts, empty, way):
        settings = {"under": "", "namespace": empty}
        cold, warm = (
            hosts.run(f"{host} {way}", *WAYS_TO_INSTALL[way], **settings) for host in "ab"
        )
        self.assert_shared(cold, warm)

    @pytest.mark.extended
    @pytest.mark.parametrize("look_up", ["exact", "hint"])
    def test_sabotaged_hook_does_not_disturb_a_step(self, hosts, cold, look_up):
        outcome = hosts.run(f"sabotaged-{look_up}", "--sabotage", torch_xla_mode=look_up)
        assert outcome.report["losses"] == self.result(cold)
        assert outcome.report["compiles"] == 2
        assert sum(outcome.stats["fallbacks"].values()) >= 1

    @pytest.mark.extended
    def test_host_with_other_instruction_sets_shares_nothing(self, hosts, cold):
        other, again = (hosts.run(f"other-cpu-{n}", *OTHER_CPU) for n in range(2))
        assert other.report["compiles"] == 2
        assert other.hits == 0
        assert again.report["compiles"] == 0

    @pytest.mark.extended
    def test_torchrun_and_intermediate_shells_work(self, hosts, empty):
        torchrun = (
            *("sh", "-c", '"$@"', "sh", sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", "2"),
        )
        settings = {"under": "graphstash run", "launcher": torchrun, "namespace": empty}
        running = hosts.start("torchrun", **settings)
        assert running.finish().report["losses"]
        lines = [json.loads(line) for line in running.stats.read_text().splitlines()]
        assert len(lines) == 2
        assert sum(line["misses"] for line in lines) == 2
        assert sum(line["hits_host"] + line["hits_server"] for line in lines) == 2

    @pytest.mark.extended
    def test_script_with_its_own_cache_directory_runs(self, hosts, empty):
        own = hosts.directory / "own"
        outcome = hosts.run("initializes", "--initialize-cache", own, namespace=empty)
        assert outcome.stats["published"] == 2
        assert "has no effect" in outcome.errors
        assert not own.exists()

    @pytest.mark.extended
    def test_forked_children_share_with_all_others_and_with_each_other(self, hosts, empty):
        forked = hosts.start("forks", "--fork", "3", namespace=empty)
        forked.finish_children(3)
        children = [json.loads(line) for line in forked.stats.read_text().splitlines()]
        assert len(children) == 3
        assert sum(child["misses"] for child in children) == 2
        assert sum(child["published"] for child in children) == 2
        assert sum(child["hits_host"] + child["hits_server"] for child in children) == 4
        assert all(child["fallbacks"] == {} for child in children)
        assert hosts.run("after-forks", namespace=empty).report["compiles"] == 0

    @pytest.mark.extended
    def test_miss_beside_a_running_cached_graph_does_not_deadlock(self, hosts, empty):
        outcome = hosts.run("beside", "--thread", namespace=empty)
        assert outcome.report["beside"] >= 10
        assert outcome.stats["misses"] + sum(outcome.stats["fallbacks"].values()) >= 2


CHANGED = """
    import os
    import torch, torch_xla, torch_xla.core.xla_model as xm
    import graphstash
    from graphstash.hooks.torch_xla.hint import HintMode

    run_safely = HintMode._run_safely

    def change_after_the_look_up(mode, work, *arguments):
        answer = run_safely(mode, work, *arguments)
        if work.__name__.startswith("_before"):
            CHANGE
        return answer

    HintMode._run_safely = change_after_the_look_up
    session = graphstash.install()
    os.environ["XLA_MINE"] = "1"
    x = torch.ones(2, device=xm.xla_device())
    STEP
    print(session.stats().fallbacks)
    """


@pytest.mark.parametrize(
    "change",
    [
        "pass",
        "torch_xla._XLAC._xla_set_mat_mul_precision('highest')",
        "os.environ['XLA_MINE'] = ''",
    ],
)
@pytest.mark.parametrize(
    "step",
    [
        "y = x + 1; xm.mark_step()",
        pytest.param(
            "torch.compile(lambda x: x + 1, backend='openxla')(x)", marks=pytest.mark.extended
        ),
    ],
)
def test_graph_in_hint_mode_is_not_shared_if_its_key_changes_meanwhile(start_program, step, change):
    program = CHANGED.replace("STEP", step).replace("CHANGE", change)
    options = {"under": "fork", "hooks": "torch_xla", "url": "none", "torch_xla_mode": "hint"}
    (printed,) = start_program(program, **options).finish().report
    assert printed.startswith("{}" if change == "pass" else "{'unshareable': ")


def test_hint_whose_files_cannot_be_listed_is_abandoned(start_program):
    program = """
        import torch, torch_xla, torch_xla.core.xla_model as xm
        import graphstash
        from graphstash.hooks.torch_xla.hint import HintMode

        def fail(mode):
            raise OSError("the directory cannot be listed")

        HintMode._new_names = fail
        session = graphstash.install()
        pending = torch.ones(2, device=xm.xla_device()) + 1
        xm.mark_step()
        print(len(session._hooks["torch_xla"]._mode._hints._open), dict(session.stats().fallbacks))
    """
    job = start_program(program, under="fork", hooks="torch_xla", url="none", torch_xla_mode="hint")
    assert job.finish().report == ["0 {'internal': 1}"]

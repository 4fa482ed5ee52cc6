"""Real Triton compilations for an absent GPU, in the oldest and the newest tested version."""

import dataclasses
import json
import signal
import struct
from typing import ClassVar

import pytest

from graphstash import ClientConfig, Stash
from graphstash.hooks.triton.kernel import pack, unpack
from graphstash_schema import ArtifactMetadata
from support.compiler_jobs import TritonJobs
from support.hook_contract import OF_THE_CACHE, HookContract
from support.waiting import PATIENT, until

KERNELS = 3
MANAGER = {"TRITON_CACHE_MANAGER": "graphstash.hooks.triton:SharedCacheManager"}
BACKEND = {
    "TRITON_CACHE_MANAGER": "triton.runtime.cache:RemoteCacheManager",
    "TRITON_REMOTE_CACHE_BACKEND": "graphstash.hooks.triton:SharedCacheBackend",
}
OWN_MANAGER = "support.cases.triton_kernels:OwnManager"
MAGIC = b"graphstash-triton\1"


def with_path(files):
    """Return an archive with a file outside the kernel's folder."""
    name = b"../scaled_add.ptx"  # the first in the order of names
    head = MAGIC + struct.pack(">I", len(files) + 1) + struct.pack(">HQ", len(name), 0) + name
    return head + pack(files)[len(MAGIC) + 4 :]


def cut(files):
    return pack(files)[:-1]


def of_another_kernel(files):
    description = json.loads(files["scaled_add.json"]) | {"hash": "0" * 64}
    return pack({**files, "scaled_add.json": json.dumps(description).encode()})


DAMAGES = (with_path, cut, of_another_kernel)
"""One damage of `test_triton_archive` for each kernel."""


class TestTriton(HookContract):
    case = "triton_kernels:kernels"
    keywords: ClassVar = {"count": KERNELS}
    programs = KERNELS
    package = "triton"
    version = "3.3.0"

    @classmethod
    def open(cls, directory, **settings):
        return TritonJobs(directory, cls.version, **settings)

    def compiled(self, outcome):
        return outcome.report["ptxas"]

    def result(self, outcome):
        return outcome.report["kernels"]

    def test_loaded_files_equal_files_of_a_compilation(self, hosts, cold, warm):
        def files(host):
            found = {}
            for path in (hosts.directory / host / "triton").glob("*/*"):
                content = path.read_bytes()
                if path.name.startswith("__grp__"):
                    listed = json.loads(content)["child_paths"]
                    assert listed == {name: str(path.with_name(name)) for name in listed}
                    content = sorted(listed)
                found[path.parent.name, path.name] = content
            return found

        assert cold.report["version"] == self.version
        assert len({kernel["cubin"] for kernel in cold.report["kernels"]}) == KERNELS
        compiled = files("cold")
        assert sum(name.startswith("__grp__") for _, name in compiled) == KERNELS
        assert files("warm") == compiled

    def test_job_killed_in_the_middle_of_a_kernel_publishes_nothing(self, hosts, server, empty):
        settings = {"namespace": empty, "lease_seconds": 2}
        killed = hosts.start("killed", "kernels", variables={"ASSEMBLER_DIES": "1"}, **settings)
        assert killed.status() == -signal.SIGKILL
        written = {
            path.suffix for path in (hosts.directory / "killed").glob("triton/*/scaled_add.*")
        }
        assert ".ptx" in written
        assert ".cubin" not in written
        assert server.stats(empty)["artifacts"] == 0
        after = hosts.run("killed", "kernels", **settings)
        assert after.stats["misses"] == after.stats["published"] == 1
        assert after.stats["fallbacks"] == {}

    def test_cache_faults_do_not_reach_triton(self, hosts, cold):
        outcome = hosts.run("raising", "with_a_fault_of_the_cache", self.keywords)
        assert outcome.report["ptxas"] == KERNELS
        assert outcome.report["kernels"] == cold.report["kernels"]
        assert outcome.stats["fallbacks"] == {"internal": KERNELS}
        assert outcome.errors.count("a fault of the cache") == 1

    @pytest.mark.extended
    def test_moved_and_half_written_directories_are_handled(self, hosts, cold):
        compiled, here = hosts.directory / "cold" / "triton", hosts.directory / "moved" / "triton"
        here.parent.mkdir()
        compiled.rename(here)
        moved = self.run(hosts, "moved", url="http://127.0.0.1:9")
        here.rename(compiled)
        assert moved.report["ptxas"] == 0
        assert moved.report["kernels"] == cold.report["kernels"]

        cut_in_half = {1: "scaled_add.json", 2: "__grp__scaled_add.json"}
        for number, path in enumerate(sorted(compiled.iterdir())):
            target = hosts.directory / "half" / "triton" / path.name
            target.mkdir(parents=True)
            for file in path.iterdir():
                content = file.read_bytes()
                if file.name == cut_in_half.get(number):
                    content = content[: len(content) // 2]
                if number != 0 or file.suffix != ".cubin":
                    (target / file.name).write_bytes(content)
        healed = self.run(hosts, "half")
        assert healed.report["ptxas"] == 0
        assert healed.hits == 3
        assert healed.report["kernels"] == cold.report["kernels"]

    @pytest.mark.extended
    def test_triton_variables_install_hook_and_changed_source_changes_key(self, hosts, cold):
        assert cold.report["environment"] is None  # children inherit no variable
        shifted = {"shift": True, "count": 2}
        manager = hosts.run(
            "manager", "kernels", {"shift": True}, variables=MANAGER, under="python"
        )
        assert manager.report["manager"] == "SharedCacheManager"
        assert manager.report["ptxas"] == manager.stats["misses"] == manager.stats["published"] == 1
        backend = hosts.run("backend", "kernels", shifted, variables=BACKEND, under="python")
        assert backend.report["manager"] == "RemoteCacheManager"
        assert backend.hits == backend.stats["published"] == backend.report["ptxas"] == 1
        both = hosts.run("both", "kernels", shifted, variables=BACKEND, under="graphstash run")
        assert both.report["ptxas"] == 0
        assert both.hits == 2
        assert both.report["kernels"] == backend.report["kernels"]
        for outcome in (manager, backend, both):
            assert outcome.stats["fallbacks"] == {}

    @pytest.mark.extended
    def test_complete_gpu_kernel_of_a_manager_is_published(self, hosts, server, empty):
        first = hosts.run("by-hand-a", "manager_calls", namespace=empty)
        assert server.stats(empty)["artifacts"] == first.stats["published"] == 1
        assert set(first.report["found"].values()) == {None}
        assert set(first.report["alone"].values()) == {True}
        second = hosts.run("by-hand-b", "manager_calls", namespace=empty, variables=BACKEND)
        found = second.report["found"]
        assert set(found.pop("whole")) == {"k.ttir", "k.cubin", "k.json"}
        assert set(found.values()) == {None}
        assert set(second.report["alone"].values()) == {True}
        assert server.stats(empty)["artifacts"] == 1
        assert server.leases_held(empty) == 0

    @pytest.mark.extended
    def test_failed_compilation_releases_its_lease_while_the_job_continues(
        self, hosts, server, empty
    ):
        go = hosts.directory / "go"
        running = hosts.start("failed", "failing", {"go": go}, namespace=empty)
        until(lambda: go.with_suffix(".failed").exists() or running.ended())
        until(lambda: server.leases_held(empty) == 0)
        assert not running.ended()
        assert go.with_suffix(".compiling").read_text() == "1"
        go.touch()
        outcome = running.finish()
        assert outcome.report["error"] == "this kernel cannot be compiled"
        assert outcome.stats["published"] == 1

    @pytest.mark.extended
    def test_uninstall_restores_triton(self, hosts, server, empty):
        outcome = hosts.run("uninstalled", "uninstalled", namespace=empty)
        assert outcome.report["manager"] == "SharedCacheManager"
        assert outcome.report["compile"] == ["triton"]  # the hook's folder
        assert outcome.report["uninstalled"] == {
            "manager": "FileCacheManager",
            "compile": ["compiler"],
        }
        assert outcome.report["ptxas"] == 2
        assert server.stats(empty)["artifacts"] == 1

    def test_uninstalled_hook_is_not_restarted_by_triton_variables(self, hosts, server, empty):
        outcome = hosts.run("final", "uninstalled", namespace=empty, variables=MANAGER)
        assert outcome.report["uninstalled"]["manager"] == "SharedCacheManager"
        assert outcome.report["ptxas"] == 2
        assert server.stats(empty)["artifacts"] == 1

    @pytest.mark.extended
    def test_cache_manager_of_user_is_kept(self, hosts, server, empty):
        own = {"TRITON_CACHE_MANAGER": OWN_MANAGER}
        outcome = hosts.run(
            "own", "kernels", namespace=empty, variables=own, under="graphstash run"
        )
        assert outcome.errors.count(f"{OWN_MANAGER}, so kernels are not shared") == 1
        assert outcome.report["manager"] == "OwnManager"
        assert outcome.report["ptxas"] == 1
        assert outcome.stats == {}
        assert server.stats(empty)["puts"] == 0

    @pytest.mark.extended
    def test_damaged_kernel_in_a_sound_envelope_is_compiled_instead(
        self, hosts, cold, server, namespace, empty, tmp_path
    ):
        settings = {"namespace": namespace, "cache_dir": tmp_path / "source", **PATIENT}
        source = ClientConfig(url=server.url, **settings)
        target = dataclasses.replace(source, namespace=empty, cache_dir=tmp_path / "target")
        metadata = ArtifactMetadata(compile_seconds=1, raw_size_bytes=1)
        with Stash(source) as sound, Stash(target) as damaged:
            for key, damage in zip(hosts.artifacts("cold"), DAMAGES, strict=True):
                assert damaged.put(key, damage(unpack(sound.get(key))), metadata)
        outcome = self.run(hosts, "damaged", namespace=empty)
        assert outcome.report["ptxas"] == KERNELS
        assert outcome.report["kernels"] == cold.report["kernels"]
        assert outcome.stats["fallbacks"] == {"rejected": KERNELS}
        assert outcome.stats["published"] == outcome.stats["conflicts"] == 0
        assert "holds no kernel for this host" in outcome.errors
        assert hosts.artifacts("damaged") == []
        assert list((hosts.directory / "damaged").glob("**/*scaled_add.so")) == []

    @pytest.mark.extended
    def test_binary_only_kernels_and_complete_kernels_are_different_artifacts(self, hosts, cold):
        binary_only = {"TRITON_STORE_BINARY_ONLY": "1"}
        alone = [hosts.run(f"binary-{n}", "kernels", variables=binary_only) for n in range(2)]
        assert [outcome.report["ptxas"] for outcome in alone] == [1, 0]
        for outcome in alone:
            assert set(outcome.report["kernels"][0]["stages"]) <= {"cubin", "source"}
            assert outcome.report["kernels"][0]["cubin"] == cold.report["kernels"][0]["cubin"]
        assert alone[0].stats["published_bytes"] < cold.stats["published_bytes"] / KERNELS


@pytest.mark.extended
class TestNewestTriton(TestTriton):
    cannot: ClassVar = OF_THE_CACHE
    version = "3.9.0"


def test_parts_for_graphs_of_torch_contain_the_variables_that_triton_lists(start_program):
    """torch loads the kernels in its graphs without Triton's key, which contains these variables.

    A C extension reads them, so the program sets one for the whole process.
    """
    program = """
        import os
        from graphstash.hooks.triton.fingerprint import compiler_parts

        before = compiler_parts(os.environ, "cuda", 90)
        os.environ["DISABLE_LLVM_OPT"] = "1"
        now = compiler_parts(os.environ, "cuda", 90)
        print(*(now.items() - before.items()))
        """
    outcome = start_program(program, under="").finish()
    assert outcome.report == ["('env.DISABLE_LLVM_OPT', 'true')"]

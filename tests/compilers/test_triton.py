"""Real Triton compilations for a GPU that is not there, in both ends of the versions tried."""

import itertools
import json
import signal
from typing import ClassVar

import pytest

from support.compiler_jobs import TRITON_VERSIONS, TritonJobs
from support.hook_contract import HookContract
from support.tiers import each_of
from support.waiting import until

KERNELS = 3
MANAGER = {"TRITON_CACHE_MANAGER": "graphstash.hooks.triton:SharedCacheManager"}
BACKEND = {
    "TRITON_CACHE_MANAGER": "triton.runtime.cache:RemoteCacheManager",
    "TRITON_REMOTE_CACHE_BACKEND": "graphstash.hooks.triton:SharedCacheBackend",
}
OWN_MANAGER = "support.cases.triton_kernels:OwnManager"
_numbers = itertools.count()


@pytest.fixture(scope="module", params=each_of(TRITON_VERSIONS))
def triton(request, jobs, server, tmp_path_factory):
    """Starts jobs of one version; all of them share."""
    directory = tmp_path_factory.mktemp("triton")
    namespace = f"triton-{request.param}"
    settings = {"url": server.url, "namespace": namespace, "jobs": jobs}
    with TritonJobs(directory, request.param, **settings) as made:
        yield made


@pytest.fixture
def fresh():
    """A namespace in which nothing is."""
    return f"triton-fresh-{next(_numbers)}"


@pytest.fixture(scope="module")
def cold(triton):
    """The first job of all: it has compiled its kernels."""
    return triton.run("cold", "kernels", {"count": KERNELS}, under="graphstash run")


@pytest.fixture(scope="module")
def warm(triton, cold):
    """The same job on another host."""
    return triton.run("warm", "kernels", {"count": KERNELS})


@pytest.mark.extended
def test_moved_and_half_written_directories_are_handled(triton, cold):
    here = triton.directory / "moved"
    here.mkdir()
    (triton.directory / "cold" / "triton").rename(here / "triton")
    url = "http://127.0.0.1:9"
    moved = triton.run("moved", "kernels", {"count": KERNELS}, url=url)
    assert moved.report["ptxas"] == 0
    assert moved.report["kernels"] == cold.report["kernels"]
    (here / "triton").rename(triton.directory / "cold" / "triton")

    half = triton.directory / "half"
    for number, path in enumerate(sorted((triton.directory / "cold" / "triton").iterdir())):
        target = half / "triton" / path.name
        target.mkdir(parents=True)
        for file in path.iterdir():
            content = file.read_bytes()
            if number == 0 and file.suffix == ".cubin":
                continue
            if number == 1 and file.name == "scaled_add.json":
                content = content[: len(content) // 2]
            if number == 2 and file.name.startswith("__grp__"):
                content = content[: len(content) // 2]
            (target / file.name).write_bytes(content)
    healed = triton.run("half", "kernels", {"count": KERNELS})
    assert healed.report["ptxas"] == 0
    assert healed.hits == 3
    assert healed.report["kernels"] == cold.report["kernels"]


@pytest.mark.extended
def test_triton_variables_install_hook_and_changed_source_changes_key(triton, cold):
    assert cold.report["environment"] is None  # nothing that children could inherit
    shifted = {"shift": True, "count": 2}
    manager = triton.run("manager", "kernels", {"shift": True}, variables=MANAGER, under="python")
    assert manager.report["manager"] == "SharedCacheManager"
    assert manager.report["ptxas"] == manager.stats["misses"] == manager.stats["published"] == 1
    backend = triton.run("backend", "kernels", shifted, variables=BACKEND, under="python")
    assert backend.report["manager"] == "RemoteCacheManager"
    assert backend.hits == backend.stats["published"] == backend.report["ptxas"] == 1
    both = triton.run("both", "kernels", shifted, variables=BACKEND, under="graphstash run")
    assert both.report["ptxas"] == 0
    assert both.hits == 2
    assert both.report["kernels"] == backend.report["kernels"]
    for outcome in (manager, backend, both):
        assert outcome.stats["fallbacks"] == {}


@pytest.mark.extended
def test_global_missing_in_key_of_triton_changes_our_key(triton, fresh):
    def run(host, kind):
        return triton.run(host, "kernels", namespace=fresh, variables={"KERNEL_TYPE": kind})

    half, whole, again = (
        run("type-a", "float16"),
        run("type-b", "float32"),
        run("type-c", "float16"),
    )
    (one,), (other,) = half.report["kernels"], whole.report["kernels"]
    assert one["hash"] == other["hash"]  # of Triton
    assert one["cubin"] != other["cubin"]
    assert [outcome.report["ptxas"] for outcome in (half, whole, again)] == [1, 1, 0]
    assert again.report["kernels"] == half.report["kernels"]


@pytest.mark.extended
def test_complete_gpu_kernel_of_a_manager_is_published(triton, server, fresh):
    first = triton.run("by-hand-a", "manager_calls", namespace=fresh)
    assert server.stats(fresh)["artifacts"] == first.stats["published"] == 1
    assert set(first.report["found"].values()) == {None}
    assert set(first.report["alone"].values()) == {True}
    second = triton.run("by-hand-b", "manager_calls", namespace=fresh, variables=BACKEND)
    found = second.report["found"]
    assert set(found.pop("whole")) == {"k.ttir", "k.cubin", "k.json"}
    assert set(found.values()) == {None}
    assert set(second.report["alone"].values()) == {True}
    assert server.stats(fresh)["artifacts"] == 1
    assert server.leases_held() == 0


def test_a_job_killed_in_the_middle_of_a_kernel_publishes_nothing(triton, server, fresh):
    killed = triton.start(
        "killed", "kernels", namespace=fresh, lease_seconds=2, variables={"ASSEMBLER_DIES": "1"}
    )
    assert killed.status() == -signal.SIGKILL
    written = {path.suffix for path in (triton.directory / "killed").glob("triton/*/scaled_add.*")}
    assert ".ptx" in written
    assert ".cubin" not in written
    assert server.stats(fresh)["artifacts"] == 0
    after = triton.run("killed", "kernels", namespace=fresh, lease_seconds=2)
    assert after.stats["misses"] == after.stats["published"] == 1
    assert after.stats["fallbacks"] == {}


@pytest.mark.extended
def test_a_compilation_that_fails_holds_no_lease_while_the_job_goes_on(triton, server, fresh):
    go = triton.directory / "go"
    running = triton.start("failing", "failing", {"go": go}, namespace=fresh)
    until(lambda: go.with_suffix(".failed").exists() or running.ended())
    until(lambda: server.leases_held() == 0)
    assert not running.ended()
    assert go.with_suffix(".compiling").read_text() == "1"
    go.touch()
    outcome = running.finish()
    assert outcome.report["error"] == "this kernel cannot be compiled"
    assert outcome.stats["published"] == 1


@pytest.mark.extended
def test_uninstall_restores_triton(triton, server, fresh):
    outcome = triton.run("uninstalled", "uninstalled", namespace=fresh)
    assert outcome.report["manager"] == "SharedCacheManager"
    assert outcome.report["compile"] == ["triton"]  # the hook's folder
    assert outcome.report["uninstalled"] == {
        "manager": "FileCacheManager",
        "compile": ["compiler"],
    }
    assert outcome.report["ptxas"] == 2
    assert server.stats(fresh)["artifacts"] == 1


@pytest.mark.extended
def test_cache_manager_of_user_is_kept(triton, server, fresh):
    own = {"TRITON_CACHE_MANAGER": OWN_MANAGER}
    outcome = triton.run("own", "kernels", namespace=fresh, variables=own, under="graphstash run")
    assert outcome.errors.count(f"{OWN_MANAGER}, so kernels are not shared") == 1
    assert outcome.report["manager"] == "OwnManager"
    assert outcome.report["ptxas"] == 1
    assert outcome.stats == {}
    assert server.stats(fresh)["puts"] == 0


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

    def test_kernels_of_the_job_differ(self, cold):
        assert cold.report["version"] == self.version
        assert len({kernel["cubin"] for kernel in cold.report["kernels"]}) == KERNELS

    @pytest.mark.usefixtures("cold", "warm")
    def test_loaded_files_equal_files_of_a_compilation(self, hosts):
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

        compiled = files("cold")
        assert sum(name.startswith("__grp__") for _, name in compiled) == KERNELS
        assert files("warm") == compiled


@pytest.mark.extended
class TestNewestTriton(TestTriton):
    version = "3.9.0"

"""A hook in another package keeps the contract of all hooks, against a real server.

docs/hooks.md builds the package, and an installer puts it beside graphstash.
"""

import subprocess
import sys

import pytest
from snippets import read

from support.compiler_jobs import CompilerJobs
from support.hook_contract import HookContract
from support.processes import graphstash, graphstash_here
from support.waiting import PATIENT_VARIABLES


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder for sys.path that contains the installed package."""
    project, site = tmp_path_factory.mktemp("toycc"), tmp_path_factory.mktemp("site")
    for snippet in read("docs/hooks.md").snippets:
        if snippet.title:
            (project / snippet.title).write_text(snippet.complete)
    uv = [sys.executable, "-m", "uv", "--quiet", "pip", "install", "--python", sys.executable]
    own = ["--no-deps", "--no-build-isolation", "--target", str(site), str(project)]
    subprocess.run([*uv, *own], check=True)
    return site


@pytest.fixture(scope="module", autouse=True)
def _installed(site):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        yield


class TestToycc(HookContract):
    case = "toycc_programs:programs"
    programs = 2
    package = "toycc"

    @classmethod
    def open(cls, directory, **settings):
        return CompilerJobs(directory, **{"under": "fork:toycc"} | settings)

    def compiled(self, outcome):
        return outcome.report["compiled"]

    def result(self, outcome):
        assert outcome.report["results"] == [42, 43]
        return outcome.report["results"]

    def test_its_artifacts_are_listed_by_their_kind(self, hosts, cold, server, namespace):
        variables = {"GRAPHSTASH_URL": server.url, "GRAPHSTASH_NAMESPACE": namespace}
        listing = graphstash_here("ls", "--kind", "plugin", **variables, **PATIENT_VARIABLES)
        assert listing.stdout.count("plugin") == cold.stats["published"]

    @pytest.mark.parametrize(("hooks", "is_wanted"), [("toycc", True), ("jax,triton", False)])
    def test_setting_selects_it(self, hosts, cold, hooks, is_wanted):
        settings = {"hooks": hooks, "under": "graphstash run"}
        outcome = self.run(hosts, f"selected-{is_wanted}", **settings)
        assert outcome.hits == (2 if is_wanted else 0)
        assert self.compiled(outcome) == (0 if is_wanted else 2)
        assert "unknown hook" not in outcome.errors


@pytest.mark.parametrize(
    ("hooks", "text"),
    [("", "toycc 1.0 (supported: 1)"), ("jax", "disabled by GRAPHSTASH_HOOKS (toycc 1.0")],
)
def test_doctor_lists_it(hooks, text):
    variables = {"GRAPHSTASH_URL": "none"} | ({"GRAPHSTASH_HOOKS": hooks} if hooks else {})
    (line,) = [
        line for line in graphstash("doctor", **variables).stdout.splitlines() if "toycc" in line
    ]
    assert text in line

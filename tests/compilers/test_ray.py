"""Workers of a real Ray cluster share what they compile, as docs/quick-start/clusters.md shows."""

import ast
from types import SimpleNamespace

import pytest
from snippets import read

from support.compiler_jobs import CompilerJobs
from support.ports import reserved_port
from support.tokens import Guarded
from support.waiting import PATIENT_VARIABLES

pytestmark = pytest.mark.extended

STEP = '"jit_step"'


def variables_of_the_page():
    """Return the variables that the page gives to Ray's workers."""
    snippets = read("docs/quick-start/clusters.md").snippets
    (code,) = (each.code for each in snippets if each.title == "train_ray.py")
    tables = (each for each in ast.walk(ast.parse(code)) if isinstance(each, ast.Dict))
    pairs = [pair for table in tables for pair in zip(table.keys, table.values, strict=True)]
    (found,) = (value for key, value in pairs if ast.literal_eval(key) == "env_vars")
    return ast.literal_eval(found)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    with (
        Guarded(folder / "server") as guarded,
        CompilerJobs(folder, cases="ray_jobs", environment="ray", under="python") as jobs,
    ):
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(guarded.token("write:default"))
        page = PATIENT_VARIABLES | variables_of_the_page()
        page |= {"GRAPHSTASH_URL": guarded.url, "GRAPHSTASH_TOKEN_FILE": str(token)}
        rounds = [
            (workers, page | {"GRAPHSTASH_CACHE_DIR": str(folder / tier)} | more)
            for tier, workers, more in (
                ("first", 2, {}),
                ("second", 1, {}),
                ("third", 1, {"GRAPHSTASH_URL": f"http://127.0.0.1:{reserved_port()}"}),
                ("fourth", 1, {"GRAPHSTASH_AUTOLOAD": "0"}),
            )
        ]
        report = jobs.run("host", "trained", {"rounds": rounds, "token": token}).report
        names = ("cold", "warm", "gone", "off")
        yield SimpleNamespace(
            leaks=report["leaks"], **dict(zip(names, report["rounds"], strict=True))
        )


def test_two_workers_compile_a_step_once(trained):
    assert len({each["process"] for each in trained.cold}) == 2
    assert sum(each["compiled"].count(STEP) for each in trained.cold) == 1


def test_worker_of_another_cluster_finds_all_programs(trained):
    assert [each["compiled"] for each in trained.warm] == [[]]
    assert all(each["hits"] > 0 and not each["fallbacks"] for each in trained.warm)


def test_workers_continue_without_the_server(trained):
    assert all(each["compiled"] and each["fallbacks"] for each in trained.gone)


def test_workers_without_the_variable_have_no_cache(trained):
    assert all(each["compiled"] and not each["has_client"] for each in trained.off)


def test_losses_are_equal_with_and_without_the_cache(trained):
    rounds = (*trained.cold, *trained.warm, *trained.gone, *trained.off)
    assert {tuple(each["losses"]) for each in rounds} == {tuple(trained.off[0]["losses"])}


def test_ray_stores_no_token(trained):
    assert trained.leaks == []

"""Two hosts of one team compile the same matrix products with max-autotune, on CPUs."""

import pytest

from support.compiler_jobs import CompilerJobs

JOBS = {
    "under": "inductor",
    "cases": "inductor_products",
    "variables": {"TORCHINDUCTOR_CACHE_DIR": "HOST/inductor"},
}
LIBRARY, CPP = "bmm", "cpp_CppMicroGemmFP32Vec"
BEST = "mm 32 16 32 5"


@pytest.fixture(scope="module")
def hosts(jobs, server, tmp_path_factory):
    """A first host, and a second host with the same products in other graphs."""
    settings = {"url": server.url, "namespace": "inductor-products", "environment": "torch-newest"}
    directory = tmp_path_factory.mktemp("hosts")
    with CompilerJobs(directory, jobs=jobs, **settings, **JOBS) as team:
        always = {"has_triton": True, "fastest": [CPP, BEST]}
        first = team.run("first", "products", always)
        other = always | {"views": 1, "refuse": CPP, "is_broken": True}
        yield first, team.run("second", "products", other)


@pytest.mark.extended
def test_a_team_measures_a_product_once(hosts):
    first, second = (each.report["product"] for each in hosts)
    assert hosts[0].report["version"].startswith("2.15")
    assert sorted(first["measured"]) == [LIBRARY, CPP]
    assert second["measured"] == []
    assert first["chosen"] == second["chosen"] == CPP
    assert hosts[0].stats["fallbacks"] == {}


@pytest.mark.extended
def test_schedule_that_no_longer_compiles_is_dropped_and_counted(hosts):
    _, second = hosts
    assert second.report["refused"]["chosen"] == LIBRARY
    assert second.report["refused"]["measured"].count(CPP) <= 1
    assert second.stats["fallbacks"]["rejected"] == 1


@pytest.mark.extended
def test_torch_measures_alone_after_failure_of_team_memory(hosts):
    _, second = hosts
    broken = second.report["broken"]
    assert set(broken["measured"]) == set(broken["generated"])
    assert broken["chosen"] == "mm"  # the first candidate, because all times are equal
    assert second.stats["fallbacks"] == {"rejected": 1, "internal": 2}  # the table, the answer
    assert second.errors.count("is tuned without the team") == 1  # only the first failure is logged
    assert "Traceback" not in second.errors


@pytest.mark.extended
def test_no_code_is_generated_for_slow_candidates(hosts):
    first, second = (each.report["triton"] for each in hosts)
    assert first["chosen"] == second["chosen"] == BEST
    assert set(first["measured"]) == set(first["generated"])
    assert second["measured"] == []
    assert set(second["generated"]) < set(first["generated"])
    assert "mm" in second["generated"]  # the library's kernel


@pytest.mark.extended
def test_installing_keeps_settings_of_user(hosts):
    for each in hosts:
        assert each.report["is_one"]  # a second installation returns the first
        assert each.report["by_hand"] == ["ByHand", "ByHand"]
        assert each.report["is_refused"]
        assert each.errors.count("does not implement uuid()") == 1


@pytest.mark.extended
def test_closing_restores_torch(hosts):
    assert all(each.report["is_taken_out"] for each in hosts)


def test_torch_without_lookup_table_is_reported_and_tunes_alone(jobs, server, namespace, tmp_path):
    settings = {"url": server.url, "namespace": namespace}
    with CompilerJobs(tmp_path, jobs=jobs, **settings, **JOBS) as team:
        job = team.run("host", "products")
    assert not job.report["is_installed"]
    assert job.errors.count("what its max-autotune measures is not shared") == 1

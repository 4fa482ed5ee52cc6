"""Hosts of one team call one Helion kernel, which Helion really tunes, on a CPU."""

import pytest

from support.compiler_jobs import CompilerJobs

BAD = [
    *("", "\x80", "[]", "null", "{}", "[" * 100_000),
    '{"config": "{}", "key": {"fields": {}}}',
    '{"config": "[1]", "key": {"fields": {}}}',
    '{"config": {"block_sizes": [1]}, "key": {"fields": {}}}',
    '{"config": "{\\"block_sizes\\": [1]}", "key": []}',
    '{"config": "{\\"block_sizes\\": [1]}", "key": {"fields": {}}, "cute_structural_policy": 7}',
]
# A configuration needs two powers of two.
UNFIT = ["[7, 64]", "[32]", '[\\"evil\\", 64]', "[-1, 64]"]
BAD += [
    f'{{"config": "{{\\"block_sizes\\": {each}}}", "key": {{"fields": {{}}}}}}' for each in UNFIT
]

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def hosts(jobs, server, tmp_path_factory):
    """Three hosts: one tunes and publishes, one follows it, and one tunes without the team."""
    settings = {"url": server.url, "namespace": "helion-kernels", "under": "helion"}
    settings |= {"cases": "helion_kernels", "environment": "helion", "hooks": ""}
    settings["variables"] = {
        "HELION_CACHE_DIR": "HOST/helion",
        "HELION_PALLAS_INTERPRET": "1",
        "HELION_REMOTE_CACHE_BACKEND": "graphstash.tuning.targets.helion.TeamBackend",
        "JAX_PLATFORMS": "cpu",
    }
    with CompilerJobs(tmp_path_factory.mktemp("hosts"), jobs=jobs, **settings) as team:
        first = team.run("first", "tuned", {"plant": BAD})
        second = team.run("second", "tuned", {"planted": len(BAD)})
        yield first, second, team.run("third", "tuned", {"is_broken": True})


def test_a_team_tunes_a_kernel_once(hosts):
    first, second, _ = hosts
    assert first.report["measured"] == 2
    assert second.report["measured"] == 0
    assert second.report["chosen"] == first.report["chosen"]
    assert first.report["is_right"]
    assert second.report["is_right"]
    assert first.stats["fallbacks"] == {}


def test_search_begins_at_findings_of_the_team(hosts):
    first, second, _ = hosts
    assert first.report["similar"] == []
    rows, columns, *_ = (*second.report["similar"][0],)
    assert [rows, columns] == second.report["chosen"]["block_sizes"]


def test_entry_that_helion_cannot_read_is_counted_and_withheld(hosts):
    _, second, _ = hosts
    assert second.report["found"] == [None] * len(BAD)
    assert second.stats["fallbacks"].pop("rejected") == len(BAD)
    assert set(second.stats["fallbacks"]) <= {"corrupt"}  # `list` also reads the unfit entries


def test_kernel_is_tuned_without_the_team_after_failure(hosts):
    _, _, third = hosts
    assert third.report["measured"] == 2
    assert third.report["is_right"]
    assert third.stats["fallbacks"] == {"internal": 3}  # `list`, `get` and `put`

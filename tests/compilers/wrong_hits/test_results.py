"""A program computes the same result with another program's artifacts as without a cache."""

import importlib

import pytest

from compilers.wrong_hits.hosts import Host
from compilers.wrong_hits.pairs import Relation
from compilers.wrong_hits.triton import WITH_ASSEMBLER


@pytest.mark.extended
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "environment"), [("jax", "")])
def test_program_beside_artifacts_of_another_computes_the_same_bits(name, environment, tmp_path):
    wrong, served = [], 0
    with Host(name, tmp_path / "host", seed=1, environment=environment) as host:
        for number, pair in enumerate(
            importlib.import_module(f"compilers.wrong_hits.{name}").PAIRS
        ):
            tier = tmp_path / f"{number}"
            host.run(pair.a, tier)
            ran = host.run(pair.b, tier)
            if ran.result != host.run(pair.b, None).result:
                wrong.append(pair.name)
            served += ran.hits > 0 and pair.relation is Relation.EQUAL
    assert wrong == []
    assert served > 0


@pytest.mark.parametrize(("change", "hits"), [("", 1), ('echo "# another" >> "$0"', 0)])
def test_kernel_is_not_published_if_its_assembler_changes_meanwhile(change, hits, tmp_path):
    program = WITH_ASSEMBLER.replace("CHANGE", change)
    with Host("triton", tmp_path / "host", seed=1) as host:
        host.run(program, tmp_path / "tier")
        assert host.run(program, tmp_path / "tier").hits == hits

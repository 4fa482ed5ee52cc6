"""Two programs share a key if they compile to the same executable, and never otherwise."""

import importlib
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from compilers.wrong_hits.hosts import PairOfHosts
from compilers.wrong_hits.pairs import Relation

COMPILERS = ("inductor", "jax", "triton", "torch_xla", "pjrt")
FORKED = ("inductor", "jax", "triton")
"""Compilers whose imports neither read nor set a variable of `prepare` that a key contains."""
PRESENT = [name for name in COMPILERS if Path(__file__).with_name(f"{name}.py").exists()]


def cases():
    """Return each pair in its versions (`Pair.is_extended`). Those outside `.venv` are extended."""
    found = []
    for name in PRESENT:
        compiler = importlib.import_module(f"compilers.wrong_hits.{name}")
        for version, environment in compiler.VERSIONS.items():
            for each in compiler.PAIRS:
                if environment and each.is_extended:
                    continue
                if each.only_in not in (None, environment):
                    continue
                marks = [pytest.mark.extended] if environment or each.is_extended else []
                identity = f"{name}-{version}-{each}"
                found.append(pytest.param(name, environment, each, id=identity, marks=marks))
    return found


@pytest.fixture(scope="module")
def hosts_of(request, tmp_path_factory, jobs, is_extended):
    """Return a function that starts two hosts of a compiler's version, once per version.

    Tests in random order return to a version. On both hosts, the programs of some pairs run in one
    process, in opposite orders, so a key that depended on earlier programs would differ.
    """
    chosen = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and "pair" in item.callspec.params
    ]
    with ExitStack() as stack:
        running = {}

        def hosts_of(name, environment):
            if (name, environment) not in running:
                hosts = PairOfHosts(
                    name,
                    tmp_path_factory.mktemp(name),
                    environment=environment,
                    zygote=jobs.zygote(name) if name in FORKED and not is_extended else None,
                )
                running[name, environment] = stack.enter_context(hosts)
                pairs = [
                    each["pair"]
                    for each in chosen
                    if (each["name"], each["environment"]) == (name, environment)
                ]
                hosts.ask_in_one_process(each for each in pairs if each.in_one_process)
            return running[name, environment]

        yield hosts_of


@pytest.mark.parametrize(("name", "environment", "pair"), cases())
def test_keys_of_pair_are_related_as_stated(hosts_of, is_extended, name, environment, pair):
    """In `make test`, a program with a process of its own runs on two hosts only if both programs
    must have one key.
    """
    hosts = hosts_of(name, environment)
    other = hosts.other.ask(pair.b)
    if pair.relation is Relation.UNSHARED:
        assert other.key == ""
        assert re.search(pair.reason, other.unshared)
        return
    is_on_two_hosts = is_extended or pair.in_one_process or pair.relation is Relation.EQUAL
    here = (hosts.one if is_on_two_hosts else hosts.other).ask(pair.a)
    assert here.unshared == other.unshared == ""
    if pair.relation is Relation.EQUAL:
        assert here.key == other.key
    else:
        assert here.key == hosts.other.ask(pair.a).key != other.key


@pytest.mark.parametrize("name", PRESENT)
def test_names_of_pairs_are_unique(name):
    names = [each.name for each in importlib.import_module(f"compilers.wrong_hits.{name}").PAIRS]
    assert len(names) == len(set(names))

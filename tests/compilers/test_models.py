"""Models of the libraries that people train with, which no hook was written for: every second host
compiles nothing and computes the same. `support.cases.models` has the models.

Each test prints a line of a table: `pytest --extended -rP tests/compilers/test_models.py`.
"""

import resource
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest

from support.compiler_jobs import CompilerJobs, InductorJobs, JaxJobs, TritonJobs
from support.jobs import Outcome

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]


class Pair(NamedTuple):
    """The same job on a host where nothing is, and on another one."""

    cold: Outcome
    warm: Outcome


@pytest.fixture
def run(server, namespace, tmp_path):
    """Runs a case cold and warm, and prints what that took."""

    def run(
        make: Callable[..., CompilerJobs],
        environment: str,
        case: str,
        *,
        plug_in: bool = False,
        cases: str = "models",
        **settings: str,
    ) -> Pair:
        settings |= {"url": server.url, "namespace": namespace, "environment": environment}
        settings |= {"under": "graphstash run", "cases": cases}
        keywords = {"plug_in": True} if plug_in else {}
        with make(tmp_path / "jobs", **settings) as jobs:

            def job(host):
                return jobs.run(host, case, keywords)

            used = [_measured(job, host) for host in "ab"]
            objects = [len(jobs.compiled(host)) if make is _inductor else 0 for host in "ab"]
        for (outcome, cpu, wall), built, name in zip(used, objects, ("cold", "warm"), strict=True):
            print(
                f"{environment} {case} {name}: {cpu:.1f} s of CPU, {wall:.1f} s, "
                f"{outcome.stats['misses']} misses, {outcome.hits} hits, {built} runs of g++"
            )
        pair = Pair(used[0][0], used[1][0])
        assert pair.cold.stats["misses"] >= pair.cold.stats["published"] > 0
        assert pair.cold.stats["fallbacks"] == pair.warm.stats["fallbacks"] == {}
        assert pair.warm.stats["published"] == 0
        assert pair.warm.report["losses"] == pair.cold.report["losses"]
        assert objects[1] == 0
        return pair

    return run


def _measured(job, host):
    """Its outcome, and the seconds that it and its children took."""

    def cpu_seconds():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    cpu, wall = cpu_seconds(), time.monotonic()
    return job(host), cpu_seconds() - cpu, time.monotonic() - wall


def _inductor(directory, **settings):
    return InductorJobs(directory, "2.7.0", **settings)


def test_an_image_classifier_of_torchvision_compiles_once_on_torch_xla(run):
    pair = run(CompilerJobs, "models-oldest", "resnet18", hooks="torch_xla")
    assert pair.cold.report["compiles"] == pair.cold.stats["published"] >= 2
    assert pair.warm.report["compiles"] == pair.warm.stats["misses"] == 0
    assert pair.warm.hits == pair.cold.stats["published"]


def test_an_image_classifier_of_torchvision_compiles_once_on_a_plug_in(run):
    pair = run(CompilerJobs, "models-newest", "resnet18", plug_in=True, hooks="pjrt")
    assert pair.cold.report["compiles"] == pair.cold.stats["published"] >= 2
    assert pair.warm.stats["misses"] == 0
    assert pair.warm.hits == pair.warm.report["compiles"] == pair.cold.stats["published"]


def test_flax_compiles_once_on_jax(run):
    pair = run(JaxJobs, "models-oldest", "flax_cnn")
    assert pair.cold.report["compiles"] == pair.cold.stats["misses"] >= 10
    assert pair.warm.report["compiles"] == pair.warm.stats["misses"] == 0


def test_flax_compiles_once_on_a_plug_in(run):
    pair = run(JaxJobs, "models-newest", "flax_cnn", plug_in=True, hooks="pjrt")
    assert pair.cold.report["compiles"] == pair.cold.stats["misses"] >= 10
    assert pair.warm.stats["misses"] == 0
    assert pair.warm.hits == pair.warm.report["compiles"]


@pytest.mark.parametrize(("model", "bypassed"), [("gpt2", 1), ("llama", 0)])
def test_models_of_hugging_face_compile_once(run, model, bypassed):
    """What torch's AOTAutograd cache bypasses is traced again on every host, with or without this
    cache ("Cannot cache a graph with functional tensor" in torch 2.7); nothing is compiled again.
    """
    pair = run(_inductor, "models-oldest", model)
    assert pair.cold.report["compiles"] >= 2
    assert pair.warm.report["compiles"] == 0  # of Inductor; g++ is counted by the host
    assert pair.warm.stats["misses"] == bypassed
    assert pair.warm.report["bypassed"] == bypassed


def test_the_kernels_of_liger_compile_once(run):
    triton = partial(TritonJobs, version="3.9.0")
    pair = run(triton, "frameworks", "kernels", cases="liger")
    assert pair.cold.report["ptxas"] == pair.cold.stats["published"] >= 5
    assert pair.warm.report["ptxas"] == pair.warm.stats["misses"] == 0
    assert pair.warm.hits == pair.cold.stats["published"]

"""Promise: `graphstash explain` names the cause of a miss, and never a wrong one.

Real compilers run each pair of `support/causes`.
"""

import re
from types import MappingProxyType

import pytest

from support.environments import packages_of
from support.explained import causes_of_compiler, grade, sentences_in
from support.processes import graphstash_here
from support.server import Server
from support.waiting import PATIENT_VARIABLES

LIBRARY = packages_of("") / "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"
COMPILERS = {
    "jax": ("jax", {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}),
    "torch": ("inductor", {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}),
    "torch_xla": ("torch_xla", {}),
    "triton": ("triton", {}),
    "pjrt": ("pjrt", {"PJRT_NAMES_AND_LIBRARY_PATHS": f"other:{LIBRARY}"}),
}
LABELS = {
    "jax": "jit(train_step)",
    "torch": "train.py:",
    "torch_xla": "train.py:",
    "triton": "scale",
    "pjrt": "jit(train_step)",
}
ON_PLUG_IN = """
import jax

jax.config.update("jax_platforms", "other")
jax.config.update("jax_traceback_in_locations_limit", 0)
"""


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """A server without artifacts of other tests: an explanation may name any that it stores."""
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


SMALL_PROGRAMS = """
import sys
from pathlib import Path

import jax.numpy as jnp

from graphstash._compile import packs

packs.MAX_PACKED_SECONDS = 1e9  # however busy this machine is
x = jnp.full((4,), 2.0)
print((x * 3).sum(), (x - 1).max(), jnp.tanh(x))
Path(sys.argv[1]).write_text("{}")
"""


def explained(script, *, compiler, url, jobs, host, changed=MappingProxyType({}), **settings):
    """Run a script on a host of its own. Return the run, and a function for `explain`."""
    hook, variables = COMPILERS[compiler]
    host.mkdir()
    (host / "train.py").write_text(script)
    own = {
        "TORCHINDUCTOR_CACHE_DIR": str(host / "inductor"),
        "TRITON_CACHE_DIR": str(host / "triton"),
    }
    settings = {"url": url, "namespace": compiler.replace("_", "-"), "hooks": hook} | settings
    ran = jobs.start(
        host,
        script=host / "train.py",
        under=f"fork:{hook}",
        variables=variables | own | dict(changed),
        **settings,
    ).finish()
    asked = PATIENT_VARIABLES | {
        "GRAPHSTASH_URL": url,
        "GRAPHSTASH_CACHE_DIR": host / "tier",
        "GRAPHSTASH_NAMESPACE": settings["namespace"],
    }
    return ran, lambda *options: graphstash_here("explain", *options, check=True, **asked).stdout


@pytest.fixture
def assert_named(jobs, team, tmp_path):
    """Runs the scripts of causes, one after the other; compares what `explain` says of each."""

    def assert_named(causes, *, compiler, before="", **settings):
        grades = {}
        for number, cause in enumerate(causes):
            _, explain = explained(
                before + cause.script,
                compiler=compiler,
                url=team.url,
                jobs=jobs,
                host=tmp_path / str(number),
                changed=cause.variables,
                **settings,
            )
            explanation = explain("--json")
            sentences = sentences_in(explanation)
            given = grade(cause, sentences) if sentences else "no miss"
            print(given, compiler, cause.name, sentences, sep="\t")  # shown with -rP
            if given != cause.expected:
                grades[cause.name] = (given, sentences)
            if number == 0:
                assert LABELS[compiler] in explanation
        assert grades == {}

    return assert_named


@pytest.mark.parametrize(
    "compiler",
    ["jax", *(pytest.param(name, marks=pytest.mark.extended) for name in [*COMPILERS][1:-1])],
)
def test_cause_of_each_miss_is_named(assert_named, is_extended, compiler):
    first, *others = causes_of_compiler(compiler)
    causes = [first, *(each for each in others if each.is_light or is_extended)]
    assert_named(causes, compiler=compiler)


@pytest.mark.extended
def test_flag_is_named_on_a_plug_in(assert_named):
    named = {"first run", "flag"}
    causes = [each for each in causes_of_compiler("jax") if each.name in named]
    assert_named(causes, compiler="pjrt", before=ON_PLUG_IN)


def test_small_programs_count_as_in_the_summary_and_are_explained(jobs, tmp_path, namespace):
    def run(host, **changed):
        ran, explain = explained(
            SMALL_PROGRAMS,
            compiler="jax",
            url=server.url,
            jobs=jobs,
            host=tmp_path / host,
            changed=changed,
            namespace=namespace,
            job=namespace,
        )
        explanation = explain()
        misses = ran.stats["misses"]
        assert misses > 3
        assert f": 0 hits, {misses} misses\n" in explanation
        groups = re.findall(r"^(\d+) miss(?:es)?: (.*)$", explanation, re.MULTILINE)
        assert sum(int(count) for count, _ in groups) == misses
        return [cause for _, cause in groups]

    # A server of their own: any similar artifact would be named as their relative.
    with Server(tmp_path / "server") as server:
        assert run("first") == ["new small program: no pack of this job has it"]
        flag = "--xla_cpu_enable_fast_math=true"
        assert run("flag", XLA_FLAGS=flag) == [f"XLA_FLAGS: {flag} here, not set there"]


def test_hook_that_is_off_is_named(jobs, team, tmp_path, namespace):
    script = next(causes_of_compiler("jax")).script
    _, explain = explained(
        script,
        compiler="jax",
        url=team.url,
        jobs=jobs,
        host=tmp_path / "host",
        namespace=namespace,
        hooks="triton",
    )
    assert "the hook jax is off (GRAPHSTASH_HOOKS)\n" in explain()

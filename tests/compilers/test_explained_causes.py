"""Promise: `graphstash explain` names the cause of a miss, and never a wrong cause.

Real compilers run the causes of `support/causes`. Each cause is a pair of runs: an edit of the
first run's script, or a variable, precedes the second run on another host. All runs of a compiler
share a namespace, as in a team.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

import pytest

from support.environments import packages_of
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


Grade: TypeAlias = Literal["right", "vague", "wrong"]

CAUSES = Path(__file__).parents[1] / "support" / "causes"

NAMED = re.compile(r"\bhere, .* there\b|which was not read|^other \w+")
"""Pattern of sentences that name a cause instead of a mere difference."""


@dataclass(frozen=True)
class Cause:
    """One change between two runs.

    Attributes:
        script: text of the script after the change.
        variables: environment variables that the change adds.
        says: words of the right sentence.
        also: words of true sentences about consequences of the change.
        hides: words that no sentence may contain.
        expected: the grade: "vague" if the compiler does not reveal the change.
        is_light: whether `make test` also runs the cause.
    """

    name: str
    script: str
    variables: Mapping[str, str]
    says: Sequence[str]
    also: Sequence[str]
    hides: Sequence[str]
    expected: Grade
    is_light: bool


def causes_of_compiler(name: str) -> Iterator[Cause]:
    """Yield the causes of a compiler. The first cause runs the unchanged script."""
    read = tomllib.loads((CAUSES / f"{name}.toml").read_text("utf-8"))
    for each in read["cause"]:
        script = read["program"]
        for old, new in each.get("edit", ()):
            assert old in script, f"{name}: {each['name']} edits text that is not there: {old}"
            script = script.replace(old, new)
        yield Cause(
            each["name"],
            script,
            each.get("variables", {}),
            each["says"],
            each.get("also", ()),
            each.get("hides", ()),
            each.get("expected", "right"),
            each.get("is_light", False),
        )


def grade(cause: Cause, sentences: Sequence[str]) -> Grade:
    """Return the grade of an explanation. One wrong sentence makes the explanation wrong."""
    fragments = [part for sentence in sentences for part in re.split(r"; ", sentence)]
    named = [part for part in fragments if NAMED.search(part)]
    if any(word in part for part in fragments for word in cause.hides):
        return "wrong"
    if any(not any(word in part for word in (*cause.says, *cause.also)) for part in named):
        return "wrong"
    is_said = any(all(word in sentence for word in cause.says) for sentence in sentences)
    return "right" if is_said else "vague"


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """A server without artifacts of other tests, because an explanation may name any artifact."""
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
    """Return a function that runs causes in turn and compares the explanations with the grades."""

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
            sentences = [each["cause"] for each in json.loads(explanation)]
            given = grade(cause, sentences) if sentences else "no miss"
            print(given, compiler, cause.name, sentences, sep="\t")  # displayed with -rP
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

    # On a shared server, an explanation would name any similar artifact.
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

"""Promise: `graphstash explain` names the cause of a miss, and never a wrong one.

Real compilers run each pair of `support/causes`.
"""

import pytest

from support.explained import causes_of_compiler, grade, sentences_in
from support.processes import graphstash_here
from support.server import Server

COMPILERS = {
    "jax": ("jax", {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}),
    "torch": ("inductor", {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}),
    "torch_xla": ("torch_xla", {}),
    "triton": ("triton", {}),
}


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """A server without artifacts of other tests: an explanation may name any that it stores."""
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


def explained(cause, *, compiler, url, jobs, host):
    """Run the script of a cause on a host of its own. Return what `graphstash explain` says."""
    hook, variables = COMPILERS[compiler]
    host.mkdir()
    script = host / "train.py"
    script.write_text(cause.script)
    own = {
        "TORCHINDUCTOR_CACHE_DIR": str(host / "inductor"),
        "TRITON_CACHE_DIR": str(host / "triton"),
    }
    settings = {"url": url, "namespace": compiler.replace("_", "-"), "hooks": hook}
    running = jobs.start(
        host,
        script=script,
        under=f"fork:{hook}",
        variables=variables | own | dict(cause.variables),
        **settings,
    )
    running.finish()
    asked = {
        "GRAPHSTASH_URL": url,
        "GRAPHSTASH_CACHE_DIR": host / "tier",
        "GRAPHSTASH_NAMESPACE": settings["namespace"],
    }
    return sentences_in(graphstash_here("explain", "--json", check=True, **asked).stdout)


@pytest.mark.parametrize(
    "compiler",
    ["jax", *(pytest.param(name, marks=pytest.mark.extended) for name in [*COMPILERS][1:])],
)
def test_cause_of_each_miss_is_named(jobs, team, tmp_path, is_extended, compiler):
    grades = {}
    for number, cause in enumerate(causes_of_compiler(compiler)):
        if number and not (cause.is_light or is_extended):
            continue
        told = explained(
            cause, compiler=compiler, url=team.url, jobs=jobs, host=tmp_path / str(number)
        )
        given = grade(cause, told) if told else "no miss"
        print(given, compiler, cause.name, told, sep="\t")  # shown with -rP
        if given != cause.expected:
            grades[cause.name] = (given, told)
    assert grades == {}

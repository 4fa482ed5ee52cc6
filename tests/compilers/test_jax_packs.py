"""Jobs of many small programs: which programs are small, and the requests that they cost."""

import pytest

from support.fault_proxy import FaultProxy
from support.tiers import most_extended

VERSIONS = most_extended(["", "jax-oldest"], quick=[""])

MANY = """
    import jax
    import numpy
    import graphstash
    from graphstash._compile import packs

    packs.MAX_PACKED_SECONDS = 1e9  # however busy this machine is
    graphstash.install()
    x = numpy.arange(8.0)
    for number in range(30):
        jax.jit(lambda x: (x * number + 1).sum())(x)
    stats = graphstash.stats()
    print(stats.hits, stats.misses, stats.fallbacks)
    """

LOOKS = """
    import jax
    import numpy
    from jax import numpy as jnp
    from graphstash.hooks.jax import compiling
    from graphstash.hooks.jax.smallness import is_small

    def look(module):
        looks.append(is_small(module))
        return looks[-1]

    compiling.is_small = look
    compiling.ProgramTracker(lambda: None, lambda *_: True, print)
    x = numpy.ones((4, 4), numpy.float32)

    def loop(x):
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: y * 2, x)

    def many(x):
        for number in range(20):
            x = jnp.sin(x) * number
        return x

    for name, function in {
        "sum": lambda x: (x + 1).sum(),
        "norm": lambda x: jnp.sqrt((x * x).sum()),
        "product": lambda x: x @ x,
        "sort": lambda x: jnp.sort(x),
        "loop": loop,
        "many": many,
        "large constant": lambda x: x + jnp.arange(2.0**21).sum(),
    }.items():
        looks = []
        jax.jit(function)(x)
        print(name, looks[-1])
    looks = []
    jax.jit(lambda x: x * 2)(numpy.ones(2**21, numpy.float32))
    print("large argument", looks[-1])
    jax.random.PRNGKey(0)
    print("seed", looks[-1])
    """


@pytest.mark.extended
@pytest.mark.parametrize("environment", VERSIONS)
def test_thirty_small_programs_cost_a_job_four_requests(
    jax_program, server, namespace, environment
):
    def run(host, url):
        settings = {"url": url, "namespace": namespace, "report_runs": "false"}
        settings["prefetch_limit"] = 0  # prefetching would request manifests
        settings["summary"] = "false"  # the summary would request up to four causes
        return jax_program(MANY, host=host, environment=environment, **settings)

    with FaultProxy(server.port) as proxy:  # one connection for each request
        assert run("a", proxy.url) == ["0 30 {}"]
        # The job requests the first pack before the first program and before the upload. The last
        # request describes the pack.
        assert proxy.connections == 4
        assert run("b", proxy.url) == ["30 0 {}"]
        assert proxy.connections == 5
        # For the copies on its disk, a run needs one look-up, which checks them against the server.
        assert run("b", proxy.url) == ["30 0 {}"]
        assert proxy.connections == 6
    counted = server.stats(namespace)
    assert counted["puts"] == counted["artifacts"] == 1


@pytest.mark.parametrize("environment", VERSIONS)
def test_program_with_few_quick_operations_and_no_large_constant_is_small(jax_program, environment):
    printed = jax_program(LOOKS, environment=environment)
    looks = dict(line.rsplit(" ", 1) for line in printed)
    assert looks == {
        "sum": "True",
        "norm": "True",
        "large argument": "True",
        "seed": "True",
        "product": "False",
        "sort": "False",
        "loop": "False",
        "many": "False",
        "large constant": "False",
    }

"""Measure the costs of the jax hook, compared with JAX without a cache and with its own cache.

Two jobs run in the oldest and the newest JAX: a hundred programs of a few operations, and a GPT of
4 layers. Six arms take turns in each round (`benchmarks.caches`). JAX's own cache stores every
program here, as the hook does. By default it stores only programs that took a second to compile.

CPU is user and system time of the job's process, to the end of its uploads, because noise affects
it less than wall time. (A test counts the requests.) The goals: cold within 5 % of no cache; warm
within 10 % of JAX's own cache on the same host, and 20 % on another host.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.jax_cache --rounds 5
"""

from functools import partial
from pathlib import Path

from benchmarks.caches import Caches
from benchmarks.figures import part
from support.jobs import Jobs

SCRIPT = Path(__file__).with_name("steps") / "costs_jax.py"
VERSIONS = {"JAX 0.4.31": "jax-oldest", "JAX 0.10.2": "jax-newest"}
COLUMNS = {"CPU, s": "cpu", "wall, s": "wall", "CPU with imports, s": "all_cpu"}


def main():
    with part("jax_cache", __doc__, rounds=5) as bench:
        bench.figures.note("Importing JAX and starting its backend are in `CPU with imports` only.")
        caches = Caches(bench, "JAX's own cache", COLUMNS, COLUMNS)
        for number in bench.rounds():
            for version, environment in VERSIONS.items():
                for job in ("small", "gpt"):
                    place = bench.directory / f"{number}-{environment}-{job}"
                    start = partial(run, bench.server.url, place, environment, job)
                    caches.compare(number, f"{version}, {job}", start)


def run(url, place, environment, job, host, cache):
    variables = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if cache == "own":
        variables |= {
            "JAX_COMPILATION_CACHE_DIR": str(place / "own"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    running = Jobs().start(
        place / host,
        job,
        script=SCRIPT,
        under="graphstash run" if cache == "graphstash" else "python",
        environment=environment,
        variables=variables,
        url=url,
        namespace=place.name,
        hooks="jax",
    )
    outcome = running.finish()
    return outcome.report | {"fallbacks": outcome.stats.get("fallbacks")}


if __name__ == "__main__":
    main()

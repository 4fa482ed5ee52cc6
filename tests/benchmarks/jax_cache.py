"""What the jax hook costs beside JAX without a cache and with its own persistent one.

Two jobs, in the oldest and the newest JAX: a hundred programs of a few operations, and a GPT of 4
layers. Six arms take turns in each round: no cache; JAX's own directory, and graphstash, both cold;
JAX's directory warm, graphstash warm on the same host, and as another host. JAX's own cache keeps
everything here, as the hook does (its default is what took a second to compile).

CPU is user and system time of the job's process, to the end of its uploads: noise touches it less
than clocks. (A test counts the requests.) The goals: cold within 5 % of no cache; warm within 10 %
of JAX's own cache on the same host, and 20 % as another host.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.jax_cache --rounds 5
"""

from pathlib import Path

from benchmarks.figures import Figures, options, progress, workspace
from support.jobs import Jobs
from support.server import Server

SCRIPT = Path(__file__).with_name("steps") / "costs_jax.py"
VERSIONS = {"JAX 0.4.31": "jax-oldest", "JAX 0.10.2": "jax-newest"}
BARE = "no cache"
OWN_COLD, OWN_WARM = "JAX's own cache, cold", "JAX's own cache, warm"
COLD, SAME_HOST, OTHER_HOST = (
    "graphstash, cold",
    "graphstash, warm, same host",
    "graphstash, warm, other host",
)
COLUMNS = {
    "CPU, s": "cpu",
    "wall, s": "wall",
    "CPU with imports, s": "all_cpu",
}
RATIOS = [
    (OWN_COLD, BARE),
    (COLD, BARE),
    (SAME_HOST, OWN_WARM),
    (OTHER_HOST, OWN_WARM),
]


def main():
    settings = options("jax_cache", __doc__.splitlines()[0], rounds=5)
    figures = Figures("jax_cache", {"rounds": settings.rounds})
    figures.note("Importing JAX and starting its backend are in `CPU with imports` only.")
    with (
        workspace() as directory,
        Server(directory / "server") as server,
        progress() as bar,
    ):
        task = bar.add_task("jax", total=settings.rounds * len(VERSIONS) * 2 * 6)
        for number in range(settings.rounds):
            for version, environment in VERSIONS.items():
                for job in ("small", "gpt"):
                    place = directory / f"{number}-{environment}-{job}"
                    arms = Arms(server, place, environment, job)
                    results = {}
                    for arm in arms.in_turn(number):
                        bar.update(task, description=f"{version}, {job}: {arm}")
                        results[arm] = arms.run(arm)
                        bar.advance(task)
                    measure(figures, f"{version}, {job}", results)
    figures.write(settings.output)


class Arms:
    """The six ways to run one job in one round; what is cold in it is warm later in it."""

    def __init__(self, server, directory, environment, job):
        self._jobs = Jobs()
        self._server = server
        self._directory = directory
        self._environment = environment
        self._job = job
        self._namespace = directory.name

    def in_turn(self, number):
        """Nobody is always first."""
        for arms in ([BARE, OWN_COLD, COLD], [OWN_WARM, SAME_HOST, OTHER_HOST]):
            turn = number % len(arms)
            yield from (*arms[turn:], *arms[:turn])

    def run(self, arm):
        variables = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
        if arm in (OWN_COLD, OWN_WARM):
            variables |= {
                "JAX_COMPILATION_CACHE_DIR": str(self._directory / "own"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
        hook = arm in (COLD, SAME_HOST, OTHER_HOST)
        running = self._jobs.start(
            self._directory / ("other" if arm == OTHER_HOST else "host"),
            self._job,
            script=SCRIPT,
            under="graphstash run" if hook else "python",
            environment=self._environment,
            variables=variables,
            url=self._server.url,
            namespace=self._namespace,
            hooks="jax",
        )
        outcome = running.finish()
        return outcome.report | {"fallbacks": outcome.stats.get("fallbacks")}


def measure(figures, title, results):
    for arm in (BARE, OWN_COLD, COLD, OWN_WARM, SAME_HOST, OTHER_HOST):
        for column, field in COLUMNS.items():
            figures.add(title, arm, column, results[arm][field])
        if results[arm]["fallbacks"]:
            figures.note(f"fallbacks in {title}, {arm}: {results[arm]['fallbacks']}")
    for first, second in RATIOS:
        for column, field in COLUMNS.items():
            ratio = results[first][field] / results[second][field]
            figures.add("ratios within a round", f"{title}: {first} / {second}", column, ratio)


if __name__ == "__main__":
    main()

"""The hook's promise: first steps with graphstash, with torch_xla's own cache, with none at all.

Six arms take turns: no cache; torch_xla's own directory and graphstash, both cold; torch_xla's
directory warm (the peer), graphstash warm as another host (empty local tier) and as the same host
(filled tier), which is where the peer stands. Then the steady state: 200 steps with and without the
hook, and what a settled step costs in look-ups, device reads and calls. The goal is a warm start
within 5 % of the peer's.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.hook --rounds 3
"""

from benchmarks.figures import Figures, options, progress, workspace
from benchmarks.launch import GPT, MLP, Launcher
from support.server import Server

JOBS = {"MLP": (MLP, ()), "GPT": (GPT, ("--steps", "4"))}
BARE = "no cache"
PEER_COLD, PEER_WARM = "torch_xla's cache, cold", "torch_xla's cache, warm"
COLD, OTHER_HOST, SAME_HOST = (
    "graphstash, cold",
    "graphstash, warm, other host",
    "graphstash, warm, same host",
)
COLUMNS = {
    "start, s": "begun_seconds",
    "first step, s": "first_step_seconds",
    "third step, s": "settled_seconds",
    "trained, s": "trained_seconds",
    "ended, s": "ended_seconds",
    "compiles": "compiles",
    "compiling, s": "compile_seconds",
}
RATIOS = "ratios within a round"
STEADY, WITHOUT, WITH = "MLP, a settled step", "without the hook", "with the hook"
STEADY_PAIRS = 2


def main():
    settings = options(
        "hook",
        __doc__.splitlines()[0],
        rounds=5,
        extra=[("steps", 200, "length of a steady run")],
    )
    figures = Figures("hook", {"rounds": settings.rounds, "steps": settings.steps})
    figures.note("Every job is a process; importing torch_xla (10 to 20 s) is not in any figure.")
    figures.note("start, trained, ended: since the launch; start holds the hook's installation.")
    figures.note("first and third step: since the first step began, its loss on the host.")
    figures.note("The goal: warm graphstash within 5 % of torch_xla's own cache, a ratio <= 1.05.")
    with (
        workspace() as directory,
        Server(directory / "server") as server,
        Launcher() as launcher,
    ):
        launcher.launch(MLP, directory / "first").finish()  # brings the libraries into memory
        settled = Steady(launcher, server, directory / "steady", settings.steps)
        with progress() as bar:
            task = bar.add_task("hook", total=settings.rounds * (6 * len(JOBS) + 2 * STEADY_PAIRS))
            for number in range(settings.rounds):
                for job in JOBS:
                    one_round(Arms(launcher, server, directory, job, number), figures, bar, task)
                bar.update(task, description="settled steps")
                for pair in range(STEADY_PAIRS):
                    settled.measure(figures, turned=pair % 2)
                    bar.advance(task, 2)
    figures.write(settings.output)


class Arms:
    """The six ways to run one job in one round; what is cold in it is warm later in it."""

    def __init__(self, launcher, server, directory, job, number):
        self.job = job
        self.number = number
        self._launcher = launcher
        self._directory = directory / f"{job}-{number}"
        self._own = str(self._directory / "own")
        self._stash = {
            "GRAPHSTASH_URL": server.url,
            "GRAPHSTASH_NAMESPACE": f"{job.lower()}-{number}",
        }

    def run(self, arm):
        script, choices = JOBS[self.job]
        hook = arm in (COLD, OTHER_HOST, SAME_HOST)
        extra = self._stash if hook else {}
        if arm in (PEER_COLD, PEER_WARM):
            extra = {"XLA_PERSISTENT_CACHE_PATH": self._own}
        place = self._directory / ("other" if arm == OTHER_HOST else "host")
        launched = self._launcher.launch(script, place, *choices, hook=hook, **extra)
        return launched.finish()


def one_round(arms, figures, bar, task):
    cold, warm = [BARE, PEER_COLD, COLD], [PEER_WARM, OTHER_HOST, SAME_HOST]
    turn = arms.number % 3
    results = {}
    # Nobody is always first.
    for arm in (*cold[turn:], *cold[:turn], *warm[turn:], *warm[:turn]):
        bar.update(task, description=f"{arms.job}: {arm}")
        results[arm] = arms.run(arm)
        bar.advance(task)
    title = f"{arms.job}, from launch"
    for arm in (*cold, *warm):
        for column, field in COLUMNS.items():
            figures.add(title, arm, column, results[arm][field])
        if results[arm]["losses"] != results[BARE]["losses"]:
            figures.note(f"LOSSES DIFFER: {arms.job}, {arm}")
        if results[arm]["stats"].get("fallbacks"):
            figures.note(f"fallbacks in {arms.job}, {arm}: {results[arm]['stats']['fallbacks']}")
    for first, second in (
        (SAME_HOST, PEER_WARM),
        (OTHER_HOST, PEER_WARM),
        (OTHER_HOST, COLD),
        (OTHER_HOST, BARE),
        (COLD, PEER_COLD),
        (COLD, BARE),
    ):
        for column, field in (("third step", "settled_seconds"), ("trained", "trained_seconds")):
            ratio = results[first][field] / results[second][field]
            figures.add(RATIOS, f"{first} / {second}", f"{arms.job}, {column}", ratio)


class Steady:
    """A long run without and with the hook, both with loaded graphs: only the hook differs."""

    def __init__(self, launcher, server, directory, steps):
        self._launcher = launcher
        self._directory = directory
        self._steps = ("--steps", steps, "--steady")
        self._arms = {
            WITHOUT: {"XLA_PERSISTENT_CACHE_PATH": str(directory / "own")},
            WITH: {"hook": True, "GRAPHSTASH_URL": server.url, "GRAPHSTASH_NAMESPACE": "steady"},
        }
        for arm in self._arms:
            self._run(arm)  # compiles

    def measure(self, figures, *, turned):
        """One run of each, the other way round when `turned`."""
        medians = {}
        for arm in reversed(self._arms) if turned else self._arms:
            report = self._run(arm, *self._steps)
            medians[arm] = report["step_seconds_median"]
            figures.add(STEADY, arm, "median ms", medians[arm] * 1e3)
            for column, count in report["per_step"].items():
                figures.add(STEADY, arm, column, count)
        figures.add(STEADY, "with / without", "median ms", medians[WITH] / medians[WITHOUT])

    def _run(self, arm, *choices):
        place = self._directory / arm.replace(" ", "-")
        return self._launcher.launch(MLP, place, *choices, **self._arms[arm]).finish()


if __name__ == "__main__":
    main()

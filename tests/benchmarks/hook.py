"""Compare first steps with graphstash, with torch_xla's own cache, and without a cache.

Six arms take turns (`benchmarks.caches`). Then follows the steady state: 200 steps with and without
the hook, and the look-ups, device reads and calls of a settled step. The goal is a warm start
within 5 % of torch_xla's own cache.

Jobs are forks of a Python that has imported torch_xla (`support.zygote`), because the import takes
ten to twenty seconds and is equal for every arm. All later work counts, including the installation
of the hook.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.hook --rounds 3
"""

import time
from pathlib import Path

from benchmarks.caches import Caches
from benchmarks.figures import part
from support.jobs import Jobs

MLP = Path(__file__).with_name("mlp.py")
GPT = Path(__file__).with_name("steps") / "gpt_example.py"
JOBS = {"MLP": (MLP, ()), "GPT": (GPT, ("--steps", "4"))}
COLUMNS = {
    "start, s": "begun_seconds",
    "first step, s": "first_step_seconds",
    "third step, s": "settled_seconds",
    "trained, s": "trained_seconds",
    "ended, s": "ended_seconds",
    "compiles": "compiles",
    "compiling, s": "compile_seconds",
}
STEADY, WITHOUT, WITH = "MLP, a settled step", "without the hook", "with the hook"
STEADY_PAIRS = 2


def main():
    extra = [("steps", 200, "length of a steady run")]
    with part("hook", __doc__, rounds=5, extra=extra) as bench:
        note = bench.figures.note
        note("Every job is a process; importing torch_xla (10 to 20 s) is not in any figure.")
        note("start, trained, ended: since the launch; start holds the hook's installation.")
        note("first and third step: since the first step began, its loss on the host.")
        note("The goal: warm graphstash within 5 % of torch_xla's own cache, a ratio <= 1.05.")
        jobs = Jobs()
        run(jobs, bench, MLP, "first")  # loads the libraries into memory
        caches = Caches(bench, "torch_xla's cache", COLUMNS, ("third step, s", "trained, s"))
        steady(jobs, bench)  # compiles
        for number in bench.rounds():
            for job, (script, options) in JOBS.items():
                place = f"{job}-{number}".lower()

                def start(host, cache, script=script, place=place, options=options):
                    return run(
                        jobs, bench, script, f"{place}/{host}", *options, cache=cache, team=place
                    )

                caches.compare(number, f"{job}, from launch", start)
            for pair in range(STEADY_PAIRS):
                steady(jobs, bench, steps=bench.settings.steps, turned=pair % 2)
        jobs.close()


def run(jobs, bench, script, place, *options, cache="", team="steady"):
    """Run a job to its end; return its report, times since the launch, and the cache's counters.

    Args:
        place: path of its host, below the workspace.
        cache: "graphstash", "own" or "".
        team: its namespace, and the folder of torch_xla's own cache.
    """
    return finish(*launch(jobs, bench, script, place, *options, cache=cache, team=team))


def launch(jobs, bench, script, place, *options, cache, team):
    own = {"XLA_PERSISTENT_CACHE_PATH": str(bench.directory / team / "own")}
    launched = time.time()  # this host's clock, comparable with times of files
    running = jobs.start(
        bench.directory / place,
        *options,
        script=script,
        under="fork" if cache == "graphstash" else "",
        variables=own if cache == "own" else {},
        url=bench.server.url,
        namespace=team,
    )
    return running, launched


def finish(running, launched):
    outcome = running.finish()
    trained = running.report.stat().st_mtime - launched
    ended = running.process.ended_at - launched
    return outcome.report | {
        "begun_seconds": trained - outcome.report["total_seconds"],  # its first line ran
        "trained_seconds": trained,
        "ended_seconds": ended,
        "fallbacks": outcome.stats.get("fallbacks"),
    }


def steady(jobs, bench, *, steps=None, turned=False):
    """Run a long job with loaded graphs, without and with the hook."""
    figures, medians = bench.figures, {}
    arms = {WITHOUT: "own", WITH: "graphstash"}
    for arm in reversed(arms) if turned else arms:
        options = ("--steps", steps, "--steady") if steps else ()
        report = run(jobs, bench, MLP, arm.replace(" ", "-"), *options, cache=arms[arm])
        if steps:
            medians[arm] = report["step_seconds_median"]
            figures.add(STEADY, arm, "median ms", medians[arm] * 1e3)
            for column, count in report["per_step"].items():
                figures.add(STEADY, arm, column, count)
    if steps:
        figures.add(STEADY, "with / without", "median ms", medians[WITH] / medians[WITHOUT])


if __name__ == "__main__":
    main()

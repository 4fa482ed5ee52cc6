"""The time to a job's first step: what the two figures of savings say, and what prefetching saves.

A job of JAX with 12 graphs. First it compiles them in four threads, cold and then warm on another
host, and what the stopwatch says is put beside what the cache says. Then they are needed one after
another, warm, over a link with a round trip of 50 ms, without prefetching and with it.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.first_step --rounds 3
"""

from pathlib import Path

from benchmarks.figures import Figures, options, progress, workspace
from support.jobs import Jobs
from support.server import Server
from support.slow_link import SlowLink

SCRIPT = Path(__file__).parents[1] / "support" / "graphs_job.py"
SAVED = "12 graphs in four threads: what was saved, s"
LINK = "12 graphs one after another, warm, 50 ms to the server and back"


def main():
    settings = options("first_step", __doc__.splitlines()[0], rounds=3)
    figures = Figures("first_step", {"rounds": settings.rounds})
    figures.note(
        "Seconds from the end of the imports to the last graph; the link has no other limit."
    )
    with (
        workspace() as directory,
        Server(directory / "server") as server,
        progress() as bar,
    ):
        for number in bar.track(range(settings.rounds), description="first step"):
            saved(figures, server, directory / f"saved-{number}")
            over_a_link(figures, server, directory / f"link-{number}")
    figures.write(settings.output)


def job(directory, url, *arguments, **variables):
    jobs = Jobs()
    running = jobs.start(
        directory,
        *arguments,
        script=SCRIPT,
        under="graphstash run",
        url=url,
        namespace=directory.parent.name,
        **variables,
    )
    outcome = running.finish()
    jobs.close()
    return outcome


def saved(figures, server, directory):
    cold = job(directory / "cold", server.url, "--threads", 4)
    warm = job(directory / "warm", server.url, "--threads", 4, prefetch_limit=0)
    stopwatch = cold.report["seconds"] - warm.report["seconds"]
    figures.add(SAVED, "JAX", "cold", cold.report["seconds"])
    figures.add(SAVED, "JAX", "warm", warm.report["seconds"])
    figures.add(SAVED, "JAX", "stopwatch", stopwatch)
    figures.add(SAVED, "JAX", "wall time", warm.stats["saved_wall_seconds"])
    figures.add(SAVED, "JAX", "compiling", warm.stats["saved_compile_seconds"])


def over_a_link(figures, server, directory):
    small = ("--layers", 6)  # what JAX itself does for a graph takes longer than any link
    job(directory / "first", server.url, *small)
    for arm, limit in (("on demand", 0), ("prefetching", "2GiB")):
        with SlowLink(server.port, round_trip_seconds=0.05) as link:
            where = directory / arm.replace(" ", "-")
            outcome = job(where, link.url, *small, prefetch_limit=limit)
            downloads = [each for each in link.requests if each.startswith("GET /v1/")]
            figures.add(LINK, arm, "first step, s", outcome.report["seconds"])
            figures.add(LINK, arm, "looking up, s", outcome.stats["fetch_seconds"])
            figures.add(
                LINK,
                arm,
                "hits",
                sum(count for name, count in outcome.stats.items() if name.startswith("hits_")),
            )
            figures.add(LINK, arm, "prefetched", outcome.stats["hits_prefetched"])
            figures.add(LINK, arm, "GETs", len(downloads))
            figures.add(LINK, arm, "at once", link.most_at_once)


if __name__ == "__main__":
    main()

"""Measure the time to a job's first step, the estimates of saved time, and prefetching.

The job is JAX with 12 graphs. First it compiles them in four threads, cold and then warm on another
host, and the stopwatch is compared with the cache's estimate. Then a warm job needs the graphs one
after another over a link with a round trip of 50 ms, without and with prefetching.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.first_step --rounds 3
"""

from functools import partial

from benchmarks.figures import part
from support.jobs import Jobs
from support.run_case import RUN_CASE, case_arguments
from support.slow_link import SlowLink

SAVED = "12 graphs in four threads: what was saved, s"
LINK = "12 graphs one after another, warm, 50 ms to the server and back"


def main():
    with part("first_step", __doc__, rounds=3) as bench:
        bench.figures.note(
            "Seconds from the end of the imports to the last graph; the link has no other limit."
        )
        for number in bench.rounds():
            saved(bench.figures, bench.server, bench.directory / f"saved-{number}")
            over_a_link(bench.figures, bench.server, bench.directory / f"link-{number}")


def job(directory, url, *, threads=1, layers=24, **settings):
    running = Jobs().start(
        directory,
        *case_arguments("graphs:compiled", threads=threads, layers=layers),
        script=RUN_CASE,
        under="graphstash run",
        url=url,
        namespace=directory.parent.name,
        **settings,
    )
    return running.finish()


def saved(figures, server, directory):
    add = partial(figures.add, SAVED, "JAX")
    cold = job(directory / "cold", server.url, threads=4)
    warm = job(directory / "warm", server.url, threads=4, prefetch_limit=0)
    add("cold", cold.report)
    add("warm", warm.report)
    add("stopwatch", cold.report - warm.report)
    add("wall time", warm.stats["saved_wall_seconds"])
    add("compiling", warm.stats["saved_compile_seconds"])


def over_a_link(figures, server, directory):
    small = {"layers": 6}  # otherwise JAX's own work for a graph takes longer than any link
    job(directory / "first", server.url, **small)
    for arm, limit in (("on demand", 0), ("prefetching", "2GiB")):
        add = partial(figures.add, LINK, arm)
        with SlowLink(server.port, round_trip_seconds=0.05) as link:
            where = directory / arm.replace(" ", "-")
            outcome = job(where, link.url, **small, prefetch_limit=limit)
            add("first step, s", outcome.report)
            add("looking up, s", outcome.stats["fetch_seconds"])
            add("hits", outcome.hits)
            add("prefetched", outcome.stats["hits_prefetched"])
            add("GETs", sum(each.startswith("GET /v1/") for each in link.requests))
            add("at once", link.most_at_once)


if __name__ == "__main__":
    main()

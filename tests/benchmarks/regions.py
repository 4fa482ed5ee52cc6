"""Measure the first step of a job in a region, 80 ms from the upstream.

The job is JAX with 12 graphs, which a job beside the upstream has published. In each round, jobs on
new hosts ask the upstream without a link, over the link, and through a region at the end of the
link: the region's first host, whose artifacts cross the link, and its second host.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.regions --rounds 5
"""

from benchmarks.figures import part
from benchmarks.first_step import job
from support.regions import Site
from support.slow_link import SlowLink

TITLE = "12 graphs one after another, warm, 80 ms to the upstream and back"


def main():
    with part("regions", __doc__, rounds=5, has_server=False) as bench:
        bench.figures.note(
            "Seconds from the end of the imports to the last graph; the link has no other limit."
        )
        with Site(bench.directory / "upstream") as upstream:
            token = upstream.token("admin:*")
            for number in bench.rounds():
                directory = bench.directory / f"regions-{number}"
                measure(bench.figures, upstream, token, directory)


def measure(figures, upstream, token, directory):
    small = {"layers": 6, "prefetch_limit": 0, "token": token}
    job(directory / "first", upstream.url, **small)
    with (
        SlowLink(upstream.port, round_trip_seconds=0.08) as link,
        Site.region(directory / "region", link.url, token) as region,
    ):
        for arm, url in (
            ("beside the upstream", upstream.url),
            ("over the link", link.url),
            ("in the region, first host", region.url),
            ("in the region, second host", region.url),
        ):
            before = len(link.requests)
            outcome = job(directory / arm.replace(" ", "-"), url, **small)
            assert outcome.hits == 12, outcome
            figures.add(TITLE, arm, "first step, s", outcome.report)
            figures.add(TITLE, arm, "looking up, s", outcome.stats["fetch_seconds"])
            crossed = [each for each in link.requests[before:] if "/artifacts" in each]
            figures.add(TITLE, arm, "requests over the link", len(crossed))


if __name__ == "__main__":
    main()

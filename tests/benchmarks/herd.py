"""Start a herd: eight processes on hosts of their own that need the same uncompiled graphs.

Counts the compilations, and measures how long after the server's commit each waiter has the
unpacked and verified artifact. The server notes the time right before the commit; the waiters use
the same clock.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.herd --rounds 3
"""

import sqlite3
import statistics
from datetime import UTC, datetime
from functools import partial

from benchmarks.figures import part
from benchmarks.hook import MLP, finish, launch, run
from support.jobs import Jobs

TITLE = "herd on one cold job"


def main():
    extra = [("processes", 8, "size of the herd")]
    with part("herd", __doc__, rounds=5, extra=extra) as bench:
        note = bench.figures.note
        note("The goal: one compilation per graph, waiters served within 500 ms of the commit.")
        note("All processes of the herd share this machine's cores with the server.")
        jobs = Jobs()
        run(jobs, bench, MLP, "first")  # loads the libraries into memory
        for number in bench.rounds():
            team = f"herd-{number}"
            places = [f"{team}-{host}" for host in range(bench.settings.processes)]
            start = partial(launch, jobs, bench, MLP, cache="graphstash", team=team)
            launched = [start(place, "--trace") for place in places]
            measure(bench.figures, bench.server, team, [finish(*each) for each in launched])
        jobs.close()


def measure(figures, server, namespace, reports):
    committed = commits(server, namespace)
    served = [
        (look_up["ended"] - commit) * 1e3
        for report in reports
        for look_up in report["look_ups"]
        if (commit := committed[look_up["fingerprint"]])
        and look_up["found"]
        and look_up["began"] < commit
    ]
    thirds = [report["settled_seconds"] for report in reports]
    rows = {
        "processes": len(reports),
        "different graphs": len(committed),
        "compiles in all": sum(report["compiles"] for report in reports),
        "fallbacks": sum(sum(report["fallbacks"].values()) for report in reports),
        "waiters served": len(served),
        "third step, median s": statistics.median(thirds),
        "third step, slowest s": max(thirds),
    }
    if served:
        rows["commit to artifact, median ms"] = statistics.median(served)
        rows["commit to artifact, slowest ms"] = max(served)
    for row, sample in rows.items():
        figures.add(TITLE, row, "graphstash", sample)


def commits(server, namespace):
    """Return the time of each artifact's commit by fingerprint, in seconds of the host's clock."""
    database = sqlite3.connect(server.data_dir / "graphstash.sqlite3")
    rows = database.execute(
        "SELECT fingerprint, created_at FROM artifacts WHERE namespace = ?", [namespace]
    ).fetchall()
    database.close()
    return {
        fingerprint: datetime.fromisoformat(created_at).replace(tzinfo=UTC).timestamp()
        for fingerprint, created_at in rows
    }


if __name__ == "__main__":
    main()

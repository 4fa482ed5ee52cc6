"""A herd: eight processes, each a host of its own, want graphs that nobody has compiled.

Counts the compilations and how long after the server's commit each waiter had the artifact,
unpacked and verified. The commit's time is what the server put down right before it; the waiters'
times are of the same clock.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.herd --rounds 3
"""

import sqlite3
import statistics
from datetime import UTC, datetime

from benchmarks.figures import Figures, options, progress, workspace
from benchmarks.launch import MLP, Launcher
from support.server import Server

TITLE = "herd on one cold job"
WHO = "graphstash"


def main():
    settings = options(
        "herd",
        __doc__.splitlines()[0],
        rounds=5,
        extra=[("processes", 8, "size of the herd")],
    )
    figures = Figures("herd", {"rounds": settings.rounds, "processes": settings.processes})
    figures.note("The goal: one compilation per graph, waiters served within 500 ms of the commit.")
    figures.note("All processes of the herd share this machine's cores with the server.")
    with (
        workspace() as directory,
        Server(directory / "server") as server,
        Launcher() as launcher,
        progress() as bar,
    ):
        launcher.launch(MLP, directory / "first").finish()  # brings the libraries into memory
        for number in bar.track(range(settings.rounds), description="herd"):
            namespace = f"herd-{number}"
            launched = [
                launcher.launch(
                    MLP,
                    directory / f"{namespace}-{host}",
                    "--trace",
                    hook=True,
                    GRAPHSTASH_URL=server.url,
                    GRAPHSTASH_NAMESPACE=namespace,
                )
                for host in range(settings.processes)
            ]
            reports = [job.finish() for job in launched]
            measure(figures, server, namespace, reports)
    figures.write(settings.output)


def measure(figures, server, namespace, reports):
    look_ups = [look_up for report in reports for look_up in report["look_ups"]]
    committed = commits(server, namespace)
    served = []
    for look_up in look_ups:
        commit = committed[look_up["fingerprint"]]
        if look_up["found"] and look_up["began"] < commit:
            served.append((look_up["ended"] - commit) * 1e3)
    fallbacks = sum(sum(report["stats"]["fallbacks"].values()) for report in reports)
    figures.add(TITLE, "processes", WHO, len(reports))
    figures.add(TITLE, "different graphs", WHO, len(committed))
    figures.add(TITLE, "compiles in all", WHO, sum(report["compiles"] for report in reports))
    figures.add(TITLE, "fallbacks", WHO, fallbacks)
    figures.add(TITLE, "waiters served", WHO, len(served))
    if served:
        figures.add(TITLE, "commit to artifact, median ms", WHO, statistics.median(served))
        figures.add(TITLE, "commit to artifact, slowest ms", WHO, max(served))
    thirds = [report["settled_seconds"] for report in reports]
    figures.add(TITLE, "third step, median s", WHO, statistics.median(thirds))
    figures.add(TITLE, "third step, slowest s", WHO, max(thirds))


def commits(server, namespace):
    """When the server committed each artifact, by fingerprint, in seconds of the host's time."""
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

"""Compare the model with the recorded runs of real clients, servers and PostgreSQL."""

import json

from benchmarks.simulation.model import simulate
from benchmarks.simulation.real import RECORD
from benchmarks.simulation.settings import Costs, Deployment, Fleet
from support.waiting import PATIENT

COMPARED = ("compiles", "downloads", "uploads", "served_bytes", "absent", "granted")
"""Counts that a test compares. CPU and refusals depend on the load of the machine."""

UNPACED = ("leases", "statements")
"""Counts that a test compares if all clients have a place. Otherwise they depend on how fast the
clients poll, and so on the load of the machine."""


def recorded():
    """Return the recorded runs by name."""
    return json.loads(RECORD.read_text())


def predicted(run):
    """Return the counts of a recorded run, as the model predicts them.

    The pace of the clients is an input: that of the run in which all clients have a place.
    """
    roomy, fleet = recorded()["roomy"], run["fleet"]
    compiling = fleet["new"] * fleet["compile_seconds"]
    own = roomy["seconds"] - roomy["start_seconds"] - compiling
    fleet = Fleet(
        **fleet, **PATIENT, start_seconds=run["start_seconds"], trace_seconds=own / fleet["graphs"]
    )
    deployment = Deployment(
        servers=run["servers"], workers=1, max_connections=run["places"], database_cores=1
    )
    outcome = simulate(fleet, deployment, Costs())
    counts = outcome.counts
    return {
        "compiles": counts["compiles"],
        "fallbacks": counts["fallbacks"],
        "downloads": counts["downloads"],
        "uploads": counts["put stored"],
        "served_bytes": outcome.served_bytes,
        "absent": counts["get absent"],
        "granted": counts["lease granted"],
        "leases": counts["lease held"] + counts["lease ready"],
        "renewals": counts["renew renewed"] + counts["put exists"],
        "refused": sum(count for name, count in counts.items() if name.endswith(" full")),
        "statements": outcome.statements,
        "server_cpu_seconds": outcome.server_cpu_seconds,
        "database_cpu_seconds": outcome.database_cpu_seconds,
        "seconds": outcome.seconds,
    }


def compare(figures):
    """Add a table for each recorded run."""
    for name, run in recorded().items():
        measured = run["counts"] | {"seconds": run["seconds"]}
        for row, model in predicted(run).items():
            title = f"recorded run: {name}"
            figures.add(title, row, "measured", measured[row])
            figures.add(title, row, "model", model)
            if measured[row]:
                figures.add(title, row, "model / measured", model / measured[row])

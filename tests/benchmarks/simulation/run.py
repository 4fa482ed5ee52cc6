"""Simulate the start of a job on fleets of several sizes, and print what it takes.

    make bench-fleet BENCH_OPTIONS="--hosts 10000 --starts cold --set servers=2 start_seconds=5"

A column is one start. *warm*: every graph is stored, and the disks are empty. *usual*: 5 % of the
graphs are new. *cold*: all are new; it has --cold-graphs of them, because each new one takes the
same. The command first compares the model with the recorded runs. Writes build/bench-fleet.json.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))

from benchmarks.figures import Figures, console
from benchmarks.simulation.compared import compare
from benchmarks.simulation.model import simulate
from benchmarks.simulation.settings import GIB, Bytes, Costs, Deployment, Fleet

PART = "fleet"
SHARES = {"warm": 0.0, "usual": 0.05, "cold": 1.0}


def deployment_for(hosts):
    """Return a deployment for a fleet of this many hosts, see docs/sizing.md."""
    if hosts <= 100:
        return Deployment(servers=1, workers=2, database_cores=1)
    if hosts <= 1000:
        return Deployment(servers=2, workers=4, database_cores=2)
    return Deployment(servers=10, workers=8, database_cores=20)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--starts", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--cold-graphs", type=int, default=4, help="[4]")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", dest="changes")
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--directory", type=Path, default=Path("build"), help="[build]")
    options = parser.parse_args(arguments)
    figures = Figures(PART, {"hosts": options.hosts, "set": options.changes})
    if options.compare:
        compare(figures)
    for hosts in options.hosts:
        for start in options.starts:
            console.log(f"{hosts} hosts, {start}")
            add(figures, hosts, start, options)
    figures.write(options.directory / "bench-fleet.json")


def add(figures, hosts, start, options):
    fleet, deployment, costs = changed(
        options.changes, Fleet(hosts=hosts), deployment_for(hosts), Costs()
    )
    if start == "cold":
        fleet = dataclasses.replace(fleet, graphs=options.cold_graphs)
    fleet = dataclasses.replace(fleet, new=round(SHARES[start] * fleet.graphs))
    outcome = simulate(fleet, deployment, costs)
    counts, links = outcome.counts, deployment.servers * deployment.link_bits_per_second / 8
    row = {
        "servers x workers": f"{deployment.servers} x {deployment.workers}",
        "seconds": outcome.seconds,
        "compiles": counts["compiles"],
        "new graphs": fleet.new,
        "fallbacks": counts["fallbacks"],
        "requests": outcome.answered,
        "refused": sum(count for name, count in counts.items() if name.endswith(" full")),
        "late": sum(count for name, count in counts.items() if name.endswith(" late")),
        "server CPU, s": outcome.server_cpu_seconds,
        "longest queue, s": outcome.longest_queue_seconds,
        "places": outcome.most_places,
        "statements": outcome.statements,
        "statements/s at most": outcome.most_statements_per_second,
        "database CPU, s": outcome.database_cpu_seconds,
        "egress, GiB": outcome.served_bytes / GIB,
        "links, mean use": outcome.served_bytes / links / outcome.seconds,
    }
    for name, figure in row.items():
        column = f"{hosts} {start}"
        if isinstance(figure, str):
            figures.say("fleets", name, column, figure)
        else:
            figures.add("fleets", name, column, figure)


def changed(changes, *records):
    """Return the records with these values: a name belongs to one of them."""
    for change in changes:
        name, _, text = change.partition("=")
        owners = [number for number, record in enumerate(records) if hasattr(record, name)]
        if not owners:
            sys.exit(f"no input is called {name}")
        old = getattr(records[owners[0]], name)
        value = Bytes(text) if isinstance(old, Bytes) else type(old)(text)
        records = tuple(
            dataclasses.replace(record, **{name: value}) if number == owners[0] else record
            for number, record in enumerate(records)
        )
    return records


if __name__ == "__main__":
    main()

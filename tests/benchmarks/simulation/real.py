"""Run a small fleet for real, and record the counts that the model has to predict.

Two servers share one PostgreSQL. Forked clients, several on each simulated host, want the same
graphs at once, the new ones first. A compilation is a sleep. *roomy* has a place for every
connection; in *full*, the clients share a few.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.simulation.real

Writes tests/benchmarks/simulation/recorded.json. Takes some four minutes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from benchmarks.costs import cpu_seconds
from graphstash import ClientConfig, Stash
from graphstash_schema import ArtifactMetadata
from support import starts
from support.cases.fleet import graph
from support.postgres import Postgres
from support.run_case import RUN_CASE, case_arguments
from support.server import Server
from support.waiting import PATIENT, until

RECORD = Path(__file__).with_name("recorded.json")
FLEET = {
    "hosts": 75,
    "processes": 4,  # of each host
    "graphs": 10,
    "new": 2,
    "size_bytes": 65_536,
    "compile_seconds": 45.0,
}
SERVERS = 2
PLACES = {"roomy": 16_384, "full": 40}
"""Connections of each server."""
IDLE_SECONDS = 10


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(PLACES))
    cases = parser.parse_args().cases
    starts.install()  # a busy machine takes more than a minute to import a server
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in cases:
        record[name] = measured(PLACES[name])
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
        print(name, json.dumps(record[name]["counts"]), flush=True)
    starts.close()


def measured(places):
    with ExitStack() as stack:
        enter = stack.enter_context
        directory = Path(enter(tempfile.TemporaryDirectory()))
        postgres = enter(Postgres(shared_preload_libraries="pg_stat_statements"))
        url = postgres.new_database()
        postgres.execute("CREATE EXTENSION pg_stat_statements")
        settings = {"GRAPHSTASH_DATABASE_URL": url, "GRAPHSTASH_MAX_CONNECTIONS": str(places)}
        # Both servers use one store.
        servers = [enter(Server(directory, **settings)) for _ in range(SERVERS)]
        publish(servers[0].url, directory / "publisher")
        before, idle = state(servers, postgres), time.monotonic()
        time.sleep(IDLE_SECONDS)  # the load of a benchmark: a server without requests
        rested = state(servers, postgres)
        idle = time.monotonic() - idle
        reports = clients(servers, directory)
        fetched_bytes = sum(each["fetched_bytes"] for each in reports)
        until(lambda: state(servers, postgres)["served_bytes"] >= fetched_bytes)
        after = state(servers, postgres)
        seconds = max(each["ended"] for each in reports) - min(each["began"] for each in reports)
        counts = {name: after[name] - rested[name] for name in after}
        for name in ("server_cpu_seconds", "database_cpu_seconds", "statements"):
            counts[name] -= (rested[name] - before[name]) / idle * seconds
        begun = sorted(each["began"] for each in reports)
        return {
            "fleet": FLEET,
            "servers": SERVERS,
            "places": places,
            "load": os.getloadavg(),
            "start_seconds": begun[-1] - begun[0],
            "seconds": seconds,
            "counts": {name: round(count, 3) for name, count in counts.items()}
            | {
                "compiles": sum(each["compiles"] for each in reports),
                "fallbacks": sum(sum(each["fallbacks"].values()) for each in reports),
                "fetched_bytes": fetched_bytes,
            },
        }


def publish(url, directory):
    """Store every graph but the new ones."""
    metadata = ArtifactMetadata(compile_seconds=60, raw_size_bytes=FLEET["size_bytes"])
    config = ClientConfig.load({}, url=url, namespace="fleet", cache_dir=directory, **PATIENT)
    with Stash(config) as stash:
        for number in range(FLEET["new"], FLEET["graphs"]):
            stash.put(graph(number), os.urandom(FLEET["size_bytes"]), metadata)


def clients(servers, directory):
    """Run the processes in one group per server, because a client has one URL."""
    running = []
    for number, server in enumerate(servers):
        hosts = len(range(number, FLEET["hosts"], len(servers)))
        report = directory / f"report-{number}.json"
        case = case_arguments(
            "fleet:read_at_once",
            settings={"url": server.url, "namespace": "fleet", **PATIENT},
            directory=directory / f"hosts-{number}",
            processes=hosts * FLEET["processes"],
            hosts=hosts,
            graphs=FLEET["graphs"],
            compile_seconds=FLEET["compile_seconds"],
            size_bytes=FLEET["size_bytes"],
        )
        (directory / f"hosts-{number}").mkdir()
        running.append((subprocess.Popen([sys.executable, RUN_CASE, report, *case]), report))
    for process, _ in running:
        assert process.wait() == 0
    return [each for _, report in running for each in json.loads(report.read_text())]


def state(servers, postgres):
    """Return what the servers and the database have counted since their start."""
    text = "".join(httpx.get(f"{each.url}/metrics", timeout=60).text for each in servers)
    requests = re.findall(r'requests_total\{method="(\w+)",status="(\d+)"\} (\S+)', text)
    counts = dict.fromkeys(("absent", "leases", "granted", "uploads", "renewals"), 0.0)
    names = {
        ("GET", "404"): "absent",
        ("POST", "200"): "leases",
        ("POST", "201"): "granted",
        ("POST", "202"): "leases",
        ("PUT", "201"): "uploads",
        ("PUT", "200"): "renewals",
    }
    for method, status, count in requests:
        if name := names.get((method, status)):
            counts[name] += float(count)
    refused = re.findall(r'refused_total\{code="too_many_connections"\} (\S+)', text)
    rows = httpx.get(f"{servers[0].url}/v1/stats", timeout=60).json()["namespaces"]
    row = next((each for each in rows if each["namespace"] == "fleet"), {})
    ((statements,),) = postgres.execute("SELECT sum(calls)::float FROM pg_stat_statements")
    return counts | {
        "refused": sum(map(float, refused)),
        "downloads": row.get("hits", 0),
        "served_bytes": row.get("served_bytes", 0),
        "server_cpu_seconds": sum(cpu_seconds(each.process.pid) for each in servers),
        "database_cpu_seconds": cpu_seconds(postgres.process.pid),
        "statements": statements,
    }


if __name__ == "__main__":
    main()

"""Many processes of a job that request the same stored graphs at once."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from graphstash import ClientConfig
from graphstash_schema import ArtifactKey
from support.host import Host

__all__ = ["graph", "read_at_once"]


def graph(number: int) -> ArtifactKey:
    """Return a key with a fingerprint that looks as random as a real one."""
    fingerprint = hashlib.sha256(str(number).encode()).hexdigest()
    return ArtifactKey.parse("torch_xla", "cpu-x86_64-0123456789abcdef", fingerprint)


def read_at_once(
    *, settings: dict[str, Any], directory: str, processes: int, hosts: int, graphs: int
) -> list[dict[str, Any]]:
    """Fork processes that read all graphs, and return the counts of each.

    Args:
        settings: settings of all clients.
        directory: parent of each host's local tier.
        processes: number of processes.
        hosts: number of hosts, over which the processes are distributed.
        graphs: number of graphs, see `graph`.
    """
    waiting, starting = os.pipe()
    reports = [Path(directory) / f"{number}.json" for number in range(processes)]
    for number, report in enumerate(reports):
        if os.fork() == 0:
            try:
                os.close(starting)
                os.read(waiting, 1)  # until all processes exist
                host = Path(directory) / f"host{number % hosts}"
                config = ClientConfig.load({}, **settings, cache_dir=host)
                report.write_text(json.dumps(_read(config, graphs)))
            finally:
                os._exit(0)
    os.close(waiting)
    os.close(starting)
    for _ in reports:
        os.wait()
    return [json.loads(report.read_text()) for report in reports]


def _read(config: ClientConfig, graphs: int) -> dict[str, Any]:
    with Host(config) as host:
        for number in range(graphs):
            host.build(graph(number))
        stats = host.stats
    return {
        "compiles": host.compiles,
        "fallbacks": dict(stats.fallbacks),
        "fetched_bytes": stats.fetched_bytes,
        "hits": stats.hits_server + stats.hits_host,
    }

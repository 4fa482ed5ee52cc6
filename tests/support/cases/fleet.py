"""Many processes of a job that request the same stored graphs at once."""

import hashlib
import json
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

# Imported here, before the forks, so that not every process imports them.
import graphstash._http.download
import graphstash._trust.proof  # noqa: F401 - see above
import graphstash_schema.lease
import graphstash_schema.metadata  # noqa: F401 - see above
from graphstash import ClientConfig, Stash
from graphstash_schema import ArtifactKey
from support.host import Host


def graph(number: int) -> ArtifactKey:
    """Return a key with a fingerprint that looks as random as a real one."""
    fingerprint = hashlib.sha256(str(number).encode()).hexdigest()
    return ArtifactKey.parse("torch_xla", "cpu-x86_64-0123456789abcdef", fingerprint)


def read_at_once(
    *,
    settings: dict[str, Any],
    directory: str,
    processes: int,
    hosts: int,
    graphs: int,
    compile_seconds: float = 0.0,
    size_bytes: int = 5,
) -> list[dict[str, Any]]:
    """Fork processes that read all graphs, and return the counts of each.

    Args:
        settings: settings of all clients.
        directory: parent of each host's local tier.
        processes: number of processes.
        hosts: number of hosts, over which the processes are distributed.
        graphs: number of graphs, see `graph`.
        compile_seconds: time of a compilation, in which the process sleeps.
        size_bytes: size of a compiled graph, whose bytes depend on its number alone.
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
                read = _read(config, graphs, compile_seconds=compile_seconds, size_bytes=size_bytes)
                report.write_text(json.dumps(read))
            finally:
                os._exit(0)
    os.close(waiting)
    os.close(starting)
    for _ in reports:
        os.wait()
    return [json.loads(report.read_text()) for report in reports]


def _read(
    config: ClientConfig, graphs: int, *, compile_seconds: float, size_bytes: int
) -> dict[str, Any]:
    began = time.monotonic()
    # As under `graphstash run`, whose processes share what the server says about copies.
    with Host(Stash(config, run="fleet")) as host:

        def compile_graph(number: int) -> bytes:
            time.sleep(compile_seconds)
            host.compiles += 1
            return random.Random(number).randbytes(size_bytes)

        for number in range(graphs):
            host.cache.get_or_compile(graph(number), partial(compile_graph, number))
        stats = host.stats
    return {
        "compiles": host.compiles,
        "fallbacks": dict(stats.fallbacks),
        "fetched_bytes": stats.fetched_bytes,
        "hits": stats.hits_server + stats.hits_host,
        "began": began,
        "ended": time.monotonic(),
    }

"""A real server process, started with the users' command."""

import sys
from pathlib import Path
from typing import Any

import httpx

from graphstash_server.testing import ServerProcess


class Server(ServerProcess):
    """`graphstash serve` on a free loopback port."""

    def __init__(self, directory: Path, **environment: str) -> None:
        super().__init__(
            directory / "data",
            command=(sys.executable, "-m", "graphstash", "serve"),
            environment=environment,
        )

    def leases_held(self, namespace: str = "") -> int:
        """Return the number of callers with the right to compile, in one namespace or in all."""
        if namespace:
            answer = httpx.get(f"{self.url}/v1/{namespace}/leases", timeout=60).json()
            return len(answer["leases"])
        answer = httpx.get(f"{self.url}/v1/stats", timeout=60).json()
        return int(answer["leases_held"])

    def stats(self, namespace: str) -> dict[str, Any]:
        """Return the counters of a namespace; zeros for an unknown namespace."""
        answer = httpx.get(f"{self.url}/v1/stats", timeout=60).json()
        for row in answer["namespaces"]:
            if row["namespace"] == namespace:
                return row
        return {"artifacts": 0, "hits": 0, "misses": 0, "puts": 0, "conflicts": 0}

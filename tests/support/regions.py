"""An upstream and its regions, as server processes that a test may kill and start again."""

import json
import struct
from pathlib import Path
from typing import Any, Self

import httpx

from graphstash_schema.envelope import ENVELOPE_MAGIC
from graphstash_server.testing import ServerProcess
from support.api import Api
from support.ports import reserved_port
from support.tokens import issue
from support.waiting import until


def envelope(api: Api, number: int = 0, payload: bytes = b"graph") -> bytes:
    """Return a blob of a key, whose head names the key as clients write it."""
    header = json.dumps(api.key(number)).encode()
    return ENVELOPE_MAGIC + struct.pack(">I", len(header)) + header + payload


def read(api: Api, number: int = 0, **headers: str) -> httpx.Response:
    """Get an artifact like a job, which asks again while the artifact is on its way."""
    answers = [api.get(number, **headers)]

    def is_answered() -> bool:
        if answers[-1].status_code != 503 or "on its way" not in answers[-1].text:
            return True
        answers.append(api.get(number, **headers))
        return False

    until(is_answered)
    return answers[-1]


class Site:
    """A server on one port that requires tokens; a context manager.

    Attributes:
        directory: data directory.
        environment: variables of the next start.
        port: port on loopback.
        url: address, also while the server does not run.
        server: the last process.
    """

    def __init__(self, directory: Path, *options: str, **environment: str) -> None:
        self.directory = directory
        self.port = reserved_port()
        self._options = (*options, "--port", str(self.port))
        self.environment = {"GRAPHSTASH_AUTH": "tokens"} | environment
        self.url = f"http://127.0.0.1:{self.port}"
        self.server: ServerProcess | None = None

    @classmethod
    def region(
        cls, directory: Path, upstream: str, token: str, *options: str, **environment: str
    ) -> Self:
        """Return a region of an upstream, which it asks with a token."""
        own = {
            "GRAPHSTASH_UPSTREAM_URL": upstream,
            "GRAPHSTASH_UPSTREAM_TOKEN": token,
            "GRAPHSTASH_UPSTREAM_ANSWER_SECONDS": "30",  # for a busy machine
        }
        return cls(directory, *options, **own | environment)

    @property
    def database_url(self) -> str:
        return f"sqlite+aiosqlite:///{self.directory / 'graphstash.sqlite3'}"

    def start(self) -> Self:
        self.server = ServerProcess(self.directory, *self._options, environment=self.environment)
        return self

    def kill(self) -> None:
        """Kill the server and its workers with SIGKILL."""
        assert self.server is not None
        self.server.kill(tree=True)

    def token(self, *grants: str) -> str:
        """Return a token that this server has issued."""
        return self.issue(*grants).token

    def issue(self, *grants: str) -> Any:
        return issue(self.database_url, *grants)

    def events(self, token: str) -> dict[str, float]:
        """Return the counters and gauges of a region's upstream by name."""
        text = ""

        def has_gauges() -> bool:
            """A scrape leaves out the gauges if the database is slow."""
            nonlocal text
            headers = {"Authorization": f"Bearer {token}"}
            answer = httpx.get(f"{self.url}/metrics", headers=headers, timeout=30)
            assert answer.status_code == 200, answer.text
            text = answer.text
            return "graphstash_upstream_up" in text

        until(has_gauges)
        found = {}
        for line in text.splitlines():
            if line.startswith("graphstash_upstream_"):
                name, _, value = line.removeprefix("graphstash_upstream_").rpartition(" ")
                found[name.removeprefix('total{event="').removesuffix('"}')] = float(value)
        return found

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.server.__exit__()

"""Promise: a team tunes a kernel once, and no wrong or false measurement decides.

Each measurement runs in a process that may crash, hang or report a false cost. Every host checks
the results of its peers.
"""

from pathlib import Path

import pytest

from support.compiler_jobs import CompilerJobs
from support.jobs import Running


class Team(CompilerJobs):
    """Jobs that tune the tiles of an invented kernel. Each host has a folder."""

    def start(self, host: str, *, under: str = "tuning", **arguments: object) -> Running:
        """Start a job with client settings and keyword arguments of `cases.tiles.tuned`."""
        own = {name: arguments.pop(name) for name in [*arguments] if name in KEYWORDS}
        own |= {"measured": self.directory / host / "measured"}
        return super().start(host, "tuned", own, under=under, **arguments)

    def measured(self, host: str) -> int:
        """Return the number of measurements of a host so far."""
        file = Path(self.directory / host / "measured")
        return len(file.read_text().splitlines()) if file.exists() else 0


KEYWORDS = {
    *("size", "device", "noise", "seed", "hang_after", "until"),
    *("batch", "batch_seconds", "reject", "ranks"),
}


@pytest.fixture
def team(server, namespace, tmp_path, jobs):
    settings = {"url": server.url, "namespace": namespace, "cases": "tiles"}
    with Team(tmp_path, jobs=jobs, **settings) as team:
        yield team

from pathlib import Path

import pytest

from support.compiler_jobs import CompilerJobs

JOB = Path(__file__).parents[2] / "support" / "tune_job.py"


@pytest.fixture
def team(server, namespace, tmp_path):
    """Starts jobs that tune; a host is a folder."""
    settings = {"url": server.url, "namespace": namespace, "under": "python", "script": JOB}
    with CompilerJobs(tmp_path, **settings) as jobs:
        yield jobs

"""Runs jobs of JAX as users run them, in environments of their own; each directory is a host."""

import os
import subprocess
import sys
from pathlib import Path

from support.environments import python_of
from support.jobs import Running

__all__ = ["JAX_JOB", "JaxJobs", "start"]

JAX_JOB = Path(__file__).with_name("jax_job.py")


def start(
    directory,
    *options,
    environment="jax-newest",
    under="graphstash run",
    script=JAX_JOB,
    variables=None,
    **settings,
):
    """Starts a job with a local tier in `directory`.

    Args:
        environment: whose Python and JAX; empty for the one that runs the tests.
        under: `graphstash run`; `python -I` with nothing but a variable; or `python` alone.
        script: what to run; its first argument is the path of its report.
        variables: of the environment.
        settings: fields of ClientConfig.
    """
    directory.mkdir(parents=True, exist_ok=True)
    number = len(list(directory.glob("report-*")))
    report = directory / f"report-{number}.json"
    stats = directory / f"stats-{number}.jsonl"
    errors = directory / f"errors-{number}"
    report.touch()
    settings = {"cache_dir": directory / "tier", "stats_file": stats, "hooks": "jax", **settings}
    # No look for a TPU: where libtpu is installed it asks the network for one.
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environ |= {f"GRAPHSTASH_{name.upper()}": str(value) for name, value in settings.items()}
    python = str(python_of(environment))
    launchers = {
        "graphstash run": [sys.executable, "-m", "graphstash", "run", "--", python],
        "python -I": [python, "-I"],
        "python": [python],
    }
    if under == "python -I":
        environ["GRAPHSTASH_AUTOLOAD"] = "1"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*launchers[under], *(str(part) for part in (script, report, *options))],
            env=environ | (variables or {}),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    return Running(report, stats, errors, process)


class JaxJobs:
    """Starts jobs in folders of one directory; kills what a failed test left."""

    def __init__(self, directory, **settings):
        self._directory = directory
        self._settings = settings
        self._started = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for running in self._started:
            if not running.ended():
                running.kill()

    def start(self, host, *options, **settings):
        settings = self._settings | settings
        self._started.append(start(self._directory / host, *options, **settings))
        return self._started[-1]

    def run(self, host, *options, **settings):
        return self.start(host, *options, **settings).finish()

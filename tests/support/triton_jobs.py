"""Starts Triton jobs in the versions that are tried, each a process and a host of its own."""

from pathlib import Path

from support.environments import python_of

__all__ = ["VERSIONS", "TritonJobs"]

_JOB = Path(__file__).with_name("triton_job.py")

VERSIONS = {"3.3.0": "", "3.9.0": "torch-newest"}
"""Environment by Triton's version; empty is the one of the tests."""


class TritonJobs:
    """Jobs of one version of Triton, in a namespace of their own.

    Args:
        jobs: starts them.
        directory: every host is a folder in it.
        version: of Triton.
        settings: of every job.
    """

    def __init__(self, jobs, directory, version, **settings):
        self.version = version
        self.directory = directory
        self.python = python_of(VERSIONS[version])
        self._jobs = jobs
        self._settings = settings
        self._started = []

    def start(self, host, *options, variables=(), hook=True, **settings):
        """Starts a job.

        Args:
            host: the name of its folder.
            options: of the script.
            variables: of its environment, as `NAME=value`.
            hook: False for a process that does not know of `graphstash run`.
            settings: fields of ClientConfig.
        """
        aside = () if hook else ("-u", "GRAPHSTASH_AUTOLOAD", "-u", "PYTHONPATH")
        running = self._jobs.start(
            self.directory / host,
            *options,
            script=_JOB,
            under="graphstash run",
            launcher=("env", *aside, *variables, self.python),
            **(self._settings | settings),
        )
        self._started.append(running)
        return running

    def run(self, host, *options, **settings):
        """Starts a job and waits for what it reports."""
        return self.start(host, *options, **settings).finish()

    def close(self):
        """Kills what a failed test left."""
        for running in self._started:
            if not running.ended():
                running.kill()

"""Starts torch.compile jobs in the versions that are tried, each a process and a host."""

import os
import shutil
import subprocess
from pathlib import Path

from support.environments import python_of
from support.jobs import Running

__all__ = ["INDUCTOR_JOB", "VERSIONS", "InductorJobs"]

INDUCTOR_JOB = Path(__file__).with_name("inductor_job.py")

VERSIONS = {"2.7.0": "", "2.15.0": "torch-newest"}
"""Environment by torch's version; empty is the one of the tests."""

_COUNTING_COMPILER = """#!/bin/sh
echo "$*" >> "$COMPILER_LOG"
exec {compiler} "$@"
"""


class InductorJobs:
    """Jobs of one version of torch, in a namespace of their own.

    A host is a folder: torch's caches, temporary files and the local tier are in it.

    Args:
        jobs: starts them.
        directory: every host is a folder in it.
        version: of torch.
        settings: of every job.
    """

    def __init__(self, jobs, directory, version, **settings):
        self.version = version
        self.directory = directory
        self.python = python_of(VERSIONS[version])
        self._jobs = jobs
        self._settings = {"hooks": "inductor"} | settings
        self._compiler = directory / "bin" / "g++"
        self._compiler.parent.mkdir(parents=True)
        self._compiler.write_text(_COUNTING_COMPILER.format(compiler=shutil.which("g++")))
        self._compiler.chmod(0o755)

    def start(self, host, *options, script=INDUCTOR_JOB, variables=(), **settings):
        """Starts a job under `graphstash run`.

        Args:
            host: the name of its folder.
            options: of the script.
            script: what to run.
            variables: of its environment, as `NAME=value`.
            settings: fields of ClientConfig.
        """
        return self._jobs.start(
            self.directory / host,
            *options,
            script=script,
            under="graphstash run",
            launcher=("env", *self._host(host), *variables, self.python),
            **(self._settings | settings),
        )

    def run(self, host, *options, **settings):
        """Starts a job and waits for what it reports."""
        return self.start(host, *options, **settings).finish()

    def run_plainly(self, host, *options, script=INDUCTOR_JOB, variables=(), **settings):
        """Runs a script as `python script`: what it wants of graphstash it asks for itself."""
        directory = self.directory / host
        variables = [*self._host(host), *variables]
        stats, report, errors = (directory / name for name in ("stats", "report", "errors"))
        settings = (
            self._settings | {"cache_dir": directory / "tier", "stats_file": stats} | settings
        )
        environment = os.environ | dict(variable.split("=", 1) for variable in variables)
        environment |= {f"GRAPHSTASH_{name.upper()}": str(v) for name, v in settings.items()}
        arguments = [str(part) for part in (self.python, script, report, *options)]
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                arguments, env=environment, stdout=subprocess.DEVNULL, stderr=stderr
            )
        return Running(report, stats, errors, process).finish()

    def compiled(self, host):
        """The command lines of the C++ compiler on a host, but for questions about itself."""
        log = self.directory / host / "compiler.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line not in {"-v", "--version"}]

    def _host(self, host):
        directory = self.directory / host
        (directory / "tmp").mkdir(parents=True, exist_ok=True)
        return (
            f"PATH={self._compiler.parent}{os.pathsep}{os.environ['PATH']}",
            f"COMPILER_LOG={directory / 'compiler.log'}",
            f"TORCHINDUCTOR_CACHE_DIR={directory / 'inductor'}",
            f"TMPDIR={directory / 'tmp'}",
            # Otherwise torch 2.7 starts three processes that import torch, in every job.
            "TORCHINDUCTOR_VEC_ISA_OK=1",
        )

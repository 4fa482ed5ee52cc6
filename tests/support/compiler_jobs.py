"""Jobs of one compiler in one of the tested versions. Each job is a process on a host."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from graphstash_schema import ArtifactKey
from support.environments import packages_of
from support.jobs import Jobs, Outcome, Running
from support.run_case import RUN_CASE, case_arguments

_HOST = "HOST"
"""Placeholder for the folder of a host in the values of variables."""

INDUCTOR_VERSIONS = {"2.7.0": "", "2.15.0": "torch-newest"}
TRITON_VERSIONS = {"3.3.0": "", "3.9.0": "torch-newest"}
"""Environment by the compiler's version; empty for the tests' own."""

# Keys contain the variables of a script, except this one, which names a folder of the host.
_COUNTING_COMPILER = """#!/bin/sh
echo "$*" >> "$TMPDIR/compiler.log"
exec {compiler} "$@"
"""

_COUNTING_PTXAS = """#!/bin/sh
case "$*" in
*--version*) ;;
*) echo run >> "$ASSEMBLER_LOG"; if [ "$ASSEMBLER_DIES" ]; then kill -9 $PPID; exit 1; fi ;;
esac
exec {ptxas} "$@"
"""
"""The text is equal on every host, because the key contains the bytes of the assembler."""


class CompilerJobs:
    """Starts jobs; a context manager that kills the jobs that a failed test left.

    A host is a folder with its caches, reports and local tier.

    Args:
        directory: parent of the hosts' folders.
        jobs: starts the jobs. Default: its own; shared jobs share a zygote.
        variables: environment of every job; `HOST` in a value becomes the host's folder.
        defaults: defaults of the other arguments of `Jobs.start`, including settings. With `cases`,
            a module of `support.cases`, the options of a job are a function of that module and a
            dictionary of its keyword arguments.
    """

    def __init__(
        self,
        directory: Path,
        *,
        jobs: Jobs | None = None,
        variables: Mapping[str, str] | None = None,
        **defaults: Any,
    ) -> None:
        self.directory = directory
        self._jobs = jobs or Jobs()
        self._own_jobs = None if jobs else self._jobs
        self._variables = dict(variables or {})
        self._defaults = {"under": "graphstash run"} | defaults
        self._started: list[Running] = []

    def start(
        self,
        host: str,
        *options: object,
        variables: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Running:
        """Start a job on the host with this folder."""
        directory = self.directory / host
        arguments = self._defaults | arguments
        if cases := arguments.pop("cases", ""):
            function, *keywords = options
            options = case_arguments(f"{cases}:{function}", **dict(*keywords))
            arguments["script"] = RUN_CASE
        own = {
            name: value.replace(_HOST, str(directory)) for name, value in self._variables.items()
        }
        running = self._jobs.start(
            directory, *options, variables=own | dict(variables or {}), **arguments
        )
        self._started.append(running)
        return running

    def run(self, host: str, *options: object, **arguments: Any) -> Outcome:
        """Start a job, and wait for its report."""
        return self.start(host, *options, **arguments).finish()

    def artifacts(self, host: str) -> list[ArtifactKey]:
        """Return the keys of the artifacts on a host's disk, in order."""
        found = (self.directory / host / "tier").glob("v2/*/*/*/*/??/*")
        names = {(path.parts[-4], path.parts[-3], path.name) for path in found}
        return [ArtifactKey.parse(*each) for each in sorted(names)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._started:
            running.kill()
        if self._own_jobs:
            self._own_jobs.close()


class JaxJobs(CompilerJobs):
    def __init__(self, directory: Path, **defaults: Any) -> None:
        # Do not search for a TPU: an installed libtpu would search the network.
        variables = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
        defaults = {"hooks": "jax", "cases": "jax_programs", "under": "fork:jax"} | defaults
        super().__init__(directory, variables=variables, **defaults)


class TritonJobs(CompilerJobs):
    """Jobs that compile kernels for an absent GPU. ptxas logs its calls."""

    def __init__(self, directory: Path, version: str, **settings: Any) -> None:
        self.version = version
        defaults = {"environment": TRITON_VERSIONS[version], "under": "fork:triton"}
        settings = defaults | {"cases": "triton_kernels"} | settings
        variables = {"TRITON_CACHE_DIR": f"{_HOST}/triton", "ASSEMBLER_LOG": f"{_HOST}/ptxas-runs"}
        tools = packages_of(settings["environment"]) / "triton/backends/nvidia/bin"
        for name in ("ptxas", "ptxas-blackwell"):
            if (tools / name).exists():
                wrapper = _executable(
                    directory / "bin" / name, _COUNTING_PTXAS.format(ptxas=tools / name)
                )
                variables[f"TRITON_{name.upper().replace('-', '_')}_PATH"] = str(wrapper)
        super().__init__(directory, variables=variables, **settings)


class InductorJobs(CompilerJobs):
    """Jobs with a C++ compiler that logs its calls."""

    def __init__(self, directory: Path, version: str, **settings: Any) -> None:
        self.version = version
        defaults = {"environment": INDUCTOR_VERSIONS[version], "under": "fork:inductor"}
        settings = defaults | {"cases": "inductor", "hooks": "inductor"} | settings
        compiler = _executable(
            directory / "bin" / "g++", _COUNTING_COMPILER.format(compiler=shutil.which("g++"))
        )
        variables = {
            "PATH": f"{compiler.parent}{os.pathsep}{os.environ['PATH']}",
            "TORCHINDUCTOR_CACHE_DIR": f"{_HOST}/inductor",
            "TMPDIR": f"{_HOST}/tmp",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",  # as in zygotes
        }
        super().__init__(directory, variables=variables, **settings)

    def start(self, host: str, *options: object, **arguments: Any) -> Running:
        (self.directory / host / "tmp").mkdir(parents=True, exist_ok=True)
        return super().start(host, *options, **arguments)

    def compiled(self, host: str) -> list[str]:
        """Return the command lines of a host's C++ compiler, without queries of its version."""
        log = self.directory / host / "tmp" / "compiler.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line not in {"-v", "--version"}]


def _executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path

"""Jobs of one compiler in one of the versions that are tried; each is a process and a host."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from support.jobs import Jobs, Outcome, Running

__all__ = [
    "INDUCTOR_VERSIONS",
    "TRITON_VERSIONS",
    "CompilerJobs",
    "InductorJobs",
    "JaxJobs",
    "TritonJobs",
]

_SUPPORT = Path(__file__).parent

INDUCTOR_VERSIONS = {"2.7.0": "", "2.15.0": "torch-newest"}
TRITON_VERSIONS = {"3.3.0": "", "3.9.0": "torch-newest"}
"""Environment by the compiler's version; empty is the one of the tests."""

_COUNTING_COMPILER = """#!/bin/sh
echo "$*" >> "$COMPILER_LOG"
exec {compiler} "$@"
"""


class CompilerJobs:
    """A context manager; kills what a failed test left.

    A host is a folder: caches, reports and the local tier are in it.

    Args:
        directory: every host is a folder in it.
        jobs: starts them; its own unless they share a zygote.
        variables: of every job's environment.
        defaults: of the other arguments of `Jobs.start`, settings included.
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
        """Starts a job on a host that is named by its folder."""
        running = self._jobs.start(
            self.directory / host,
            *options,
            variables=self._variables | dict(variables or {}),
            **(self._defaults | arguments),
        )
        self._started.append(running)
        return running

    def run(self, host: str, *options: object, **arguments: Any) -> Outcome:
        """Starts a job and waits for what it reports."""
        return self.start(host, *options, **arguments).finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._started:
            running.kill()


class JaxJobs(CompilerJobs):
    def __init__(self, directory: Path, **defaults: Any) -> None:
        # No look for a TPU: where libtpu is installed it asks the network for one.
        variables = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
        defaults = {"hooks": "jax"} | defaults
        script = _SUPPORT / "jax_job.py"
        super().__init__(directory, variables=variables, script=script, **defaults)


class TritonJobs(CompilerJobs):
    def __init__(self, directory: Path, version: str, **settings: Any) -> None:
        self.version = version
        settings = {"environment": TRITON_VERSIONS[version]} | settings
        super().__init__(directory, script=_SUPPORT / "triton_job.py", **settings)


class InductorJobs(CompilerJobs):
    """The host's C++ compiler counts what it is asked to compile."""

    def __init__(self, directory: Path, version: str, **settings: Any) -> None:
        self.version = version
        settings = {"environment": INDUCTOR_VERSIONS[version], "hooks": "inductor"} | settings
        super().__init__(directory, script=_SUPPORT / "inductor_job.py", **settings)
        self._compiler = directory / "bin" / "g++"
        self._compiler.parent.mkdir(parents=True)
        self._compiler.write_text(_COUNTING_COMPILER.format(compiler=shutil.which("g++")))
        self._compiler.chmod(0o755)

    def start(
        self,
        host: str,
        *options: object,
        variables: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Running:
        directory = self.directory / host
        (directory / "tmp").mkdir(parents=True, exist_ok=True)
        own = {
            "PATH": f"{self._compiler.parent}{os.pathsep}{os.environ['PATH']}",
            "COMPILER_LOG": str(directory / "compiler.log"),
            "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
            "TMPDIR": str(directory / "tmp"),
            # Otherwise torch 2.7 starts three processes that import torch, in every job.
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
        }
        return super().start(host, *options, variables=own | dict(variables or {}), **arguments)

    def compiled(self, host: str) -> list[str]:
        """The command lines of the C++ compiler on a host, but for questions about itself."""
        log = self.directory / host / "compiler.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if line not in {"-v", "--version"}]

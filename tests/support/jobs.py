"""Run training jobs as users run them, each in a process. Its directory stands for a host.

`under` selects the start of a job:

* `graphstash run`: as a user starts it, from the command line; each job imports torch_xla.
* `fork` (default): right after the import of torch_xla, see `zygote`.
* an empty string: the same without a hook.
* `torch`, `tuning`, `backup`: after the import of torch, of the client's searches, or of the
  server's command `backup`.
* `fork:NAME`: after the import of the compiler of the hook NAME, which is then installed.
* `python -I`: a Python with only a variable. `python`: a Python without it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.environments import python_of
from support.starts import Popen, Zygote
from support.waiting import PATIENT, until

JOB = Path(__file__).with_name("job.py")
TRAIN_JOB = Path(__file__).with_name("train_job.py")
SECONDS = 800

_IMPORTED = {
    "torch_xla": ("torch_xla",),
    "torch": (
        "graphstash.training",
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
    ),
    "inductor": (
        *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed"),
        *("torch._inductor.codecache:torch_key", "triton.compiler.compiler:triton_key"),
        "torch._inductor.cpu_vec_isa:valid_vec_isa_list",  # on processors with AMX, it compiles C++
        "torch._inductor.cpp_builder:get_compiler_version_info.cache_clear",  # a job's g++ differs
        "torch._inductor.fx_passes.joint_graph:lazy_init",
        *("torch._inductor.codegen.common:init_backend_registration", "torch.utils.cpp_extension"),
        *("sympy.tensor.tensor", "torch.fx.experimental.validator"),
    ),
    "jax": ("jax",),
    "pjrt": ("jax",),
    "triton": (
        *("triton", "triton.compiler"),
        *("triton.compiler.compiler:triton_key", "triton.runtime.cache:triton_key"),
    ),
    "backup": (
        *("graphstash.__main__", "graphstash_server.commands.backup", "graphstash_server.context"),
        *("graphstash_server.services.maintenance.backup", "aiosqlite", "asyncpg"),
    ),
    "toycc": ("toycc",),
    "helion": ("helion", "helion.language", "jax", "torch"),
    "tuning": ("numpy", "graphstash._process.session", "graphstash.tuning.task"),
}
"""Modules of a compiler or of another kind of job, by name of the zygote."""

READ_BY_IMPORTS = {
    "PJRT_DEVICE": "CPU",
    "JAX_PLATFORMS": "cpu",
    # Otherwise torch 2.7 starts three processes that import torch, in every job.
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
}
"""Variables that compilers read at import."""


def losses_of(path: Path) -> dict[int, str]:
    """Return the losses that a training job has written so far, by step."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(step): loss for step, loss in (line.split() for line in lines if " " in line)}


@dataclass
class Outcome:
    """A job's report, the counters of its cache, and its output."""

    report: Any
    stats: dict[str, Any]
    errors: str

    @property
    def hits(self) -> int:
        return sum(count for name, count in self.stats.items() if name.startswith("hits_"))


@dataclass
class Running:
    report: Path
    stats: Path
    errors: Path
    process: Popen

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def kill(self) -> None:
        """Kill the job unless it has ended."""
        self.process.kill()
        self.process.wait(30)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def status(self) -> int:
        """Wait for the end, and return the exit status, negative for a signal."""
        return int(self.process.wait(SECONDS))

    def finish(self) -> Outcome:
        status = self.status()
        errors = self.errors.read_text()
        assert status == 0, errors
        lines = self.stats.read_text().splitlines() if self.stats.exists() else []
        stats = json.loads(lines[-1]) if lines else {}
        return Outcome(json.loads(self.report.read_text()), stats, errors)

    def finish_children(self, number: int) -> list[Any]:
        """Wait for a job that only forks, and return its children's reports."""
        status = self.status()
        assert status == 0, self.errors.read_text()
        reports = [self.report.with_suffix(f".{n}.json") for n in range(number)]
        return [json.loads(report.read_text()) for report in reports]


def until_step(step: int, losses: Path, job: Running) -> None:
    """Return when a training job has written the loss of a step, or has ended."""
    until(lambda: max(losses_of(losses), default=0) >= step or job.ended(), seconds=SECONDS)


SHARED = ("torch_xla", "torch", "inductor", "jax", "triton", "backup", "tuning")
"""Names of the zygotes that workers may share."""

_shared: dict[tuple[str, ...], Zygote] = {}


def imported_by(name: str) -> tuple[str, ...]:
    """Return the modules that a zygote imports before it forks jobs."""
    return "graphstash._http.connections", *_IMPORTED[name]  # the former as in every job


def use_shared(zygotes: Mapping[str, Zygote]) -> None:
    """Let the zygotes with these names fork the jobs of the tests' own Python."""
    _shared.update({imported_by(name): zygote for name, zygote in zygotes.items()})


class Jobs:
    """Starts jobs. A zygote starts when a job first needs it, and stays."""

    def __init__(self) -> None:
        self._zygotes: dict[tuple[str, tuple[str, ...]], Zygote] = {}

    def close(self) -> None:
        for zygote in self._zygotes.values():
            zygote.close()

    def start(
        self,
        directory: Path,
        *options: object,
        script: Path = JOB,
        under: str = "fork",
        environment: str = "",
        launcher: Sequence[str | Path] = (),
        variables: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Running:
        """Start a job with a local tier in `directory`.

        Args:
            script: script to run; its first argument is the path of its report.
            under: see the module's docstring.
            environment: environment whose Python runs the script; empty for the tests' own.
            launcher: command that starts the script under `graphstash run`. Default: that Python.
            variables: environment variables.
            settings: fields of ClientConfig; `PATIENT` provides defaults.
        """
        directory.mkdir(parents=True, exist_ok=True)
        number = len(list(directory.glob("report-*")))
        report = directory / f"report-{number}.json"
        stats = directory / f"stats-{number}.jsonl"
        errors = directory / f"errors-{number}"
        report.touch()
        errors.touch()
        settings = {"cache_dir": directory / "tier", "stats_file": stats, **PATIENT, **settings}
        environ = os.environ | {"PJRT_DEVICE": "CPU"}
        environ.pop("XLA_FLAGS", None)  # torch_xla sets it in the tests' own process
        environ |= {f"GRAPHSTASH_{name.upper()}": str(v) for name, v in settings.items()}
        if under == "python -I":
            environ["GRAPHSTASH_AUTOLOAD"] = "1"
        environ |= variables or {}
        arguments = [str(part) for part in (script, report, *options)]
        way, _, name = under.partition(":")
        zygote, hook = None, ""
        python = python_of(environment)
        if way in ("fork", "", *_IMPORTED):
            name = way if way in _IMPORTED else name or "torch_xla"
            hook = name if way == "fork" else ""
            command: Sequence[str | Path] = (python,)
            zygote = self.zygote(name, environment)
        else:
            launcher = launcher or (python,)
            command = {
                "graphstash run": (sys.executable, "-m", "graphstash", "run", "--", *launcher),
                "python -I": (python, "-I"),
                "python": (python,),
            }[under]
        with errors.open("a") as stderr:
            process = Popen(
                [*command, *arguments],
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                zygote=zygote,
                hook=hook,
            )
        return Running(report, stats, errors, process)

    def zygote(self, name: str, environment: str = "") -> Zygote:
        """Return the process that has imported a compiler and forks its jobs."""
        imported = imported_by(name)
        if not environment and imported in _shared:
            return _shared[imported]
        if (environment, imported) not in self._zygotes:
            self._zygotes[environment, imported] = Zygote(
                python_of(environment), *imported, environment=os.environ | READ_BY_IMPORTS
            )
        return self._zygotes[environment, imported]

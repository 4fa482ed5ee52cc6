"""Run one training step under every hook: cold, and warm on another host with an empty disk.

The step is a small GPT (4 layers, 128 wide; torch and JAX) or, for Triton, three kernels of such a
step, compiled for sm_90 without a GPU. `graphstash run` starts every job as a process in the
environment of its compiler. Cold and warm jobs share only a namespace. The README's table is
`build/bench-compilers.md`.

    PYTHONPATH=tests .venv/bin/python -m benchmarks.compilers --rounds 3
"""

import json
import os
import shutil
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import part, table_of
from support.environments import python_of
from support.jobs import Jobs

STEPS = Path(__file__).with_name("steps")
TITLE = "first step of a training job"

COUNTING = """#!/bin/sh
case " $* " in *" -o"*) echo "$*" >> "{log}" ;; esac
exec "{program}" "$@"
"""
"""A stand-in for a compiler that logs a line for each output file, and then calls the compiler."""


@dataclass(frozen=True)
class Arm:
    name: str
    hook: str
    script: str
    environment: str = ""  # of tests/environments; empty for this process's own
    choices: tuple[str, ...] = ()

    @property
    def python(self):
        return python_of(self.environment)


def arms():
    xla = ("--backend", "xla")
    inductor = ("--backend", "inductor")
    return [
        Arm("torch_xla 2.7", "torch_xla", "gpt_torch.py", choices=xla),
        Arm("torch_xla 2.9", "pjrt", "gpt_torch.py", "xla-newest", (*xla, "--plugin")),
        Arm("JAX 0.4.31", "jax", "gpt_jax.py", "jax-oldest"),
        Arm("JAX 0.10.2", "jax", "gpt_jax.py", "jax-newest"),
        Arm("JAX 0.8.3, plug-in", "pjrt", "gpt_jax.py", "jax-pjrt", ("--plugin",)),
        Arm("torch.compile 2.7", "inductor", "gpt_torch.py", choices=inductor),
        Arm("torch.compile 2.15", "inductor", "gpt_torch.py", "torch-newest", inductor),
        Arm("Triton 3.3", "triton", "kernels_triton.py"),
        Arm("Triton 3.9", "triton", "kernels_triton.py", "torch-newest"),
    ]


def main():
    with part("compilers", __doc__, rounds=3) as bench:
        note = bench.figures.note
        note("First step: tracing, compiling or fetching, and running; importing is not in it.")
        note("Losses of cold and warm are compared bit for bit (Triton: the cubins).")
        jobs = Jobs()
        for number in bench.rounds():
            for index, arm in enumerate(arms()):
                team = f"bench-{number}-{index}"
                reports = {}
                for host in ("cold", "warm"):
                    bench.now(f"{arm.name}, {host}")
                    place = bench.directory / team / host
                    reports[host] = run(jobs, arm, place, bench.server.url, team)
                measure(bench.figures, arm, **reports)
    table = bench.settings.output.with_suffix(".md")
    table.write_text("\n".join(table_of(bench.figures.tables[TITLE])) + "\n")
    print(f"written: {table}")


def run(jobs, arm, host, url, namespace):
    """Run one job on a host of its own; return its report, its counters, and its tool calls."""
    host.mkdir(parents=True)
    tools = host / "tools"
    tools.mkdir()
    log = host / "made"
    log.touch()
    count_runs(tools / "g++", shutil.which("g++"), log)
    environment = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "TORCHINDUCTOR_CACHE_DIR": str(host / "inductor"),
        "TRITON_CACHE_DIR": str(host / "triton"),
        "JAX_PLATFORMS": "cpu",
        "PJRT_DEVICE": "CPU",
    }
    if arm.hook == "triton":
        for program in arm.python.parents[1].glob("lib/python*/site-packages/triton/**/bin/ptxas*"):
            count_runs(tools / program.name, program, log)
            variable = program.name.upper().replace("-", "_")
            environment[f"TRITON_{variable}_PATH"] = str(tools / program.name)
    running = jobs.start(
        host,
        *arm.choices,
        script=STEPS / arm.script,
        under="graphstash run",
        environment=arm.environment,
        variables=environment,
        url=url,
        namespace=namespace,
        hooks=arm.hook,
    )
    report = running.finish().report
    counted = Counter()
    for line in running.stats.read_text().splitlines():  # one line per process
        process = json.loads(line)
        counted.update({name: n for name, n in process.items() if isinstance(n, int | float)})
        counted["fallbacks"] += sum(process["fallbacks"].values())
    made = len(log.read_text().splitlines())
    return report | {"counted": counted, "made": made}


def count_runs(path, program, log):
    path.write_text(COUNTING.format(log=log, program=program))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def measure(figures, arm, *, cold, warm):
    def add(column, sample):
        figures.add(TITLE, arm.name, column, sample)

    figures.say(TITLE, arm.name, "hook", arm.hook)
    first_cold, first_warm = cold["step_seconds"][0], warm["step_seconds"][0]
    add("cold, s", first_cold)
    add("warm, s", first_warm)
    add("cold / warm", first_cold / first_warm)
    add("compiled cold", cold["counted"]["misses"])
    add("compiled warm", warm["counted"]["misses"])
    counts = warm["counted"].items()
    add("fetched", sum(count for name, count in counts if name.startswith("hits_")))
    add("fetched, KiB", warm["counted"]["fetched_bytes"] / 1024)
    if arm.hook in ("inductor", "triton"):
        add("g++ or ptxas runs cold", cold["made"])
        add("g++ or ptxas runs warm", warm["made"])
    figures.say(TITLE, arm.name, "equal", "yes" if cold["losses"] == warm["losses"] else "NO")
    for host, report in (("cold", cold), ("warm", warm)):
        if report["counted"]["fallbacks"]:
            figures.note(f"{arm.name}, {host}: {report['counted']['fallbacks']} fallbacks")


if __name__ == "__main__":
    main()

"""Runs one training job cold, warm, and on eight hosts at once.

    cold   a real training job against an empty server
    warm   the same job as another host would run it: new process, empty local tier
    herd   eight small jobs at once, each as a host of its own, on a graph that is not cached yet

Every number about compiling comes from torch_xla's own metrics in the jobs' reports, not from
graphstash. Prints a table and writes the same as JSON. `make demo` runs it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

JOB = Path(__file__).with_name("train_gpt.py")
HERD = 8

console = Console()


@dataclass(frozen=True)
class Job:
    """A training process under the cache, as one host of its own."""

    name: str
    process: subprocess.Popen[str]
    report: Path
    stats: Path

    def finish(self) -> dict[str, Any]:
        """Waits for the job and merges its report with what the cache counted."""
        if self.process.wait() != 0:
            raise SystemExit(f"{self.name} failed; its output is above")
        report = json.loads(self.report.read_text())
        stats = json.loads(self.stats.read_text().splitlines()[-1])
        return {
            "first_step_seconds": report["first_step_seconds"],
            "settled_seconds": report["settled_seconds"],
            "step_seconds_median": report["step_seconds_median"],
            "compile_seconds": report["compile_seconds"],
            "compiles": report["compiles"],
            "hits": report["persistent_hits"],
            "waits": stats["waits"],
            "fetched_bytes": stats["fetched_bytes"] + stats["prefetched_bytes"],
            "published_bytes": stats["published_bytes"],
            "fallbacks": stats["fallbacks"],
            "losses": report["losses"],
        }


def environment() -> dict[str, str]:
    """This process's variables without settings of a cache of your own."""
    return {name: os.environ[name] for name in os.environ if not name.startswith("GRAPHSTASH_")}


def start(name: str, directory: Path, *options: str) -> Job:
    """Starts a job with a local tier of its own, in `directory`; it finds the server by itself."""
    directory.mkdir(parents=True)
    report, stats = directory / "report.json", directory / "stats.jsonl"
    command = [
        *(sys.executable, "-m", "graphstash", "run"),
        *("--cache-dir", str(directory / "tier"), "--stats-file", str(stats), "--"),
        *(sys.executable, str(JOB), "--report", str(report), *options),
    ]
    process = subprocess.Popen(
        command,
        # On import, torch starts idle workers for a compiler that these jobs do not use; on a small
        # machine their start would be most of what is measured.
        env={"PJRT_DEVICE": "CPU", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Job(name, process, report, stats)


def watch(title: str, *jobs: Job) -> None:
    """Prints the jobs' output, below it a line that says what runs and then how long it took."""
    started = time.monotonic()
    with Live(Spinner("dots", title), console=console, refresh_per_second=4, transient=True):
        for job in jobs:
            for line in job.process.stdout or ():
                console.print(f"  [dim]{job.name:>6} │[/dim] {line.rstrip()}", highlight=False)
    console.print(f"  {title}: {time.monotonic() - started:.1f} s")


@contextmanager
def server(directory: Path) -> Iterator[str]:
    """A server on a free port, with its data in `directory`; yields its URL."""
    os.environ["XDG_STATE_HOME"] = str(directory / "state")  # apart from a server of your own
    port_file = directory / "port"
    log = (directory / "server.log").open("w")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "graphstash", "serve", "--port", "0"),
            *("--data-dir", str(directory / "data"), "--port-file", str(port_file)),
        ],
        env=environment(),
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + 60
        while not port_file.exists() or not port_file.read_text().strip():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{Path(log.name).read_text()}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def summarize(cold: dict[str, Any], warm: dict[str, Any], herd: dict[str, Any]) -> Table:
    """The table that is printed at the end."""
    table = Table(title="graphstash: the same training job, three times")
    table.add_column("")
    for heading in ("first step", "compiling", "compiles", "hits", "waits", "in", "out"):
        table.add_column(heading, justify="right", no_wrap=True)
    runs = (("cold", cold), ("warm", warm), (f"herd of {herd['processes']}", herd))
    for name, run in runs:
        table.add_row(name, f"{run['first_step_seconds']:.2f} s", *_row(run))
    return table


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{run['compile_seconds']:.2f} s",
        str(run["compiles"]),
        str(run["hits"]),
        str(run["waits"]),
        f"{run['fetched_bytes'] / 1024:.0f} KiB",
        f"{run['published_bytes'] / 1024:.0f} KiB",
    )


def gather(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds up a herd; the first step is its median."""
    total = {
        name: sum(run[name] for run in runs)
        for name in (
            *("compile_seconds", "compiles", "hits"),
            *("waits", "fetched_bytes", "published_bytes"),
        )
    }
    first = sorted(run["first_step_seconds"] for run in runs)[len(runs) // 2]
    graphs = {run["compiles"] + run["hits"] for run in runs}
    same = all(run["losses"] == runs[0]["losses"] for run in runs)
    return {
        "processes": len(runs),
        "graphs": max(graphs),
        "first_step_seconds": first,
        "losses_equal": same,
        **total,
        "fallbacks": [run["fallbacks"] for run in runs],
    }


def main() -> None:
    """Runs the three parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("build/demo.json"))
    parser.add_argument("--mode", choices=("lazy", "compile", "dynamo"), default="lazy")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    settings = ("--mode", options.mode, "--steps", str(options.steps))
    with tempfile.TemporaryDirectory(prefix="graphstash-demo-") as name:
        directory = Path(name)
        with server(directory) as url:
            console.print(f"server at {url}")
            job = start("cold", directory / "cold", *settings)
            watch("cold: an empty cache", job)
            cold = job.finish()
            job = start("warm", directory / "warm", *settings)
            watch("warm: another host with an empty local tier", job)
            warm = job.finish()
            jobs = [
                start(f"herd {n}", directory / f"herd{n}", "--small", "--mode", options.mode)
                for n in range(HERD)
            ]
            watch(f"herd: {HERD} hosts need one new graph at once", *jobs)
            herd = gather([job.finish() for job in jobs])
    console.print(summarize(cold, warm, herd))
    ratio = cold["first_step_seconds"] / warm["first_step_seconds"]
    equal = "equal bit for bit" if warm["losses"] == cold["losses"] else "DIFFERENT"
    console.print(
        f"The warm job reached its first step {ratio:.1f} times sooner; its {len(warm['losses'])} "
        f"losses are {equal}.\nThe herd needed {herd['graphs']} graphs and compiled "
        f"{herd['compiles']} in all."
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"cold": cold, "warm": warm, "herd": herd}, indent=2))
    console.print(f"written: {options.output}")


if __name__ == "__main__":
    main()

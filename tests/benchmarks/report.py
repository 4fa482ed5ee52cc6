"""A report: the figures of several parts, the machine, and the reached goals."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import console, table_of

TESTS = Path(__file__).parents[1]


def begin(**more):
    started = time.strftime("%Y-%m-%d %H:%M %Z")
    return {"machine": machine(), "started": started, "parts": {}, "failed": [], **more}


def environment(*paths, **more):
    """Return this process's environment without graphstash's settings, for imports from tests."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GRAPHSTASH_")}
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, *paths)))} | more


def run_part(report, name, module, output, *options, env):
    """Run a module as a process, and add the figures that it writes to `output` to the report."""
    command = [sys.executable, "-m", module, "--output", output, *options]
    if subprocess.run([*map(str, command)], env=env, check=False).returncode == 0:
        report["parts"][name] = json.loads(output.read_text())
    else:
        report["failed"].append(name)


def files_of(directory, name):
    directory.mkdir(parents=True, exist_ok=True)
    return {form: directory / f"{name}.{form}" for form in ("json", "md", "png")}


def finish(report, written):
    """Print the paths of the report. Exit with an error if a part failed."""
    console.print("written:", ", ".join(map(str, written)))
    if report["failed"]:
        raise SystemExit(f"failed: {', '.join(report['failed'])}; the reasons are above")


def machine():
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def cpu_model():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def pages(report, title="Benchmarks", *, about="", goals=(), picture=""):
    """Return the report for people: the goals, the plot, then every table.

    Each cell is `median (min to max)`.

    Args:
        report: report of `begin`, with its parts.
        title: title of the page.
        about: explanation of the page.
        goals: goals to list; none by default.
        picture: Markdown of the plot.
    """
    where = report["machine"]
    what = f"{where['cores']} cores ({where['cpu']}), {where['memory_gib']} GiB"
    what += f", Linux {where['kernel']}, Python {where['python']}"
    lines = [f"# {title}", ""]
    if about:
        lines += [about, ""]
    if goals:
        lines += ["| goal | in how many cells | median of the cells (lowest to highest) |"]
        lines += ["|---|---|---|", *(goal.as_markdown() for goal in goals), ""]
    if picture:
        lines += [picture, ""]
    lines += [f"{report['started']}; {what}. Cells: median (min to max)."]
    for name, part in report["parts"].items():
        load = ", ".join(f"{part[when][0]:.1f}" for when in ("load_before", "load_after"))
        settings = ", ".join(f"{key} {value}" for key, value in part["settings"].items())
        lines += ["", f"## {name}", "", f"{settings}; load average before and after: {load}."]
        for heading, rows in part["tables"].items():
            lines += ["", f"### {heading}", "", *table_of(rows)]
        lines += ["", *(f"- {note}" for note in part["notes"])]
    for part in report["failed"]:
        lines += ["", f"`{part}` failed."]
    return "\n".join(lines) + "\n"


@dataclass
class Goal:
    """A cell reaches a goal if its median over the rounds does. Noise gets no margin.

    Attributes:
        text: text of the goal.
        least: minimum for each cell.
        cells: each cell's figure, by its name.
    """

    text: str
    least: float
    cells: dict[str, float]

    @property
    def missed(self):
        return {name: value for name, value in self.cells.items() if value < self.least}

    def as_json(self):
        return vars(self) | {"missed": sorted(self.missed)}

    def as_markdown(self):
        if not self.cells:
            return f"| {self.text} | nothing to measure it by here | |"
        low, high = min(self.cells.values()), max(self.cells.values())
        middle = statistics.median(self.cells.values())
        reached = len(self.cells) - len(self.missed)
        verdict = "holds" if not self.missed else "does not hold"
        misses = ", ".join(f"{name} {value:.2f}" for name, value in self.missed.items())
        return (
            f"| {self.text} | {verdict}: {reached} of {len(self.cells)} | {middle:.2f} "
            f"({low:.2f} to {high:.2f})" + (f"; not in {misses}" if misses else "") + " |"
        )

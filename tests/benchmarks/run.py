"""Runs the benchmarks one after the other and puts what they measured into one report.

Nothing here decides whether a build is good: figures move with the machine and its other guests, so
the report says what machine it was and how busy. `make bench` runs this; parts can be named:

    .venv/bin/python tests/benchmarks/run.py server --rounds 5 --seconds 2

Writes build/bench-<part>.json, build/bench.json and build/bench.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from benchmarks.figures import columns_of, console, show  # noqa: E402 (the line above finds it)

PARTS = {
    "server": "every call beside nginx, docker-registry, turborepo, redis; CPU each; 6 minutes",
    "hook": "first and settled steps with the hook, torch_xla's own cache or none; 10 minutes",
    "compilers": "the same step under every hook, cold and warm, by compiler; 15 minutes",
    "jax_cache": "the jax hook beside JAX's own cache, cold and warm; 8 minutes",
    "million": "a million artifacts beside a thousand, on SQLite and PostgreSQL; 10 minutes",
    "client": "get and fetch of 64 MiB beside http.client, CPU and memory; 3 minutes",
    "verify": "a signed artifact of 64 MiB from loopback: what checking adds; 2 minutes",
    "herd": "eight processes want one uncompiled graph: compilations and waiting; 2 minutes",
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:10}{text}" for name, text in PARTS.items()),
    )
    parser.add_argument("parts", nargs="*", metavar="part", help="default: all, in this order")
    parser.add_argument("--rounds", type=int, help="samples of every figure [each part's own]")
    parser.add_argument("--seconds", type=int, help="length of one measurement of the server")
    parser.add_argument("--directory", type=Path, default=Path("build"), help="[build]")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    options.directory.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(), "started": time.strftime("%Y-%m-%d %H:%M %Z"), "parts": {}}
    failed = []
    for part in options.parts or PARTS:
        console.rule(f"[bold]{part}[/bold]: {PARTS[part]}")
        output = options.directory / f"bench-{part}.json"
        if run(part, options, output) == 0:
            report["parts"][part] = json.loads(output.read_text())
        else:
            failed.append(part)
    report["failed"] = failed
    (options.directory / "bench.json").write_text(json.dumps(report, indent=2) + "\n")
    (options.directory / "bench.md").write_text(markdown(report))
    console.print(f"written: {options.directory / 'bench.json'}, {options.directory / 'bench.md'}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the reasons are above")


def run(part, options, output):
    """Runs one part as a process of its own, with no settings from outside."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRAPHSTASH_")}
    command = [sys.executable, "-m", f"benchmarks.{part}", "--output", str(output)]
    if options.rounds is not None:
        command += ["--rounds", str(options.rounds)]
    if options.seconds is not None and part == "server":
        command += ["--seconds", str(options.seconds)]
    return subprocess.run(
        command, env=environment | {"PYTHONPATH": str(TESTS)}, check=False
    ).returncode


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


def markdown(report):
    """The report for people: one table per table, `median (min to max)` in each cell."""
    about = report["machine"]
    where = f"{about['cores']} cores ({about['cpu']}), {about['memory_gib']} GiB"
    what = f"Linux {about['kernel']}, Python {about['python']}"
    lines = [
        "# Benchmarks",
        "",
        f"{report['started']}; {where}, {what}. Cells: median (min to max).",
    ]
    for name, part in report["parts"].items():
        load = ", ".join(f"{part[when][0]:.1f}" for when in ("load_before", "load_after"))
        settings = ", ".join(f"{key} {value}" for key, value in part["settings"].items())
        lines += ["", f"## {name}", "", f"{settings}; load average before and after: {load}."]
        for title, rows in part["tables"].items():
            columns = columns_of(rows)
            lines += ["", f"### {title}", "", row("", columns), row("---", ["---:"] * len(columns))]
            for label, cells in rows.items():
                lines.append(row(label, [show(cells.get(column, "")) for column in columns]))
        lines += ["", *(f"- {note}" for note in part["notes"])]
    for part in report["failed"]:
        lines += ["", f"`{part}` failed."]
    return "\n".join(lines) + "\n"


def row(label, cells):
    return f"| {label} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

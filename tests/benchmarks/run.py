"""Run the benchmarks in turn, and write their figures into one report.

No figure decides whether a build is good, because figures depend on the machine and its load. The
report therefore describes the machine and its load. `make bench` runs this; parts can be named:

    .venv/bin/python tests/benchmarks/run.py server --rounds 5 --seconds 2

Writes build/bench-<part>.json, build/bench.json and build/bench.md.
"""

import argparse
import json
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from benchmarks.figures import console
from benchmarks.report import begin, environment, files_of, finish, pages, run_part

PARTS = {
    "server": "every call beside seven peers, at two loads; CPU each; 15 minutes",
    "tail": "the slowest answers of a server that is 60 % busy, beside nginx; 4 minutes",
    "hook": "first and settled steps with the hook, torch_xla's own cache or none; 10 minutes",
    "compilers": "the same step under every hook, cold and warm, by compiler; 15 minutes",
    "jax_cache": "the jax hook beside JAX's own cache, cold and warm; 8 minutes",
    "million": "a million artifacts beside a thousand, on SQLite and PostgreSQL; 10 minutes",
    "client": "get and fetch of 64 MiB beside http.client, CPU and memory; 3 minutes",
    "small": "get and put of 4 KiB and 1 MiB beside http.client, CPU; 1 minute",
    "regions": "first step of a job in a region 80 ms from its upstream; 5 minutes",
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
    parser.add_argument("--seconds", type=int, help="length of one measurement of server and tail")
    parser.add_argument("--directory", type=Path, default=Path("build"), help="[build]")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    written, report = files_of(options.directory, "bench"), begin()
    for part in options.parts or PARTS:
        console.rule(f"[bold]{part}[/bold]: {PARTS[part]}")
        output = options.directory / f"bench-{part}.json"
        given = ["--rounds", options.rounds] if options.rounds is not None else []
        if options.seconds is not None and part in ("server", "tail"):
            given += ["--seconds", options.seconds]
        run_part(report, part, f"benchmarks.{part}", output, *given, env=environment())
    written["json"].write_text(json.dumps(report, indent=2) + "\n")
    written["md"].write_text(pages(report))
    finish(report, [written["json"], written["md"]])


if __name__ == "__main__":
    main()

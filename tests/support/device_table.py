"""A table of what the tests on a device have shown: part, result and seconds."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any


def print_table(reporter: Any, conftest: str) -> None:
    """Print the table of a folder's tests, if they ran.

    Args:
        reporter: pytest's terminal reporter.
        conftest: the path of the folder's conftest.py.
    """
    folder = f"tests/{Path(conftest).parent.name}/"
    results: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    for result, reports in reporter.stats.items():
        for report in reports:
            if getattr(report, "nodeid", "").startswith(folder) and hasattr(report, "duration"):
                part = _part_of(report.nodeid)
                seconds[part] += report.duration
                if result in {"passed", "failed", "error"}:
                    results[part][result] += 1
    if not results:
        return
    width = max(map(len, results))
    reporter.section(f"what {folder} has shown")
    for part, counts in results.items():
        result = ", ".join(f"{count} {name}" for name, count in counts.items())
        reporter.write_line(f"{part:{width}}  {result:20}  {seconds[part]:6.1f} s")
    reporter.write_line(f"{'in all':{width}}  {'':20}  {sum(seconds.values()):6.1f} s")


def _part_of(nodeid: str) -> str:
    """Return file and test in words. The tests of hooks are parts of their own."""
    file, _, test = nodeid.partition("::")
    name, _, parameters = test.partition("[")
    stem = Path(file).stem.removeprefix("test_")
    if stem == "hooks" and parameters:
        return f"hook: {parameters.removesuffix(']')}"
    return f"{stem}: {name.removeprefix('test_').replace('_', ' ')}"

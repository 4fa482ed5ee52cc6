"""Run a program of `support.cases.on_a_device` on a host that compiles it, and on a second host."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.compiler_jobs import CompilerJobs
from support.jobs import Outcome


def on_two_hosts(
    directory: Path,
    function: str,
    keywords: Mapping[str, Any],
    *,
    variables: Mapping[str, str],
    **options: Any,
) -> tuple[Outcome, Outcome]:
    """Return the outcomes of both hosts. Check that the second host computes the same bits with
    artifacts of the first.
    """
    outcomes = []
    with CompilerJobs(directory, cases="on_a_device", variables=variables, **options) as jobs:
        for host in ("first", "second"):
            (directory / host / "tmp").mkdir(parents=True)
            outcomes.append(jobs.run(host, function, keywords))
    cold, warm = outcomes
    assert warm.report["bits"] == cold.report["bits"]
    assert warm.report.get("losses") == cold.report.get("losses")
    assert cold.stats["published"] > 0
    assert cold.stats["fallbacks"] == warm.stats["fallbacks"] == {}
    assert warm.hits > 0
    return cold, warm

"""A job that downloads bombs, in a process of its own."""

from pathlib import Path
from typing import Any

from graphstash_schema import ArtifactKey
from support.meter import forget_peak, kibibytes
from support.reader_job import OWN, ReaderJob


def costs_of(*, settings: dict[str, Any], keys: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the growth of the process in bytes for each key, and the reason of the compilation."""
    costs = []
    for number, key in enumerate(keys):
        place = Path(settings["cache_dir"]) / str(number)
        with ReaderJob(**settings | {"cache_dir": place}) as job:
            forget_peak()
            before = kibibytes("VmRSS")
            assert job.build(ArtifactKey.parse(**key)) == OWN
            grown = (kibibytes("VmHWM") - before) * 1024
            costs.append({"grown": grown, "fallbacks": dict(job.fallbacks)})
    return costs

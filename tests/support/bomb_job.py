"""A job of its own that is given a bomb; says how much memory that took, in bytes."""

import json
import sys
from pathlib import Path

from graphstash_schema import ArtifactKey
from support.reader_job import OWN, ReaderJob


def peak_bytes() -> int:
    # Not ru_maxrss: it begins with the parent's peak.
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


settings = json.loads(sys.argv[1])
small, large = (ArtifactKey.model_validate(key) for key in settings.pop("keys"))
with ReaderJob(**settings | {"cache_dir": Path(settings["cache_dir"])}) as job:
    job.build(small)  # everything is loaded now
    before = peak_bytes()
    assert job.build(large) == OWN
    print(json.dumps({"grown": peak_bytes() - before, "fallbacks": job.fallbacks}))

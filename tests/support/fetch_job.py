"""A process that gets one large artifact; says how much memory that took, and what for.

    fetch_job.py SETTINGS {get,fetch}        SETTINGS: of the client, and `keys`, small and large

Prints JSON: `grown` (bytes of memory at the peak, beside what the small artifact took) and `sha256`
of what it got.
"""

import hashlib
import json
import sys
from pathlib import Path

from graphstash import ClientConfig, Stash
from graphstash_schema import ArtifactKey


def peak_bytes() -> int:
    # Not ru_maxrss: that begins with the peak of the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


settings = json.loads(sys.argv[1])
small, large = (ArtifactKey.parse(*key.split("/")) for key in settings.pop("keys"))
target = Path(settings["cache_dir"]) / "payload"
with Stash(ClientConfig.load({}, **settings)) as stash:
    assert stash.get(small) is not None  # everything is loaded now
    assert stash.fetch(small, target) is not None
    before = peak_bytes()
    payload = stash.get(large) if sys.argv[2] == "get" else stash.fetch(large, target)
    grown = peak_bytes() - before
    assert payload is not None
    if not isinstance(payload, bytes):
        payload = target.read_bytes()
    print(json.dumps({"grown": grown, "sha256": hashlib.sha256(payload).hexdigest()}))

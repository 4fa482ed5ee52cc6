"""Memory of a process that fetches one large artifact."""

import hashlib
from pathlib import Path
from typing import Any

from graphstash import ClientConfig, Stash
from graphstash_schema import ArtifactKey


def growth(
    *, settings: dict[str, Any], small: str, large: str, is_file: bool
) -> dict[str, str | int]:
    """Return how much more memory the large artifact needs than the small one, and its SHA-256."""
    Path(settings["cache_dir"]).mkdir(mode=0o700, exist_ok=True)
    target = Path(settings["cache_dir"]) / "payload"
    small_key, large_key = (ArtifactKey.parse(*key.split("/")) for key in (small, large))
    with Stash(ClientConfig.load({}, **settings)) as stash:
        assert stash.get(small_key) is not None  # loads all modules
        assert stash.fetch(small_key, target) is not None
        before = _peak_bytes()
        payload = None if is_file else stash.get(large_key)
        if is_file:
            assert stash.fetch(large_key, target) is not None
        grown_bytes = _peak_bytes() - before
    sha256 = hashlib.sha256(target.read_bytes() if payload is None else payload).hexdigest()
    return {"grown_bytes": grown_bytes, "sha256": sha256}


def _peak_bytes() -> int:
    # Not ru_maxrss, which begins with the peak of the parent process.
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024

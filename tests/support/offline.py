"""A host that cannot reach its server any more."""

import hashlib
import shutil
from pathlib import Path

__all__ = ["unplugged"]

_NOBODY = "http://127.0.0.1:9"


def unplugged(tier: Path, url: str) -> str:
    """A URL at which nobody answers, and at which this tier's host has reached the server of `url`
    whenever it did so."""
    known = tier / "servers" / hashlib.sha256(url.encode()).hexdigest()[:16]
    away = tier / "servers" / hashlib.sha256(_NOBODY.encode()).hexdigest()[:16]
    shutil.rmtree(away, ignore_errors=True)
    shutil.copytree(known, away)
    return _NOBODY

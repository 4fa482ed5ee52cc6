"""A host that cannot reach its server any more."""

import hashlib
import shutil
from pathlib import Path

_NOBODY = "http://127.0.0.1:9"


def unplugged(tier: Path, url: str) -> str:
    """Return a URL without a server, under which the tier has the state of the server at `url`."""
    known = tier / "servers" / hashlib.sha256(url.encode()).hexdigest()[:16]
    away = tier / "servers" / hashlib.sha256(_NOBODY.encode()).hexdigest()[:16]
    shutil.rmtree(away, ignore_errors=True)
    shutil.copytree(known, away)
    return _NOBODY

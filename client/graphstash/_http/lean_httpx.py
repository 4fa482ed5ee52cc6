"""httpx without its command line. Modules of this package import httpx from here.

If click and rich are installed, as they are here, httpx imports its own command line. That would
cost every training process a third of a second. httpx skips a module that is absent.
"""

import sys
from typing import Any, cast

_absent = sys.modules.setdefault("httpx._main", cast("Any", None)) is None
import httpx  # noqa: E402 - see above

if _absent:
    sys.modules.pop("httpx._main", None)

__all__ = ["httpx"]

"""Precompiled headers, late: torch prepares one before it knows whether anything is compiled.

Since 2.8 Inductor preprocesses a header (to name it by its content), precompiles it, and only then
asks for the C++ objects that would use it. With the objects fetched, both were for nothing, and
they are the most expensive thing left in a warm process. So the header is prepared when the first
object is really built. The source code includes the header by itself: without its precompiled form
an object takes longer to build and is the same.
"""

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["LateHeader", "build_header_of", "late"]

_log = logging.getLogger("graphstash")


class LateHeader(str):
    """Stands for the path of a header that is not prepared yet; it is empty, so torch uses none.

    It travels inside the builder's options to the thread that builds.
    """

    __slots__ = ("prepare",)
    prepare: Callable[[], str]


def late(original: Callable[..., str]) -> Callable[..., str]:
    """Takes the place of `codecache._precompile_header`."""

    def precompile_header(*args: Any, **kwargs: Any) -> str:
        header = LateHeader()
        header.prepare = lambda: original(*args, **kwargs)
        return header

    return precompile_header


def build_header_of(builder: Any) -> None:
    """Prepares the header that a builder was to use, and lets it use it; never raises."""
    header = getattr(builder._build_option, "precompiled_header", None)
    if not isinstance(header, LateHeader):
        return
    try:
        path = header.prepare()
    except Exception:  # noqa: BLE001 - the hook's outermost frame: it is built without the header
        _log.debug("precompiling a header failed", exc_info=True)
        return
    # What the builder's constructor makes of the option.
    builder._include_dirs_args = f"-include {path} {builder._include_dirs_args}"

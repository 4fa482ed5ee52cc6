"""Import OpenTelemetry, an optional dependency, if tracing is on."""

from typing import TYPE_CHECKING

from graphstash_server.errors import StartError
from graphstash_server.settings import Settings

if TYPE_CHECKING:
    from graphstash_server.tracing import Tracing

__all__ = ["find_tracing"]


def find_tracing(settings: Settings) -> "type[Tracing] | None":
    """Return the class that creates spans, or None if tracing is off. Raise StartError if
    OpenTelemetry is missing.
    """
    if not settings.tracing:
        return None
    try:
        from graphstash_server.tracing import Tracing
    except ModuleNotFoundError as error:
        raise StartError(
            f"GRAPHSTASH_TRACING needs OpenTelemetry ({error.name} is missing): "
            "pip install 'graphstash[server,tracing] @ git+<repository>'"
        ) from error
    return Tracing

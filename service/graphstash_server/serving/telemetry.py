"""find_tracing: load the tracing class if the settings ask for it. OpenTelemetry is an extra."""

from typing import TYPE_CHECKING

from graphstash_server.errors import StartError
from graphstash_server.settings import Settings

if TYPE_CHECKING:
    from graphstash_server.tracing import Tracing

__all__ = ["find_tracing"]


def find_tracing(settings: Settings) -> "type[Tracing] | None":
    """Return the class that creates spans, or None if tracing is off.

    Raises:
        StartError: tracing is on and its packages are missing.
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
